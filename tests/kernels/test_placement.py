"""What runs on a device that is not there: no operand lies elsewhere, nobody waits, the same bits.

Each scenario runs on the CPU and on a device that is pretended, and must leave the same there.
"""

import ast
import contextlib
import functools
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mcftensor as mcf
from mcftensor.arithmetic.noise import draw_key
from mcftensor.kernels.without_float64 import has_float64
from mcftensor.passes.operators import OPERATORS
from support.helpers import sample
from support.kernel_cases import assert_same_bits
from support.optimizers import CASES
from support.pretended import Misplaced, pretended, say_warm

SCALED = mcf.scaling.scaled(torch.float16)

SCENARIOS: dict[str, Callable[[str], list[Tensor]]] = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def each(**choices):
    """Scenarios of a function, one for each choice of an argument."""
    ((name, values),) = choices.items()

    def register(function):
        for key, value in values.items():
            SCENARIOS[f"{function.__name__}-{key}"] = functools.partial(function, **{name: value})
        return function

    return register


def drawn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(dtype)


def numbers(results):
    """Components, on the CPU."""
    found = []
    for x in results:
        found += [getattr(t, "_cpu", t).detach() for t in getattr(x, "components", (x,))]
    return [x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for x in found]


# ---------------------------------------------------------------------------------- operations


FORMATS = {
    f.name: f
    for f in (mcf.bf16x2, mcf.bf16x3, mcf.fp32x2, mcf.fp64x2, mcf.bf16i16, mcf.bf16i8, mcf.mxfp8)
} | {name: mcf.Format.from_name(name) for name in ("bf16x2sr", "fp32x2br", "bf16br", "fp16x2")}


@each(format=FORMATS)
def operations(device, format):
    """Each of the table, in all its forms, with operands of all kinds."""
    x, y = (sample(format, 5, 64, seed=i).to(device) for i in range(2))
    plain, scalar = drawn(5, 64, dtype=format.dtype).to(device), torch.tensor(0.3).to(device)
    results = []
    for name, row in OPERATORS.items():
        keyword = {row.keyword: 0.3} if row.keyword else {}
        for other in (y, plain, scalar, 0.7) if row.operands > 1 else (y,):
            if not isinstance(other, Tensor) and name.startswith("addc"):
                continue
            operands = [y] * (row.operands - 2) + [other] * (row.operands > 1)
            results.append(getattr(torch, name)(x, *operands, **keyword))
            if hasattr(Tensor, f"{name}_"):
                results.append(getattr(x.clone(), f"{name}_")(*operands, **keyword))
            if hasattr(torch, f"_foreach_{name}") and other is y:
                lists = [[z, z] for z in operands]
                results += getattr(torch, f"_foreach_{name}")([x, x], *lists)
    return results


@each(format={name: FORMATS[name] for name in ("bf16x2", "fp32x2", "bf16i8", "bf16x2sr")})
def other_operators(device, format):
    """Evaluated wide, or a structure operation."""
    x, y = (sample(format, 6, 64, seed=i).to(device) for i in range(2))
    rows = torch.tensor([3, 1]).to(device)
    z = x.clone()
    z[rows] = y[rows]
    z[z > 1] = 0.25
    z[z < -1] = y[z < -1]
    z[0, :3] = torch.tensor([1.0, 2.0, 3.0]).to(device)
    results = [z, x.exp(), x.softmax(1), x.sum(), x.mean(0), x.cumsum(1), x.norm(), x.var(1)]
    results += [x @ y.t(), x.sort(1).values, x.amax(1), x.clamp(-1, 1), x.abs().log1p(), x > 0]
    results += [torch.where(x > 0, x, 1.2), torch.cat([x, y]), torch.stack([x, y]), x.pow(2)]
    results += [x.view(-1)[::2], x.t().contiguous(), x[1:3], x.gather(1, rows[None]), x.round()]
    results += [torch.zeros_like(x), torch.full_like(x, 0.3), x.new_zeros(3), x.sigmoid(), -x]
    results += [x.index_select(0, rows), x.masked_fill(x > 0, 0.1), torch.maximum(x, y), x.std()]
    results += [x.flip(0), x.roll(1), x.repeat(2, 1), x.tril(), x.floor(), x % 0.3, x.erf()]
    return results


@each(format={name: FORMATS[name] for name in ("bf16x2", "bf16i8", "mxfp8")} | {"scaled": SCALED})
def numbers_into_masks(device, format):
    x = mcf.as_expansion(drawn(6, 64).to(device), format)
    x[x > 1] = 0.3
    x[torch.tensor([True, False] * 3).to(device)] = 0.7
    x[:, torch.tensor([True, False] * 32).to(device)] = torch.tensor(0.4, device="cpu")
    return [x]


@scenario
def beyond_float64(device):
    """Made of arithmetic of the format."""
    x, y = (sample(mcf.fp64x2, 6, 12, seed=i).to(device) for i in range(2))
    rows = torch.tensor([3, 1]).to(device)
    results = [x.sum(), x.mean(0), x.cumsum(1), x.var(1), x.norm(), x.sign(), x**4, x @ y.t()]
    results += [x @ y[0], torch.addmm(y @ y.t(), x, y.t()), torch.nextafter(x, y), x.abs().rsqrt()]
    results += [torch.copysign(x, y), torch.copysign(x, -1.0), x.index_add(0, rows, y[:2])]
    results += [x.index_put((rows,), y[:2], accumulate=True)]
    return [*results, x.scatter_add(1, rows.expand(6, 2), y)]


@scenario
def what_is_read(device):
    """For the caller."""
    x, y = (sample(mcf.bf16x2, 6, 12, seed=i).to(device) for i in range(2))
    read = [torch.equal(x, y), x.tolist(), x.numpy(), float(x[0, 0])]
    read += [x.new_tensor([0.1]), torch.cat([x, x]).unique(), x[x > 0], torch.nextafter(x, y)]
    return [x if isinstance(x, Tensor) else torch.as_tensor(x, device="cpu") for x in read]


@scenario
def conversion(device):
    x, wide = drawn(70, 64).to(device), drawn(70, 64).double().to(device) / 3
    results = []
    for format in FORMATS.values():
        for given in (x, wide):
            made = mcf.as_expansion(given, format)
            results += [
                made,
                mcf.as_plain(made, torch.float32),
                made.to(torch.float64),
                made.half(),
            ]
            results.append(torch.empty_like(made).copy_(given))
            results.append(made.clone().copy_(sample(mcf.fp32x2, 70, 64).to(device)))
    return results


@scenario
def conversion_on_the_device(device):
    """Formats by sizes of weights, which are read."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64)).to(device)
    return list(mcf.as_plain(mcf.as_expansion(model), torch.float32).parameters())


@scenario
def changes_of_place(device):
    x = sample(mcf.bf16x3, 5, 4)
    there = x.to(device)
    return [there, there.cpu(), there.to(device), x.clone().copy_(there), there.clone().copy_(x)]


@scenario
def copies_of_plain_tensors(device):
    """From the host and from the device."""
    sources = [drawn(5, 4), drawn(5, 4).to(device)]
    return [sample(mcf.bf16x3, 5, 4).to(device).copy_(source) for source in sources]


# -------------------------------------------------------------------------------------- models


def model_on(device, format=None, **options):
    say_warm(is_warm=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 32))
    model = mcf.as_expansion(model, format, **options)
    return model.to(device)


def batch(device, seed=0):
    return drawn(8, 32, seed=seed).to(device)


def loss_of(model, x):
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


def states_of(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [x for p in parameters for x in optimizer.state[p].values()]
    return [x for x in states if isinstance(x, Tensor)]


def trained(model, optimizer, device, steps=2):
    batches = [batch(device, i) for i in range(steps)]
    for x in batches:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        say_warm(is_warm=True)
    return [*model.parameters(), *states_of(optimizer)]


MODES = {
    "none": (None, None),
    "light": (None, "light"),
    "plus": (None, "plus"),
    "full": (mcf.bf16i16, "full"),
    "compact": (mcf.bf16i8, "compact"),
}


@each(choice={"-".join(x.id.split()): x.values for x in CASES})
def steps(device, choice):
    cls, flags = choice
    model = model_on(device)
    if cls is torch.optim.Muon:
        parameters = [p for p in model.parameters() if p.dim() == 2]
    else:
        parameters = list(model.parameters())
    options = {"momentum": 0.9} if cls is torch.optim.SGD else {}
    return trained(model, cls(parameters, lr=1e-2, **options, **flags), device)


@each(mode=MODES)
def modes(device, mode):
    format, name = mode
    results = []
    for flags in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        model = model_on(device, format)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True, **flags)
        if name:
            mcf.collage(optimizer, name)
        results += trained(model, optimizer, device)
    return results


@each(capturable={"foreach": {"foreach": True}, "fused": {"fused": True}})
def inside_a_graph(device, capturable):
    """Step counts and learning rates on the device; those of the CPU are elsewhere."""
    options = capturable | ({"capturable": True} if device != "cpu" else {})
    model = model_on(device)
    lr = torch.tensor(1e-2).to(device) if "fused" in capturable else 1e-2
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, **options)
    trained(model, optimizer, device)
    return list(model.parameters()) if "fused" in capturable else []  # which differ from others


@scenario
def loss_scales(device):
    """As `torch.amp.GradScaler` gives them to a fused step."""
    results = []
    for found in (0.0, 1.0):
        model = model_on(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        loss_of(model, batch(device)).backward()
        optimizer.grad_scale = torch.tensor(2.0).to(device)
        optimizer.found_inf = torch.tensor(found).to(device)
        optimizer.step()
        results += [*model.parameters()]
    return results


@each(format={f.name: f for f in (mcf.bf16x2, mcf.bf16i8)})
def steps_in_backward(device, format):
    model = model_on(device, format)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    mcf.step_in_backward(model, optimizer)
    for i in range(3):
        loss_of(model, batch(device, i)).backward()
        optimizer.step()
    return [*model.parameters(), *states_of(optimizer)]


@scenario
def accumulation(device):
    model = model_on(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        with mcf.accumulate_gradients(model):
            for i in range(3):
                loss_of(model, batch(device, i)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


@each(kind={"bf16": torch.bfloat16, "expansions": None})
def edq(device, kind):
    model = model_on(device) if kind is None else model_on("cpu").to(device)
    if kind is not None:
        model = mcf.as_plain(model).to(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    meter = mcf.EDQ(optimizer, every=1)
    trained(model, optimizer, device)
    return [torch.tensor(list(meter.last.values()), dtype=torch.float64), *model.parameters()]


@each(dtype={"float16": torch.float16, "e4m3": torch.float8_e4m3fn})
def scaled(device, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 32))
    format = mcf.scaling.scaled(dtype)
    model = mcf.as_expansion(model, format if dtype == torch.float16 else None).to(device)
    x = mcf.as_expansion(drawn(8, 32).to(device), format)
    results = [x, x + x, x * 0.3, x @ x.t(), x.softmax(1), x.exp(), x.sum(), x.mean(1), x.sqrt()]
    if dtype == torch.float16:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results += list(model.parameters())
    return results


@scenario
def layers_of_scaled_numbers(device):
    """Forward, and the gradients of inputs and weights."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.LeakyReLU(), nn.GroupNorm(2, 8)]
    layers += [nn.AvgPool2d(2), nn.SiLU(), nn.Flatten(), nn.Linear(72, 16), nn.RMSNorm(16)]
    layers += [nn.GLU(), nn.ELU(), nn.Hardtanh(), nn.LogSigmoid(), nn.PReLU(), nn.LogSoftmax(1)]
    model = mcf.as_expansion(nn.Sequential(*layers), SCALED).to(device)
    x = mcf.as_expansion(drawn(2, 4, 8, 8).to(device), SCALED).requires_grad_()
    out = model(x)
    nn.functional.mse_loss(out, drawn(2, 8).to(device)).backward()
    return [out, x.grad, *[p.grad for p in model.parameters()], *model.parameters()]


@scenario
def operators_of_scaled_numbers(device):
    x, y = (mcf.as_expansion(drawn(6, 16, seed=i).to(device), SCALED) for i in range(2))
    rows = torch.tensor([3, 1]).to(device)
    at = torch.tensor([[3, 1], [0, 2]]).to(device)
    q, k, v = (mcf.as_expansion(drawn(1, 2, 6, 16, seed=i).to(device), SCALED) for i in range(3))
    results = [x.scatter(1, at, 0.3), x.scatter(1, at, y), x.index_put((rows,), y[:2])]
    results += [nn.functional.embedding(rows, x), nn.functional.pad(x, (1, 2)), torch.cat([x, y])]
    results += [x.masked_fill(x > 0, 0.3), torch.where(x > 0, x, y), x.cumsum(1), x.std()]
    results += [x.logsumexp(1), x.norm(), x.var(1), x.clamp(-1, 1), torch.maximum(x, y), x.sign()]
    results += [x.lerp(y, 0.3), x.abs().rsqrt(), x.reciprocal(), torch.zeros_like(x), x.sum(0)]
    results += [
        x.new_full((3,), 0.3),
        mcf.as_plain(nn.functional.scaled_dot_product_attention(q, k, v)),
    ]
    return [*results, nn.functional.cross_entropy(x, torch.arange(6, device=x.device))]


@scenario
def files(device):
    """Saved from the device, and loaded there."""
    folder = Path(tempfile.mkdtemp())
    model = model_on(device)
    optimizer = mcf.collage(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), "plus")
    trained(model, optimizer, device)
    mcf.save_file(model.state_dict(), folder / "model.safetensors")
    loaded = mcf.load_file(folder / "model.safetensors", device=device)
    other = model_on(device)
    other.load_state_dict(loaded)
    its_optimizer = mcf.collage(torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True), "plus")
    its_optimizer.load_state_dict(optimizer.state_dict())
    return [*loaded.values(), *trained(other, its_optimizer, device)]


# --------------------------------------------------------------------------------------- tests


# Where the host waits for the device, and a scenario in which it does; the page says why.
WAITS = {
    "operators/structure.py to_copy": "changes_of_place",
    "patches/distributed.py _converted": "conversion_on_the_device",
    "tensor/tensor.py _like": "modes-compact",
    "tensor/implicit_rounding.py _is_small_update": "copies_of_plain_tensors",
    "formats/moving.py move_component": "operations-mxfp8",
    "dispatch/store.py overwrite": "changes_of_place",
    "dispatch/store.py uninterrupted": "other_operators-bf16x2",
    "operators/comparison.py all_equal": "what_is_read",
    "operators/comparison.py by_rank": "what_is_read",
    "wide/scattering.py _combined": "beyond_float64",
    "wide/products.py __init__": "beyond_float64",
    "wide/products.py _further": "beyond_float64",
    "wide/products.py _unmatched": "beyond_float64",
    "formats/defaults.py format_of_weights": "conversion_on_the_device",
    "formats/block_codes.py require": "modes-compact",
    "formats/expansion_format.py _normalized": "files",
    "checkpoint/safetensors_files.py write": "files",
    "meters/edq/readings.py totals": "edq-expansions",
    "kernels/digit_body.py add_eagerly": "edq-expansions",
    "arithmetic/integer_parts.py modulo": "other_operators-fp32x2",
    "arithmetic/integer_parts.py _at": "other_operators-fp32x2",
}
WITH_FLOAT64 = {
    "scaling/structure_rules.py _to_copy": "scaled-float16",
    "tensor/readable_values.py _on_host": "what_is_read",
    "dispatch/rounded_arguments.py _has_bits": "other_operators-bf16x2",
    "wide/corrections.py _of_elements": "other_operators-fp32x2",
    "dispatch/rounded_arguments.py places_of_rests": "other_operators-fp32x2",
}
WITHOUT_FLOAT64 = {
    "passes/optimizer_steps.py _numbers": "inside_a_graph-fused",
    "passes/optimizer_steps.py _at_hand": "inside_a_graph-fused",
    "tensor/tensor_repr.py _in_numpy": "what_is_read",
}
ALL_WAITS = WAITS | WITH_FLOAT64 | WITHOUT_FLOAT64
# Where it waits from the second step on.
LATER = {
    "steps-Adafactor": {  # its means may be of numbers that float64 rounds
        *("tensor/readable_values.py _on_host", "dispatch/rounded_arguments.py _has_bits"),
    },
    "edq": {"kernels/digit_body.py add_eagerly", "meters/edq/readings.py totals"},
    "files": {
        *("formats/expansion_format.py _normalized", "checkpoint/safetensors_files.py write"),
        "operators/structure.py to_copy",
    },
}
LATER_WITHOUT_FLOAT64 = {
    *("passes/optimizer_steps.py _numbers", "passes/optimizer_steps.py _at_hand"),
    *(f"wide/products.py {name}" for name in ("__init__", "_further", "_unmatched")),
    "tensor/tensor_repr.py _in_numpy",
}
SLOW = ("operations-fp32x2br", "operations-fp64x2")
PAGE = Path(__file__).parents[2] / "docs/reference/devices.md"


def runs_alike(name, kind, default="cpu"):
    """Assert that a scenario leaves the same on the CPU and on a device; return the device."""
    torch.manual_seed(1)
    expected = numbers(SCENARIOS[name]("cpu"))
    with pretended(kind) as device, torch.device(default):
        torch.manual_seed(1)
        got = numbers(SCENARIOS[name](kind))
    assert_same_bits(got, expected)
    waits = WAITS | (WITH_FLOAT64 if has_float64() else WITHOUT_FLOAT64)
    assert device.waits <= set(waits)
    (allowed,) = [LATER[key] for key in LATER if name.startswith(key)] or [set()]
    assert device.later <= allowed | (set() if has_float64() else LATER_WITHOUT_FLOAT64)
    return device


def marked(name, is_slow):
    marks = [pytest.mark.slow] * is_slow
    if "scaled" in name:
        marks.append(pytest.mark.with_float64("scaled formats compute in float64"))
    return pytest.param(name, marks=marks)


@pytest.mark.thinned(of=24)
@pytest.mark.parametrize("name", [marked(x, x in SLOW) for x in SCENARIOS])
def test_on_cuda(name):
    runs_alike(name, "cuda")


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize(
    "name",
    [
        *("operations-bf16x2", "other_operators-bf16x2", "numbers_into_masks-bf16x2"),
        *("steps-SGD-fused", "modes-compact", "files"),
    ],
)
def test_on_xpu(name):
    """Where no kernel of Triton runs."""
    assert runs_alike(name, "xpu").launches == []


DEFAULTS = ("operations-mxfp8", "other_operators-bf16x2", "steps-Rprop-foreach", "edq-expansions")


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("name", [marked(x, x not in DEFAULTS) for x in SCENARIOS])
def test_with_the_device_as_default(name):
    """`torch.set_default_device("cuda")`: PyTorch makes tensors there that name no device."""
    runs_alike(name, "cuda", default="cuda")


def test_the_library_names_the_device_of_every_tensor():
    unplaced = [
        f"{path.name}, line {call.lineno}: {ast.unparse(call)}"
        for path in sorted(Path(mcf.__file__).parent.rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and is_unplaced(call)
    ]
    assert not unplaced


MAKERS = {
    *("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand"),
    *("randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}


def is_unplaced(call):
    """Whether a call of `torch.zeros` or the like has no argument `device`."""
    made_by = ast.unparse(call.func).removeprefix("torch.")
    is_maker = made_by in MAKERS and ast.unparse(call.func).startswith("torch.")
    return is_maker and not {"device", None} & {x.arg for x in call.keywords}


def test_it_sees_what_names_no_device():
    calls = ("torch.zeros(1)", "torch.zeros(1, device=d)", "torch.zeros(1, **like)", "zeros(1)")
    found = [is_unplaced(ast.parse(call, mode="eval").body) for call in calls]
    assert found == [True, False, False, False]


def test_keys_are_drawn_by_the_generator_of_the_device():
    with pretended("cuda") as device:
        assert draw_key(device.device).device == device.device


@pytest.mark.parametrize("format", ["bf16x2", "bf16i8", "mxfp8", marked("scaled", False)])
def test_nobody_waits_for_numbers_in_masks(format):
    assert runs_alike(f"numbers_into_masks-{format}", "cuda").waits == set()


@pytest.mark.thinned(of=16)
@pytest.mark.parametrize(
    "where",
    [
        *WAITS,
        *(
            pytest.param(x, marks=pytest.mark.with_float64("the wait is of code for float64"))
            for x in WITH_FLOAT64
        ),
        *WITHOUT_FLOAT64,
    ],
)
def test_waits_that_the_page_names(where):
    assert f"`{where.split()[0]}`, `{where.split()[1]}`" in PAGE.read_text()
    mode = mcf.without_float64() if where in WITHOUT_FLOAT64 else contextlib.nullcontext()
    with mode, pretended("cuda") as device:
        SCENARIOS[ALL_WAITS[where]]("cuda")
    assert where in device.waits | device.later


def test_the_page_names_no_others():
    found = re.findall(r"\| `(\w+/[\w/]+\.py)`, `(\w+)` \|", PAGE.read_text())
    assert {" ".join(x) for x in found} == set(ALL_WAITS)


# ------------------------------------------------------------------------------------ the harness


def test_what_would_fail_there_fails():
    with pretended("cuda"):
        x = drawn(3).to("cuda")
        assert x.device == torch.zeros_like(x).device == torch.device("cuda", 0)
        assert (x + torch.tensor(1.0)).device.type == "cuda"
        with pytest.raises(Misplaced):
            x + torch.zeros(1)
    with pretended("mps", has_float64=False), pytest.raises(Misplaced):
        drawn(3).to("mps").double()
