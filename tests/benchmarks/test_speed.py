"""The speed benchmarks themselves: who runs, in which order, and which bytes are counted."""

import json
import logging
import math
import time

import pytest
import torch

import compiling
import envelope
import first_steps
import mcftensor as mcf
import overhead
import same_path
import steps
import threads
import train
import train_memory
from common.bounds import BOUNDS
from speed import memory, report
from speed.clocks import HostClock, bandwidth
from speed.collage_loop import grow, scale
from speed.contenders import BASELINES, KNOWN, Contender
from speed.gpt import SHAPES, parameter_shapes
from speed.measuring import WARM_UP, Group, measure, order
from speed.peers import PEERS
from speed.running import size, storages
from speed.workloads import WORKLOADS, make_workload

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What bounds the speed of steps needs large blocks to measure."""
    monkeypatch.setattr("speed.measuring.bandwidth", lambda device, clock: 1e9)


@pytest.fixture
def workload():
    return make_workload("tiny", "cpu")


@pytest.fixture
def matrix(monkeypatch):
    monkeypatch.setitem(WORKLOADS, "matrix", lambda: [(16, 64)])
    return make_workload("matrix", "cpu")


def figures(workload, contenders, rounds=1):
    found = measure(workload, contenders, "cpu", HostClock(), rounds)
    return found["contenders"]


def test_own_contenders_step(workload):
    found = figures(workload, list(KNOWN.values()))
    assert set(found) == set(KNOWN)
    for name, row in found.items():
        assert "failed" not in row, (name, row)
        assert row["seconds"] > 0
        assert row["ratio"] > 0


def test_peers_step_or_say_why_not(workload):
    peers = [peer for peer in PEERS if not peer.compiles]
    found = figures(workload, peers)
    assert set(found) == {BASELINES["AdamW"].name} | {peer.name for peer in peers}
    for row in found.values():
        assert ("failed" in row) != ("seconds" in row)
        assert "\n" not in row.get("failed", "")


def test_a_failure_is_told_and_the_others_go_on(workload):
    def broken(workload):
        raise OSError("no such\nthing")

    def idle(workload):
        running = KNOWN["torch bf16, fused"].build(workload)
        running.step = lambda: None
        return running

    found = figures(workload, [Contender("broken", broken), Contender("idle", idle)])
    assert found["broken"]["failed"] == "OSError: no such"
    assert "leaves the parameters" in found["idle"]["failed"]
    assert found["master weights"]["ratio"] == 1


def test_figures_without_a_baseline(workload, monkeypatch, tmp_path):
    def broken(workload):
        raise MemoryError

    monkeypatch.setitem(BASELINES, "AdamW", Contender("master weights", broken))
    found = measure(workload, [KNOWN["torch bf16, fused"]], "cpu", HostClock(), 2)
    assert found["contenders"]["torch bf16, fused"]["ratio"] is None
    assert report.table("tiny", found).row_count == 2
    assert report.failures(found) == ["master weights: MemoryError: "]
    machine = {"device": "cpu", "cpu": "one"}
    report.draw(tmp_path / "steps.png", {"machine": machine, "workloads": {"tiny": found}})


def test_a_contender_may_fail_in_a_later_round(workload):
    def build(workload):
        running = KNOWN["torch bf16, fused"].build(workload)
        step, calls = running.step, []

        def limited():
            calls.append(None)
            if len(calls) > 5:
                raise RuntimeError("enough")
            step()

        running.step = limited
        return running

    found = figures(workload, [Contender("limited", build)], rounds=3)
    assert found["limited"]["failed"] == "RuntimeError: enough"
    assert found["master weights"]["rounds"] == 3


# Bytes a parameter: moved, and held with parameter and gradient.
@pytest.mark.parametrize(
    ("name", "moved", "held"),
    [
        ("master weights", 28, 20),
        ("master weights, gradients freed", 28, 16),
        ("SGD, master weights", 20, 16),
        ("torch bf16, for-loop", 14, 8),
        ("torch bf16, fused", 14, 8),
        ("torch fp32, fused", 28, 16),
        ("mcf light, fused", 18, 10),
        ("mcf plus, for-loop", 22, 12),
        ("mcf plus, fused", 22, 12),
        ("mcf plus, stochastic, fused", 22, 12),
        ("mcf none, foreach", 26, 14),
        ("mcf full, fused", 26, 14),
        ("SGD, mcf full, fused", 18, 10),
    ],
)
def test_bytes(matrix, name, moved, held):
    row = figures(matrix, [KNOWN[name]])[name]
    assert row["bytes_moved"] == moved
    assert row["bytes_held"] == held
    assert row["bytes_added"] == held - (8 if name == "torch fp32, fused" else 4)


def test_three_terms_are_counted(monkeypatch):
    monkeypatch.setitem(WORKLOADS, "vector", lambda: [(1000,)])
    row = figures(make_workload("vector", "cpu"), [KNOWN["mcf plus, fused"]])["mcf plus, fused"]
    assert row["bytes_moved"] == 2 + 2 * (6 + 2 + 6)


def test_states_of_other_subclasses_and_objects_are_counted():
    class Quantized:
        def __init__(self):
            self.codes = torch.zeros(10, dtype=torch.int8)
            self.name = "codes"

    x = mcf.as_expansion(torch.ones(10, 2), mcf.bf16x2)
    plain = torch.ones(4)
    held = {"a": Quantized(), "b": [x, plain, plain[:2]], "step": torch.tensor(1.0), "n": 3}
    assert size(storages(held)) == 10 + 2 * 2 * 20 + 16


def test_everybody_steps_once_a_round_and_the_order_alternates(workload):
    taken = []

    def watched(name):
        def build(workload):
            running = KNOWN["torch bf16, fused"].build(workload)
            step = running.step
            running.step = lambda: (taken.append(name), step())
            return running

        return Contender(name, build)

    group = Group(workload, "cpu", HostClock(), {})
    for name in "abc":
        group.start(watched(name))
    rounds = []
    for turn in range(4):
        taken.clear()
        group.round(turn)
        rounds.append("".join(taken))
    assert rounds == ["abc", "acb", "cab", "cba"]
    assert order(["x"], 5) == ["x"]


def test_a_contender_that_takes_too_long_is_given_up(workload):
    group = Group(workload, "cpu", HostClock(), {}, limit=0.1)
    group.start(Contender("slow", lambda workload: time.sleep(20)))
    assert group.measurements["slow"].failure.startswith("TimeoutError: given up after 0.1 s")


def test_groups_have_their_baseline_and_lose_nobody(workload, monkeypatch):
    monkeypatch.setattr(Group, "is_full", lambda self: len(self.running) > 2)
    names = ["torch bf16, fused", "mcf plus, fused", "mcf light, fused", "SGD, mcf full, fused"]
    found = figures(workload, [KNOWN[name] for name in names], rounds=2)
    assert set(found) == {*names, "master weights", "SGD, master weights"}
    assert all(found[name]["rounds"] == 2 for name in names)
    assert found["master weights"]["rounds"] == 4  # in two groups


def test_peak_memory():
    x = torch.ones(1000)
    assert memory.peak("cpu", lambda: x.mul_(2)) < 100
    assert 8000 <= memory.peak("cpu", lambda: (x + 1) * 2) < 8100
    assert 20_000 <= memory.peak("cpu", lambda: torch._foreach_add([x] * 5, 1)) < 20_100


def test_bandwidth():
    assert bandwidth("cpu", HostClock(), 2**20) > 0


def test_shapes_of_gpt_2():
    shapes = parameter_shapes(SHAPES["124M"])
    assert len(shapes) == 148
    assert sum(map(math.prod, shapes)) == 124_439_808
    assert 1.3e9 < sum(map(math.prod, parameter_shapes(SHAPES["1.3B"]))) < 1.33e9


def test_the_command_writes_figures_and_a_picture(tmp_path, capsys, monkeypatch):
    for variable in steps.CACHES:  # which it sets
        monkeypatch.setenv(variable, "")
    monkeypatch.setattr(logging, "disable", lambda level: None)
    arguments = ["--only", "mcf plus, fused", "triton", "--workloads", "tiny", "--rounds", "2"]
    steps.main([*arguments, "--out", str(tmp_path), "--json", str(tmp_path / "figures.json")])
    record = json.loads((tmp_path / "figures.json").read_text())
    assert record["machine"]["torch"] == torch.__version__
    tiny = record["workloads"]["tiny"]
    assert tiny["parameters"] == 16 * 32 + 32 + 30
    assert list(tiny["contenders"])[:2] == ["mcf plus, fused", "optimi Kahan, triton"]
    row = tiny["contenders"]["mcf plus, fused"]
    assert row["seconds_quartiles"][0] <= row["seconds"] <= row["seconds_quartiles"][1]
    assert (tmp_path / "steps.png").stat().st_size > 10_000
    assert "mcf plus, fused" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--only", "nobody"], ["--rounds", "0"]])
def test_mistakes(arguments, capsys):
    with pytest.raises(SystemExit):
        steps.parse(arguments)
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.slow
def test_training(tmp_path, capsys):
    path = tmp_path / "train.json"
    arguments = ["--model", "tiny", "--device", "cpu", "--steps", "1", "--rounds", "1"]
    train.main([*arguments, "--json", str(path)])
    record = json.loads(path.read_text())
    assert list(record["strategies"]) == list(train.STRATEGIES)
    for row in record["strategies"].values():
        assert row["tokens_a_second"] > 0
        assert row["peak_bytes"] > 10 * record["parameters"]
    assert "Collage loop" in capsys.readouterr().out


def test_memory_of_a_training():
    """By hand: 8 bytes, and for master weights 16 and 4 of float32 gradients."""
    parameters = sum(math.prod(shape) for shape in parameter_shapes(SHAPES["tiny"]))

    def found(strategy, length=2):
        return train_memory.allocated(strategy, 1, length, "tiny", 1) / parameters

    assert found("bf16") == pytest.approx(8, abs=1)
    assert found("master") == pytest.approx(20, abs=1)
    assert found("bf16", 32) > found("bf16") + 0.5


@pytest.mark.slow
@pytest.mark.skipif(not train_memory.STATUS.exists(), reason="the system has no such file")
def test_each_training_has_a_process_of_its_own(tmp_path):
    path = tmp_path / "memory.json"
    options = ["--model", "tiny", "--windows", "1x8", "--strategies", "plus", "bf16"]
    train_memory.main([*options, "--json", str(path)])
    found = json.loads(path.read_text())["windows"]["1x8"]
    assert found["plus"]["allocated"] > found["bf16"]["allocated"] > 0
    assert all(row["resident"] >= 0 for row in found.values())


@pytest.mark.parametrize("path", compiling.PATHS)
def test_compiling(path):
    torch.compiler.reset()
    found = compiling.figures("expansions", path, "function", SHAPES["tiny"])
    assert min(found["first step"], found["later"]) > 0  # which is longer, is not for a test
    assert found["graphs"] == 0


@pytest.mark.slow
def test_first_steps_find_what_others_have_compiled(tmp_path):
    first, *others = first_steps.in_new_process("mcf plus, fused", tmp_path, 1)
    assert len(others) == first_steps.LATER
    assert first > min(others) > 0
    compiled = [*tmp_path.iterdir()]
    assert compiled
    first_steps.in_new_process("mcf plus, fused", tmp_path, 1)
    assert [*tmp_path.iterdir()] == compiled


def test_steps_by_threads():
    waited = []
    times = threads.take_turns(1, 3, lambda: waited.append(1), "tiny")
    assert list(times) == list(threads.CHOSEN)
    assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in times.values())
    assert len(waited) == len(times) * (3 + 1 + WARM_UP)
    found = threads.summarized([times, times])
    assert found["master weights"]["ratio"] == 1


def test_overhead_measures_both_kinds(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: model)  # takes half a minute
    for times in (overhead.operation_times(1), overhead.pass_times(SHAPES["tiny"], 1, 2)):
        assert all(list(found) == list(overhead.CONVERSIONS) for found in times.values())
        assert all(x > 0 for found in times.values() for x in found.values())


def test_the_loop_of_collage_keeps_what_bf16_loses():
    high, low = torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)
    for _ in range(100):
        grow(high, low, torch.full_like(high, 1e-4))
    assert (high.double() + low.double()).tolist() == pytest.approx([1.01] * 3, rel=5e-4)
    for _ in range(100):
        scale(high, low, 0.999)
    assert (high.double() + low.double()).tolist() == pytest.approx(
        [1.01 * 0.999**100] * 3, rel=2e-3
    )


def test_the_published_worst_cases_are_of_the_bounds_that_are_tested():
    published = json.loads((envelope.ROOT / "benchmarks/results/envelope.json").read_text())
    for name, operations in published["formats"].items():
        for operation, entry in operations.items():
            bound = BOUNDS[operation][mcf.Format.from_name(name)][0]
            assert entry["bound"] == round(bound, 4)
            assert entry["worst"] <= bound


def test_worst_cases_are_found():
    cases, worst = envelope.errors("mul", mcf.fp16x2, seed=0)
    assert cases > 10_000
    assert 0.85 < worst <= 1.25


def test_steps_are_compared_with_those_of_the_same_path():
    found = same_path.ratios(2, 8, same_path.PATHS["foreach"], 1)
    assert found.keys() == {"plus", "exact", "compact", "seconds of float32"}
    assert min(found.values()) > 0
