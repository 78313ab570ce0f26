"""A script run with meters on its optimizers: what it stores in 16 bits, and what that loses."""

from __future__ import annotations

import gc
import importlib.util
import runpy
import statistics
import sys
import traceback
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import set_stance
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from mcftensor.formats import bf16x3
from mcftensor.formats.defaults import format_of_weights, is_vector
from mcftensor.meters.edq import EDQ
from mcftensor.meters.edq.diagnosis import Diagnosis, Finding
from mcftensor.meters.edq.report import percent
from mcftensor.patches.optimizers import parameters_of, untraced
from mcftensor.tensor.components import stored_format_of
from mcftensor.training.state_names import SECOND_MOMENTS

_SAMPLES = 4
_LOST = 0.1
"""The share of lost updates up to which plain 16-bit weights need nothing."""

_SHORT = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_ORDER = ("norms", "embeddings", "matrices", "biases", "other vectors")


class Enough(BaseException):
    """Ends a script after enough steps. Handlers of `Exception` let it pass."""


class Doctor(Diagnosis):
    """A diagnosis that ends after some steps, and says more of what it sees.

    Args:
        steps: of any one optimizer, after which `Enough` is raised. Four are measured, the first
            and the last among them.

    Attributes:
        is_enough: whether the steps have been taken.
        loses: whether weights or second moments lose a good part of their updates.
    """

    def __init__(self, steps: int) -> None:
        super().__init__(every=max(1, (steps - 1) // (_SAMPLES - 1)))
        self.is_enough = self.loses = False
        self._limit = steps
        self._taken: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._seen_of: defaultdict[EDQ, _Seen] = defaultdict(_Seen)

    @property
    def steps(self) -> int:
        """The steps of the optimizer that took the most."""
        return max([meter.steps for meter in self.meters], default=0)

    def __enter__(self) -> Doctor:
        super().__enter__()
        self._counting = register_optimizer_step_post_hook(self._count)
        return self

    def __exit__(self, *error: object) -> None:
        self._counting.remove()
        super().__exit__(*error)

    def _count(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        untraced(self._count_now, optimizer)

    def _count_now(self, optimizer: Optimizer) -> None:
        if optimizer not in self._seen or any(meter.is_sampling for meter in self.meters):
            return
        self._taken[optimizer] = self._taken.get(optimizer, 0) + 1
        if self._taken[optimizer] >= self._limit:
            self.is_enough = True
            raise Enough

    def _note(self, meter: EDQ, optimizer: Optimizer | None) -> None:
        super()._note(meter, optimizer)
        assert optimizer is not None
        self._seen_of[meter].look(meter, optimizer)

    def _say(self, *, at_end: bool) -> None:
        """Say nothing: `verdict` is printed when the script has ended."""

    def _lines(self, meter: EDQ) -> list[str]:
        finding, seen = Finding(meter, self._noted[meter]), self._seen_of[meter]
        title, *lines = finding.lines()
        if finding.lost is None:
            return [title, *seen.facts, *lines]
        # Where small updates never arrive, large ones may hide it in the ratio.
        loses = finding.loses or (bool(seen.short) and finding.lost > _LOST)
        self.loses |= loses or bool(seen.slow_moments or any(finding.frozen.values()))
        frozen = {name for found in finding.frozen.values() for name in found}
        slow = [line for name, line in seen.slow_moments.items() if name not in frozen]
        kinds = ", ".join(f"{kind} {percent(round(x, 3))}" for kind, x in seen.kinds())
        advice = seen.ways() if loses or seen.slow_moments else []
        return [
            title,
            *seen.facts,
            f"{lines[0]} at a learning rate of {seen.rate}: {kinds}",
            *lines[1:],
            *slow,
            *(advice or finding.advice() or ["nothing to do"]),
        ]


class _Seen:
    """What a doctor has seen of an optimizer."""

    def __init__(self) -> None:
        self.facts: list[str] = []
        self.slow_moments: dict[str, str] = {}
        self.rate = ""
        self.short = ""  # the 16-bit dtype of plain weights
        self._given = 0.0  # the largest learning rate
        self._long = 0.0  # the share of elements for which two terms are too few
        self._kind_of: dict[str, str] = {}
        self._lost: defaultdict[str, list[float]] = defaultdict(list)  # for each sample

    def look(self, meter: EDQ, optimizer: Optimizer) -> None:
        """Record a sample, and what the optimizer stores."""
        named = meter.parameters_of(optimizer)
        if not self._kind_of.keys() >= named.keys():
            owners = _owners()
            self._kind_of = {name: _kind(p, *owners.get(id(p), ())) for name, p in named.items()}
        found: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        for name, reading in meter.per_parameter.items():
            if reading["lost"] is not None:
                found[self._kind_of[name]].append((reading["lost"], reading["numel"]))
        for kind, pairs in found.items():
            total = sum(numel for _, numel in pairs)
            self._lost[kind].append(sum(lost * numel for lost, numel in pairs) / total)
        rates = sorted({float(group["lr"]) for group in optimizer.param_groups if "lr" in group})
        self.rate = " to ".join(f"{x:g}" for x in dict.fromkeys([*rates[:1], *rates[-1:]]))
        self._describe(optimizer)

    def _describe(self, optimizer: Optimizer) -> None:
        params = list(parameters_of(optimizer))
        tensors, elements, states = Counter[str](), Counter[str](), dict[str, set[str]]()
        for p in params:
            kind = stored_format_of(p).name
            tensors[kind] += 1
            elements[kind] += p.numel()
            for name, x in optimizer.state.get(p, {}).items():
                if isinstance(x, Tensor) and x.dim() and x.is_floating_point():
                    states.setdefault(name, set()).add(stored_format_of(x).name)
        weights = [f"{n} in {kind} ({elements[kind]:,} elements)" for kind, n in tensors.items()]
        self.facts = [f"weights: {', '.join(weights)}"]
        if states:
            kinds = [f"{name} in {' and '.join(sorted(x))}" for name, x in states.items()]
            self.facts.append(f"states: {', '.join(kinds)}")
        self.short = next((kind for kind in _SHORT if kind in tensors), "")
        # Schedulers keep the rate that was given.
        given = [group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups]
        rates = [float(x) for x in given if x is not None]
        self._given = max(rates, default=0.0)
        if self.short and rates:
            matrices = [p for p in params if not is_vector(p.shape)]
            long = [p for p in matrices if format_of_weights(p, self._given) == bf16x3]
            total = sum(p.numel() for p in matrices)
            self._long = sum(p.numel() for p in long) / total if total else 0.0
        self.slow_moments = {
            name: f"{name} in {kind} will stand still: it decays by {percent(1 - beta)} a step, "
            f"and {kind} resolves {50 * torch.finfo(_SHORT[kind]).eps:.2g} %"
            for name in sorted(states.keys() & SECOND_MOMENTS)
            for kind in sorted(states[name] & _SHORT.keys())
            for beta in {_decay(group) for group in optimizer.param_groups}
            if 0 < 1 - beta < torch.finfo(_SHORT[kind]).eps / 4
        }

    def kinds(self) -> Iterator[tuple[str, float]]:
        """Yield the median share of lost updates of each kind of parameter."""
        for kind in _ORDER:
            if kind in self._lost:
                yield kind, statistics.median(self._lost[kind])

    def ways(self) -> list[str]:
        """Return what keeps updates of plain 16-bit weights."""
        if not self.short:
            return []
        other = "or weights in float32 under torch.autocast: 16 bytes a parameter with AdamW"
        if self.short == "float16":
            return ["keep the weights exactly: model = mcf.as_expansion(model, mcf.fp16i16)", other]
        if self._long > 0.5:
            return [
                "two bf16 terms are too few at this learning rate; keep the weights exactly:",
                _way("mcf.bf16i16", "full", "14 bytes"),
                other,
            ]
        return [
            "keep the weights as expansions:",
            _way(f"lr={self._given:g}", "plus", "12 bytes a parameter with AdamW"),
            f"or {_way('mcf.bf16i8', 'compact', '7.1')}",
            other,
        ]


def _way(argument: str, mode: str, size: str) -> str:
    convert = f"model = mcf.as_expansion(model, {argument})"
    return f'{convert}; mcf.collage(optimizer, "{mode}"): {size}'


def _decay(group: dict[str, Any]) -> float:
    """Return the factor by which second moments decay, or 0 if it is not known."""
    betas = group.get("betas")
    known = betas[1] if betas else group.get("alpha", group.get("rho", 0.0))
    return float(known) if isinstance(known, (float, Tensor)) else 0.0


def _owners() -> dict[int, tuple[nn.Module, str]]:
    """Return the modules of parameters and their names there, by identity."""
    modules = [x for x in gc.get_objects() if issubclass(type(x), nn.Module)]
    named = [(x, vars(x).get("_parameters") or {}) for x in modules]
    return {id(p): (x, name) for x, own in named for name, p in own.items() if p is not None}


def _kind(p: Tensor, module: nn.Module | None = None, name: str = "") -> str:
    if "bias" in name:
        return "biases"
    if "Norm" in type(module).__name__:
        return "norms"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embeddings"
    return "other vectors" if is_vector(p.shape) else "matrices"


def examine(
    program: str, arguments: Sequence[str] = (), *, is_module: bool = False, steps: int = 100
) -> tuple[str, int]:
    """Run a program until it has stepped so often, and return a report and an exit status.

    The status is 0 if nothing is lost, 1 if something is, and 2 if the program raised or nothing
    could be measured.

    Raises:
        ValueError: there is no such program.
    """
    if not (_is_found(program) if is_module else Path(program).exists()):
        raise ValueError(f"there is no {'module' if is_module else 'file'} {program!r} to run")
    end, has_failed = "ended", False
    with Doctor(steps) as doctor:
        try:
            # A compiled step rounds otherwise than a copy of it.
            with _as_main(program, arguments, is_module), set_stance("force_eager"):
                if is_module:
                    runpy.run_module(program, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(program, run_name="__main__")
        except BaseException as error:  # noqa: BLE001
            if doctor.is_enough:
                end = "was stopped"
            elif isinstance(error, SystemExit):
                end = f"left with status {error.code or 0}"
                has_failed = error.code not in (None, 0)
            elif isinstance(error, KeyboardInterrupt):
                end = "was interrupted"
            else:
                end, has_failed = f"raised {type(error).__name__}", True
                _print_error(error)
        verdict = doctor.verdict()
    said = f"{program} {end} after {doctor.steps} steps"
    if not doctor.meters:
        verdict += (
            " in this process. If the script starts others, let them import mcftensor, and set "
            "MCFTENSOR_EDQ=100 in the environment"
        )
    is_measured = any(meter.last for meter in doctor.meters)
    status = 2 if has_failed or not is_measured else int(doctor.loses)
    return f"{said}\n{verdict}", status


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its package
        return False


@contextmanager
def _as_main(program: str, arguments: Sequence[str], is_module: bool) -> Iterator[None]:
    """Arrange arguments and the path of imports as Python does for a program."""
    argv, path = sys.argv, sys.path[:]
    try:
        sys.argv = [program, *arguments]
        if not is_module:
            sys.path[0] = str(Path(program).resolve().parent)
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _print_error(error: BaseException) -> None:
    """Print an error of the program, without the frames that lead to it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        trace = trace.tb_next
    sys.stdout.flush()
    traceback.print_exception(type(error), error, trace)
