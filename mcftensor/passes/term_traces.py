"""Traces on terms as kernels: each operation is one of `formulas.py`, rounded to nearest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic.formulas import OPERATIONS
from mcftensor.arithmetic.machine_numbers import Machine
from mcftensor.arithmetic.number_protocol import Number, Numbers
from mcftensor.kernels import Body, Signature
from mcftensor.passes.evaluation import Asked, Evaluation
from mcftensor.passes.expressions import scalar_tensor, stored_floats
from mcftensor.passes.traces import Operation, Trace


def kernel(trace: Trace, results: tuple[int, ...]) -> tuple[Body, Signature]:
    """Return the body that computes the variables `results` of a trace, and its signature."""
    return trace.once(results, lambda: _kernel(trace, results))


def _kernel(trace: Trace, results: tuple[int, ...]) -> tuple[Body, Signature]:
    dtypes: dict[str, list[torch.dtype]] = {"tensor": [], "number": [], "nothing": []}
    for format, begins_as, *_ in trace.variables:
        dtypes[begins_as] += [x.dtype for x in format.components]
    written = [x.dtype for i in results for x in trace.variables[i].format.components]

    def body(vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor) -> Sequence[Tensor]:
        left = {"tensor": iter(vectors), "number": map(scalar_tensor, scalars)}
        begun = [
            list(itertools.islice(left.get(begins_as, ()), len(format.components)))
            for format, begins_as, *_ in trace.variables
        ]
        made = _OfTerms(trace, begun)
        for operation in trace.operations:
            made.carry_out(operation)
        return [x for i in results for x in made.stored.get(i, begun[i])]

    return body, Signature(tuple(dtypes["tensor"]), tuple(dtypes["number"]), tuple(written))


class _OfTerms(Evaluation[Number]):
    """Operations on numbers of more than one term. Every result is rounded at once."""

    _system: Numbers

    def __init__(self, trace: Trace, begun: Sequence[Sequence[Any]]) -> None:
        super().__init__(trace)
        self._begun = begun
        self._system = trace.operations[0].format.numbers

    def carry_out(self, operation: Operation) -> None:
        if operation.format.numbers != self._system:
            self.numbers.clear()
            self._system = operation.format.numbers
        super().carry_out(operation)

    def components(self, i: int) -> Sequence[Any]:
        return self._begun[i]

    def scalar(self, asked: Asked) -> Number:
        return self.read(asked[1])

    def decode(self, i: int, components: Sequence[Any], factor: Asked) -> Number:
        return self._system.of(stored_floats(self.trace.variables[i].format, components))

    def encode(self, i: int, numbers: Number, keys: Sequence[Asked], into: Any) -> Sequence[Tensor]:
        return self.trace.variables[i].format.encode(numbers, None)

    def compute(self, operation: Operation, operands: Sequence[Any]) -> Number:
        return OPERATIONS[operation.name](*operands)

    def enter(self, operation: Operation, numbers: Number) -> None:
        super().enter(operation, numbers)
        self.store(operation.target)

    def store(self, i: int) -> None:
        format = self.trace.variables[i].format
        if isinstance(self._system, Machine):  # it knows the number that it has rounded to
            self.stored[i], self.numbers[i] = format.rounded(self.numbers[i])
            del self.unstored[i]
        else:
            super().store(i)
        pairs = zip(self.stored[i], format.components, strict=True)
        self.stored[i] = [x.to(component.dtype) for x, component in pairs]
