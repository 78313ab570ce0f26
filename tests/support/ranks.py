"""Tests that run on several processes at once.

`@on_ranks(2)` makes a test of a function that every process runs, each with a process group of
gloo. The processes stay for the tests that follow, since starting them takes seconds; after a
failure they are started anew. What hangs is stopped, and the traceback of every rank is shown.
What they write to stderr is shown with MCFTENSOR_TEST_STDERR=1.
"""

import collections
import contextlib
import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mcftensor as mcf
from mcftensor.kernels.without_float64 import has_float64
from support.leftovers import remember, restore
from support.no_float64 import no_float64

remember()  # which imports modules of torch, for all processes that are forked
TIMEOUT = 90
"""Seconds that a test may take on all processes together."""


def on_ranks(world: int, backend: str = "gloo") -> Callable[[Callable[..., None]], Any]:
    """Run a test on so many processes; it may be parametrized, and has no other fixtures."""

    def decorate(check: Callable[..., None]) -> Any:
        def test(ranks: "RankPool", **arguments: Any) -> None:
            ranks.run(world, backend, check.__module__, check.__name__, arguments)

        functools.update_wrapper(test, check)
        del test.__wrapped__
        parameters = list(inspect.signature(check).parameters.values())
        fixture = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([*parameters, fixture])
        test.check = check
        return test

    return decorate


class RankPool:
    """Processes that wait for tests. A test on two ranks runs on the first two of them."""

    def __init__(self) -> None:
        self.processes: list[tuple[Any, Connection]] = []

    def run(
        self, world: int, backend: str, module: str, name: str, arguments: dict[str, Any]
    ) -> None:
        """Run a check on all ranks; raise AssertionError with the tracebacks of those that fail."""
        self.processes += [_started() for _ in range(world - len(self.processes))]
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(self.processes[:world]):
                store = str(Path(folder, "store"))
                job = rank, world, backend, store, module, name, arguments
                pipe.send((*job, has_float64()))  # or the test runs with `--without-float64`
            outcomes = self._outcomes(world)
        failures = [f"rank {rank}: {text}" for rank, text in outcomes.items() if text]
        if failures:
            self.stop()
            pytest.fail("\n".join(failures), pytrace=False)

    def _outcomes(self, world: int) -> dict[int, str]:
        outcomes = dict.fromkeys(range(world), f"no answer, stopped after {TIMEOUT} seconds")
        waiting = {rank: pipe for rank, (_, pipe) in enumerate(self.processes[:world])}
        deadline = time.monotonic() + TIMEOUT
        while waiting and time.monotonic() < deadline:
            for rank, pipe in list(waiting.items()):
                if pipe.poll(0.005):
                    try:
                        outcomes[rank] = pipe.recv()
                    except EOFError:
                        outcomes[rank] = "its process died"
                    del waiting[rank]
                    if outcomes[rank]:  # the others wait for it
                        deadline = min(deadline, time.monotonic() + 5)
        for rank in waiting:
            if any(outcomes[r] for r in range(world) if r not in waiting):
                outcomes[rank] = "stopped, as another rank failed"
        return outcomes

    def stop(self) -> None:
        """Stop all processes."""
        for process, pipe in self.processes:
            pipe.close()
            process.kill()
            process.join()
        self.processes.clear()


def _started() -> tuple[Any, Connection]:
    """A fork of a process that has imported torch, which takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.ranks"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _work(pipe: Connection) -> None:
    torch.set_num_threads(1)
    faulthandler.enable()  # where a process died
    if "MCFTENSOR_TEST_STDERR" not in os.environ:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    while True:
        try:
            rank, world, backend, store, module, name, arguments, with_float64 = pipe.recv()
        except EOFError:
            return
        before = remember()
        try:
            dist.init_process_group(
                backend,
                init_method=f"file://{store}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=TIMEOUT / 2),
            )
            if backend == "nccl":
                torch.cuda.set_device(rank)
            dist.barrier()  # or a rank that needs no other leaves while others still connect
            torch.manual_seed(0)
            check = getattr(importlib.import_module(module), name).check
            with contextlib.nullcontext() if with_float64 else no_float64(of_all=False):
                check(**arguments)
            outcome = ""
        except BaseException:  # noqa: BLE001
            outcome = traceback.format_exc()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        changed = restore(before)
        if changed and not outcome:
            outcome = "the test leaves behind: " + "; ".join(changed)
        pipe.send(outcome)


class Wire(TorchDispatchMode):
    """Counts the bytes that this rank hands to each collective, within it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            self.sent[func.overloadpacket.__name__] += sum(x.nbytes for x in tensors)
        return func(*args, **(kwargs or {}))


def gathered(x: Any) -> list[Any]:
    """What each rank has of an expansion, brought together term by term."""
    found = [[torch.empty_like(t) for t in x.components] for _ in range(dist.get_world_size())]
    for i, term in enumerate(x.components):  # gloo knows no int16
        parts = [terms[i].view(torch.uint8) for terms in found]
        dist.all_gather(parts, term.detach().contiguous().view(torch.uint8))
    return [mcf.MCFTensor(terms, x.format) for terms in found]
