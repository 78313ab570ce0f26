"""Numbers as terms of one base, evaluated by networks of error-free transformations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mcftensor.arithmetic import networks, ordering
from mcftensor.arithmetic.noise import Noise
from mcftensor.arithmetic.number_protocol import Floats, Number, Numbers
from mcftensor.arithmetic.rounding import as_floats, split_terms
from mcftensor.kernels.without_float64 import Pieces, pieces, widest


@dataclass(frozen=True)
class Network(Numbers):
    """Numbers with `terms` terms of a base."""

    dtype: torch.dtype
    terms: int

    def of(self, floats: Floats) -> Terms:
        """Return the number that is the sum of floats of any dtype.

        Floats of other dtypes are split into terms. Several such floats, or more floats than terms,
        are summed and normalized.
        """
        enough = self.terms
        if any(x.dtype != self.dtype for x in floats):
            enough = self.terms if len(floats) == 1 else 1
            floats = [part for x in floats for y in as_floats(x) for part in self._parts(y)]
        if len(floats) > enough:
            return Terms(
                networks.replace_nonfinite(networks.distill(floats, self.terms), floats[0])
            )
        zeros = [torch.zeros_like(floats[0])] * (self.terms - len(floats))
        return Terms([*floats, *zeros])

    def _parts(self, x: Tensor) -> Floats:
        """Return a float of another dtype as terms of this one."""
        if x.dtype.itemsize >= self.dtype.itemsize and x.dtype != self.dtype:
            return split_terms(x, self.dtype, self.terms)
        return [x.to(self.dtype)]


class Terms(Number):
    """A number as normalized terms."""

    def _by(
        self,
        two: Callable[..., Floats],
        more: Callable[..., Floats],
        *others: Number | Tensor | float,
    ) -> Terms:
        """Apply a network to this number and others."""
        operands = [x.floats for x in (self, *map(self._entered, others))]
        return Terms((two if len(self.floats) == 2 else more)(*operands))

    def split(self, base: torch.dtype, terms: int, noise: Noise | None = None) -> Floats:
        """Return normalized terms of a base. A surplus last term of this number is rounded off."""
        if (base, terms) == (self.floats[0].dtype, len(self.floats) - 1):
            return networks.shorten(self.floats, noise)
        return super().split(base, terms, noise)

    def _entered(self, x: Number | Pieces | Tensor | float) -> Number:
        if isinstance(x, Number):
            return x
        leading = self.floats[0]
        kind = Network(leading.dtype, len(self.floats))
        if not isinstance(x, Pieces | Tensor) and widest(leading.device) == torch.float32:
            x = pieces(x, leading.device)
        if isinstance(x, Pieces):
            return kind.of(x[:2] if kind == Network(torch.float32, 2) else x)
        if not isinstance(x, Tensor):
            x = torch.scalar_tensor(x, dtype=torch.float64, device=leading.device)
        return kind.of([x])

    def __neg__(self) -> Terms:
        return Terms(networks.neg(self.floats))

    def __add__(self, other: Number | Tensor | float) -> Terms:
        return self._by(networks.add2, networks.add, other)

    def __mul__(self, other: Number | Tensor | float) -> Terms:
        return self._by(networks.mul2, networks.mul, other)

    def __truediv__(self, other: Number | Tensor | float) -> Terms:
        return self._by(networks.div, networks.div, other)

    def sqrt(self) -> Terms:
        """The square root."""
        return self._by(networks.sqrt2, networks.sqrt)

    def fma(self, y: Number, z: Number) -> Terms:
        """self * y + z."""
        return self._by(networks.fma2, networks.fma, y, z)

    def maximum(self, other: Number) -> Terms:
        """The larger of two numbers."""
        return Terms(ordering.maximum(self.floats, other.floats))
