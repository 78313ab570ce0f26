"""Exported files: PyTorch alone, the bits of the library, readable."""

import builtins
import copy
import functools
import io
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import mcftensor as mcf
from mcftensor import __main__ as command_line
from mcftensor.arithmetic.machine_numbers import Machine
from mcftensor.arithmetic.noise import Noise
from mcftensor.export import exporting, readable_code
from mcftensor.export.exporting import LONGEST

export = functools.cache(exporting.export)

PYTHON = os.environ.get("MCFTENSOR_OTHER_PYTHON", sys.executable)
"""Python of an environment with another release of torch, in which files are tried too."""

FORMATS = {mcf.bf16i16: "full", mcf.bf16x2: "plus", mcf.bf16i8: "compact"}
STOCK = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon", "adafactor": "Adafactor"}
OPTIONS = {
    "adamw": [{"weight_decay": 0.1}, {"lr": 1e-5, "betas": (0.9, 0.95), "weight_decay": 0}],
    "sgd": [{"momentum": 0.9, "weight_decay": 0.1}, {"lr": 0.1, "momentum": 0.8, "nesterov": True}],
    "muon": [{}, {"lr": 1e-2, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}],
    "adafactor": [{"weight_decay": 0.1}, {"lr": 1e-3, "eps": (1e-8, 1e-3), "d": 2.0}],
}
PAIRS = [(name, format) for name in OPTIONS for format in FORMATS]
each_pair = pytest.mark.parametrize(
    ("name", "format"), PAIRS, ids=[f"{name}-{format.name}" for name, format in PAIRS]
)


class Model(nn.Module):
    def __init__(self, name):
        super().__init__()
        shapes = [(33, 40), (5, 32), (1, 7), (2, 96)]
        if name != "muon":
            shapes += [(7,), (3, 4, 9), (), (1, 3, 1)]
        for i, shape in enumerate(shapes):
            setattr(self, f"w{i}", nn.Parameter(torch.randn(shape)))


def loaded(text):
    """Run an exported file where the library cannot be imported."""
    own = builtins.__import__

    def load(name, *args, **kwargs):
        if name.partition(".")[0] == "mcftensor":
            raise ModuleNotFoundError(name)
        return own(name, *args, **kwargs)

    namespace = {"__builtins__": {**vars(builtins), "__import__": load}, "__name__": "exported"}
    exec(compile(text, "exported.py", "exec"), namespace)
    return namespace


def gradients(model, step):
    """Gradients of very different sizes, some of them zero."""
    random = torch.Generator().manual_seed(step)
    for p in model.parameters():
        scale = 10.0 ** torch.randint(-8, 3, (), generator=random)
        x = torch.randn(p.shape, generator=random) * scale
        yield torch.where(torch.rand(p.shape, generator=random) < 0.1, 0, x).to(torch.bfloat16)


def set_gradients(model, step):
    for p, grad in zip(model.parameters(), gradients(model, step), strict=True):
        p.grad = grad


def given(model, format):
    return model.named_parameters() if format is mcf.bf16i8 else model.parameters()


def saved_and_loaded(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def require_the_bits_of_the_library(name, format, options, steps):
    torch.manual_seed(0)
    plain = Model(name)
    ours = mcf.as_expansion(copy.deepcopy(plain), format)
    stock = getattr(torch.optim, STOCK[name])(ours.parameters(), **options)
    exported = loaded(export(name, format))[STOCK[name]]
    optimizer = exported(given(plain, format), **{"lr": stock.defaults["lr"]} | options)
    stock = mcf.collage(stock, FORMATS[format])
    for step in range(steps):
        set_gradients(ours, step)
        set_gradients(plain, step)
        stock.step()
        optimizer.step()
        if step == steps // 2:  # and goes on in another process
            weights, states = saved_and_loaded([plain.state_dict(), optimizer.state_dict()])
            plain = Model(name).bfloat16()
            optimizer = exported(given(plain, format))
            plain.load_state_dict(weights)
            optimizer.load_state_dict(states)
        for group in (*stock.param_groups, *optimizer.param_groups):
            group["lr"] *= 0.9
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        state = optimizer.state[q]
        require_same(p.components, (q.detach(), state["tail"]))
        assert torch.equal(mcf.as_plain(p.detach(), torch.float32), optimizer.number(q))
        for key in stock.state[p].keys() - {"step"}:
            x, own = stock.state[p][key], state[key]
            if isinstance(own, tuple):
                require_same(x.components, own)
            else:
                require_same([mcf.as_plain(x, own.dtype)], [own])


def require_same(a, b):
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@pytest.mark.thinned(of=2)
@each_pair
def test_has_the_bits_of_the_library(name, format):
    for options in OPTIONS[name]:
        require_the_bits_of_the_library(name, format, options, 5)


@pytest.mark.slow
@each_pair
def test_has_the_bits_of_the_library_after_many_steps(name, format):
    require_the_bits_of_the_library(name, format, OPTIONS[name][0], 1000)


@pytest.mark.thinned(of=2)
@each_pair
def test_is_readable(name, format, tmp_path):
    text = export(name, format)
    assert text.count("\n") <= LONGEST == 200
    file = tmp_path / "exported.py"
    file.write_text(text)
    ruff = [sys.executable, "-m", "ruff"]
    style = ["--isolated", "--line-length", "100", "--no-cache", str(file)]
    for action in (["format", "--check"], ["check", "--select", "E,F,I,B,W"]):
        done = subprocess.run([*ruff, *action, *style], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("unparsed", "formatted"),
    [
        ("    (a, (b, c)) = f((a, b))", "    a, (b, c) = f((a, b))"),
        ("x = [a for (a, b) in zip(c)]", "x = [a for a, b in zip(c)]"),
        ("for (a, b) in zip(c):", "for a, b in zip(c):"),
        ("return (f(a), -b)", "return f(a), -b"),
        ("return (a + b) * (c + d)", "return (a + b) * (c + d)"),
        ("return sum((x > 1 for x in y)) <= 1", "return sum(x > 1 for x in y) <= 1"),
        ("x = s['a'] ** 2 + y ** z", 'x = s["a"] ** 2 + y**z'),
        ("x = 1 / y.z ** 0.5 + f(x) ** 0.5", "x = 1 / y.z**0.5 + f(x) ** 0.5"),
    ],
)
def test_lines_are_as_ruff_formats_them_whatever_python_unparses(unparsed, formatted):
    assert readable_code._formatted(unparsed) == formatted


def test_special_values_are_those_of_the_library():
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38, 1.0])
    for format, mode in FORMATS.items():
        plain = nn.Module()
        plain.w = nn.Parameter(special.repeat(8, 1))
        ours = mcf.as_expansion(copy.deepcopy(plain), format)
        optimizer = loaded(export("sgd", format))["SGD"](given(plain, format), lr=0.5)
        stock = torch.optim.SGD(ours.parameters(), lr=0.5, momentum=0.9)
        stock = mcf.collage(stock, mode)
        for model, step in ((plain, optimizer), (ours, stock)):
            model.w.grad = special.repeat(8, 1).T.to(torch.bfloat16)
            step.step()
        parts = zip(ours.w.components, (plain.w, optimizer.state[plain.w]["tail"]), strict=True)
        for x, y in parts:
            assert torch.equal(bits(x), bits(y))


def test_conversions_are_those_of_the_library():
    """For every code, and for bit patterns of every kind, with noise of every size."""
    own = loaded(export("adamw", mcf.bf16i8)) | loaded(export("adamw", mcf.bf16x2))
    own |= loaded(export("sgd", mcf.bf16i16))
    random = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (64, 100), generator=random)
    x = patterns.to(torch.int32).view(torch.float32)
    x[:16] = torch.randn(16, 100, generator=random).square()
    x[16:32] = x[:1] * 2.0 ** torch.randint(-140, 120, (16, 1), generator=random)
    noise = torch.randint(-(2**31), 2**31, x.shape, generator=random).to(torch.int32)
    made = Noise()
    made.pattern = noise
    for name in ("bf16i8", "bf16i16", "bf16x2", "mxfp8", "ue5m3"):
        f = mcf.Format.from_name(name)
        given = (x, noise) if f.takes_key else (x,)
        ours = f.encode(Machine(torch.float32).of([x]), made if f.takes_key else None)
        found = own[f"encode_{name}"](*given)
        for a, b in zip(ours, found, strict=True):
            assert torch.equal(bits(a), bits(b))
        if name in ("mxfp8", "ue5m3"):
            codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
            scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8).contiguous()
            found = codes, scales
        (number,) = Machine(torch.float32).of(f.decode(found)).summed().floats
        assert torch.equal(bits(number), bits(own[f"decode_{name}"](*found)))


def bits(x):
    return x.detach().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])


@pytest.mark.thinned(of=2)
@each_pair
def test_takes_options_closures_and_groups(name, format):
    exported = loaded(export(name, format))[STOCK[name]]
    model = Model(name)
    with pytest.raises(TypeError, match=r"no option \['rate'\]; it has \['lr'"):
        exported(given(model, format), rate=1)
    with pytest.raises(TypeError, match=r"is torch.float64; give float32 or bfloat16"):
        exported(given(Model(name).double(), format))
    optimizer = exported(given(model, format))
    added = nn.Parameter(torch.ones(2, 3))
    optimizer.add_param_group({"params": [added], "lr": 0.5})
    set_gradients(model, 0)
    added.grad = torch.ones(2, 3, dtype=torch.bfloat16)
    before = optimizer.number(added)
    assert optimizer.step(lambda: 7) == 7
    assert (optimizer.number(added) != before).all()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_sgd_and_muon_say_what_they_are_for():
    sgd, muon = (loaded(export(x, mcf.bf16i16))[STOCK[x]] for x in ("sgd", "muon"))
    with pytest.raises(ValueError, match="momentum must be above 0"):
        sgd([nn.Parameter(torch.ones(3))], momentum=0)
    with pytest.raises(ValueError, match="give matrices, and other parameters to AdamW"):
        muon([nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["lion"], "no file for 'lion'; give one of adamw, sgd, muon, adafactor"),
        (["adamw", "--format", "mxfp8"], "no file for mxfp8; give bf16i16, bf16x2 or bf16i8"),
        (["adamw", "--format", "none"], "'none' is not the name of a format"),
    ],
)
def test_what_has_no_file_is_refused_by_name(arguments, reason, capsys):
    assert command_line.main(["export", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert reason in err
    assert err.count("\n") == 1


def test_what_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(exporting, "LONGEST", 90)
    with pytest.raises(ValueError, match=r"adamw over bf16i16: it has \d+ lines, and 90"):
        exporting.export("adamw", mcf.bf16i16)


def test_the_command_prints_the_file(capsys):
    assert command_line.main(["export", "adamw"]) == 0
    assert capsys.readouterr().out == export("adamw", mcf.bf16i16)


_PROGRAM = """
import sys, torch
files, steps = torch.load(sys.argv[1])
found = {}
for name, text, weights, grads in files:
    namespace = {"__name__": "exported"}
    exec(text, namespace)
    params = [torch.nn.Parameter(x) for x in weights]
    named = [(f"w{i}", p) for i, p in enumerate(params)]
    cls = namespace[name]
    optimizer = cls(named if "named_parameters" in cls.__init__.__code__.co_varnames else params)
    for own in grads:
        for p, grad in zip(params, own):
            p.grad = grad
        optimizer.step()
    found[name, text] = [optimizer.number(p) for p in params]
assert "mcftensor" not in sys.modules
torch.save(found, sys.argv[2])
"""


@pytest.mark.slow
def test_has_the_same_bits_in_another_release_of_torch(tmp_path):
    files = []
    for name, format in PAIRS:
        torch.manual_seed(0)
        model = Model(name)
        weights = [p.detach() for p in model.parameters()]
        grads = [list(gradients(model, step)) for step in range(20)]
        files.append((STOCK[name], export(name, format), weights, grads))
    torch.save((files, 20), tmp_path / "in.pt")
    results = []
    for python in (sys.executable, PYTHON):
        arguments = [str(tmp_path / x) for x in ("in.pt", "out.pt")]
        subprocess.run([python, "-c", _PROGRAM, *arguments], check=True, cwd=tmp_path)
        results.append(torch.load(tmp_path / "out.pt"))
    for (name, text), numbers in results[0].items():
        for x, y in zip(numbers, results[1][name, text], strict=True):
            if name in ("AdamW", "SGD"):  # others have sums, whose order is the release's
                assert torch.equal(x, y)
            torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)
