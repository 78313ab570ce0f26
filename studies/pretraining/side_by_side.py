"""Trainings side by side on a CPU: one thread each takes less time than all threads for one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from tqdm import tqdm

import mcftensor as mcf

T = TypeVar("T")


def side_by_side(
    tasks: Sequence[Callable[[Any], T]], jobs: int, bar: tqdm[Any], *, threads: int = 1
) -> list[T]:
    """Return the results of functions of a bar, which run in processes of their own.

    Args:
        tasks: functions that take a bar and update it once a step.
        jobs: the number of processes.
        bar: the bar that shows the steps of all.
        threads: the threads of each process.
    """
    context = multiprocessing.get_context("spawn")
    taken, before = context.Value("q", 0), bar.n
    with context.Pool(jobs, _begin, (taken, threads)) as pool:
        found = [pool.apply_async(_with_steps, (task,)) for task in tasks]
        for waiting in found:
            while not waiting.ready():
                waiting.wait(0.5)
                bar.update(before + taken.value - bar.n)
        return [x.get() for x in found]


class _Steps:
    """A bar in another process: it counts the steps, and shows nothing."""

    def __init__(self, taken: Any) -> None:
        self._taken = taken

    def update(self) -> None:
        with self._taken.get_lock():
            self._taken.value += 1

    def set_postfix(self, **_: Any) -> None:
        pass


_steps: list[_Steps] = []


def _begin(taken: Any, threads: int) -> None:
    torch.set_num_threads(threads)
    mcf.fast_products().__enter__()
    _steps.append(_Steps(taken))


def _with_steps(task: Callable[[Any], T]) -> T:
    return task(_steps[-1])
