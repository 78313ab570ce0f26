"""Traces on storage formats as kernels with the bits of PyTorch's float32 operations.

Each operation is known by its roundings. If the processor or a library rounds an operation
differently, as square roots, PyTorch's operation runs between two kernels, on scratch memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic import eft
from mcftensor.arithmetic.formulas import OPERATIONS
from mcftensor.formats import PLAIN, Format
from mcftensor.kernels import Signature
from mcftensor.kernels.first_use import are_alike, hard_numbers
from mcftensor.passes.expressions import scalar_tensor
from mcftensor.passes.format_conversion import decoding, encoding
from mcftensor.passes.operators import OPERATORS
from mcftensor.passes.traces import Operation, Trace


def _lerp(x: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    way = end - x
    from_end = eft.fma(-way, 1 - weight, end)
    return torch.where(weight.abs() < 0.5, eft.fma(weight, way, x), from_end)


# PyTorch's roundings of the formulas on float32, where these are not the operators of Python.
_ROUNDINGS: dict[str, Callable[..., Any]] = {
    **OPERATIONS,
    "sqrt": eft.sqrt,
    "fma": eft.fma,
    "fnma": lambda x, y, z: eft.fma(-x, y, z),
    "addcmul": lambda x, a, b, value: eft.fma(value * a, b, x),
    "lerp": _lerp,
}


def _rounded(name: str, *operands: Tensor, **named: Tensor) -> Tensor:
    """Compute PyTorch's operation on float32, rounding by rounding."""
    formula, found = OPERATORS[name].formula(*operands, **named)
    return _ROUNDINGS[formula](*found)


_TRIED = (0.3, -0.0017, 0.75, 3.0)
_FLOAT32 = PLAIN[torch.float32]


@functools.lru_cache(maxsize=256)
def _is_known(name: str, are_numbers: tuple[bool, ...], keywords: tuple[str, ...]) -> bool:
    """Whether a formula gives the bits of PyTorch's operation on hard operands."""
    if name not in OPERATORS:
        return False
    count = len(are_numbers) - len(keywords)
    tensors = [hard_numbers(torch.float32, i, 2048)[3:] for i in range(len(are_numbers))]

    def called(function: Callable[..., Tensor], number: Any) -> Tensor:
        given = [number if x else tensors[i] for i, x in enumerate(are_numbers)]
        return function(*given[:count], **dict(zip(keywords, given[count:], strict=True)))

    formula, function = functools.partial(_rounded, name), getattr(torch, name)
    return all(
        are_alike(
            called(function, x), called(formula, torch.tensor(x, dtype=torch.float32, device="cpu"))
        )
        for x in _TRIED
    )


Factor = tuple[bool, tuple[int, ...]]
"""A deferred factor: whether it includes the variable's initial factor, and its numbers."""

Asked = tuple[Any, ...]
"""A scalar: `("number", variable)`, `("factor", variable, Factor)`, `("key", variable)`,
`("count", variable, writes before)` or `("start",)`."""

_WHOLE = ("key", "count", "start")


class Stage:
    """A kernel for some operations of a trace, followed by an operation of PyTorch.

    Attributes:
        then: the operation that follows; its operand is one more output.
        then_run: PyTorch's function of that operation, or None.
        vectors: the variables to read; None is the result of the preceding operation.
        scalars: the scalars to read.
        stored: the variables to write.
        signature: the signature of `body`.
        factors: the deferred factors, by variable.
    """

    def __init__(
        self,
        trace: Trace,
        operations: Sequence[Operation],
        then: Operation | None,
        needed: set[int],
        before: Stage | None,
    ) -> None:
        self.then, self._trace, self._operations = then, trace, operations
        self.then_run: Callable[..., Any] | None = then and getattr(torch, then.single_name)
        self._entered = before.then if before else None
        changing = [x for x in operations if not trace.is_note(x)]
        changing += [self._entered] if self._entered else []
        self.stored = sorted({x.target for x in changing} & needed)
        self._writes_before: dict[int, int] = before.writes if before else {}
        self._factors_before: dict[int, Factor] = before.factors if before else {}
        self.vectors: list[int | None] = []
        self.scalars: list[Asked] = []
        ones = torch.ones(1, device="cpu")

        def components(i: int | None) -> Sequence[Tensor]:
            if i not in self.vectors:
                self.vectors.append(i)
            return [ones.to(x.dtype) for x in self.format(i).components]

        def scalar(asked: Asked) -> Tensor:
            if asked not in self.scalars:
                self.scalars.append(asked)
            return ones[0].to(_dtype(asked))

        outputs = self._compute(components, scalar, ones.long())
        read = [x for i in self.vectors for x in self.format(i).components]
        written = [x for i in self.stored for x in self.format(i).components]
        self.signature = Signature(
            tuple([x.dtype for x in read]),
            tuple(map(_dtype, self.scalars)),
            tuple([x.dtype for x in outputs]),
            frozenset([i for i, x in enumerate([*read, *written]) if x.is_shared]),
            packed=frozenset([i for i, x in enumerate([*read, *written]) if x.is_packed]),
        )

    def format(self, i: int | None) -> Format:
        """Return the format of a vector."""
        return _FLOAT32 if i is None else self._trace.variables[i].format

    def body(
        self, vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor
    ) -> Sequence[Tensor]:
        """Return the components to store, and the operand of the following operation."""
        left = iter(vectors)
        stored = {i: [next(left) for _ in self.format(i).components] for i in self.vectors}
        given = dict(zip(self.scalars, map(scalar_tensor, scalars), strict=True))
        return self._compute(stored.__getitem__, given.__getitem__, index)

    def _compute(
        self,
        components: Callable[[int | None], Sequence[Tensor]],
        scalar: Callable[[Asked], Tensor],
        index: Tensor,
    ) -> list[Tensor]:
        variables = self._trace.variables
        numbers: dict[int, Tensor] = {}
        made: dict[int, Operation] = {}  # the operations that made numbers not yet stored
        stored: dict[int, Sequence[Tensor]] = {}
        self.writes, self.factors = dict(self._writes_before), dict(self._factors_before)

        def write(operation: Operation, number: Tensor) -> None:
            i = operation.target
            numbers[i], made[i], self.factors[i] = number, operation, (False, ())
            self.writes[i] = self.writes.get(i, 0) + 1

        def store(i: int) -> None:
            format, operation = variables[i].format, made.pop(i)
            keys: list[Tensor] = []
            if operation.key is not None:
                keys = [scalar(("start",)), scalar(("key", operation.key))]
            elif format.takes_key:
                keys = [scalar(("start",)), scalar(("count", i, self.writes[i] - 1))]
            stored[i] = encoding(format, torch.float32)([numbers.pop(i)], keys, index)

        def factor_of(i: int) -> Factor:
            return self.factors.get(i, (bool(variables[i].format.shared), ()))

        def read(i: int) -> Tensor:
            format = variables[i].format
            if i in made and not (format.is_exact or format.arithmetic == "plain"):
                store(i)
            if i not in numbers:
                own = stored[i] if i in stored else components(i)
                (number,) = decoding(format, torch.float32)(own, (), index)
                if any(factor_of(i)):
                    number = number * scalar(("factor", i, factor_of(i))).to(torch.float32)
                numbers[i] = number
            return numbers[i]

        if self._entered is not None:
            write(self._entered, components(None)[0])
        for operation in self._operations:
            _, _, operands, target, keywords, _ = operation
            if self._trace.is_note(operation):
                if target in made:
                    store(target)
                numbers.pop(target, None)
                first, factors = factor_of(target)
                self.factors[target] = first, (*factors, operands[1])
                continue
            given = [
                scalar(("number", i)).to(torch.float32)
                if variables[i].begins_as == "number"
                else read(i)
                for i in operands
            ]
            count = len(given) - len(keywords)
            named = dict(zip(keywords, given[count:], strict=True))
            write(operation, _rounded(operation.single_name, *given[:count], **named))
        taken = [] if self.then is None else [read(self.then.operands[0])]
        for i in self.stored:
            if i in made:
                store(i)
        return [*(x for i in self.stored for x in stored[i]), *taken]


@functools.lru_cache(maxsize=1024)
def stages(trace: Trace, results: tuple[int, ...], steps: tuple[Operation, ...]) -> list[Stage]:
    """Return the steps to results as kernels, in order; none if PyTorch is faster."""
    left = list(steps)
    cut: list[tuple[list[Operation], Operation | None]] = []
    while (then := next((x for x in left if not _has_formula(trace, x)), None)) is not None:
        if len(then.operands) > 1:
            return []
        place = left.index(then)
        chosen = {place}  # by place, since a trace may repeat an operation
        for i in reversed(range(place)):
            if any(_depends(left[j], left[i]) for j in chosen):
                chosen.add(i)
        cut.append(([left[i] for i in sorted(chosen - {place})], then))
        left = [x for i, x in enumerate(left) if i not in chosen]
    cut.append((left, None))
    made: list[Stage] = []
    for place, (operations, last) in enumerate(cut):
        later = [x for own, _ in cut[place + 1 :] for x in own]
        later += [x for _, x in cut[place + 1 :] if x is not None]
        needed = {*results, *(i for x in later for i in x.operands)}
        made.append(Stage(trace, operations, last, needed, made[-1] if made else None))
    return made


def _has_formula(trace: Trace, operation: Operation) -> bool:
    are_numbers = [trace.variables[i].begins_as == "number" for i in operation.operands]
    return _is_known(operation.single_name, tuple(are_numbers), operation.keywords)


def _depends(x: Operation, earlier: Operation) -> bool:
    """Whether an operation must follow an earlier one."""
    return earlier.target in (*x.operands, x.target) or x.target in earlier.operands


def _dtype(asked: Asked) -> torch.dtype:
    return torch.int64 if asked[0] in _WHOLE else torch.float32
