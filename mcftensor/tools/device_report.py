"""A report on a device: arithmetic, kernels, steps, large tensors, streams and graphs."""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from mcftensor.convert import as_expansion
from mcftensor.formats import bf16x2
from mcftensor.kernels.without_float64 import has_float64, without_float64
from mcftensor.selfcheck import found_broken, machine_digest
from mcftensor.tensor.tensor import MCFTensor
from mcftensor.tools.hard_inputs import full_bits
from mcftensor.tools.known_results import Work, bits_digest, known_work, recorded_digests
from mcftensor.training.collage import collage
from mcftensor.training.format_change import components_of

_PERIOD = 1 << 16
"""The number of elements after which large tensors repeat."""

GIBIBYTE, MANY = 1 << 29, 1 << 31
"""Elements of bfloat16: 1 GiB of them, and more than 32 bits can count."""

_NAMES_SHOWN = 3


class _LeftOut(Exception):
    """A check that the device cannot run; the message says why."""


@dataclass
class Line:
    """The result of one group of checks.

    Attributes:
        name: the name of the group.
        count: the number of checks.
        failures: the names of failed checks.
        reason: why no checks were run, or the error that was raised.
        note: text shown in place of a result.
        seconds: the time that the checks took.
    """

    name: str
    count: int = 0
    failures: list[str] = field(default_factory=list)
    reason: str = ""
    note: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return one line of the report."""
        if self.note:
            return f"  -   {self.name}: {self.note}"
        if self.reason and not self.failures:
            return f"  -   {self.name}: left out, {self.reason}"
        if self.failures:
            shown = "; ".join(self.failures[:_NAMES_SHOWN])
            more = len(self.failures) - _NAMES_SHOWN
            rest = f" and {more} more" if more > 0 else ""
            return f"FAIL  {self.name}: {len(self.failures)} of {self.count}: {shown}{rest}"
        return f"  ok  {self.name}: {self.count}, {self.seconds:.1f} s"


def report(device: torch.device, *, compiled: bool = True) -> Iterator[Line]:
    """Yield each line when its checks are done."""
    with warnings.catch_warnings():
        if device.type != "cpu":  # otherwise eager PyTorch would replace a wrong kernel
            warnings.filterwarnings("error", "mcftensor runs without compiled code")
        yield from _lines(device, compiled)


def _lines(device: torch.device, compiled: bool) -> Iterator[Line]:
    yield _line("arithmetic against fractions", lambda: found_broken(device, compiled=False))
    if compiled:
        yield _line("arithmetic, compiled", lambda: found_broken(device, compiled=True))
    in_float64 = has_float64(device)
    if not in_float64:
        yield Line("float64, formats of it and conversions from it", reason="not on this device")
    recorded = recorded_digests(in_float64=in_float64)
    for group, works in known_work(in_float64=in_float64).items():
        yield _line(group, _compared(works, recorded[group], device))
    digest, reason = machine_digest(device)
    note = f"{digest}, by {torch.get_num_threads()} threads of the host" if digest else ""
    name = "digest of a backward pass, to compare machines that share training steps"
    yield Line(name, reason=reason, note=note)
    for name, check in _CHECKS.items():
        yield _line(name, partial(check, device))


def introduction(device: torch.device) -> str:
    """Return the name of the device and the versions."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        name = f"{found.name}, {found.total_memory / 2**30:.0f} GiB"
    return f"{device}: {name}, torch {torch.__version__}"


def _line(name: str, check: Callable[[], tuple[int, list[str]]]) -> Line:
    start = time.perf_counter()
    try:
        count, failures = check()
        line = Line(name, count, failures)
    except _LeftOut as error:
        line = Line(name, reason=str(error))
    except Exception as error:  # noqa: BLE001  # devices, drivers, compilers, and failed trials
        reason = str(error).partition("\n")[0]
        line = Line(name, 1, [f"{type(error).__name__}: {reason}"])
    line.seconds = time.perf_counter() - start
    return line


def _compared(
    works: dict[str, Work], recorded: dict[str, str], device: torch.device
) -> Callable[[], tuple[int, list[str]]]:
    def check() -> tuple[int, list[str]]:
        context = nullcontext if has_float64(device) else without_float64
        digest = partial(_digest_or_error, device=device, context=context)
        if device.type == "cuda":  # compilers run as other processes, and threads keep them busy
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                digests = [*threads.map(digest, works.values())]
        else:
            digests = [*map(digest, works.values())]
        found = dict(zip(works, digests, strict=True))
        wrong = {name: x for name, x in found.items() if x != recorded.get(name)}
        return len(works), [
            name if x.isalnum() and x.islower() else f"{name} ({x})" for name, x in wrong.items()
        ]

    return check


def _digest_or_error(
    work: Work, device: torch.device, context: Callable[[], AbstractContextManager[object]]
) -> str:
    try:
        with context():
            return bits_digest(work(device))
    except Exception as error:  # noqa: BLE001  # other results are still reported
        return type(error).__name__


def broken_on_large(device: torch.device, elements: int) -> tuple[int, list[str]]:
    """Check a product in place and a conversion on a large tensor, all elements of it."""
    period = full_bits(torch.bfloat16, "large", _PERIOD).to(device)
    x = MCFTensor.of((_repeated(period, elements), _repeated(period * 2**-9, elements)), bf16x2)
    with torch.no_grad():
        x.mul_(0.3)
    expected = MCFTensor.of((period.clone(), period * 2**-9), bf16x2)
    with torch.no_grad():
        expected.mul_(0.3)
    failures = [
        f"component {i} of a product"
        for i, (got, right) in enumerate(zip(x.components, expected.components, strict=True))
        if not _repeats(got, right)
    ]
    return 2, failures


def _repeated(period: Tensor, elements: int) -> Tensor:
    return period.repeat(elements // _PERIOD)


def _repeats(x: Tensor, period: Tensor) -> bool:
    rows = x.view(-1, _PERIOD)
    parts = rows.split(1 << 12)  # a comparison needs as much memory as its operands
    return all(bool((part == period).all()) for part in parts)


def _require_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise _LeftOut("a CUDA device is not at hand")


def _large(elements: int) -> Callable[[torch.device], tuple[int, list[str]]]:
    def check(device: torch.device) -> tuple[int, list[str]]:
        needed = 5 * elements  # two components and a part
        _require_cuda(device)
        free = torch.cuda.mem_get_info(device)[0]
        if free < needed:
            raise _LeftOut(f"{free / 2**30:.0f} GiB are free, {needed / 2**30:.0f} are needed")
        return broken_on_large(device, elements)

    return check


def _views(device: torch.device) -> tuple[int, list[str]]:
    """Compare views with odd start addresses, gaps or transposed axes with their copies."""
    components = [full_bits(torch.bfloat16, f"view {i}", 61, 67).to(device) for i in range(2)]
    x = MCFTensor.of((components[0], components[1] * 2**-9), bf16x2)
    arranged: dict[str, Callable[[Tensor], Tensor]] = {
        "beginning at an odd address": lambda t: t.flatten()[1:],
        "with gaps": lambda t: t[:, ::2],
        "transposed": lambda t: t.t(),
        "repeated": lambda t: t[:1].expand(5, 67),
    }
    failures = []
    for name, arrange in arranged.items():
        view = arrange(x)
        if not _are_alike(view * view + 0.1, view.clone() * view.clone() + 0.1):
            failures.append(name)
    return len(arranged), failures


def _are_alike(x: Tensor, y: Tensor) -> bool:
    return all(map(torch.equal, components_of(x), components_of(y)))


def _training(device: torch.device) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    p = nn.Parameter(as_expansion(full_bits(torch.float32, "p", 65, 97).to(device), bf16x2))
    p.grad = full_bits(torch.bfloat16, "g", 65, 97).to(device)
    # The step count is on the device, as graphs require.
    capturable = device.type == "cuda"
    return p, collage(torch.optim.AdamW([p], fused=True, capturable=capturable), "plus")


@contextmanager
def _other_stream(device: torch.device) -> Iterator[None]:
    """Return a context on another stream, between earlier and later work on the current one."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)


def _streams(device: torch.device) -> tuple[int, list[str]]:
    """Compare steps on another stream with steps on the default one."""
    _require_cuda(device)
    (p, optimizer), (q, its_optimizer) = _training(device), _training(device)
    for _ in range(3):
        optimizer.step()
        with _other_stream(device):
            its_optimizer.step()
    return 1, [] if _are_alike(p.detach(), q.detach()) else ["weights after three steps"]


def _graphs(device: torch.device) -> tuple[int, list[str]]:
    """Compare captured and replayed steps with single steps."""
    _require_cuda(device)
    (p, optimizer), (q, its_optimizer) = _training(device), _training(device)
    with _other_stream(device):
        its_optimizer.step()  # creates the states
    with torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            its_optimizer.step()
        for _ in range(3):
            graph.replay()
    for _ in range(4):
        optimizer.step()
    return 1, [] if _are_alike(p.detach(), q.detach()) else ["weights after four steps"]


def _second_device(device: torch.device) -> tuple[int, list[str]]:
    """Run operations on the last device while another device is current."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        raise _LeftOut("one device is at hand")
    works = {n: w for n, w in known_work()["operations"].items() if n.endswith("bf16x2")}
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    with torch.cuda.device(0):
        return _compared(works, recorded_digests()["operations"], last)()


_CHECKS: dict[str, Callable[[torch.device], tuple[int, list[str]]]] = {
    "views": _views,
    "tensors of 1 GiB": _large(GIBIBYTE),
    "tensors of 2^31 elements": _large(MANY),
    "a stream of its own": _streams,
    "a captured graph": _graphs,
    "two devices": _second_device,
}
