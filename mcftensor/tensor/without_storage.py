"""Methods of torch.Tensor about storage, for expansions, which have no storage of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor
from torch.compiler import is_compiling

from mcftensor.tensor.addresses import are_hidden
from mcftensor.tensor.components import COMPONENTS, ComponentTensor, require_computing

_DATA: Any = torch.Tensor.data


def _without_storage(name: str) -> Callable[..., NoReturn]:
    """Return a method that raises TypeError, in place of a method that would access storage."""

    def refuse(self: ComponentTensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"{name}: an expansion in {self._format.name} has no storage of its own; assign values "
            "with copy_(), or take plain tensors out with mcf.as_plain(x, dtype)"
        )

    return refuse


class AddressedTensor(ComponentTensor):
    """The part of `MCFTensor` that implements `data`, addresses and storages."""

    # Makes a tensor like this one from other components; `MCFTensor` defines it.
    _like: ClassVar[Callable[..., Any]]

    @property
    def data(self) -> Tensor:
        """The same terms, detached from autograd, which does not see writes to them.

        `p.data = expansion` makes both share memory, as with plain tensors: `p` takes over the
        terms, their format and their layout.

        `plain.data = expansion` raises. Write `plain.data.copy_(expansion)`, or
        `plain.data = mcf.as_plain(expansion, plain.dtype)`.
        """
        if is_compiling():
            return self.detach()
        return self._like([x.data for x in self.components])

    @data.setter
    def data(self, value: Tensor) -> None:
        # torch's own setter would change shape and dtype, but not the terms.
        if (
            not isinstance(value, ComponentTensor)
            or value._format.dtype != self._format.dtype
            or value._has_rules != self._has_rules
        ):
            given = (
                value.format.name if isinstance(value, ComponentTensor) else f"plain {value.dtype}"
            )
            resized = (
                ". To resize, as resize_token_embeddings does, do it before "
                "mcf.as_expansion(model), or grow a value, which keeps all terms: "
                "module.weight = nn.Parameter(torch.cat([mcf.as_expansion(weight), rows]))"
            )
            raise TypeError(
                f"data: an expansion in {self._format.name} of shape {tuple(self.shape)} cannot "
                f"take the data of a {given} tensor of shape {tuple(value.shape)}. To leave the "
                "format, use mcf.as_plain(module) or mcf.as_plain(tensor, dtype); to assign "
                f"values, copy_(){resized if value.shape != self.shape else ''}"
            )
        if value.shape != self.shape or value.device != self.device:
            raise ValueError(
                f"data: shape {tuple(self.shape)} on {self.device} given data of shape "
                f"{tuple(value.shape)} on {value.device}; make a new expansion instead"
            )
        if self._is_param:
            require_computing(value._format)
        self._read()  # no longer on a tape
        self._is_own = False
        if value.stride() != self.stride():
            with torch._C.DisableTorchFunctionSubclass():
                _DATA.__set__(self, value)  # changes the layout only
        new: dict[str, Any] = dict(
            zip(COMPONENTS, [x.detach() for x in value.components], strict=False)
        )
        new |= {"_writes": value._writes, "_first": value._first, "_factor": value._factor}
        new["_base_components"] = value._base_components
        new["_format"] = value._format  # tensors that share memory have one format
        self.__dict__.update(new)  # one call, which no signal interrupts

    def data_ptr(self) -> int:
        """Return the address of the first element of the leading component, as an identity of
        memory.

        The address of a view includes its offset. The other components are at other addresses.
        """
        if are_hidden():
            self.components  # noqa: B018  # runs deferred work before attributes are copied
            return 0
        return self._lying().data_ptr()

    const_data_ptr = data_ptr

    set_ = _without_storage("set_")
    apply_ = _without_storage("apply_")
    __dlpack__ = _without_storage("__dlpack__")

    def storage(self) -> NoReturn:
        """Raise TypeError: safetensors would read storage that does not exist."""
        raise TypeError(
            f"storage: an expansion in {self._format.name} of shape {tuple(self.shape)} has none, "
            "but one for each of its terms. To save in safetensors files, use mcf.save_file, or "
            "mcf.checkpoint.store_as_terms(model) where another program saves the model"
        )

    def share_memory_(self) -> Self:
        """Move every term to shared memory, and return the tensor."""
        for component in self.components:
            component.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return whether every term is in shared memory."""
        return all(x.is_shared() for x in self._read())
