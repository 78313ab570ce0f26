"""The main job, `studies/pretrain.py`, on a model and a text small enough for seconds."""

import contextlib
import io
import itertools
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import mcftensor as mcf
import pretrain
from mcftensor.kernels import fast_products
from pretraining import report, strategies, text, training
from pretraining.model import GPT, Shape, loss
from pretraining.run import Run
from pretraining.strategies import (
    HALVES,
    STRATEGIES,
    WITHOUT_TAILS,
    bytes_per_parameter,
    parameters_of,
)
from pretraining.training import progress_bar
from support.commands import assert_one_line, exit_status
from support.pretrain_runs import write_poem

TINY = Shape(context=16, layers=1, width=32, heads=2)
PARAMETERS = sum(p.numel() for p in GPT(TINY).parameters())
VECTORS = sum(p.numel() for p in GPT(TINY).parameters() if p.dim() == 1)


@pytest.fixture(autouse=True)
def _tiny_model(monkeypatch):
    monkeypatch.setitem(training.SHAPES, "cpu", TINY)


@pytest.fixture
def run(poem, tmp_path):
    """Run the command on the poem; return its exit status and what results.json holds."""

    def run(*arguments):
        out = tmp_path / "out"
        status = pretrain.main(["--data", str(poem), "--out", str(out), *arguments])
        return status, json.loads((out / "results.json").read_text())

    return run


# The command


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of all strategies, what results.json holds, and what is printed."""
    folder, screen = tmp_path_factory.mktemp("finished"), io.StringIO()
    write_poem(folder)
    arguments = ["--data", str(folder / "poem.txt"), "--out", str(folder), "--steps", "12"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(screen):
        patch.setitem(training.SHAPES, "cpu", TINY)
        assert pretrain.main(arguments) == 0
    return folder, json.loads((folder / "results.json").read_text()), screen.getvalue()


def test_all_strategies_start_alike_and_learn(finished):
    folder, record, screen = finished
    results = record["strategies"]
    assert list(results) == list(STRATEGIES)
    first = {name: (r["training"][0], r["validation"][0][1]) for name, r in results.items()}
    (half,) = {first.pop(name) for name in HALVES}
    (others,) = set(first.values())
    assert half == pytest.approx(others, rel=1e-2), "the same in another arithmetic"
    master = results["master"]["final"]["nats"]
    for result in results.values():
        assert len(result["training"]) == 12
        steps, losses = zip(*result["validation"], strict=True)
        assert steps[0] == 0
        assert steps[-1] == 12
        assert losses[-1] < losses[0]
        final = result["final"]
        assert final["nats"] == losses[-1]
        assert final["bits_per_byte"] == pytest.approx(losses[-1] / math.log(2))
        assert final["difference_to_master"] == losses[-1] - master
        assert result["seconds_per_step"] > 0
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert all(name in screen for name in (*STRATEGIES, "bits per byte", "EDQ ratio"))


@pytest.mark.parametrize(
    ("peer", "size"),
    [("kahan", 10), ("flash24", 7.125), ("torchao4", None), ("torchao8", None), ("bnb8", None)],
)
@pytest.mark.filterwarnings("ignore")  # Theirs are not ours.
def test_an_optimizer_of_another_library_learns_with_the_settings_of_torch(peer, size, run):
    pytest.importorskip(strategies.PEERS[peer][0], reason="it is not installed")
    status, record = run("--steps", "3", "--strategies", f"master,{peer}", "--lr", "2e-3")
    assert status == 0
    master, result = (record["strategies"][name] for name in ("master", peer))
    assert result["training"][0] == master["training"][0], "the same weights"
    assert result["final"]["nats"] == pytest.approx(master["final"]["nats"], abs=0.05)
    if size is not None:
        assert result["bytes_per_parameter"] == pytest.approx(size, abs=0.1)
    named = list(GPT(TINY).to(torch.bfloat16).named_parameters())
    stock = strategies.stock_optimizer("adamw", "fused", 2e-3, 0.99)
    groups = strategies.optimizer_for(peer, named, stock).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    for group in groups:
        assert len(group["params"]) == len(group["param_names"])
        betas = group["betas"] if "betas" in group else (group["beta1"], group["beta2"])
        assert (float(group["lr"]), *betas) == (pytest.approx(2e-3), 0.9, 0.99)


def test_peers_are_a_name_for_all_of_them():
    assert pretrain.parse(["--strategies", "master", "peers"]).strategies == [
        "master",
        *strategies.PEERS,
    ]


def test_every_strategy_is_metered(finished):
    """Steps 1, 3, …, 11 of 12; the means are those of the last two of these six."""
    _, record, _ = finished
    results = record["strategies"]
    for name, result in results.items():
        readings = result["edq"]
        assert [reading["step"] for reading in readings] == [1, 3, 5, 7, 9, 11]
        assert all(reading["numel"] == PARAMETERS for reading in readings)
        final = result["final"]
        for of_reading, of_result in (("ratio", "edq_ratio"), ("lost", "lost")):
            late = [reading[of_reading] for reading in readings[-2:]]
            assert final[of_result] == pytest.approx(sum(late) / 2)
        if name not in WITHOUT_TAILS or name == "master":
            assert final["edq_ratio"] == pytest.approx(1, abs=1e-3)
            assert final["lost"] < 0.05
    bf16, plus = results["bf16"]["final"], results["plus"]["final"]
    assert bf16["edq_ratio"] == bf16["edq_ratio_leading"] < 0.7
    assert bf16["lost"] == bf16["lost_leading"] > 0.5
    assert plus["lost_leading"] > 0.5 > plus["lost"]
    rounded = results["round"]["final"]
    assert rounded["lost"] == rounded["lost_leading"] > 0.5, "as many as in bf16, and yet"
    assert rounded["edq_ratio"] == pytest.approx(1, abs=0.2)


def test_the_meter_changes_nothing_and_its_time_is_not_counted(run, monkeypatch):
    """Sampled steps take half a second each here, the others do not."""
    arguments = ("--steps", "4", "--strategies", "plus,master")
    _, metered = run(*arguments)

    class Idle:
        def __init__(self, optimizer, every, callback):
            self.every, self.step, self.last, self.history = every, 0, None, []
            optimizer.register_step_post_hook(self.sample)

        def sample(self, *_):
            self.step += 1
            if self.step % self.every == 1:
                time.sleep(0.5)
                self.last = {"step": self.step}

        def remove(self):
            pass

    monkeypatch.setattr(mcf, "EDQ", Idle)
    _, alone = run(*arguments)
    for name in ("plus", "master"):
        results = [record["strategies"][name] for record in (metered, alone)]
        assert results[0]["training"] == results[1]["training"]
        assert results[0]["validation"] == results[1]["validation"]
        assert results[1]["seconds_per_step"] < 0.5
        assert results[1]["final"]["edq_ratio"] is None


def test_about_25_samples_are_taken(run):
    _, record = run("--steps", "60", "--strategies", "bf16")
    steps = [reading["step"] for reading in record["strategies"]["bf16"]["edq"]]
    assert steps == list(range(1, 61, 2))


@pytest.mark.parametrize(
    ("optimizer", "matrix_bytes", "vector_bytes"),
    [
        (
            "adamw",
            (16, 8, 10, 12, 14, 14, 13, 12, 7 + 2 / 32, 5 + 2 / 32, 14, 13),
            (16, 8, 12, 16, 20, 14, 14, 12, 14, 12, 14, 14),
        ),
        (
            "sgd",
            (12, 6, 8, 10, 10, 10, 9, 8, 6 + 1 / 32, 4 + 1 / 32, 10, 9),
            (12, 6, 10, 14, 14, 10, 10, 8, 10, 8, 10, 10),
        ),
    ],
)
def test_memory_is_measured(run, optimizer, matrix_bytes, vector_bytes):
    """Vectors are three-term expansions in `light`, `plus` and `full`, matrices two-term ones. In
    `tail8`, `compact`, `released` and `half8` vectors have the longer tails."""
    status, record = run("--steps", "2", "--optimizer", optimizer)
    assert status == 0
    for name, matrix, vector in zip(STRATEGIES, matrix_bytes, vector_bytes, strict=True):
        expected = matrix + (vector - matrix) * VECTORS / PARAMETERS
        assert record["strategies"][name]["bytes_per_parameter"] == pytest.approx(expected)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("path", ["foreach", "forloop"])
def test_exact_is_master_weights(run, monkeypatch, optimizer, path):
    """To the bit, if these too round ties away from zero."""
    build = strategies.master_weights

    def away(named, stock):
        named = list(named)
        found = build(named, stock)
        parameters = sorted((p for _, p in named), key=lambda p: p.dim() <= 1)

        @torch.no_grad()
        def round_away(*_):
            for p, master in zip(parameters, parameters_of(found), strict=True):
                p.copy_(mcf.as_expansion(master, mcf.bf16i16).components[0])

        found.register_step_post_hook(round_away)
        return found

    monkeypatch.setattr(strategies, "master_weights", away)
    arguments = ("--steps", "40", "--optimizer", optimizer, "--path", path)
    status, record = run(*arguments, "--strategies", "master,exact")
    assert status == 0
    assert record["settings"]["path"] == path
    master, exact = (record["strategies"][name] for name in ("master", "exact"))
    assert master["training"] == exact["training"]
    assert master["validation"] == exact["validation"]
    assert master["final"]["edq_ratio"] == exact["final"]["edq_ratio"]


@pytest.mark.slow
def test_a_witness_sees_what_a_loss_hides(run, capsys):
    arguments = ("--steps", "30", "--beta2", "0.999")
    _, alone = run(*arguments)
    _, record = run(*arguments, "--witness")
    found = {name: result["witness"] for name, result in record["strategies"].items()}
    for name, result in record["strategies"].items():
        assert result["training"] == alone["strategies"][name]["training"], "it changes nothing"
        assert alone["strategies"][name]["witness"] == {}
    for name in ("compact", "released"):
        assert found[name]["second_moment"] == pytest.approx(1, abs=0.05)
        assert found[name]["largest_run"] < 1.3 * found[name]["largest_exact"]
    for name in ("master", "exact", "tail8", "round", *HALVES):
        assert found[name]["second_moment"] == pytest.approx(1, abs=1e-5)
        assert found[name]["largest_run"] == pytest.approx(found[name]["largest_exact"], rel=1e-4)
    for kind in ("displacement_matrices", "displacement_vectors"):
        errors = {name: found[name][kind] for name in found}
        assert errors["exact"] < 1e-3
        assert errors["half16"] < 1e-3
        assert errors["tail8"] < errors["round"]
        assert errors["bf16"] > 0.2
    assert found["tail8"]["displacement_matrices"] < 1e-2 < found["round"]["displacement_matrices"]
    assert "second moment over exact" in capsys.readouterr().out


def test_float16_weights_serve_as_they_train():
    """A plain float16 model has the same logits, to the bit, and the tails are not zero."""
    text = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(0))
    for strategy in HALVES:
        settings = {"steps": 6, "lr": 1e-2, "beta2": 0.999, "batch_size": 4, "device": "cpu"}
        job = training.Training(Run(strategy, seed=0, **settings), text, text, None, False)
        with mcf.fast_products():
            for batch in job.batches():
                job.take(batch)
        components = {name: p.components for name, p in job.model.state_dict().items()}
        assert all(tail.any() for _, tail in components.values())
        assert {(p.grad.dtype, type(p.grad)) for p in job.model.parameters()} == {
            (torch.bfloat16, torch.Tensor)
        }
        server = GPT(TINY).half()
        server.load_state_dict({name: leading for name, (leading, _) in components.items()})
        windows = text[: 3 * TINY.context].unflatten(0, (3, -1))
        with mcf.fast_products():
            assert torch.equal(server(windows), job.model(windows))


def test_gradients_released_in_backward_are_the_same(run):
    """Sampled steps, of which there are four, see gradients; the others free them."""
    _, record = run("--steps", "8", "--strategies", "compact,released")
    compact, released = record["strategies"].values()
    assert compact["training"] == released["training"]
    assert compact["validation"] == released["validation"]
    assert compact["edq"] == released["edq"]
    assert released["bytes_per_parameter"] < compact["bytes_per_parameter"] - 1.9


def test_a_witness_of_sgd_sees_weights_alone(run):
    _, record = run("--steps", "3", "--optimizer", "sgd", "--strategies", "exact", "--witness")
    found = record["strategies"]["exact"]["witness"]
    assert found.keys() == {"displacement_matrices", "displacement_vectors"}
    assert max(found.values()) < 1e-4


def test_the_seed_decides_everything(run):
    arguments = ("--steps", "3", "--strategies", "bf16,master")
    first, again, other = (run(*arguments, "--seed", seed)[1] for seed in ("1", "1", "2"))
    for name in ("bf16", "master"):
        curves = [r["strategies"][name]["training"] for r in (first, again, other)]
        assert curves[0] == curves[1] != curves[2]


def test_results_name_settings_and_versions(run):
    _, record = run("--steps", "1", "--strategies", "bf16")
    settings = record["settings"]
    assert (settings["optimizer"], settings["lr"], settings["beta2"]) == ("adamw", 3e-4, 0.999)
    assert settings["parameters"] == PARAMETERS
    assert record["machine"]["torch"] == torch.__version__
    assert record["strategies"]["bf16"]["final"]["difference_to_master"] is None


@pytest.mark.parametrize("slow", [[], [torch.bfloat16, torch.float16]], ids=str)
def test_a_processor_without_bf16_products_is_told_of(run, capsys, monkeypatch, slow):
    """Its products are those of float32, rounded, so losses are those of other processors."""
    _, record = run("--steps", "2", "--strategies", "master,released")
    for module in (fast_products, pretrain, training):
        monkeypatch.setattr(module, "slow_dtypes", lambda: frozenset(slow))
    seen = []
    monkeypatch.setattr(
        training,
        "loss",
        lambda *arguments: (seen.append(fast_products._CONTEXTS.library), loss(*arguments))[1],
    )
    capsys.readouterr()
    _, own = run("--steps", "2", "--strategies", "master,released")
    assert (pretrain.WITHOUT_PRODUCTS in capsys.readouterr().out) == bool(slow)
    assert own["machine"]["products_in_float32"] == sorted(map(str, slow))
    assert {library is not None for library in seen} == {bool(slow)}, "validation included"
    for name, result in own["strategies"].items():
        losses = record["strategies"][name]["training"]
        assert result["training"] == pytest.approx(losses, abs=1e-3)


def test_one_bar_shows_the_time_left_of_all(run, tmp_path, monkeypatch):
    """It begins with the steps that are done, and counts those of all strategies."""
    bars = []
    monkeypatch.setattr(
        pretrain, "progress_bar", lambda *counts: bars.append(progress_bar(*counts)) or bars[-1]
    )
    arguments = ("--steps", "4", "--checkpoint", str(tmp_path / "checkpoint"))
    run(*arguments, "--strategies", "plus")
    run(*arguments, "--strategies", "bf16,plus,exact")
    assert [(bar.initial, bar.n, bar.total) for bar in bars] == [(0, 4, 4), (4, 12, 12)]
    assert all(bar.smoothing == 0 for bar in bars), "the mean has the time of validations"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "0"], "argument --steps: must be a whole number from 1 on, not '0'"),
        (["--steps", "many"], "argument --steps: must be a whole number from 1 on, not 'many'"),
        (["--batch-size", "-1"], "argument --batch-size: must be a whole number from 1 on"),
        (["--lr", "nan"], "argument --lr: must be a number above 0, not 'nan'"),
        (["--beta2", "1"], "argument --beta2: must be a number from 0 to below 1, not '1'"),
        (["--seed", "-1"], "argument --seed: must be a whole number from 0 on, not '-1'"),
        (["--strategies", "plus,minus"], "unknown strategy 'minus': choose from master, bf16"),
        (["--strategies", ","], "unknown strategy '': choose from master, bf16"),
        (["--optimizer", "muon"], "argument --optimizer: invalid choice: 'muon'"),
        (["--witness", "--checkpoint", "x"], "--witness: it runs in one process, and without"),
        (["--data", "no/such/text"], "cannot read no/such/text: No such file or directory"),
        (["--out", "/dev/null/out"], "cannot write to /dev/null/out: Not a directory"),
    ],
)
def test_a_mistake_gets_one_line_and_status_2(poem, capsys, arguments, complaint):
    assert exit_status(pretrain.main, ["--data", str(poem), *arguments]) == 2
    assert_one_line(capsys.readouterr().err, "pretrain.py", complaint)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there(poem, capsys):
    assert exit_status(pretrain.main, ["--data", str(poem), "--device", "cuda"]) == 2
    assert_one_line(
        capsys.readouterr().err, "pretrain.py", "--device cuda: torch finds no CUDA device"
    )


@pytest.mark.parametrize("content", [b"", b"too short"])
def test_a_text_too_small(tmp_path, capsys, content):
    path = tmp_path / "small.txt"
    path.write_bytes(content)
    assert exit_status(pretrain.main, ["--data", str(path)]) == 2
    assert_one_line(capsys.readouterr().err, "pretrain.py", f"the text in {path} is too small")


def test_a_folder_without_text(tmp_path, capsys):
    assert exit_status(pretrain.main, ["--data", str(tmp_path)]) == 2
    assert_one_line(
        capsys.readouterr().err, "pretrain.py", f"the text in {tmp_path} is too small: 0 bytes"
    )


def test_interrupting(poem, tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "loss", interrupt)
    options = ["--data", str(poem), "--out", str(tmp_path / "out")]
    assert pretrain.main(options) == 130
    folder = tmp_path / "out" / "checkpoint"
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "interrupted, and nothing is kept; with --checkpoint DIR" in said
    assert f'make train ARGS="--checkpoint {folder}"' in said
    assert pretrain.main([*options, "--checkpoint", str(folder)]) == 130
    goes_on = f"interrupted; the same command goes on from what is in {folder}"
    assert goes_on in capsys.readouterr().err


def test_as_a_script():
    script = Path(pretrain.__file__)
    command = [sys.executable, str(script), "--steps", "0"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert_one_line(process.stderr, "pretrain.py", "--steps")


def test_trainings_side_by_side_are_those_one_after_the_other(poem, tmp_path):
    """Each has its own process, where it computes in one thread."""
    found = []
    for jobs in ("1", "2"):
        out = tmp_path / jobs
        command = [sys.executable, pretrain.__file__, "--data", str(poem), "--out", str(out)]
        command += ["--steps", "2", "--strategies", "master,exact,compact", "--jobs", jobs]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "2"})
        own = json.loads((out / "results.json").read_text())
        assert list(own["strategies"]) == ["master", "exact", "compact"]
        found.append({k: [y for _, y in x["validation"]] for k, x in own["strategies"].items()})
    for name, losses in found[0].items():
        assert found[1][name] == pytest.approx(losses, abs=1e-4)


# Its parts


def test_learning_rate_warms_up_and_decays():
    factors = [training.learning_rate_factor(step, 100) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[10] == 1
    assert factors[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(factors[10:]))
    assert training.learning_rate_factor(0, 1) == 1


def test_bytes_per_parameter_counts_each_tensor_once():
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    )
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    assert bytes_per_parameter(model, optimizer) == 4
    model(torch.ones(4)).sum().backward()
    assert bytes_per_parameter(model, optimizer) == 8
    optimizer.step()
    assert bytes_per_parameter(model, optimizer) == 16


def test_a_loss_that_is_not_finite_is_null(tmp_path):
    result = training.Result(training=[math.nan], validation=[(0, 5.0), (1, math.inf)])
    report.write_json(tmp_path / "results.json", {"bf16": result})
    record = json.loads((tmp_path / "results.json").read_text())["strategies"]["bf16"]
    assert record["training"] == [None]
    assert record["final"]["nats"] is None


def test_what_came_out_in_one_line():
    finals = {"master": 2.5, "bf16": 2.75, "plus": 2.625, "full": 2.375}
    results = {name: training.Result(validation=[(0, x)]) for name, x in finals.items()}
    assert report.in_one_line(results, 90.0) == (
        "Validation loss, less the 2.5000 of master weights: bf16 +0.2500; plus, full -0.1250 to "
        "+0.1250. 4 trainings took 1.5 minutes"
    )
    assert report.in_one_line({"plus": results["plus"], "full": results["full"]}, 60.0) == (
        "Lowest validation loss: 2.3750, full; 2 trainings took 1.0 minutes"
    )
    two = {name: results[name] for name in ("master", "bf16")}
    assert report.in_one_line(two, 6.0).endswith("bf16 +0.2500. 2 trainings took 0.1 minutes")


def test_the_table_without_master_weights():
    result = training.Result(validation=[(0, 5.0), (1, 4.0)])
    table = report.table({"bf16": result}, "title")
    assert rows(table)["difference to master, nats"] == ["—"]


def rows(table):
    """The cells of a table by the first of each row."""
    names, *columns = ([*column.cells] for column in table.columns)
    return {name.strip(): [*row] for name, *row in zip(names, *columns, strict=True)}


def readings(*ratios):
    kinds = ("ratio", "lost", "ratio_leading", "lost_leading")
    return [{"step": i} | dict.fromkeys(kinds, r) for i, r in enumerate(ratios, start=1)]


def test_figures_of_the_meter_are_means_over_the_last_quarter():
    for ratios, late in (
        ([0.1] * 6 + [0.5, 0.7], 0.6),
        ([0.25], 0.25),
        ([0.1, 0.1, 0.1, None], None),
        ([0.1] * 6 + [None, 0.5], 0.5),
        ([], None),
    ):
        assert training.Result(edq=readings(*ratios)).late("ratio") == pytest.approx(late)


def test_the_table_says_what_updates_lose():
    bf16 = training.Result(validation=[(0, 5.0), (1, 4.0)], edq=readings(0.25))
    master = training.Result(validation=[(0, 5.0), (1, 4.0)])
    table = rows(report.table({"bf16": bf16, "master": master}, "title"))
    assert table["EDQ ratio"] == ["0.2500", "—"]
    assert table["updates lost"] == ["25.0 %", "—"]


@pytest.mark.parametrize(
    ("share", "text"),
    [(None, "—"), (0, "0.0 %"), (1e-6, "< 0.001 %"), (1.2e-4, "0.012 %"), (0.8312, "83.1 %")],
)
def test_shares_as_text(share, text):
    assert report.percent(share) == text


def test_the_picture_shows_losses_and_what_updates_lose(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(report.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    for names in (("master", "bf16", "plus"), ("bf16", "plus"), ("bf16",)):
        results = {
            name: training.Result(
                validation=[(0, 5.0), (1, 4.0), (2, 3.0)],
                edq=readings(0.25, 7.0 if name == "plus" else None),
            )
            for name in names
        }
        report.draw(tmp_path / "loss.png", results, "title")
        panels = {axes.get_title(): axes for axes in figures[-1].axes}
        assert ("Difference to master weights" in panels) == ("master" in names)
        lines = {axes.get_title(): len(axes.lines) for axes in figures[-1].axes}
        # One more for leading terms of plus.
        assert lines["EDQ ratio: 1 where weights move as intended"] == len(names) + (
            "plus" in names
        )
        ratios = panels["EDQ ratio: 1 where weights move as intended"]
        assert ratios.get_ylim()[0] <= 0
        assert 1 < ratios.get_ylim()[1] <= 1.5


# The text


def test_a_file_is_split_by_position(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)))
    training, validation = text.load(path, window=10)
    assert training.tolist() == list(range(90))
    assert validation.tolist() == list(range(90, 100))


@pytest.mark.parametrize("count", [2, 5, 30])
def test_a_folder_is_split_by_file(tmp_path, count):
    contents = {f"{n:03} in one piece\n".encode() for n in range(count)}
    for n, content in enumerate(sorted(contents)):
        folder = tmp_path / f"folder{n % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"{n}.txt").write_bytes(content)
    parts = [bytes(part.tolist()) for part in text.load(tmp_path, window=1)]
    training, validation = (set(part.splitlines(keepends=True)) for part in parts)
    assert training.isdisjoint(validation)
    assert training | validation == contents
    assert len(validation) == math.ceil(count / 10)


def test_the_split_depends_on_relative_paths_alone(tmp_path):
    parts = []
    for root in (tmp_path / "here", tmp_path / "there"):
        root.mkdir()
        for n in range(20):
            (root / f"{n}.txt").write_text(f"text {n}")
        parts.append([part.tolist() for part in text.load(root, window=1)])
    assert parts[0] == parts[1]


def test_hidden_and_binary_files_are_left_out(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (tmp_path / "a.txt").write_text("visible é")
    assert [file.name for file in text.text_files(tmp_path)] == ["a.txt"]


def test_a_folder_with_one_file_is_split_by_position(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"0123456789" * 10)
    training, validation = text.load(tmp_path, window=5)
    assert (len(training), len(validation)) == (90, 10)


def test_the_standard_library():
    root = text.standard_library()
    files = [file.relative_to(root) for file in text.library_files(root)]
    assert Path("ast.py") in files
    assert not any({"test", "site-packages"} & set(file.parts) for file in files)
    training, validation = text.load(None, window=1000)
    assert len(training) > 5 * len(validation) > 0
