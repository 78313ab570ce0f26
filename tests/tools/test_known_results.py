"""The digests that ship with the package are those of this CPU, of Triton's interpreter, and of a
GPU; and the report says what differs."""

import contextlib
import functools

import pytest
import torch

import mcftensor as mcf
from mcftensor.__main__ import main
from mcftensor.kernels import eager, first_use
from mcftensor.kernels.without_float64 import has_float64
from mcftensor.passes import expansion
from mcftensor.tools import device_report, known_results
from support.kernel_cases import way
from support.pretended import pretended

CPU = torch.device("cpu")
WORK = [(group, name) for group, works in known_results.known_work().items() for name in works]


def differing(device=CPU):
    made = known_results.made_digests(torch.device(device))
    recorded = known_results.recorded_digests(in_float64=has_float64())
    assert {g: list(x) for g, x in made.items()} == {g: list(x) for g, x in recorded.items()}
    return [(g, n) for g, works in recorded.items() for n in works if made[g][n] != works[n]]


def test_a_device_gives_what_is_recorded(device):
    assert differing(device) == []


@pytest.mark.parametrize("path", ["eager", pytest.param("cpp", marks=pytest.mark.slow)])
def test_other_paths_give_what_is_recorded(path):
    with way(path):
        assert differing() == []


# Kernels of a hundred instructions and more take the interpreter seconds.
QUICK = ("bf16x2", "fp16x2")


@pytest.mark.thinned(of=4)
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")
@pytest.mark.parametrize(
    ("group", "name"),
    [
        pytest.param(
            g, n, marks=[] if g == "operations" and n.endswith(QUICK) else pytest.mark.slow
        )
        for g, n in WORK
        if g not in ("transformations of any bits", "subnormal numbers", "quotients and roots")
    ],
)
def test_triton_gives_what_is_recorded(group, name):
    pytest.importorskip("triton")
    with way("triton"):
        found = known_results.bits_digest(known_results.known_work()[group][name](CPU))
    assert found == known_results.recorded_digests()[group][name]


def test_one_bit_changes_a_digest_and_a_nan_does_not():
    x = torch.tensor([1.0, float("nan"), -0.0])
    same, other = x.clone(), x.clone()
    same.view(torch.int32)[1] ^= 1 << 31 | 1
    other.view(torch.int32)[2] ^= 1
    assert same.isnan()[1]
    assert known_results.bits_digest([x]) == known_results.bits_digest([same])
    for different in (other, x.double(), x.abs(), x[:2], x.view(3, 1)):
        assert known_results.bits_digest([x]) != known_results.bits_digest([different])


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def test_the_report_has_twenty_lines(capsys):
    assert main(["selfcheck", "--eager"]) == 0
    found = lines(capsys)
    assert len(found) <= 20
    assert found[0].startswith("cpu: ")
    assert all(x.startswith(("  ok  ", "  -   ")) for x in found[1:-1])
    assert sum("digest of a backward pass" in x for x in found) == 1
    count = 164 if has_float64() else 132
    assert found[-1].startswith(f"{count} checks passed on cpu in ")


def test_the_digest_of_a_backward_pass_is_of_its_bits(monkeypatch):
    host = torch.device("cpu")
    digest = known_results.leaf_digest(host)
    assert digest == known_results.leaf_digest(host)
    assert len(digest) == 12
    gelu = torch.nn.functional.gelu
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda x: gelu(x, approximate="tanh"))
    assert digest != known_results.leaf_digest(host)


def test_a_kernel_that_is_wrong_is_named(capsys, monkeypatch):
    run = eager.run

    def wrong(body, columns):
        run(body, columns)
        for x in columns.outputs[0]:
            if x.dtype == torch.bfloat16:
                x.view(torch.int16).view(-1)[-1:] ^= 1

    with way("eager"):
        monkeypatch.setattr(eager, "run", wrong)
        assert main(["selfcheck", "--eager"]) == 1
    found = capsys.readouterr()
    (line,) = [x for x in found.out.splitlines() if x.startswith("FAIL  operations")]
    assert "add in bf16x2" in line
    assert len(found.err.splitlines()) == 1


def test_a_launch_that_raises_is_told(monkeypatch):
    def broken(device):
        raise RuntimeError("CUDA error: misaligned address\nmore")

    works = {"a": lambda device: [torch.ones(1)], "b": broken}
    recorded = {"a": known_results.bits_digest([torch.ones(1)]), "b": "0"}
    line = device_report._line("group", device_report._compared(works, recorded, CPU))
    assert str(line) == "FAIL  group: 1 of 2: b (RuntimeError)"
    three = str(device_report.Line("group", 9, list("abc")))
    assert three == "FAIL  group: 3 of 9: a; b; c"
    assert str(device_report.Line("group", 9, list("abcde"))) == (
        "FAIL  group: 5 of 9: a; b; c and 2 more"
    )
    line = device_report._line("group", lambda: broken(CPU))
    assert str(line) == "FAIL  group: 1 of 1: RuntimeError: CUDA error: misaligned address"


@pytest.mark.slow
def test_a_device_without_float64_gets_a_report():
    with pretended("mps", has_float64=False) as device:
        said = list(map(str, device_report.report(device.device, compiled=False)))
    assert [x for x in said if x.startswith("FAIL")] == []
    left_out = "  -   float64, formats of it and conversions from it: left out, not on this device"
    assert left_out in said
    (line,) = [x for x in said if "fused steps" in x]
    assert line.startswith("  ok  fused steps: ")


def test_without_float64_this_device_gives_what_is_recorded():
    recorded = known_results.recorded_digests(in_float64=False)
    with mcf.without_float64():
        assert known_results.made_digests(CPU) == recorded
    steps = "AdamW, bf16x3, full"  # has other last bits without float64
    assert recorded["fused steps"][steps] != known_results.recorded_digests()["fused steps"][steps]
    names = [name for works in recorded.values() for name in works]
    assert not any(map(known_results.is_of_float64, names))


def test_without_float64_what_is_broken_is_found(monkeypatch):
    with mcf.without_float64():
        assert mcf.selfcheck(compiled=False) == 38
        monkeypatch.setattr(expansion, "mul", lambda x, y: (x[0] * y[0], *x[1:]))
        with pytest.raises(mcf.errors.SelfCheckError, match="mul in bf16x3"):
            mcf.selfcheck(compiled=False)


class PretendedGraph:
    """A captured step. What is captured has run once already, which is the first replay."""

    def __init__(self):
        self.is_first = True

    def replay(self):
        if not self.is_first:
            self.step()
        self.is_first = False


def test_lines_for_cuda_alone_run(monkeypatch):
    """On a device that is pretended, where eager PyTorch computes."""
    made, training = [], device_report._training

    def spy(device):
        made.append(training(device))
        return made[-1]

    @contextlib.contextmanager
    def capture(graph):
        yield
        graph.step = made[-1][1].step

    monkeypatch.setattr(device_report, "_training", spy)
    with pretended("cuda") as device:
        for name, value in {
            "Stream": torch.cuda.current_stream,
            "stream": lambda stream: stream,
            "CUDAGraph": PretendedGraph,
            "graph": capture,
            "device_count": lambda: 1,
            "mem_get_info": lambda device: (1 << 30, 1 << 33),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value, raising=False)
        lines = {
            name: device_report._line(name, functools.partial(check, device.device))
            for name, check in device_report._CHECKS.items()
        }
        lines["small"] = device_report._line(
            "small", lambda: device_report._large(1 << 18)(device.device)
        )
    said = {name: str(line) for name, line in lines.items()}
    assert said["two devices"] == "  -   two devices: left out, one device is at hand"
    for name, size in (("tensors of 1 GiB", 2), ("tensors of 2^31 elements", 10)):
        assert said[name] == f"  -   {name}: left out, 1 GiB are free, {size} are needed"
    for name in ("views", "a stream of its own", "a captured graph", "small"):
        assert said[name].startswith(f"  ok  {name}: ")


def test_a_kernel_that_fails_its_trial_fails_the_report(monkeypatch):
    """Though eager PyTorch would give the right bits in its place."""

    def tried(device):
        first_use.say_eager("meta", "ArithmeticError: other bits")
        return [torch.ones(1)]

    recorded = {"group": {"work": known_results.bits_digest([torch.ones(1)])}}
    monkeypatch.setattr(device_report, "known_work", lambda **_: {"group": {"work": tried}})
    monkeypatch.setattr(device_report, "recorded_digests", lambda **_: recorded)
    monkeypatch.setattr(device_report, "found_broken", lambda device, compiled: (1, []))
    monkeypatch.setattr(device_report, "_CHECKS", {})
    said = list(map(str, device_report.report(torch.device("meta"), compiled=False)))
    assert said[-2] == "FAIL  group: 1 of 1: work (UserWarning)"


def test_large_tensors_are_looked_at_to_the_end(monkeypatch):
    elements = 4 * device_report._PERIOD
    assert device_report.broken_on_large(CPU, elements) == (2, [])
    repeated = device_report._repeated

    def changed(period, elements):
        x = repeated(period, elements)
        x[-1] = 3
        return x

    monkeypatch.setattr(device_report, "_repeated", changed)
    assert device_report.broken_on_large(CPU, elements)[1] != []


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_whole_report_on_a_gpu(capsys):
    assert main(["selfcheck", "--device", "cuda"]) == 0
