"""EDQ: what is measured, and how it is used."""

import gc
import math
import os
import subprocess
import sys
import weakref

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import mcftensor as mcf
from common.oracle import fractions
from common.probes import random_updates
from support.helpers import SCALED, STORED, small_model
from support.metering import PLAIN, Stepper, gradients, make, with_gradient
from support.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("one_by_one")


FIGURES = ("edq", "ratio", "lost", "ratio_leading", "lost_leading")


def terms(x):
    return x.components if isinstance(x, mcf.MCFTensor) else (x,)


def exactly(x):
    """The elements as rationals."""
    is_stored = getattr(x, "format", None) in (*STORED, *SCALED)
    parts = [mcf.as_plain(x, torch.float32)] if is_stored else terms(x)
    return [sum(part) for part in zip(*(fractions(t.flatten()) for t in parts), strict=True)]


def expected(before, after, intended):
    """Every figure, in rational arithmetic, from what was intended and what was seen."""
    moved = [b - a for a, b in zip(exactly(before), exactly(after), strict=True)]
    before, after = (getattr(x, "compute_tensor", x) for x in (before, after))
    pairs = zip(before.flatten(), after.flatten(), strict=True)
    leading = [fractions(b)[0] - fractions(a)[0] for a, b in pairs]
    square = sum(d * d for d in intended)
    aims = [i for i, d in enumerate(intended) if d]
    norm = math.sqrt(square)
    along, along_leading = (
        sum(d * m for d, m in zip(intended, found, strict=True)) for found in (moved, leading)
    )
    return {
        "edq": float(along) / norm,
        "ratio": float(along / square),
        "lost": sum(not moved[i] for i in aims) / len(aims),
        "ratio_leading": float(along_leading / square),
        "lost_leading": sum(not leading[i] for i in aims) / len(aims),
        "update_norm": norm,
        "numel": len(intended),
    }


def test_figures_of_plain_bf16_by_hand():
    # Below 1.0 bf16 numbers are 2^-8 apart, below 2^-3 they are 2^-11: the first update is lost.
    p = nn.Parameter(torch.tensor([1.0, 1.0, 0.125, 0.125], dtype=torch.bfloat16))
    p.grad = torch.tensor([2**-10, 2**-7, 2**-10, 0.0], dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([p], lr=1.0)
    edq = mcf.EDQ(optimizer)
    optimizer.step()
    assert edq.last == {
        "step": 1,
        "edq": pytest.approx(65 / 66 * math.sqrt(66) / 1024, rel=1e-15),
        "ratio": 65 / 66,
        "lost": 1 / 3,
        "ratio_leading": 65 / 66,
        "lost_leading": 1 / 3,
        "update_norm": pytest.approx(math.sqrt(66) / 1024, rel=1e-15),
        "largest": 2.0**-7,
        "numel": 4,
    }


def test_figures_of_bf16x2_by_hand():
    # Of (1, -2^-10), eight bits a term, the last bit is 2^-17: the second update is lost. The
    # first one ends at the tie (1, -2^-9), the third at (1 - 2^-7, -2^-10).
    p = nn.Parameter(mcf.as_expansion(torch.full((3,), 1 - 2**-10), mcf.bf16x2))
    p.grad = torch.tensor([2**-10, 2**-20, 2**-7], dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([p], lr=1.0)
    edq = mcf.EDQ(optimizer)
    optimizer.step()
    small, tiny, large = 2.0**-20, 2.0**-40, 2.0**-14  # squares
    assert edq.last["ratio"] == (small + large) / (small + tiny + large)
    assert edq.last["ratio_leading"] == large / (small + tiny + large)
    assert edq.last["lost"] == 1 / 3
    assert edq.last["lost_leading"] == 2 / 3


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize(
    "kind", [*PLAIN, torch.float64, *mcf.formats.FORMATS, *STORED, *SCALED], ids=str
)
def test_figures_against_rationals(kind):
    precision = (
        kind.precision if isinstance(kind, mcf.Format) else mcf.Format(kind, 2).precision / 2
    )
    scale = 2.0 ** -round(precision - 2)  # updates at the edge of what the format resolves
    shape = (4, 100) if kind in SCALED else (400,)
    p = make(kind, *shape)
    before = p.detach().clone()
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(400, generator=generator).to(p.dtype)
    grad[::7] = 0
    p.grad = grad.view(shape)
    optimizer = torch.optim.SGD([p], lr=scale)
    edq = mcf.EDQ(optimizer)
    optimizer.step()
    intended = [
        -fractions(g)[0] * fractions(torch.tensor(scale).double())[0] for g in p.grad.flatten()
    ]
    figures = expected(before, p.detach(), intended)
    found = {name: edq.last[name] for name in figures}
    resolution = 2.0**-53 / scale if precision <= 48 else 2.0**-106 / scale
    assert found == pytest.approx(figures, rel=max(1e-12, 100 * resolution))
    assert 0.01 < figures["lost"] < 0.5
    assert figures["ratio_leading"] < figures["ratio"] or kind not in mcf.formats.FORMATS


@pytest.mark.parametrize(
    ("size", "bf16", "leading", "lost", "lost_leading"),
    [(1e-6, 0.0295, 0.204, 0.988, 0.975), (1e-5, 0.280, 0.952, 0.885, 0.805)],
)
def test_random_updates_of_small_weights(size, bf16, leading, lost, lost_leading):
    edq = random_updates(size)
    assert edq.last["step"] == 50
    found = edq.per_parameter
    assert found["plain"]["ratio"] == pytest.approx(bf16, rel=0.1)
    assert found["plain"]["lost"] == pytest.approx(lost, rel=0.1)
    assert found["pair"]["ratio"] == pytest.approx(1.0, abs=1e-3)
    assert found["pair"]["ratio_leading"] == pytest.approx(leading, rel=0.1)
    assert found["pair"]["lost_leading"] == pytest.approx(lost_leading, rel=0.1)


def test_float32_loses_nothing():
    p = make(torch.float32, 1000)
    optimizer = torch.optim.AdamW([p], lr=1e-3)
    with mcf.EDQ(optimizer) as edq:
        for _ in range(3):
            p.grad = torch.randn(1000)
            optimizer.step()
    for reading in edq.history:
        assert reading["ratio"] == pytest.approx(1.0, abs=5e-5)
        assert reading["lost"] <= 0.002  # of 1000 elements, two to move by less than 2^-24


def test_frozen_ones_ring_the_alarm_once():
    p = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([p], lr=1e-4)
    edq = mcf.EDQ(optimizer, alarm=0.9, patience=3, names=[("norm.weight", p)])

    def step():
        p.grad = torch.randn(64).bfloat16()
        optimizer.step()

    step()
    step()
    with pytest.warns(
        mcf.errors.FrozenWeightWarning, match=r"norm\.weight of shape \(64,\).*3 samples"
    ):
        step()
    step()  # warnings are errors here
    assert edq.last["lost"] == 1.0
    assert (p == 1).all()


@pytest.mark.parametrize("rounding", ["balanced", "stochastic"])
def test_weights_that_wait_for_a_later_step_ring_no_alarm(rounding):
    format = mcf.Format(torch.bfloat16, 1, rounding=rounding)
    p = nn.Parameter(mcf.as_expansion(torch.ones(64), format))
    optimizer = torch.optim.SGD([p], lr=1e-5)
    edq = mcf.EDQ(optimizer, alarm=0.9, patience=2)
    for _ in range(4):  # warnings are errors here
        p.grad = torch.ones(64, dtype=torch.bfloat16)
        optimizer.step()
        assert edq.last["lost"] >= 0.9


def test_the_alarm_waits_for_samples_in_a_row():
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([p], lr=1.0)
    mcf.EDQ(optimizer, alarm=0.9, patience=2)
    for update in (1e-4, 0.1, 1e-4, 0.0):
        p.grad = torch.full((4,), update, dtype=torch.bfloat16)
        optimizer.step()
    p.grad = torch.full((4,), 1e-4, dtype=torch.bfloat16)
    with pytest.warns(mcf.errors.FrozenWeightWarning):  # a step of zeros says nothing
        optimizer.step()


def test_no_update_no_ratio():
    p, idle = make(torch.bfloat16, 8), make(torch.bfloat16, 3)
    p.grad = torch.zeros_like(p)
    optimizer = torch.optim.SGD([{"params": [p]}, {"params": [idle]}], lr=1.0)
    edq = mcf.EDQ(optimizer)
    optimizer.step()
    assert [edq.last[name] for name in FIGURES] == [None] * 5
    assert edq.last["update_norm"] == 0
    assert edq.last["numel"] == 8  # a parameter without gradient takes no part
    assert list(edq.per_parameter) == ["0.0"]
    assert edq.per_group[1]["numel"] == 0
    p.grad = idle.grad = None
    optimizer.step()
    assert len(edq.history) == 1


def test_infinite_gradients_are_told():
    p = make(torch.bfloat16, 8)
    p.grad = torch.full((8,), math.inf, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([p], lr=1.0)
    edq = mcf.EDQ(optimizer)
    optimizer.step()
    assert math.isnan(edq.last["ratio"])
    assert edq.last["lost"] == 0


@pytest.mark.with_float64("complex numbers are measured in complex128")
def test_complex_parameters():
    p = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    p.grad = torch.full((4,), 0.25 + 2**-30 * 1j, dtype=torch.complex64)
    optimizer = torch.optim.SGD([p], lr=1.0)
    edq = mcf.EDQ(optimizer)
    optimizer.step()
    assert edq.last["lost"] == 0
    assert edq.last["update_norm"] == pytest.approx(0.5)


def test_parts_add_up():
    model = small_model().bfloat16()
    groups = [{"params": [p for p in model.parameters() if p.dim() == d]} for d in (1, 2)]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, weight_decay=0.1)
    edq = mcf.EDQ(optimizer, names=model.named_parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    named = dict(model.named_parameters())
    assert set(edq.per_parameter) == set(named)
    for parts in (edq.per_group, list(edq.per_parameter.values())):
        assert sum(part["numel"] for part in parts) == edq.last["numel"]
        square = sum(part["update_norm"] ** 2 for part in parts)
        assert square == pytest.approx(edq.last["update_norm"] ** 2, rel=1e-12)
        along = sum(part["ratio"] * part["update_norm"] ** 2 for part in parts)
        assert along == pytest.approx(edq.last["ratio"] * square, rel=1e-12)
    assert edq.per_group[0]["numel"] == sum(p.numel() for p in named.values() if p.dim() == 1)


class Wrapper(Stepper):
    def __init__(self, inner):
        super().__init__(inner.param_groups)
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


def test_every_and_names_and_callbacks():
    model = small_model().bfloat16()
    seen = []
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    edq = mcf.EDQ(optimizer, every=3, callback=lambda meter: seen.append(meter.last["step"]))
    for step in range(7):
        gradients(model.parameters(), step)
        optimizer.step()
    assert seen == [1, 4, 7]
    assert [reading["step"] for reading in edq.history] == seen
    assert list(edq.per_parameter) == [name for name, _ in model.named_parameters()]


def test_the_table_has_what_is_lost_most_first():
    kept, frozen = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([kept, frozen], lr=1e-4)
    edq = mcf.EDQ(optimizer, names=[("kept", kept), ("frozen", frozen)])
    assert "no reading" in repr(edq)
    assert "No reading yet" in edq._repr_html_()
    Console(quiet=True).print(edq.table())
    gradients([kept, frozen], 0)
    frozen.grad.clamp_(-1, 1)
    optimizer.step()
    console = Console(width=100)
    with console.capture() as capture:
        console.print(edq.table())
    lines = capture.get()
    assert lines.index("frozen") < lines.index("kept") < lines.index("all")
    assert "100 %" in lines
    with console.capture() as capture:
        console.print(edq.table(limit=1))
    assert "kept" not in capture.get()
    page = edq._repr_html_()
    assert page.index("frozen") < page.index("kept") < page.index("all")
    assert "Updates of step 1" in page
    assert repr(edq).startswith("EDQ(every=1, step 1: ratio ")


def test_the_figure_shows_the_history(tmp_path):
    (p,), optimizer, edq = with_gradient(Stepper)
    for step in range(3):
        gradients([p], step)
        optimizer.step()
    p.grad.zero_()
    optimizer.step()
    figure = edq.figure()
    upper, lower = figure.axes
    (whole,) = upper.lines
    assert list(whole.get_xdata()) == [1, 2, 3, 4]
    assert list(whole.get_ydata())[:3] == [reading["ratio"] for reading in edq.history[:3]]
    assert math.isnan(whole.get_ydata()[3])
    assert list(lower.lines[0].get_ydata())[:3] == [r["lost"] for r in edq.history[:3]]
    figure.savefig(tmp_path / "edq.png")
    assert (tmp_path / "edq.png").stat().st_size > 1000


def test_the_figure_has_the_ratio_1_in_view_where_all_is_lost():
    weight = nn.Parameter(torch.ones(9).bfloat16())
    optimizer = torch.optim.SGD([weight], lr=1e-4)
    edq = mcf.EDQ(optimizer)
    for _ in range(3):
        weight.grad = torch.ones(9).bfloat16()
        optimizer.step()
    upper, lower = edq.figure().axes
    assert max(upper.lines[0].get_ydata()) == 0
    assert upper.get_ylim()[0] <= 0 < 1 < upper.get_ylim()[1]
    assert lower.get_ylim()[0] <= 0


def test_the_figure_shows_leading_terms_of_expansions():
    weight = nn.Parameter(mcf.as_expansion(torch.ones(9), mcf.bf16x2))
    optimizer = torch.optim.SGD([weight], lr=1e-4)
    edq = mcf.EDQ(optimizer)
    for _ in range(3):
        weight.grad = torch.ones(9).bfloat16()
        optimizer.step()
    for axes, kind in zip(edq.figure().axes, ("ratio", "lost"), strict=True):
        whole, leading = axes.lines
        assert list(whole.get_ydata()) == [reading[kind] for reading in edq.history]
        assert list(leading.get_ydata()) == [r[f"{kind}_leading"] for r in edq.history]


def test_readings_reach_tensorboard(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(tmp_path)
    (p,), optimizer, edq = with_gradient(
        Stepper, every=2, callback=mcf.meters.edq.to_tensorboard(writer, parameters=True)
    )
    for step in range(3):
        gradients([p], step)
        optimizer.step()
    writer.close()
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    scalars = events.Scalars("edq/ratio")
    assert [event.step for event in scalars] == [1, 3]
    assert [event.value for event in scalars] == pytest.approx([r["ratio"] for r in edq.history])
    assert len(events.Scalars("edq_lost/0.0")) == 2


def test_a_resumed_meter_goes_on_as_one_that_did_not_stop(tmp_path):
    """Step 4 of every third is the one measured next, and the alarm has begun to count."""

    def meter():
        p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([p], lr=1e-4)
        return optimizer, mcf.EDQ(optimizer, every=3, alarm=0.5, patience=3)

    def train(optimizer, steps):
        for _ in range(steps):
            for p in optimizer.param_groups[0]["params"]:
                p.grad = torch.ones_like(p)
            optimizer.step()

    (whole_optimizer, whole), (stopped_optimizer, stopped) = meter(), meter()
    train(whole_optimizer, 6)
    train(stopped_optimizer, 5)
    torch.save(stopped.state_dict(), tmp_path / "meter.pt")
    resumed_optimizer, resumed = meter()
    resumed.load_state_dict(torch.load(tmp_path / "meter.pt", weights_only=True))
    assert resumed.last == stopped.last
    assert resumed.per_parameter == stopped.per_parameter
    train(resumed_optimizer, 1)
    for optimizer in (whole_optimizer, resumed_optimizer):
        with pytest.warns(mcf.errors.FrozenWeightWarning, match="the last of 3 samples"):
            train(optimizer, 1)
        train(optimizer, 3)  # and not once more
    assert [r["step"] for r in resumed.history] == [1, 4, 7, 10]
    assert resumed.state_dict() == whole.state_dict()
    assert stopped.last["step"] == 4, "a state is a copy"


def test_a_resumed_meter_knows_that_parameters_are_coupled():
    class Coupled(torch.optim.SGD):
        """Steps by the norm of all gradients together."""

        @torch.no_grad()
        def step(self, closure=None):
            grads = [p.grad for p in self.param_groups[0]["params"]]
            norm = torch.stack([g.norm() for g in grads]).norm()
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad * (1e-3 / norm))

    def meter():
        parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer = Coupled(parameters, lr=1.0)
        return optimizer, mcf.EDQ(optimizer, every=5)

    optimizer, first = meter()
    with pytest.warns(UserWarning, match="does not treat parameters one by one"):
        optimizer.step()
    optimizer, second = meter()
    second.load_state_dict(first.state_dict())
    optimizer.step()
    assert [reading["step"] for reading in second.history] == [2]


def test_small_parameters_are_measured_together(monkeypatch):
    monkeypatch.setattr("mcftensor.meters.edq.meter._SMALL", 100)
    model = small_model().bfloat16()  # 32, 8, 8, 8, 16 and 2 elements
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    edq = mcf.EDQ(optimizer)
    gradients(model.parameters(), 0)
    together = [[place.name for place in batch] for batch in edq._batches(optimizer)]
    assert together == [["0.0", "0.1", "0.2", "0.3", "0.4", "0.5"]]
    monkeypatch.setattr("mcftensor.meters.edq.meter._SMALL", 1)
    alone = [[place.name for place in batch] for batch in edq._batches(optimizer)]
    assert alone == [["0.0"], ["0.1", "0.2", "0.3"], ["0.4", "0.5"]]
    optimizer.step()
    one_by_one = dict(edq.per_parameter)
    assert len(one_by_one) == 6


def test_names_are_made_unique():
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(
        [{"params": a.named_parameters()}, {"params": b.named_parameters()}], lr=0.1
    )
    edq = mcf.EDQ(optimizer)
    gradients([*a.parameters(), *b.parameters()], 0)
    optimizer.step()
    assert list(edq.per_parameter) == ["weight", "bias", "weight (1.0)", "bias (1.1)"]
    optimizer.param_groups[1]["params"].append(late := make(torch.float32, 3))
    gradients([late], 0)
    optimizer.step()
    assert list(edq.per_parameter)[-1] == "1.2"


def test_the_copies_are_gone_without_the_garbage_collector():
    p = make(mcf.bf16x2, 8)
    optimizer = mcf.collage(torch.optim.AdamW([p], fused=True), "plus")
    mcf.EDQ(optimizer)
    gradients([p], 0)
    optimizer.step()

    def alive():
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = alive()
        optimizer.step()
        assert alive() == before
    finally:
        gc.enable()


def test_removal_leaves_nothing_behind():
    p = make(torch.bfloat16, 8)
    optimizer = torch.optim.AdamW([p])
    before = set(vars(optimizer))
    edq = mcf.EDQ(optimizer, names=[("w", p)])
    gradients([p], 0)
    optimizer.step()
    edq.remove()
    assert set(vars(optimizer)) == before
    for name, value in vars(optimizer).items():
        assert "_hooks" not in name or not value, name
    optimizer.step()
    assert len(edq.history) == 1
    alive = [weakref.ref(x) for x in (edq, optimizer, p)]
    del optimizer, p
    gc.collect()
    assert alive[1]() is alive[2]() is None  # what it has measured holds neither
    del edq
    gc.collect()
    assert alive[0]() is None


def test_a_dropped_meter_in_a_with_block():
    _, optimizer, edq = with_gradient(Stepper)
    edq.remove()
    with pytest.raises(ZeroDivisionError), mcf.EDQ(optimizer):
        raise ZeroDivisionError
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_two_meters_at_once():
    _, optimizer, edq = with_gradient(Stepper)
    other = mcf.EDQ(optimizer)
    optimizer.step()
    assert edq.last == other.last


def test_groups_added_later():
    (p,), optimizer, edq = with_gradient(Stepper)
    late = make(torch.float32, 5)
    optimizer.add_param_group({"params": [late]})
    gradients([p, late], 0)
    optimizer.step()
    assert list(edq.per_parameter) == ["0.0", "1.0"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": 0}, ValueError, "every=0"),
        ({"every": 2.5}, ValueError, "every=2.5"),
        ({"every": True}, ValueError, "every=True"),
        ({"names": [torch.ones(2)]}, TypeError, "pairs of a name and a parameter"),
        ({"patience": 0}, ValueError, "patience=0"),
        ({"alarm": 1.5}, ValueError, r"alarm=1\.5"),
        ({"names": [("w", torch.ones(1)), ("w", torch.ones(1))]}, ValueError, "same name"),
    ],
)
def test_bad_arguments(arguments, error, message):
    optimizer = torch.optim.SGD([make(torch.float32, 4)], lr=0.1)
    with pytest.raises(error, match=message):
        mcf.EDQ(optimizer, **arguments)
    assert not optimizer._optimizer_step_pre_hooks


def test_not_an_optimizer():
    with pytest.raises(TypeError, match="got Linear"):
        mcf.EDQ(nn.Linear(1, 1))


def test_an_optimizer_around_another():
    optimizer = Wrapper(torch.optim.SGD([make(torch.float32, 4)], lr=0.1))
    with pytest.raises(ValueError, match=r"Wrapper steps other.*mcf\.EDQ\(optimizer\.inner\)"):
        mcf.EDQ(optimizer)


def test_an_optimizer_without_hooks():
    class Bare(torch.optim.Optimizer):
        def __init__(self, params):
            self.param_groups = [{"params": params}]
            self.state = {}

        def step(self):
            pass

    with pytest.raises(ValueError, match="does not call hooks"):
        mcf.EDQ(Bare([make(torch.float32, 4)]))


MEMORY = """
import sys, torch, mcftensor as mcf
from mcftensor.meters.edq import EDQ

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

count, size = 24, 2**20
torch.set_num_threads(1)
parameters = [torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for _ in range(count)]
for p in parameters:
    p.grad = torch.ones_like(p)
optimizer = torch.optim.AdamW(parameters, foreach=False)
coupled = sys.argv[1] == "coupled"
tiny = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
tiny.grad = torch.ones_like(tiny)
with EDQ(torch.optim.AdamW([tiny], foreach=False)) as edq:
    pass
optimizer.step()
before = peak()
edq = mcf.EDQ(optimizer, coupled=coupled)
optimizer.step()
assert edq.last is not None
print((peak() - before) / (8 * size))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_a_few_copies_of_one_parameter():
    # With thresholds set, glibc gives freed memory back at once, and the peak is the program's.
    at_once = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}

    def copies(mode):
        command = [sys.executable, "-c", MEMORY, mode]
        run = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | at_once
        )
        return float(run.stdout)

    # In float64 copies of a parameter, of which the model has 24.
    assert copies("single") < 8
    assert copies("coupled") > 60


@on_ranks(2)
def test_sums_run_over_all_ranks():
    mesh = init_device_mesh("cpu", (2,))
    full = [torch.randn(5, 3), torch.randn(7), torch.randn(4, 2)]
    grads = [torch.randn_like(x) for x in full]
    placements = [[Shard(0)], [Shard(0)], [Replicate()]]

    def run(distribute):
        parameters = []
        for x, g, where in zip(full, grads, placements, strict=True):
            x, g = x.bfloat16(), g.bfloat16()
            if distribute:
                x, g = distribute_tensor(x, mesh, where), distribute_tensor(g, mesh, where)
            p = nn.Parameter(x.clone())
            p.grad = g.clone()
            parameters.append(p)
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=False)
        edq = mcf.EDQ(optimizer)
        optimizer.step()
        optimizer.step()
        return edq

    sharded, whole = run(True), run(False)
    assert not sharded.not_metered, sharded.not_metered
    for name, b in whole.per_parameter.items():
        a = sharded.per_parameter[name]
        assert a["numel"] == b["numel"]
        for key in a:
            assert abs(a[key] - b[key]) <= 1e-12 * abs(b[key]), (name, key, a[key], b[key])
    assert abs(sharded.last["ratio"] - whole.last["ratio"]) < 1e-12
    assert 0.1 < whole.last["lost"] < 0.9, whole.last


def test_names_may_be_a_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mcf.EDQ(optimizer, names=model) as edq:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert list(edq.per_parameter) == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_figure_of_few_samples_is_not_empty(steps):
    pytest.importorskip("matplotlib")
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    edq = mcf.EDQ(optimizer)
    for _ in range(steps):
        optimizer.step()
    for axes in edq.figure().axes:
        assert all(line.get_marker() == "." for line in axes.lines)
        assert ("No reading" in axes.get_title(loc="left")) == (steps == 0)


def test_names_are_pairs():
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    for names in ([p], [("p", p, 1)], [(p, "p")]):
        with pytest.raises(TypeError, match="EDQ: names are pairs"):
            mcf.EDQ(optimizer, names=names)
    with mcf.EDQ(optimizer, names=[["p", p]]):
        pass
