"""`MCFTensor`: expansions as a torch.Tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcftensor.arithmetic.write_counts import count_beside, moved
from mcftensor.formats import Format, require_format, unmoved
from mcftensor.formats.format import named
from mcftensor.kernels.columns import on_device
from mcftensor.kernels.without_float64 import format_of_numbers, is_long_int, widest
from mcftensor.passes.format_conversion import machine_number, number_terms, of_number
from mcftensor.tensor.components import Role, check_components, check_writes, normalized
from mcftensor.tensor.fsdp_hooks import GatheredTensor
from mcftensor.tensor.pickling import PickledTensor
from mcftensor.tensor.readable_values import ReadableTensor
from mcftensor.tensor.step_context import current_step
from mcftensor.tensor.without_storage import AddressedTensor

_without_function: Any = torch._C._disabled_torch_function_impl


def _rebuild(
    components: Any,
    format: Any,
    role: Any,
    shape: Any,
    requires_grad: bool,
    is_param: bool,
    writes: Any = None,
) -> MCFTensor:
    """Rebuild a tensor from a pickle, with checks, because a file may contain anything.

    Raises:
        ValueError: components, format and role do not make a tensor of this shape.
    """
    try:
        found = Format.from_name(format)
        if len(components) == len(found.components):
            components = list(map(unmoved, components, found.components))
        check_components(components, found)
        if found.layout(components[0])[0] != shape or role not in ("value", "parameter"):
            raise ValueError(f"shape {shape}, {role!r}, components of {components[0].shape}")
        check_writes(writes, found)
        components, _ = normalized(components, found)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"MCFTensor: damaged components, format or role ({error})") from error
    x = MCFTensor.of(components, found, role, writes=writes)
    x.requires_grad_(requires_grad)
    if is_param:
        x.__dict__["_parameter"] = True
    return x


class MCFTensor(GatheredTensor, PickledTensor, AddressedTensor, ReadableTensor):
    """A tensor whose elements are expansions: unevaluated sums of floats of one small type.

    Each term has the `shape`, `stride`, `device` and `dtype` of the tensor.
    `as_expansion` makes these tensors; call the class itself only with normalized terms.

    A tensor has one of two roles. A *value* is a number type like any other: arithmetic with
    numbers, plain tensors and expansions gives expansions. A *parameter* is a weight. Operations
    with plain tensors use its leading term and give plain results, while every update in place
    changes all its terms. `nn.Parameter(expansion)` makes a parameter. Within a step of an
    optimizer it counts as a value. Some formats, such as `mcf.scaling.scaled(torch.float16)`, carry
    out operators by their own rules; all their tensors are values.

    Args:
        components: the terms, leading term first, normalized; plain tensors of equal shape,
            strides, device and dtype.
        format: the format or its name; by default inferred from their dtype and number.
        role: `"value"` or `"parameter"`.

    Raises:
        TypeError: the components are not of the format's dtypes.
        ValueError: a wrong number of components, components that are not plain tensors, or
            components of unlike shapes, strides or devices.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.as_expansion(torch.tensor([1.0, 0.1], dtype=torch.float64), mcf.fp32x2)
        >>> x * x + 1
        MCFTensor([2.0000, 1.0100], format=fp32x2)
        >>> (x * 0.999).components[0]
        tensor([0.9990, 0.0999])
    """

    _rebuilt = staticmethod(_rebuild)

    @staticmethod
    def __new__(
        cls,
        components: Sequence[Tensor],
        format: Format | str | None = None,
        role: Role = "value",
        *,
        _name: str | None = None,
        _writes: Tensor | None = None,
        _first: int = 0,
    ) -> MCFTensor:
        """Check components, and make a tensor from them."""
        if _name is not None:
            format = Format.from_name(_name)
        if format is None:
            format = Format(components[0].dtype, len(components))
        format = require_format(format, "MCFTensor", with_rules=True)
        check_components(components, format)
        return cls._made(components, format, role, _writes, _first, own=False)

    def __init__(
        self,
        components: Sequence[Tensor],
        format: Format | str | None = None,
        role: Role = "value",
        *,
        _name: str | None = None,
        _writes: Tensor | None = None,
        _first: int = 0,
    ) -> None:
        pass

    def _like(
        self, components: Sequence[Tensor], *, own: bool = False, start: int = 0
    ) -> MCFTensor:
        """Return the results of one operation on each component as a tensor like this one.

        `own` says that the components are in new memory; otherwise they are views, which share the
        write count. The result starts `start` elements after the first one, and its elements keep
        their sequences of balanced rounding.
        """
        writes, first = self._writes, self._first + start
        if writes is not None and own:
            writes, first = moved(writes.to(components[0].device, copy=True), first), 0
        made = MCFTensor.of(
            components, self._format, self._role, own=own, writes=writes, first=first
        )
        if not own and self._factor is not None:
            made._factor = self._factor
        if not own and self._base_components is not None:
            made._base_components = self._base_components
        return made

    def _made_beside(self, components: Sequence[Tensor], role: Role) -> MCFTensor:
        """Return new components as a tensor of this format without writes, such as a state of an
        optimizer.

        Tensors that one step creates like this one round by different sequences.
        """
        writes, device = self._count, components[0].device
        if writes is not None:
            step = current_step()
            number = 0 if step is None else step.number_beside(self)
            known = writes.device == device or not writes.is_meta
            writes = count_beside(writes, f"{number}").to(device) if known else None
        return MCFTensor.of(components, self._format, role, own=True, writes=writes)

    def __setitem__(self, index: Any, value: Any) -> None:
        # torch would round a number to the base dtype before dispatch.
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            is_mask = isinstance(index, Tensor) and index.dtype == torch.bool
            # A number for a mask has to be on the CPU.
            place = torch.device("cpu") if is_mask else self.device
            value = number_in(value, self._format, device=place)
        super().__setitem__(index, value)

    def new_tensor(  # type: ignore[override]
        self,
        data: Any,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> Tensor:
        """Return data in the format and role of this tensor. torch would round them to the base
        dtype.
        """
        is_narrow = self.is_inside_step and dtype != self._format.dtype_of_numbers(
            self._component0.device
        )
        if dtype is not None and (is_narrow or dtype != self._format.dtype):
            plain = self.compute_tensor
            return plain.new_tensor(data, dtype=dtype, device=device, requires_grad=requires_grad)
        if not isinstance(data, Tensor):
            data = of_numbers(data)
        made = self.new_empty(data.shape, device=device).copy_(data.detach())
        return made.requires_grad_(requires_grad)

    def new(  # type: ignore[override]
        self, *size_or_data: Any, device: torch.device | str | None = None
    ) -> Tensor:
        """Return `new_tensor` of data, or `new_empty` of a size."""
        (first, *_) = size_or_data or (0,)
        if isinstance(first, torch.Size) or (
            hasattr(first, "__index__") and not isinstance(first, (Tensor, np.ndarray))
        ):
            return self.new_empty(*size_or_data or (0,), device=device)
        return self.new_tensor(first, device=device)


def of_numbers(data: Any) -> Tensor:
    """Return numbers, in nested lists or an array, in float64, or in float32 terms without it."""
    if (long := _long_ints(data)) is not None:
        return long
    if widest() == torch.float64:
        return torch.tensor(data, dtype=torch.float64, device="cpu")
    high = torch.tensor(data, dtype=torch.float32, device="cpu").numpy()  # or an error
    numbers = np.asarray(data, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        low = np.where(np.isfinite(high), numbers - high, 0).astype(np.float32)
        total = high.astype(np.float64) + low
        high = total.astype(np.float32)  # low may lie on a tie
        low, rest = (
            np.where(np.isfinite(high), x, 0).astype(np.float32)
            for x in (total - high, numbers - total)
        )
    terms = [torch.from_numpy(np.array(x)) for x in (high, low, rest)]
    return MCFTensor.of(terms, named(format_of_numbers()))


def _long_ints(data: Any) -> Tensor | None:
    """Return numbers in all their bits if ints that float64 does not hold are among them."""
    found = np.asarray(data)
    if found.dtype.kind not in "iufO" or (isinstance(data, np.ndarray) and found.dtype.kind == "f"):
        return None
    if found.dtype.kind != "O" and not (
        found.size and abs(found.astype(np.float64)).max() >= 2**53
    ):
        return None
    numbers = np.array(data, dtype=object)
    if not any(map(is_long_int, numbers.flat)):
        return None
    rows = [[x.item() for x in number_terms(y, None)[1]] for y in numbers.flat]
    columns = zip(*[[*row, 0.0, 0.0][:3] for row in rows], strict=True)
    made = [torch.tensor(x, dtype=widest(), device="cpu").view(numbers.shape) for x in columns]
    return MCFTensor.of(made, named(format_of_numbers()))


def number_in(
    x: float, format: Format, role: Role = "value", device: torch.device | None = None
) -> Tensor:
    """Return a number as a 0-d expansion, rounded to nearest.

    In formats with shared scales or rules it is a plain tensor: float64, or without it float32,
    rounded to odd.
    """
    if format.shared or format.rules is not None:
        number = machine_number(x, device)
        return number if device is None else on_device(number, device)
    terms = of_number(x, format, device)
    return MCFTensor.of(
        [t if device is None else on_device(t, device) for t in terms], format, role
    )


torch.serialization.add_safe_globals([MCFTensor, named, _rebuild])
