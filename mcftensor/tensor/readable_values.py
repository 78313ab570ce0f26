"""The numbers of an expansion as text, NumPy arrays and Python floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcftensor.kernels.without_float64 import widest
from mcftensor.tensor import text_tables
from mcftensor.tensor.addresses import require_dispatch
from mcftensor.tensor.components import ComponentTensor
from mcftensor.tensor.tensor_repr import formatted, sum_on_host, text_of


class ReadableTensor(ComponentTensor):
    """The part of `MCFTensor` that converts it to text, NumPy and Python floats."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "Parameter containing:\n" if self._is_param else ""
        is_unknown = self._has_rules and self.is_meta  # a meta tensor has no exponent
        if type(self._read()[0]) is not torch.Tensor or is_unknown:
            return f"{kind}MCFTensor(shape={tuple(self.shape)}, format={self._format.name})"
        text = text_of(self._shown(), self._format.decode(self._read()), self._format)
        about = f"format={self._format.name}{self._format.about(self._read())}"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{kind}MCFTensor({text}, {about}{grad})"

    def _shown(self) -> Tensor:
        """Return the collapsed values in float64, or in float32 on devices without float64."""
        return self._collapsed(widest(self.device))

    def _repr_html_(self) -> str:
        components = self._read()
        has_data = type(components[0]) is torch.Tensor and not self.is_meta
        is_shown = has_data and 0 < self.numel() <= text_tables.FEW
        about = f"{self._role}, shape {tuple(self.shape)}, {text_tables.size(self.nbytes)}"
        numbers = self._shown() if is_shown else None
        return text_tables.numbers(repr(self), about, self._format, components, numbers)

    def __format__(self, spec: str) -> str:
        if self.dim() or type(self._read()[0]) is not torch.Tensor:
            return object.__format__(self, spec)
        terms = self._format.decode(self._read())
        return formatted(self._on_host().item(), terms, self._format, spec)

    def _on_host(self) -> np.ndarray:
        """Return the collapsed values in float64."""
        if widest(self.device) == torch.float64 or self._has_rules:
            return self._collapsed().cpu().numpy()
        return sum_on_host(self._format.decode(self._read()))

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Return the collapsed values in float64, as a copy on the CPU.

        Raises:
            RuntimeError: the tensor requires grad, and `force` is false.
        """
        if self.requires_grad and not force:
            raise RuntimeError(
                "numpy: this expansion requires grad; call .detach().numpy(), or numpy(force=True)"
            )
        return self._on_host()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __float__(self) -> float:
        require_dispatch(self)
        return super().__float__()

    def tolist(self) -> Any:
        """Return the collapsed values as nested lists of Python floats."""
        return self._on_host().tolist()

    def dequantize(self) -> Tensor:
        """Return the numbers as a plain tensor. Storage formats decode exactly, to float32."""
        return self._collapsed(self._format.dtype_of_numbers(self.device))
