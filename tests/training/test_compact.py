"""`collage(optimizer, "compact")`: states of one byte, and what training makes of them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mcftensor as mcf
from common.database import cases, configurations, paths_of
from common.roster import classes, subject
from common.trial import Way, displacement, error
from speed.memory import peak
from support.helpers import compiled_whole, exact
from support.optimizers import PATHS, SAMPLE

STEPS = 20
SHAPES = [(), (7,), (1, 9), (3, 5), (2, 3, 4), (40, 50)]
CASES = [case for case in cases() if case[0] != "LBFGS"]
HELD = [mcf.bf16i8, mcf.bf16i16, mcf.bf16x2, mcf.fp32x2]

FIRST, SECOND, WIDE = mcf.mxfp8, mcf.ue5m3, mcf.bf16i16
PROMISED = {
    "Adadelta": {"square_avg": SECOND, "acc_delta": SECOND},
    "Adagrad": {"sum": WIDE},
    "Adam": {"exp_avg": FIRST, "exp_avg_sq": SECOND, "max_exp_avg_sq": SECOND.nearest},
    "Adamax": {"exp_avg": FIRST, "exp_inf": SECOND},
    "AdamW": {"exp_avg": FIRST, "exp_avg_sq": SECOND, "max_exp_avg_sq": SECOND.nearest},
    "Muon": {"momentum_buffer": FIRST},
    "NAdam": {"exp_avg": FIRST, "exp_avg_sq": SECOND},
    "RAdam": {"exp_avg": FIRST, "exp_avg_sq": SECOND},
    "RMSprop": {"square_avg": SECOND, "momentum_buffer": FIRST},
    "SGD": {"momentum_buffer": FIRST},
}
"""Of matrices."""

slow = [pytest.mark.slow]


def train(optimizer, parameters, steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
        optimizer.step()


def entered(start, held):
    return [nn.Parameter(mcf.as_expansion(x, held) if held else x.double()) for x in start]


@pytest.mark.thinned(of=16)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id="-".join(case), marks=[] if SAMPLE[case[0]] == case[1] else slow)
        for case in CASES
    ],
)
def test_every_optimizer_of_torch(case):
    name, configuration, path = case
    keywords = configurations(name)[configuration].keywords | paths_of(name)[path]
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 5), (40, 50)] if name == "Muon" else SHAPES
    start = [torch.randn(shape, generator=generator).bfloat16().float() for shape in shapes]
    ours, theirs = entered(start, mcf.bf16i8), entered(start, None)
    cls = getattr(torch.optim, name)
    optimizer = mcf.collage(cls(ours, **keywords), "compact")
    train(optimizer, ours)
    train(cls(theirs, **keywords), theirs)
    moved = torch.cat([(exact(p) - x).flatten() for p, x in zip(ours, start, strict=True)])
    wanted = torch.cat([(p.detach() - x).flatten() for p, x in zip(theirs, start, strict=True)])
    assert (moved - wanted).norm() <= 0.3 * wanted.norm()
    assert_promised(name, optimizer, ours)


def assert_promised(name, optimizer, parameters):
    for p in parameters:
        is_matrix = sum(length > 1 for length in p.shape) > 1
        states = optimizer.state[p]
        is_wide = "grad_avg" in states or not is_matrix  # of a centered RMSprop, and vectors
        for state, promised in PROMISED.get(name, {}).items():
            if isinstance(states.get(state), torch.Tensor):
                assert exact(states[state]).isfinite().all()
                assert states[state].format is (WIDE if is_wide else promised), state


def test_lbfgs_descends():
    ways = [Way(torch.float64), Way(mcf.bf16i8, collage="compact")]
    found = [displacement(subject("torch.optim", "LBFGS"), way) for way in ways]
    assert error(found[1], found[0]) < 0.01


# Of what the error is large with states of float32, too, or that keeps weights in a first moment.
CHAOTIC = {"DAdaptAdaGrad", "DAdaptAdan", "DAdaptLion", "DAdaptSGD", "Gravity"}
KEEPS_WEIGHTS = {"AccSGD"}
# What takes other views of its states, wraps other optimizers, or does not run here.
REFUSED = {"AdaGO", "AdaMuon", "MuonClip"}
WRAPPERS = {
    *("Lookahead", "Magma", "OrthoGrad", "SafeFP16Optimizer", "TRAC"),
    *("ScheduleFreeWrapper", "ScheduleFreeWrapperReference"),
}
MISSING = {"CPUOffloadOptimizer", "DeMo", "DistributedMuon"}
QUICK = {"AdaBelief", "Adan", "ADOPT", "CAME", "Lion", "SOAP", "AdamWScheduleFree", "Prodigy"}


def third_party():
    for package in ("pytorch_optimizer", "schedulefree", "prodigyopt"):
        try:
            found = classes(package)
        except ImportError:
            continue
        for name in found.keys() - MISSING:
            marks = [] if name in QUICK else slow
            yield pytest.param(package, name, id=f"{package}-{name}", marks=marks)


@pytest.mark.thinned(of=3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "name"), sorted(third_party(), key=lambda case: case.id))
def test_classes_of_other_packages(package, name):
    case, way = subject(package, name), Way(mcf.bf16i8, collage="compact")
    if name in WRAPPERS:
        with pytest.raises(TypeError, match=r"collage: .*give"):
            displacement(case, way)
        return
    if name in REFUSED:
        with pytest.raises(NotImplementedError, match=r"share a scale.*mcf\.collage"):
            displacement(case, way)
        return
    found = displacement(case, way)
    assert found.isfinite().all()
    if name not in CHAOTIC | KEEPS_WEIGHTS:
        assert error(found, displacement(case, Way(torch.float64))) < 0.3


class TestRefusals:
    @pytest.mark.parametrize(
        ("cls", "mode", "reason"),
        [
            ("Adagrad", {"sum": mcf.ue5m3}, "only grows"),
            ("Adagrad", {"sum": mcf.mxfp8}, "only grows"),
            ("AdamW", {"exp_avg": mcf.ue5m3}, "negative numbers.*mcf.mxfp8"),
            ("AdamW", {"exp_avg": mcf.ue5m3.nearest}, "negative numbers.*mcf.mxfp8"),
            ("Rprop", {"step_size": mcf.mxfp8}, "what the weights move by"),
            ("ASGD", {"ax": mcf.mxfp8}, "average of weights"),
            ("RMSprop", {"grad_avg": mcf.mxfp8}, "close to zero"),
        ],
    )
    def test_what_a_byte_does_not_do_for(self, cls, mode, reason):
        p = nn.Parameter(mcf.as_expansion(torch.ones(3, 4), mcf.bf16i8))
        optimizer = getattr(torch.optim, cls)([p])
        (name, format) = next(iter(mode.items()))
        with pytest.raises(
            ValueError, match=rf"mode\['{name}'\] is {format.name}.*{reason}.*|.*mcf\.bf16i16"
        ):
            mcf.collage(optimizer, mode)
        assert "_collage" not in vars(optimizer)

    def test_a_state_that_is_negative(self):
        p = nn.Parameter(mcf.as_expansion(torch.ones(3, 4), mcf.bf16i8))
        optimizer = torch.optim.AdamW([p])
        p.grad = torch.ones(3, 4).bfloat16()
        optimizer.step()
        optimizer.state[p]["exp_avg_sq"] = torch.full((3, 4), -1.0)
        with pytest.raises(ValueError, match="ue5m3 holds second moments, and 12 of 12"):
            mcf.collage(optimizer, "compact")


@pytest.mark.parametrize("path", PATHS)
def test_states_of_vectors_are_float32(path):
    """Also by name: a vector has no rows."""
    p = nn.Parameter(mcf.as_expansion(torch.ones(4), mcf.bf16i8))
    optimizer = torch.optim.AdamW([p], **PATHS[path])
    mcf.collage(optimizer, {"exp_avg": mcf.mxfp8})
    p.grad = torch.ones(4).bfloat16()
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].format is mcf.bf16i16


def moments_of(path, held, shape, gradients, **keywords):
    """The states of AdamW, and the second moments in float64, after each gradient."""
    p = nn.Parameter(mcf.as_expansion(torch.zeros(shape), held))
    optimizer = torch.optim.AdamW([p], lr=1e-4, **PATHS[path], **keywords)
    mcf.collage(optimizer, "compact")
    beta = optimizer.param_groups[0]["betas"][1]
    wanted = torch.zeros(shape, dtype=torch.float64)
    for gradient in gradients:
        p.grad = gradient.to(p.dtype)
        wanted.mul_(beta).add_(p.grad.double().square(), alpha=1 - beta)
        optimizer.step()
        yield p, optimizer.state[p], wanted


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize(
    "held", [pytest.param(f, id=f.name, marks=slow * (f is not HELD[0])) for f in HELD]
)
@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=5)
@given(
    shape=st.sampled_from([(4, 64), (3, 33), (2, 5, 7), (5, 1, 2)]),
    size=st.integers(-18, 17),
    width=st.integers(0, 20),
    share=st.sampled_from([0.0, 0.5, 0.99]),
    seed=st.integers(0, 2**31 - 1),
)
def test_second_moments_are_zero_only_where_they_are(path, held, shape, size, width, share, seed):
    """Of gradients whose squares float32 holds, from 1e-18 to 1e18, some of them zero."""
    generator = torch.Generator().manual_seed(seed)

    def draw():
        x = torch.randn(shape, generator=generator)
        sizes = (width * torch.randn(shape, generator=generator) + math.log(10) * size).clamp(
            -41, 41
        )
        x = (x.sign() * sizes.exp()).where(x != 0, 1.0)
        return x.where(torch.rand(shape, generator=generator) >= share, 0.0)

    for p, states, wanted in moments_of(path, held, shape, (draw() for _ in range(50))):
        second = exact(states["exp_avg_sq"])
        assert torch.equal(second == 0, wanted == 0)
        assert second.isfinite().all()
        assert exact(p).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("held", HELD, ids=lambda f: f.name)
@pytest.mark.parametrize("path", PATHS)
def test_second_moments_are_right_in_the_median(path, held):
    generator = torch.Generator().manual_seed(0)
    shape = (64, 96)
    sizes = torch.randn(shape, generator=generator).exp() * 1e-3
    draws = (torch.randn(shape, generator=generator) * sizes for _ in range(5000))
    *_, (_, states, wanted) = moments_of(path, held, shape, draws, betas=(0.9, 0.999))
    ratios = exact(states["exp_avg_sq"]) / wanted
    assert abs(ratios.median() - 1) < 0.01
    assert states["exp_avg_sq"].writes == 5001


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("held", HELD, ids=lambda f: f.name)
@pytest.mark.parametrize("path", PATHS)
def test_a_step_is_one_write(path, held):
    gradients = (torch.randn(4, 64) for _ in range(3))
    *_, (_, states, _) = moments_of(path, held, (4, 64), gradients, amsgrad=True)
    assert states["exp_avg"].writes == states["exp_avg_sq"].writes == 4
    assert states["max_exp_avg_sq"].writes is None


def test_an_ambiguous_name_is_wide():
    """Velocities are signed."""

    class Named(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self):
            for p in self.param_groups[0]["params"]:
                self.state[p].setdefault("v", torch.zeros_like(p)).add_(p.grad)

    p = nn.Parameter(mcf.as_expansion(torch.ones(3, 4), mcf.bf16i8))
    optimizer = mcf.collage(Named([p]), "compact")
    for _ in range(2):
        p.grad = -torch.ones(3, 4).bfloat16()
        optimizer.step()
    assert optimizer.state[p]["v"].format is WIDE
    assert exact(optimizer.state[p]["v"]).eq(-2).all()


@pytest.mark.parametrize("path", PATHS)
def test_edq_changes_nothing(path):
    runs = []
    for is_metered in (False, True):
        generator = torch.Generator().manual_seed(0)
        p = nn.Parameter(mcf.as_expansion(torch.randn(4, 64, generator=generator), mcf.bf16i8))
        optimizer = mcf.collage(torch.optim.AdamW([p], lr=1e-3, **PATHS[path]), "compact")
        edq = mcf.EDQ(optimizer) if is_metered else None
        train(optimizer, [p], steps=4)
        assert edq is None or edq.last["ratio"] is not None
        states = optimizer.state[p]
        runs.append([p.detach(), states["exp_avg"], states["exp_avg_sq"]])
    for x, y in zip(*runs, strict=True):
        assert all(map(torch.equal, x.components, y.components))
        assert x.writes == y.writes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", ["for-loop", pytest.param("fused", marks=slow)])
def test_compiled_steps_have_the_bits_of_eager_ones(path):
    runs = []
    for is_compiled in (False, True):
        torch.compiler.reset()
        p = nn.Parameter(mcf.as_expansion(torch.ones(4, 64), mcf.bf16i8))
        optimizer = mcf.collage(torch.optim.AdamW([p], lr=1e-3, **PATHS[path]), "compact")
        if is_compiled:
            optimizer.step = torch.compile(optimizer.step)
        train(optimizer, [p], steps=3)
        states = optimizer.state[p]
        runs.append([p.detach(), states["exp_avg"], states["exp_avg_sq"]])
    for x, y in zip(*runs, strict=True):
        assert all(map(torch.equal, x.components, y.components))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_step_in_one_graph_rounds_twice():
    """Where everything is traced, a product with a number is a write as any other."""
    p = nn.Parameter(mcf.as_expansion(torch.ones(4, 64), mcf.bf16i8))
    optimizer = mcf.collage(torch.optim.AdamW([p], lr=1e-3, foreach=False), "compact")
    train(optimizer, [p], steps=1)
    step = compiled_whole(optimizer)
    for count in range(1, 3):
        p.grad = torch.ones(4, 64).bfloat16()
        step()
        assert optimizer.state[p]["exp_avg_sq"].writes == 2 + 2 * count


@pytest.mark.parametrize(
    ("format", "bytes_of_one"), [(mcf.bf16x2, 4), (mcf.bf16i16, 4), (mcf.bf16i8, 3)], ids=str
)
def test_little_is_held_beside_what_is_made(format, bytes_of_one):
    """By conversions, and by the first step, which makes states."""
    parameters = nn.ParameterList([torch.randn(1024, 1024).bfloat16() for _ in range(8)])
    count = sum(p.numel() for p in parameters)
    held = peak("cpu", lambda: mcf.as_expansion(parameters, format))
    assert held < (bytes_of_one + 0.2) * count
    optimizer = mcf.collage(torch.optim.AdamW(parameters, fused=True), "compact")
    for p in parameters:
        p.grad = torch.randn_like(p, dtype=torch.bfloat16)
    held = peak("cpu", optimizer.step)
    assert held < (2.1 + 16 / 8) * count  # one of the eight in 16 bytes on its way
