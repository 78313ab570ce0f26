"""What a model holds, said before it is there, against tensors and the process."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.helpers import SCALED, STORED, small_model
from support.optimizers import CASES


def network(convert=mcf.as_expansion) -> nn.Module:
    """Matrices, vectors, a kernel of a convolution, a scalar."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, (3, 5)), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(6, 4))
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    return convert(model)


def step(model, optimizer):
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()


def said(memory):
    """Without how it is known."""
    return [{k: v for k, v in vars(x).items() if k != "known"} for x in memory.held]


def assert_foretold(model, optimizer):
    before = mcf.meters.summary(model, optimizer)
    assert not optimizer.state or isinstance(optimizer, torch.optim.Adagrad)
    step(model, optimizer)
    after = mcf.meters.summary(model, optimizer)
    assert said(before) == said(after)
    assert before.unpredicted is None
    assert {x.known for x in after.held} == {"measured"}
    assert "predicted" in {x.known for x in before.held}
    assert "estimated" not in {x.known for x in before.held}
    return after


def bytes_of(x):
    """Of a tensor, by its components."""
    if isinstance(x, mcf.MCFTensor):
        count = 0 if x.writes is None else x.writes.nbytes
        return sum(t.nbytes for t in x.components) + count
    return x.nbytes


# ---------------------------------------------------------------------------- predicted, measured


@pytest.mark.thinned(of=36)
@pytest.mark.parametrize("mode", [None, "light", "plus", "full", "plain"])
@pytest.mark.parametrize(("cls", "flags"), CASES)
def test_what_is_predicted_is_there_after_a_step(cls, flags, mode):
    if cls is torch.optim.Muon:
        model = mcf.as_expansion(nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 8, False)))
    else:
        model = network(nn.Module.bfloat16 if mode == "plain" else mcf.as_expansion)
    options = {"momentum": 0.9} if cls is torch.optim.SGD else {}
    optimizer = cls(model.parameters(), **flags, **options)
    if mode not in (None, "plain"):
        mcf.collage(optimizer, mode)
    found = assert_foretold(model, optimizer)
    assert found.bytes_of("parameters") == sum(map(bytes_of, model.parameters()))
    states = [x for state in optimizer.state.values() for x in state.values()]
    assert found.bytes_of("states") == sum(bytes_of(x) for x in states if torch.is_tensor(x))
    assert found.bytes_of("gradients") == sum(p.grad.nbytes for p in model.parameters())
    assert found.bytes_of("buffers") == sum(b.nbytes for b in model.buffers())


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("kind", [*mcf.formats.FORMATS, *STORED, *SCALED], ids=lambda f: f.name)
def test_formats(kind):
    model = mcf.as_expansion(small_model(), kind)
    optimizer = torch.optim.AdamW(model.parameters())
    found = assert_foretold(model, optimizer)
    assert found.bytes_of("parameters") == sum(map(bytes_of, model.parameters()))
    states = [x for state in optimizer.state.values() for x in state.values()]
    assert found.bytes_of("states") == sum(map(bytes_of, states))


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": torch.tensor(1e-3), "fused": True}),
        (torch.optim.AdamW, {"capturable": False, "maximize": True}),
        (torch.optim.SGD, {}),
    ],
)
def test_options(cls, options):
    model = network()
    assert_foretold(model, cls(model.parameters(), **options))


@pytest.mark.parametrize("mode", [{"exp_avg": None, "exp_avg_sq": mcf.bf16x3}, {"exp_avg": None}])
def test_modes_by_name(mode):
    model = network()
    assert_foretold(model, mcf.collage(torch.optim.AdamW(model.parameters()), mode))


def test_groups_of_other_options():
    model = small_model()
    first, *others = model.parameters()
    groups = [{"params": [first], "amsgrad": True}, {"params": others}]
    found = assert_foretold(model, torch.optim.Adam(groups))
    states = {(x.name, x.state) for x in found.held if x.kind == "states"}
    assert ("0.weight", "max_exp_avg_sq") in states
    assert ("0.bias", "max_exp_avg_sq") not in states


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("name", ["Lion", "CAME", "SM3", "AdaFactor", "Lamb", "Adan"])
def test_optimizers_of_other_packages(name):
    optimizers = pytest.importorskip("pytorch_optimizer")
    model = network()
    assert_foretold(model, getattr(optimizers, name)(model.parameters(), lr=1e-3))


def test_sparse_gradients():
    model = nn.Embedding(50, 7, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    before = mcf.meters.summary(model, optimizer)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert said(before) == said(mcf.meters.summary(model, optimizer))


class Shapes(torch.optim.Optimizer):
    """States of all kinds of shapes."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                a, b, c = p.shape
                self.state[p] = {
                    "rows": torch.zeros(a, 1),
                    "square": torch.zeros(b, b),
                    "flat": torch.zeros(p.numel()),
                    "folded": torch.zeros(a, b * c, dtype=torch.int8),
                    "window": torch.zeros(9),
                    "list": [torch.zeros(c), torch.zeros(3, a)],
                    "odd": torch.zeros(p.numel() // 5 + 1),
                    "text": "none",
                }


def test_shapes_of_states():
    model = nn.ParameterList([torch.zeros(40, 8, 9), torch.zeros(8, 8, 4)])
    optimizer = Shapes(model.parameters())
    before = mcf.meters.summary(model, optimizer)
    estimated = {x.state for x in before.held if x.known == "estimated"}
    assert estimated == {"odd"}
    step(model, optimizer)
    after = mcf.meters.summary(model, optimizer)
    kept = [[x for x in said(m) if x["state"] != "odd"] for m in (before, after)]
    assert kept[0] == kept[1]
    assert {x.state for x in after.held} >= {"list.0", "list.1", "odd"}
    assert "? " in str(before)


class OneSided(Shapes):
    """Keeps a matrix for the shorter side."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"factor": torch.zeros(min(p.shape), min(p.shape))}


def test_the_order_of_lengths_counts():
    model = nn.ParameterList([torch.zeros(40, 9), torch.zeros(9, 40), torch.zeros(9, 9)])
    assert_foretold(model, OneSided(model.parameters()))


@pytest.mark.parametrize("kind", [None, mcf.bf16x2, mcf.bf16i8])
def test_before_anything_is_allocated(kind):
    """A model that no machine holds."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**20, 2**20, bias=False), nn.Linear(2**20, 8, bias=False))
        model = mcf.as_expansion(model, kind) if kind else model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    if kind:
        mcf.collage(optimizer, "full")
    found = mcf.meters.summary(model, optimizer)
    size = 3 * (kind.bytes if kind else 2) + 2
    assert found.bytes_per_parameter == pytest.approx(size, rel=1e-9)
    assert found.trained == 2**40 + 2**23


# ------------------------------------------------------------------------------------------- cases


def test_without_an_optimizer():
    model = network()
    found = mcf.meters.summary(model)
    assert found.bytes_of("states") == 0
    assert found.bytes_of("gradients") == 2 * found.trained
    assert found.by_format("parameters").keys() == {"bf16x2", "bf16x3"}


def test_tied_and_frozen_parameters():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    model = mcf.as_expansion(model)
    found = mcf.meters.summary(model, torch.optim.AdamW(model.parameters()))
    assert [x.name for x in found.held if x.kind == "gradients"] == ["0.weight"]
    assert found.trained == 24
    assert found.bytes_of("parameters") == 6 * 24 + 2 * 20
    assert found.bytes_per_parameter == 6 + 2 + 12 + 4 / 24


def test_gradients_that_are_there_are_measured():
    model = mcf.as_expansion(nn.Linear(4, 4, bias=False))
    mcf.accumulate_gradients(model)
    assert mcf.meters.summary(model).bytes_of("gradients") == 2 * 16
    model(torch.ones(4).bfloat16()).sum().backward()
    assert mcf.meters.summary(model).bytes_of("gradients") == 4 * 16
    assert mcf.meters.summary(model).by_format("gradients") == {"bf16x2": 64}


def test_released_gradients():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    assert mcf.meters.summary(model, optimizer, released=True).bytes_of("gradients") == 0
    with mcf.step_in_backward(model, optimizer):
        found = mcf.meters.summary(model, optimizer)
        assert found.released
        assert found.bytes_of("gradients") == 0
        assert "gradients are released" in str(found)
    assert mcf.meters.summary(model, optimizer).bytes_of("gradients") == 2 * found.trained


def test_parameters_that_only_the_optimizer_has():
    model, other = small_model(), nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([*model.parameters(), other])
    found = mcf.meters.summary(model, optimizer)
    assert found.bytes_of("parameters", "optimizer 0.6") == 20


def test_what_cannot_be_predicted_is_said():
    model = small_model()
    optimizer = torch.optim.LBFGS(model.parameters())
    found = mcf.meters.summary(model, optimizer)
    assert found.unpredicted.startswith("LBFGS: LBFGS keeps as many vectors")
    assert "without the states of the optimizer: LBFGS" in str(found)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert mcf.meters.summary(model, optimizer).unpredicted is None
    assert mcf.meters.summary(model, optimizer).bytes_of("states") > 0


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise ArithmeticError("no such step")


def test_an_optimizer_whose_step_fails():
    model = small_model()
    found = mcf.meters.summary(model, Failing(model.parameters()))
    assert found.unpredicted == "Failing: its step raises ArithmeticError: no such step"


def test_nothing_is_changed():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook ran"))
    generator = torch.get_rng_state()
    mcf.meters.summary(model, optimizer)
    assert not optimizer.state
    assert torch.equal(generator, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(([],), "got list; give a module"), ((nn.ReLU(), nn.ReLU()), "got ReLU; give a torch.optim")],
)
def test_errors(arguments, message):
    with pytest.raises(TypeError, match=message):
        mcf.meters.summary(*arguments)


# ------------------------------------------------------------------------------------------ shown


def test_the_table():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(30)], nn.BatchNorm1d(8), nn.Linear(8, 2))
    model[31].requires_grad_(False)
    model = mcf.as_expansion(model, overrides={"30.running_var": mcf.bf16x3})
    optimizer = mcf.collage(torch.optim.AdamW(model.parameters()), "plus")
    found = mcf.meters.summary(model, optimizer)
    first, line, *rows = str(found).splitlines()
    heads = ["shape", "role", "format", "gradient", "exp_avg", "exp_avg_sq", "bytes"]
    assert first.split() == heads
    assert len(line) == len(first) == len(rows[0])
    parameter = ["parameter", "bf16x2", "~", "bfloat16", "~", "bfloat16", "~", "bf16x2"]
    assert rows[0].split() == ["*.weight", "8×8", "30", "of", "these", *parameter, "22.62", "KiB"]
    kinds = {row.split()[0]: row for row in rows}
    assert "plain, frozen" in kinds["31.weight"]
    assert "buffer, value" in kinds["30.running_var"]
    assert kinds["in"].split()[-2:] == [f"{found.total / 1024:.2f}", "KiB"]
    assert kinds["master"].split()[-2:] == [f"{found.master_weights / 1024:.2f}", "KiB"]
    assert f'AdamW, mode "plus": {found.trained:,} parameters are trained' in rows
    assert f"{found.bytes_per_parameter:.2f} bytes a parameter" in str(found)
    page = found._repr_html_()
    notes = 3
    assert page.count("<p>") == notes
    assert page.count("<tr>") == page.count("</tr>") == 1 + len(rows) - notes
    assert repr(found).startswith("Summary(")


def test_layers_that_differ_have_rows_of_their_own():
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
    model = mcf.as_expansion(model, overrides={"2.weight": mcf.bf16x3})
    rows = [line.split() for line in str(mcf.meters.summary(model)).splitlines()]
    assert ["*.weight", "8×8", "3"] in [row[:3] for row in rows]
    assert ["2.weight", "8×8", "parameter", "bf16x3"] in [row[:4] for row in rows]


def test_many_states_take_a_few_columns():
    class Many(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                self.state[p] = {f"s{i}": torch.zeros_like(p) for i in range(9)}

    model = mcf.as_expansion(nn.Linear(3, 3, bias=False))
    found = mcf.meters.summary(model, Many(model.parameters()))
    assert len(found._states()) == 4
    assert found.bytes_of("states") == 9 * found.bytes_of("parameters")


@pytest.mark.parametrize(
    ("mode", "said"),
    [(None, None), ("light", "light"), ({"exp_avg": None}, "by name")],
)
def test_modes_are_said(mode, said):
    model = mcf.as_expansion(small_model())
    optimizer = torch.optim.AdamW(model.parameters())
    if mode:
        mcf.collage(optimizer, mode)
    found = mcf.meters.summary(model, optimizer)
    assert (found.optimizer, found.mode) == ("AdamW", said)


def test_the_dict():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    content = json.loads(json.dumps(mcf.meters.summary(model, optimizer).to_dict()))
    kinds = content["kinds"]
    assert content["total"] == sum(kind["bytes"] for kind in kinds.values())
    assert content["total"] == sum(x["bytes"] for x in content["held"])
    for kind in kinds.values():
        assert kind["bytes"] == sum(kind["formats"].values())
    for kind in ("parameters", "gradients", "states"):
        assert kinds[kind]["bytes"] == sum(x[kind] for x in content["parameters"].values())
    assert content["master_weights_bytes_per_parameter"] == 16


PROCESS = """
import torch, mcftensor as mcf

def used():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) * 1024

torch.set_num_threads(1)
torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]).step()
def build():
    model = torch.nn.Sequential(*[torch.nn.Linear(2**10, 2**10, bias=False) for _ in range(16)])
    model = mcf.as_expansion(model)
    optimizer = mcf.collage(torch.optim.AdamW(model.parameters()), "plus")
    return model, optimizer
def step(model, optimizer):
    for p in model.parameters():
        p.grad = torch.ones(p.shape, dtype=p.dtype)
    optimizer.step()
first = torch.nn.Linear(2, 2, bias=False)
warm = mcf.as_expansion(first)
step(warm, mcf.collage(torch.optim.AdamW(warm.parameters()), "plus"))
before = used()
model, optimizer = build()
said = mcf.meters.summary(model, optimizer).total
step(model, optimizer)
print((used() - before) / said)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_takes_what_is_said():
    at_once = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, "-c", PROCESS]
    run = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | at_once
    )
    assert float(run.stdout) == pytest.approx(1, abs=0.1)
