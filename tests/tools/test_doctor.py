"""The doctor runs a script, unchanged, and ends with a verdict in each case."""

import sys

import pytest
import torch

from mcftensor import __main__ as command_line
from mcftensor.tools import doctor

MODEL = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 8))
for p in model.parameters():
    p.data.add_(1)
model = model.to({dtype})
optimizer = torch.optim.{optimizer}

def step(optimizer=optimizer):
    optimizer.zero_grad()
    model(torch.randint(16, (4, 3))).square().mean().backward()
    optimizer.step()
"""
FOREVER = "\nwhile True:\n    step()\n"
ADAMW = "AdamW(model.parameters(), lr=1e-5)"


@pytest.fixture
def report(tmp_path, monkeypatch):
    """The lines of a report on a script, and the status."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(end, dtype="torch.bfloat16", optimizer=ADAMW, steps=4, arguments=()):
        script = tmp_path / "train.py"
        script.write_text(MODEL.format(dtype=dtype, optimizer=optimizer) + end)
        before = sys.argv, sys.path[:], sys.modules["__main__"]
        text, status = doctor.examine(str(script), arguments, steps=steps)
        assert (sys.argv, sys.path, sys.modules["__main__"]) == before
        first, *lines = text.splitlines()
        assert len(lines) <= 11
        return first.removeprefix(f"{script} "), [line.strip() for line in lines], status

    return run


def test_bf16_loses_and_ways_out_are_named(report):
    first, lines, status = report(FOREVER)
    assert first == "was stopped after 4 steps"
    assert lines[0] == "EDQ of AdamW, measured at 4 of 4 steps"
    assert lines[1] == "weights: 5 in bfloat16 (216 elements)"
    assert lines[2] == "states: exp_avg in bfloat16, exp_avg_sq in bfloat16"
    assert lines[3] == (
        "100 % of updates are lost at a learning rate of 1e-05: norms 100 %, embeddings 100 %, "
        "matrices 100 %, biases 100 %"
    )
    assert "the effective learning rate is 0.00 of yours" in lines
    slow = "exp_avg_sq in bfloat16 will stand still: it decays by 0.1 % a step, and bfloat16 "
    assert slow + "resolves 0.39 %" in lines
    assert status == 1


def test_the_way_out_depends_on_the_size_of_updates(report):
    *_, rate, _, way, _, _ = report(FOREVER, optimizer="SGD(model.parameters(), lr=1e-3)")[1]
    assert float(rate.split()[5]) > 0.5  # large updates, beside many that are lost
    assert way.startswith("model = mcf.as_expansion(model, lr=0.001); mcf.collage(optimizer, ")
    lines = report(FOREVER, optimizer="SGD(model.parameters(), lr=1e-7)")[1]
    assert "model = mcf.as_expansion(model, mcf.bf16i16)" in lines[-2]
    lines = report(FOREVER, "torch.float16", "SGD(model.parameters(), lr=1e-6)")[1]
    assert "model = mcf.as_expansion(model, mcf.fp16i16)" in lines[-2]


def test_float32_loses_nothing(report):
    first, lines, status = report(FOREVER, "torch.float32")
    assert (first, lines[-1], status) == ("was stopped after 4 steps", "nothing to do", 0)
    assert lines[1] == "weights: 5 in float32 (216 elements)"
    assert "the effective learning rate is 1.00 of yours" in lines


def test_expansions_lose_nothing_or_need_a_finer_format(report):
    expanded = (
        "\nimport mcftensor as mcf\nmcf.as_expansion(model, mcf.bf16x2)\nmodel.train()\n" + FOREVER
    )
    lines, status = report(expanded, optimizer="SGD(model.parameters(), lr=1e-2)")[1:]
    assert (lines[-1], status) == ("nothing to do", 0)
    assert lines[1] == "weights: 5 in bf16x2 (216 elements)"
    lines, status = report(expanded, optimizer="SGD(model.parameters(), lr=1e-9)")[1:]
    assert (lines[-1].partition(":")[0], status) == ("give the weights a finer format", 1)


def test_states_of_16_bits_over_float32_weights(report):
    narrow = """
class Narrow(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-5, "betas": (0.9, 0.999)})

    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            v = state.setdefault("exp_avg_sq", torch.zeros_like(p, dtype=torch.bfloat16))
            v.mul_(0.999).add_(0.001 * p.grad.square().to(v.dtype))
            p.data.sub_(1e-5 * p.grad / (v.to(p.dtype).sqrt() + 1e-8))

optimizer = Narrow(model.parameters())
while True:
    step(optimizer)
"""
    _, lines, status = report(narrow, "torch.float32")
    assert lines[2] == "states: exp_avg_sq in bfloat16"
    assert any(line.startswith("exp_avg_sq in bfloat16 will stand still") for line in lines)
    assert status == 1


@pytest.mark.parametrize(
    ("end", "first", "status"),
    [
        ("for _ in range(3):\n    step()\n", "ended after 3 steps", 1),
        ("step()\nsys.exit()\n", "left with status 0 after 1 steps", 1),
        ("step()\nsys.exit(3)\n", "left with status 3 after 1 steps", 2),
        ("step()\nsys.exit('no data')\n", "left with status no data after 1 steps", 2),
        ("step()\nraise OSError('no data')\n", "raised OSError after 1 steps", 2),
        ("step()\nraise KeyboardInterrupt\n", "was interrupted after 1 steps", 1),
        ("", "ended after 0 steps", 2),
        ("1 / 0", "raised ZeroDivisionError after 0 steps", 2),
        ("def (", "raised SyntaxError after 0 steps", 2),
    ],
)
def test_each_script_has_an_end(report, end, first, status, capsys):
    found = report(end)
    assert (found[0], found[2]) == (first, status)
    if "after 0" in first:
        assert found[1][0].startswith("EDQ: no optimizer has stepped in this process. If")
    else:
        assert found[1][0].startswith("EDQ of AdamW, measured at ")
    if "raised" in first:
        error = capsys.readouterr().err
        assert "runpy" not in error
        assert "doctor.py" not in error
        assert "train.py" in error


def test_handlers_of_the_script_see_an_ordinary_end(report):
    """It cleans up, and its handlers of exceptions do not run."""
    caught = """
try:
    while True:
        try:
            step()
        except Exception:
            print("caught")
finally:
    print("cleaned up")
"""
    assert report(caught)[0] == "was stopped after 4 steps"


def test_a_script_that_catches_everything_is_stopped_as_it_is_about_to_go_on(report):
    caught = "for _ in range(9):\n    try:\n        step()\n    except BaseException: pass\n"
    first, lines, _ = report(caught + "raise ValueError('after all')")
    assert first.startswith("was stopped after ")
    assert lines[0].startswith("EDQ of AdamW")


def test_arguments_and_the_folder_of_the_script(report, tmp_path):
    (tmp_path / "beside_it.py").write_text("rate = 0.5")
    end = "import beside_it, __main__\nassert __main__.model is model\n"
    end += "assert sys.argv[1:] == ['--lr', 'x'] and __name__ == '__main__'\nstep()\n"
    assert report(end, arguments=["--lr", "x"])[0] == "ended after 1 steps"
    sys.modules.pop("beside_it")


def test_each_optimizer_has_a_verdict(report):
    end = """
other = torch.optim.SGD(model.parameters(), lr=1.0)
for _ in range(3):
    step()
    step(other)
"""
    _, lines, status = report(end, "torch.float32", "Adagrad(model.parameters(), lr=0.1)")
    titles = [line for line in lines if line.startswith("EDQ of")]
    assert [line.partition(",")[0] for line in titles] == ["EDQ of Adagrad", "EDQ of SGD"]
    assert status == 0


def test_what_cannot_be_measured_is_said(report):
    end = "optimizer.step(lambda: model(torch.ones(2, 3).long()).square().mean().backward() or 0.0)"
    with pytest.warns(UserWarning, match="cannot be measured"):
        _, lines, status = report(end, "torch.float32", "LBFGS(model.parameters())")
    assert lines[0] == "EDQ of LBFGS, measured at 0 of 1 steps"
    assert status == 2


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["model", "optimizer.step"])
def test_under_torch_compile(report, compiled):
    torch._dynamo.reset()
    end = f"{compiled} = torch.compile({compiled}, backend='aot_eager')\n" + FOREVER
    first, lines, status = report(end)
    assert first == "was stopped after 4 steps"
    assert "100 % of updates are lost" in lines[3]
    assert status == 1


def test_a_module_of_a_package(tmp_path, monkeypatch, capsys):
    package = tmp_path / "trained_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "rates.py").write_text("rate = 1e-5")
    text = MODEL.format(dtype="torch.bfloat16", optimizer=ADAMW)
    (package / "train.py").write_text("from .rates import rate\n" + text + FOREVER)
    monkeypatch.syspath_prepend(tmp_path)
    assert command_line.main(["doctor", "--steps", "2", "-m", "trained_package.train", "--lr"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("trained_package.train was stopped after 2 steps\nEDQ of AdamW")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["none.py"], "there is no file 'none.py' to run"),
        (["-m", "no_such_module"], "there is no module 'no_such_module' to run"),
        (["-m", "no_such.module"], "there is no module 'no_such.module' to run"),
    ],
)
def test_a_program_that_is_not_there(arguments, reason, capsys):
    assert command_line.main(["doctor", *arguments]) == 2
    assert capsys.readouterr().err == f"python -m mcftensor doctor: {reason}\n"


def test_steps_are_a_whole_number(capsys):
    with pytest.raises(SystemExit) as left:
        command_line.main(["doctor", "--steps", "0", "train.py"])
    assert left.value.code == 2
    assert "must be a whole number above 0, not '0'" in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "status", "prints"), [(None, 1, 1), ("0", 0, 1), ("1", 0, 0)])
def test_one_rank_prints_and_launchers_see_no_failure(
    rank, status, prints, tmp_path, monkeypatch, capsys
):
    script = tmp_path / "train.py"
    script.write_text(MODEL.format(dtype="torch.bfloat16", optimizer=ADAMW) + FOREVER)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert command_line.main(["doctor", "--steps", "1", str(script)]) == status
    assert bool(capsys.readouterr().out) == prints
    script.write_text("")
    assert command_line.main(["doctor", str(script)]) == 2
