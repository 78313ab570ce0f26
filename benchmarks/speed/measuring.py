"""Contenders stepping in turn."""

from __future__ import annotations

import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from speed import memory
from speed.clocks import Clock, bandwidth
from speed.contenders import BASELINES, Contender
from speed.patience import patience
from speed.running import Running
from speed.workloads import Workload

WARM_UP = 2  # steps after the first one
BYTES_HELD = 24  # at most, by a contender for each parameter
BYTES_TEMPORARY = 100  # at most, in a step for each element of the largest tensor
SPARE = {"cpu": 0.4, "cuda": 0.05}  # of the free memory, left alone: others may use the machine


@dataclass
class Measurement:
    """What one contender took."""

    contender: Contender
    first: float = 0.0  # seconds of the first step
    held: int = 0
    added: int = 0
    moved: int = 0
    peak: int = 0
    seconds: list[float] = field(default_factory=list)  # one a round
    queued: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)  # to the baseline in the same round
    failure: str | None = None

    def record(self, parameters: int, speed: float) -> dict[str, Any]:
        """The figures for JSON: medians, and quartiles where there are two rounds or more."""
        about = {"family": self.contender.family, "kind": self.contender.kind}
        if self.failure is not None:
            return about | {"failed": self.failure}
        median = statistics.median(self.seconds)
        queued = statistics.median(self.queued) if self.queued else None
        return about | {
            "seconds": median,
            "seconds_quartiles": quartiles(self.seconds),
            "seconds_queued": queued,
            "ratio": statistics.median(self.ratios) if self.ratios else None,
            "ratio_quartiles": quartiles(self.ratios) if self.ratios else None,
            "rounds": len(self.seconds),
            "first_step_seconds": self.first,
            "bytes_held": self.held / parameters,
            "bytes_added": self.added / parameters,
            "bytes_moved": self.moved / parameters,
            "extra_peak_bytes": self.peak / parameters,
            "share_of_limit": self.moved / speed / (queued or median),
        }


def quartiles(values: Sequence[float]) -> list[float]:
    """The first and the third one."""
    if len(values) < 2:
        return [*values] * 2
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def order(names: Sequence[str], turn: int) -> list[str]:
    """Who steps when in a round: begun one later each time, and backwards every other time."""
    start = turn % len(names)
    rotated = [*names[start:], *names[:start]]
    return rotated[::-1] if turn % 2 else rotated


def measure(
    workload: Workload,
    contenders: Sequence[Contender],
    device: str,
    clock: Clock,
    rounds: int,
    progress: Callable[[str], object] = lambda text: None,
    limit: float = 300.0,
) -> dict[str, Any]:
    """Run all contenders on a workload, in groups that memory can hold, and record the figures.

    A contender that is not ready for the rounds after `limit` seconds is given up.
    """
    torch.compiler.reset()  # a first step compiles, whatever ran before on other shapes
    speed = bandwidth(device, clock)
    measurements = {contender.name: Measurement(contender) for contender in contenders}
    waiting = deque(contenders)
    while waiting:
        group = Group(workload, device, clock, measurements, limit)
        for running in group.fill(waiting):
            progress(f"{workload.name}: first steps of {running}")
        for turn in range(rounds):
            progress(f"{workload.name}: round {turn + 1} of {rounds}, {len(group.running)} at once")
            group.round(turn)
        group.weigh()
        group.running.clear()
        memory.release(device)
    return {
        "parameters": workload.parameters,
        "tensors": len(workload.values),
        "bytes_a_second": speed,
        "contenders": {
            name: measurement.record(workload.parameters, speed)
            for name, measurement in measurements.items()
        },
    }


class Group:
    """Contenders whose parameters and states are in memory at once, with their baselines."""

    def __init__(
        self,
        workload: Workload,
        device: str,
        clock: Clock,
        measurements: dict[str, Measurement],
        limit: float = 300.0,
    ) -> None:
        self.workload = workload
        self.device = device
        self.clock = clock
        self.measurements = measurements
        self.limit = limit
        self.running: dict[str, Running] = {}
        self.spare = SPARE[device] * memory.available(device)

    def fill(self, waiting: deque[Contender]) -> Iterator[str]:
        """Start contenders until memory is short, the baselines that they need before them."""
        tried = False
        while waiting and not (tried and self.is_full()):
            contender = waiting.popleft()
            baseline = BASELINES[contender.kind]
            for chosen in dict.fromkeys([baseline, contender]):
                if chosen.name not in self.running:
                    yield chosen.name
                    self.start(chosen)
            tried = True

    def is_full(self) -> bool:
        """Whether another contender, with the temporaries of a step, might not fit."""
        needed = BYTES_HELD * self.workload.parameters + BYTES_TEMPORARY * self.workload.largest
        return memory.available(self.device) < self.spare + needed

    def start(self, contender: Contender) -> None:
        """Set up one, and take its first steps."""
        measurement = self.measurements.setdefault(contender.name, Measurement(contender))
        with self.failing(contender.name), patience(self.limit), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            running = contender.build(self.workload)
            before = running.parameters[0].detach().clone()
            running.prepare()
            measurement.first = self.wall_seconds(running)
            require_moved(before, running)
            for _ in range(WARM_UP):
                running.prepare()
                running.step()
            running.prepare()
            measurement.peak = memory.peak(self.device, running.step)
            self.running[contender.name] = running

    def wall_seconds(self, running: Running) -> float:
        """Time of a step with all that the host does in it, such as compiling."""
        self.clock.wait()
        start = time.perf_counter()
        running.step()
        self.clock.wait()
        return time.perf_counter() - start

    def round(self, turn: int) -> None:
        """One step of each."""
        found: dict[str, float] = {}
        for name in order(list(self.running), turn):
            running = self.running[name]
            with self.failing(name), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                running.prepare()
                found[name] = self.clock.seconds(running.step)
                queued = self.clock.queued_seconds(again(running))
                if queued is not None:
                    self.measurements[name].queued.append(queued)
        for name, seconds in found.items():
            measurement = self.measurements[name]
            measurement.seconds.append(seconds)
            baseline = BASELINES[measurement.contender.kind].name
            if baseline in found:
                measurement.ratios.append(seconds / found[baseline])

    def weigh(self) -> None:
        """See what each holds and moves: in the end, since whoever was given the memory of an
        expansion may write to it, so that nothing is put on a tape that writes to it any more."""
        for name, running in self.running.items():
            measurement = self.measurements[name]
            running.prepare()
            measurement.held = running.held()
            measurement.added = running.added()
            measurement.moved = running.moved()

    def failing(self, name: str) -> Failing:
        """Note what goes wrong, and go on without this one."""
        return Failing(self, name)


class Failing:
    """Keeps one contender's error from ending the others' run."""

    def __init__(self, group: Group, name: str) -> None:
        self.group = group
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        self.group.running.pop(self.name, None)
        self.group.measurements[self.name].failure = reason(error)
        return True


def again(running: Running) -> Callable[[], object]:
    """A step that may be taken several times in a row."""

    def step() -> object:
        running.prepare()
        return running.step()

    return step


def require_moved(before: torch.Tensor, running: Running) -> None:
    """Refuse figures of a step that leaves the parameters where they were."""
    if torch.equal(before, running.parameters[0].detach()):
        raise RuntimeError("its step leaves the parameters as they were")


def reason(error: Exception) -> str:
    """An error in one line; a compiler that is broken off wraps the reason in its own errors."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, TimeoutError):
            error = inner
        inner = inner.__cause__ or inner.__context__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return text if len(text) <= 160 else text[:159] + "…"
