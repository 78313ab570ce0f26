"""What pages compute in the browser is what the library computes, to the bit."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import mcftensor as mcf

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="no node is found to run JavaScript")

SOURCE = Path(__file__).parents[2] / "docs/assets/floats.js"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
names = pytest.mark.parametrize("name", DTYPES)
# Zeros, the least and largest subnormal and normal numbers, ones and its neighbours, infinities,
# NaNs; the other sign follows.
SPECIAL = {
    "bf16": "0000 0001 0002 007e 007f 0080 0081 3f7f 3f80 3f81 4000 7b7f 7f7e 7f7f 7f80 7f81 7fc0",
    "fp16": "0000 0001 0002 03fe 03ff 0400 0401 3bff 3c00 3c01 4000 7800 7bfe 7bff 7c00 7c01 7e00",
}

# What is asked of the page's own file: a function of the calculator, over rows of bits.
ASK = """
const floats = require(process.argv[1]);
const { call, name, rows } = JSON.parse(require("fs").readFileSync(0, "utf8"));
const format = floats.FORMATS[name];
const calls = {
    identity: (x) => [x],
    twoSum: (a, b) => Object.values(floats.twoSum(a, b, format)),
    fastTwoSum: (a, b) => Object.values(floats.fastTwoSum(a, b, format)),
    twoProd: (a, b) => { const { p, e } = floats.twoProd(a, b, format); return [p, e]; },
    fma: (a, b, c) => [floats.fma(a, b, c, format)],
    renormalize2: (...x) => floats.renormalize(x, 2, format),
    renormalize3: (...x) => floats.renormalize(x, 3, format),
};
const answer = rows.map((row) =>
    calls[call](...row.map((bits) => floats.fromBits(bits, format)))
        .map((x) => floats.toBits(x, format)));
console.log(JSON.stringify(answer));
"""
WALK = """
const floats = require(process.argv[1]);
const rows = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(rows.map((row) => floats.walk(...row))));
"""


def run(script, data, source=SOURCE):
    command = [NODE, "-e", script, str(source)]
    done = subprocess.run(
        command, input=json.dumps(data), check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def ask(call, name, columns):
    """Columns of bits that the calculator gives, and the tensors that it was given."""
    rows = [[x & 0xFFFF for x in row] for row in zip(*(c.tolist() for c in columns), strict=True)]
    answer = run(ASK, {"call": call, "name": name, "rows": rows})
    return torch.tensor(answer, dtype=torch.int32).T


def bits(x):
    """Patterns, with one for all NaNs, which is the calculator's."""
    nan = torch.tensor(torch.nan, dtype=x.dtype).view(torch.int16)
    return torch.where(torch.isnan(x), nan, x.view(torch.int16)).to(torch.int32) & 0xFFFF


def patterns(name, operands, count=25_000):
    """Bits at random, and pairs close in magnitude, and all combinations of special ones."""
    generator = torch.Generator().manual_seed(operands)
    free = torch.randint(-(2**15), 2**15, (operands, count), generator=generator)
    near = free[:1] ^ torch.randint(0, 2**11, (operands, count), generator=generator)
    flipped = torch.randint(0, 2, near.shape, generator=generator) << 15
    special = torch.tensor([int(x, 16) for x in SPECIAL[name].split()])
    special = torch.cat([special, special | 0x8000])
    if operands > 2:
        draws = torch.randint(0, len(special), (operands, 5_000), generator=generator)
        corners = special[draws]
    else:
        corners = torch.cartesian_prod(*[special] * operands).reshape(-1, operands).T
    return torch.cat([free, near ^ flipped, corners], dim=1).to(torch.int16)


def check(call, name, columns, expected):
    found = ask(call, name, columns)
    for place, (a, b) in enumerate(zip(found, map(bits, expected), strict=True)):
        wrong = (a != b).nonzero().flatten()
        first = [hex(c[wrong[0]].item() & 0xFFFF) for c in columns] if len(wrong) else None
        assert len(wrong) == 0, (call, name, place, len(wrong), first)


@names
def test_patterns_are_read_and_written(name):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    check("identity", name, [every], [every.view(DTYPES[name])])


@names
def test_sums_and_their_errors(name):
    columns = patterns(name, 2)
    assert columns.shape[1] >= 50_000
    a, b = columns.view(DTYPES[name])
    s, e = mcf.eft.two_sum(a, b)
    bb = s - a
    aa = s - bb
    check("twoSum", name, columns, [s, bb, aa, a - aa, b - bb, e])
    s, e = mcf.eft.fast_two_sum(a, b)
    check("fastTwoSum", name, columns, [s, s - a, e])


@names
def test_products_and_their_errors(name):
    columns = patterns(name, 2)
    a, b = columns.view(DTYPES[name])
    check("twoProd", name, columns, mcf.eft.two_prod(a, b))


@names
def test_fma(name):
    columns = patterns(name, 3)
    a, b, c = columns.view(DTYPES[name])
    check("fma", name, columns, [mcf.eft.fma(a, b, c)])
    columns[2] = (-(a * b)).view(torch.int16)  # where the product cancels, one rounding shows
    check("fma", name, columns, [mcf.eft.fma(a, b, columns[2].view(DTYPES[name]))])


@names
@pytest.mark.parametrize("terms", [2, 3])
@pytest.mark.parametrize("count", [15_000, pytest.param(25_000, marks=pytest.mark.slow)])
def test_renormalize(name, terms, count):
    columns = patterns(name, 4, count)
    values = list(columns.view(DTYPES[name]))
    check(f"renormalize{terms}", name, columns, mcf.expansion.renormalize(values, terms))


@names
@pytest.mark.parametrize(
    ("count", "steps"), [(200, 40), pytest.param(40_000, 5, marks=pytest.mark.slow)]
)
def test_weights_walk_as_those_of_the_library(name, count, steps):
    generator = torch.Generator().manual_seed(0)
    weights = (4 * torch.rand(count, generator=generator) - 2).to(DTYPES[name])
    numbers = 10 ** (-1 - 5 * torch.rand(count, generator=generator, dtype=torch.float64))
    updates = numbers.float()
    for kind, terms in ((name, 1), (f"{name}x2", 2), (f"{name}x3", 3)):
        rows = [[*row, steps, kind] for row in zip(weights.tolist(), numbers.tolist(), strict=True)]
        found = torch.tensor(run(WALK, rows), dtype=torch.float64)  # weight, step, term
        x = (weights,)
        if terms > 1:
            x = mcf.expansion.expand(weights, mcf.Format(DTYPES[name], terms))
        for step in range(1, steps + 1):
            x = [x[0] - updates.to(x[0].dtype)] if terms == 1 else mcf.expansion.grow(x, -updates)
            for term, expected in enumerate(x):
                assert torch.equal(found[:, step, term], expected.double()), (kind, step, term)


AROUND = """
const floats = require(process.argv[1]);
const { rows, name, terms } = JSON.parse(require("fs").readFileSync(0, "utf8"));
const format = floats.FORMATS[name];
console.log(JSON.stringify(rows.map((x) => floats.around(x, format, terms).map(String))));
"""
# By the name of a format: the calculator's format, its terms, and the encoding of the library.
LINES = {
    "bf16": ("bf16", 1, lambda x: x.bfloat16()),
    "fp16": ("fp16", 1, lambda x: x.half()),
    "fp32": ("fp32", 1, lambda x: x.float()),
    "e4m3": ("e4m3", 1, lambda x: x.to(torch.float8_e4m3fn)),
    "e5m2": ("e5m2", 1, lambda x: x.to(torch.float8_e5m2)),
    "bf16x2": ("bf16", 2, lambda x: mcf.as_expansion(x, mcf.bf16x2)),
    "fp16x2": ("fp16", 2, lambda x: mcf.as_expansion(x, mcf.fp16x2)),
    "fp32x2": ("fp32", 2, lambda x: mcf.as_expansion(x, mcf.fp32x2)),
    "bf16i8": ("bf16i8", 1, lambda x: mcf.as_expansion(x, mcf.bf16i8.with_rounding("nearest"))),
    "bf16i16": ("fp32", 1, lambda x: mcf.as_expansion(x, mcf.bf16i16)),
}


@pytest.mark.parametrize("kind", LINES)
def test_the_number_line_has_the_numbers_of_the_library(kind):
    name, terms, encode = LINES[kind]
    generator = torch.Generator().manual_seed(3)
    count = 40_000
    wide = kind.startswith(("bf16", "fp32"))
    exponents = torch.randint(*((-110, 120) if wide else (-12, 15)), (count,), generator=generator)
    if kind == "e4m3":
        exponents = exponents.clamp(-9, 7)
    x = (1 + torch.rand(count, generator=generator, dtype=torch.float64)) * 2.0**exponents
    x = torch.where(torch.rand(count, generator=generator) < 0.5, -x, x)
    # Half of them are sums of two short floats: ties, and numbers of the format, are among them.
    x[::2] = x[::2].bfloat16().double() * (
        1 + torch.randint(-4, 5, (count // 2,), generator=generator) * 2.0**-9
    )
    encoded = encode(x)
    nearest = mcf.as_plain(encoded, torch.float64) if terms > 1 or "i" in kind else encoded.double()
    rows = run(AROUND, {"rows": x.tolist(), "name": name, "terms": terms})
    rows = [[float(v) for v in row] for row in rows]
    below, above, found = torch.tensor(rows, dtype=torch.float64).T
    assert torch.equal(found, nearest)
    assert (below <= x).all()
    assert (x <= above).all()
    assert ((found == below) | (found == above)).all()
    # Nothing lies between: both ends are numbers, and their middle goes to one of them.
    for end in (below, above):
        again = encode(end)
        plain = mcf.as_plain(again, torch.float64) if terms > 1 or "i" in kind else again.double()
        assert torch.equal(plain, end)


def test_a_number_is_rounded_before_it_is_subtracted():
    """What the calculator takes for granted of torch."""
    weights = (1 + torch.rand(2000, generator=torch.Generator().manual_seed(0))).bfloat16()
    for weight in weights:
        assert weight - 0.0177 == weight - torch.tensor(0.0177).bfloat16()


COMPARE = """
const checkpoints = require(process.argv[1]);
const fs = require("fs");
const paths = JSON.parse(fs.readFileSync(0, "utf8"));
const files = paths.map((path) => new File([fs.readFileSync(path)], path));
checkpoints.compare([files[0]], [files[1]]).then(
    (found) => console.log(JSON.stringify({ ...found, summary: checkpoints.summary(found) })),
    (error) => console.log(JSON.stringify({ error: error.message })),
);
"""


def compare(*paths):
    return run(COMPARE, [str(path) for path in paths], SOURCE.with_name("checkpoints.js"))


def checkpoints(folder, change):
    """Two files of one model of many dtypes, in which `change` moves some elements."""
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(70, 30, generator=generator, dtype=torch.float64).to(dtype)
        x[0, :8] = torch.tensor([0.0, -0.0, 1.0, 1.0, torch.nan, torch.inf, 0.0, -1.0])
        tensors[f"{dtype}.weight".replace("torch.", "")] = x
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        bits = torch.randint(0, 256, (999,), generator=generator, dtype=torch.uint8)
        tensors[str(dtype).replace("torch.", "")] = bits.view(dtype)
    tensors |= {"count": torch.tensor(3), "empty": torch.zeros(0), "mask": torch.ones(3) > 0}
    for format in (mcf.bf16x2, mcf.bf16x3, mcf.bf16i8, mcf.bf16i16):
        x = torch.randn(20, 10, generator=generator)
        x[0, :4] = torch.tensor([0.0, 1.0, torch.nan, 1 + 2**-12])
        tensors[f"own.{format.name}"] = mcf.as_expansion(x, format)
    mcf.save_file(tensors, folder / "before.safetensors")
    moved = {}
    for name, x in tensors.items():
        plain = x.clone() if name in ("count", "mask", "empty") else x.to(torch.float64)
        if plain.is_floating_point() and plain.numel():
            mask = torch.rand(plain.shape, generator=generator) < change
            plain = torch.where(mask, plain * 1.001, plain)
            plain = torch.where(plain == 0, -plain, plain)
        if isinstance(x, mcf.MCFTensor):
            moved[name] = mcf.as_expansion(mcf.as_plain(plain, torch.float64), x.format)
        else:
            moved[name] = plain.to(x.dtype)
    mcf.save_file(moved, folder / "after.safetensors")
    return folder / "before.safetensors", folder / "after.safetensors"


@pytest.mark.parametrize("change", [0.0, 0.3, 1.0])
def test_the_tool_for_two_checkpoints_counts_as_audit_does(tmp_path, change):
    paths = checkpoints(tmp_path, change)
    found, expected = compare(*paths), mcf.meters.audit(*paths)
    assert found["refused"] == found["lone"] == []
    assert (found["integer"], found["empty"]) == (expected.not_floating, expected.empty)
    assert found["summary"].replace(" %", "%") == expected.summary()
    assert len(found["tensors"]) == len(expected.tensors) == 10
    for a, b in zip(found["tensors"], expected.tensors, strict=True):
        assert (a["name"], tuple(a["shape"]), a["verdict"]) == (b.name, b.shape, b.verdict)
        assert a["dtype"] == b.cells()[2]
        assert (a["unchanged"], a["zeros"], a["ones"]) == (b.unchanged, b.zeros, b.ones), b.name
        assert sum(a["stretches"]) == pytest.approx(48 * (1 - b.unchanged), abs=3)


def test_the_tool_for_two_checkpoints_says_what_it_cannot_compare(tmp_path):
    x = torch.ones(64, 64)
    mcf.save_file({"a": x, "b": x + 1, "c": mcf.as_expansion(x, mcf.mxfp8)}, tmp_path / "before")
    mcf.save_file(
        {"a": x[:3].clone(), "d": x, "c": mcf.as_expansion(x, mcf.mxfp8)}, tmp_path / "after"
    )
    found = compare(tmp_path / "before", tmp_path / "after")
    assert found["tensors"] == []
    assert found["lone"] == ["b", "d"]
    assert [text.split(":")[0] for text in found["refused"]] == ["a", "c"]
    (tmp_path / "other").write_bytes(b"PK\x03\x04 no safetensors file")
    assert "is not a safetensors file" in compare(tmp_path / "before", tmp_path / "other")["error"]
    whole = (tmp_path / "after").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-10])
    assert "ends within" in compare(tmp_path / "before", tmp_path / "cut")["error"]
