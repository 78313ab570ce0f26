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
from mcftensor.passes.evaluation import Asked, Evaluation, Factor
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


class Stage:
    """A kernel for some operations of a trace, followed by an operation of PyTorch.

    Attributes:
        then: the operation that follows; its operand is one more output.
        then_run: PyTorch's function of that operation, or None.
        vectors: the variables to read; None is the result of the preceding operation.
        scalars: the scalars to read.
        stored: the variables to write.
        signature: the signature of `body`.
        writes: how often each variable was written, to the end of the stage.
        factors: the deferred factors, by variable.
    """

    writes: dict[int, int]
    factors: dict[int, Factor]

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
        self._before = (before.writes, before.factors) if before else ()
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
        made = _InKernel(self._trace, components, scalar, index, self._before)
        if self._entered is not None:
            made.enter(self._entered, components(None)[0])
        for operation in self._operations:
            made.carry_out(operation)
        taken = [] if self.then is None else [made.read(self.then.operands[0])]
        for i in self.stored:
            if i in made.unstored:
                made.store(i)
        self.writes, self.factors = made.writes, made.factors
        return [*(x for i in self.stored for x in made.stored[i]), *taken]


class _InKernel(Evaluation[Tensor]):
    """Operations on the tensors of which a kernel is recorded."""

    def __init__(
        self,
        trace: Trace,
        components: Callable[[int | None], Sequence[Tensor]],
        scalar: Callable[[Asked], Tensor],
        index: Tensor,
        before: Any,
    ) -> None:
        super().__init__(trace, *before)
        self._components, self._scalar, self._index = components, scalar, index

    def components(self, i: int) -> Sequence[Tensor]:
        return self._components(i)

    def scalar(self, asked: Asked) -> Tensor:
        return self._scalar(asked).to(_dtype(asked))

    def decode(self, i: int, components: Sequence[Tensor], factor: Asked) -> Tensor:
        format = self.trace.variables[i].format
        (numbers,) = decoding(format, torch.float32)(components, (), self._index)
        is_of_first, others = factor[-1]
        has_factor = others or (is_of_first and format.shared)
        return numbers * self.scalar(factor) if has_factor else numbers

    def encode(
        self, i: int, numbers: Tensor, keys: Sequence[Asked], into: Any = None
    ) -> Sequence[Tensor]:
        encode = encoding(self.trace.variables[i].format, torch.float32)
        return encode([numbers], list(map(self.scalar, keys)), self._index)

    def compute(self, operation: Operation, operands: Sequence[Tensor]) -> Tensor:
        count = len(operands) - len(operation.keywords)
        named = dict(zip(operation.keywords, operands[count:], strict=True))
        return _rounded(operation.single_name, *operands[:count], **named)


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
    return torch.int64 if asked[0] in ("key", "count", "start") else torch.float32
