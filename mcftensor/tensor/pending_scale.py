"""A deferred factor of a tensor.

In a format of one byte, `v.mul_(0.999)` would be lost, or round a second time before the next
addition. Formats with shared scales therefore store the factor of a multiplication exactly. The
next write applies it, and so does a read of the components.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcftensor.arithmetic.write_counts import moved
from mcftensor.formats import Format
from mcftensor.passes.format_conversion import decode_columns, encode_columns, key_for


class PendingScale:
    """The deferred factor of a tensor, shared by all its views.

    Attributes:
        value: the number, 1 if no multiplication is deferred.
        components: the components of the whole tensor.
    """

    def __init__(
        self, components: Sequence[Tensor], format: Format, writes: Tensor | None, first: int
    ) -> None:
        self.value = 1.0
        self.components, self._format = components, format
        self._writes, self._first = writes, first

    def is_of_all(self, components: Sequence[Tensor]) -> bool:
        """Return whether components cover the whole tensor rather than a part of it."""
        return components[0].numel() == self.components[0].numel()

    @torch.no_grad()
    def apply(self) -> None:
        """Multiply the numbers by the factor, and round once."""
        if self.value == 1:
            return
        columns = [[x] for x in self.components]
        numbers = torch.empty_like(self._format.template(self.components[0]), dtype=torch.float32)
        decode_columns(self._format, columns, [numbers])
        numbers.mul_(self.value)
        count = None if self._writes is None else moved(self._writes, self._first)
        key = key_for(self._format, numbers.device, count)
        encode_columns(self._format, [numbers], columns, [] if key is None else [key])
        self.value = 1.0
        if self._writes is not None:
            self._writes.add_(1)
