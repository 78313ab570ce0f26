"""What Python, torch and the library keep for a thread or a process, and tests must not change.

`remember` reads all of it and `restore` brings it back and names what had changed, so that the test
that changed it fails, and not a later one.
"""

import gc
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

import mcftensor as mcf
from mcftensor.formats.format import _REGISTRY
from mcftensor.kernels import LOCK
from mcftensor.kernels.without_float64 import CONTEXTS
from mcftensor.patches.table import TABLE
from mcftensor.tensor import implicit_rounding, step_context

mcf.as_expansion(torch.ones(1))  # the first of the process changes torch, whichever test makes it


@dataclass(frozen=True)
class Kept:
    """One thing that is kept: how to read it, and how to set it, if it can be set."""

    read: Callable[[], Any]
    write: Callable[[Any], Any] | None = None


def _pop_modes(count: int, length: Callable[[], int], pop: Callable[..., Any]) -> None:
    while length() > count:
        pop()


def _set_environment(variables: dict[str, str]) -> None:
    for name in _environment().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


# What pytest and torch's compiler say to themselves by the environment.
_NOT_OF_TESTS = ("PYTEST_CURRENT_TEST", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR")


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in _NOT_OF_TESTS}


def _autocast() -> list[Any]:
    devices = [(torch.is_autocast_enabled(x), torch.get_autocast_dtype(x)) for x in ("cpu", "cuda")]
    return [*devices, torch.is_autocast_cache_enabled()]


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_deterministic(flags: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])


def _flushes_subnormals() -> bool:
    return not (torch.tensor([1e-310], dtype=torch.float64) * 1).item()


def _handlers() -> dict[int, Any]:
    names = (signal.SIGINT, signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1, signal.SIGVTALRM)
    return {x: signal.getsignal(x) for x in names}


def _set_handlers(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


def _timers_run() -> list[bool]:
    return [signal.getitimer(x) != (0.0, 0.0) for x in _TIMERS]


def _stop_timers(_: Any) -> None:
    for x in _TIMERS:
        signal.setitimer(x, 0)


def _limits() -> list[tuple[int, int]]:
    return [
        resource.getrlimit(x)
        for x in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_NOFILE)
    ]


def _hooks() -> list[int]:
    modules, optimizers = torch.nn.modules.module, sys.modules["torch.optim.optimizer"]
    found = (
        modules._global_forward_hooks,
        modules._global_forward_pre_hooks,
        modules._global_backward_hooks,
        modules._global_parameter_registration_hooks,
        optimizers._global_optimizer_pre_hooks,
        optimizers._global_optimizer_post_hooks,
    )
    return [len(x) for x in found]


def _configurations() -> dict[str, Any]:
    """Those of torch's compilers, by hashes; they are imported late, and only some tests do."""
    names = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")
    return {x: sys.modules[x].get_hash() for x in names if x in sys.modules}


# Each name that the library changes, with the path of its owner: as modules, and as attributes.
_PLACES = [
    (patch.name, [(".".join(owner[: i + 1]), owner[i]) for i in range(len(owner))], attribute)
    for patch in TABLE
    if patch.change is not None
    for *owner, attribute in [patch.name.split(".")]
]


def _patched() -> dict[str, Any]:
    """What stands under each name of torch that the library changes."""
    found, modules = {}, sys.modules
    for name, path, attribute in _PLACES:
        place: Any = None
        for module, part in path:
            place = modules.get(module) or getattr(place, part, None)
        if place is not None:
            found[name] = _untraced(getattr(place, attribute, None))
    return found


def _untraced(function: Any) -> Any:
    """A function as it was before torch's compiler, where it is first called, took it out of what
    it traces."""
    while hasattr(function, "_torchdynamo_orig_callable"):
        function = function._torchdynamo_orig_callable
    return function


def _formats_of_others() -> set[str]:
    """The library makes and keeps formats of its own classes as they are first named."""
    return {
        name for name, x in _REGISTRY.items() if not type(x).__module__.startswith("mcftensor.")
    }


def _forget_formats(names: set[str]) -> None:
    for name in _formats_of_others() - names:
        del _REGISTRY[name]


def _release(lock: Any) -> None:
    while lock._is_owned():
        lock.release()


KEPT = {
    "whether gradients are recorded": Kept(torch.is_grad_enabled, torch.set_grad_enabled),
    "inference mode": Kept(torch.is_inference_mode_enabled),
    "dispatch modes": Kept(
        torch._C._len_torch_dispatch_stack,
        lambda count: _pop_modes(
            count,
            torch._C._len_torch_dispatch_stack,
            lambda: torch._C._pop_torch_dispatch_stack(None),
        ),
    ),
    "function modes": Kept(
        torch._C._len_torch_function_stack,
        lambda count: _pop_modes(
            count, torch._C._len_torch_function_stack, torch._C._pop_torch_function_stack
        ),
    ),
    "torch functions of subclasses": Kept(torch._C._is_torch_function_enabled),
    "levels of forward derivatives": Kept(lambda: forward_ad._current_level),
    "function transforms": Kept(lambda: torch._C._functorch.peek_interpreter_stack() is None),
    "the step of this thread": Kept(
        step_context.current_step, lambda step: setattr(step_context._thread, "step", step)
    ),
    "contexts without float64": Kept(
        lambda: CONTEXTS.depth, lambda depth: setattr(CONTEXTS, "depth", depth)
    ),
    "the lock of writes": Kept(lambda: "unlocked" in repr(LOCK), lambda _: _release(LOCK)),
    "the default dtype": Kept(torch.get_default_dtype, torch.set_default_dtype),
    "the default device": Kept(torch.get_default_device),
    "the number of threads": Kept(torch.get_num_threads, torch.set_num_threads),
    "deterministic algorithms": Kept(_deterministic, _set_deterministic),
    "autocast": Kept(_autocast),
    "anomaly detection": Kept(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda flags: torch.set_anomaly_enabled(*flags),
    ),
    "the precision of float32 products": Kept(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    "subnormal numbers": Kept(_flushes_subnormals, torch.set_flush_denormal),
    "warnings that come always": Kept(torch.is_warn_always_enabled, torch.set_warn_always),
    "hooks of all modules and optimizers": Kept(_hooks),
    "a process group": Kept(torch.distributed.is_initialized),
    "settings of compilers": Kept(_configurations),
    "the trace function": Kept(sys.gettrace, sys.settrace),
    "the profile function": Kept(sys.getprofile, sys.setprofile),
    "the trace function of threads": Kept(threading.gettrace, threading.settrace),
    "the profile function of threads": Kept(threading.getprofile, threading.setprofile),
    "the environment": Kept(_environment, _set_environment),
    "the working directory": Kept(Path.cwd, os.chdir),
    "signal handlers": Kept(_handlers, _set_handlers),
    "timers": Kept(_timers_run, _stop_timers),
    "limits of resources": Kept(_limits),
    "levels of logging that are disabled": Kept(
        lambda: logging.root.manager.disable, logging.disable
    ),
    "what happens where an expansion is rounded": Kept(
        lambda: implicit_rounding._thread.action,
        lambda action: setattr(implicit_rounding._thread, "action", action),
    ),
    "garbage collection": Kept(gc.isenabled, lambda is_on: gc.enable() if is_on else gc.disable()),
    "registered formats": Kept(_formats_of_others, _forget_formats),
    "patches of torch": Kept(_patched),
}


def remember() -> dict[str, Any]:
    """Read everything that is kept."""
    return {name: kept.read() for name, kept in KEPT.items()}


def restore(before: dict[str, Any]) -> list[str]:
    """Bring back what was read before, and say what had changed."""
    changed = []
    for name, kept in KEPT.items():
        now = kept.read()
        if name in ("patches of torch", "settings of compilers"):
            # A module may have been imported since, and patched for the first time.
            pairs = [(was, now[k]) for k, was in before[name].items() if k in now]
            same = all(x == y or getattr(y, "__wrapped__", None) is x for x, y in pairs)
        else:
            same = now == before[name]
        if not same:
            changed.append(f"{name}: {_differences(before[name], now)}")
            if kept.write is not None:
                kept.write(before[name])
    return changed


def _differences(before: Any, now: Any) -> str:
    if isinstance(before, dict):
        keys = [k for k in before.keys() | now.keys() if before.get(k) != now.get(k)]
        before, now = ({k: x.get(k) for k in keys} for x in (before, now))
    return f"{before} before, {now} now"
