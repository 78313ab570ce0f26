"""Functions of tensors, recorded while they run on examples, with the functions that they call.

The operations are PyTorch's own, in their order, so that code that repeats them has the same bits.
Choices that depend on formats are made while recording. Shapes must not matter to a function, but
for those in `BY_SHAPE`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mcftensor.arithmetic.noise import Noise
from mcftensor.arithmetic.number_protocol import Sum
from mcftensor.formats import Format
from mcftensor.kernels.custom_ops import DEFINITIONS

_PACKAGE = Path(__file__).parents[1]
FOLDERS = ("arithmetic", "formats")
"""Where the functions are whose calls are recorded as such."""

BY_SHAPE = {name: DEFINITIONS[name] for name in ("block_max", "spread")}
"""Functions whose operations depend on shapes. A call of one is recorded as an operation."""


@dataclass(eq=False)
class Applied:
    """An operation of PyTorch, or a call of a function in `BY_SHAPE`."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Tensor


@dataclass(eq=False)
class Region:
    """A call of a function: what it did, and the names of its tensors."""

    name: str
    doc: str | None
    arguments: list[Tensor] = field(default_factory=list)
    steps: list[Applied | Region] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    returned: list[Tensor] = field(default_factory=list)

    def operations(self) -> Iterator[Applied]:
        """Yield all operations in order."""
        for x in self.steps:
            yield from x.operations() if isinstance(x, Region) else (x,)


class Recorder(TorchFunctionMode):
    """Records operations, and the library's functions that they belong to."""

    def __init__(self, region: Region, folders: Sequence[str]) -> None:
        super().__init__()
        self.places = tuple([str(_PACKAGE / name) for name in folders])
        self.stack, self.alive = [region], list[Any]()
        self.constants: dict[int, Any] = {}  # tensors with one value everywhere, by id

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "_opname", "")
        if name in DEFINITIONS and name not in BY_SHAPE:
            with self:
                return DEFINITIONS[name](*args, **kwargs)
        if func is Tensor.clone:
            return args[0]  # which nothing changes
        result = func(*args, **kwargs)
        if func is Tensor.maximum and (least := self.constants.get(id(args[1]))) is not None:
            func, args, kwargs = Tensor.clamp, args[:1], {"min": least}
        if isinstance(result, Tensor) and not any(result is x for x in args):
            self.alive.append(result)  # so that its id stays its own
            self.stack[-1].steps.append(Applied(func, args, kwargs, result))
            if func in (torch.ones_like, torch.full_like):
                self.constants[id(result)] = args[1] if args[1:] else 1
        return result

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Begin a region if a function of the library is called, as a trace function of Python."""
        code = frame.f_code
        if (
            event != "call"
            or code.co_name.startswith("<")
            or not code.co_filename.startswith(self.places)
        ):
            return None
        region = Region(*_title(frame))
        region.arguments = [x for y in frame.f_locals.values() for x in tensors_in(y)]
        self.stack[-1].steps.append(region)
        self.stack.append(region)

        def follow(frame: FrameType, event: str, arg: Any) -> Any:
            for name, value in frame.f_locals.items():
                found = tensors_in(value)
                if len(found) == 1 and name != "self":
                    region.names.setdefault(id(found[0]), name)
            if event == "return":
                region.returned = tensors_in(arg)
                self.stack.pop()
            return follow

        return follow(frame, "call", None)


def _title(frame: FrameType) -> tuple[str, str | None]:
    """Return the name of a function or of its class, and the first line of its docstring."""
    name, own = frame.f_code.co_name, frame.f_locals.get("self")
    doc = frame.f_code.co_consts[0] if frame.f_code.co_consts else None
    if name == "__init__":
        name, doc = type(own).__name__.lower(), type(own).__doc__
    elif isinstance(own, Format):
        name = f"{name}_{own.nearest.name.removesuffix('rn')}"
    line = doc.strip().partition("\n")[0] if isinstance(doc, str) else ""
    for argument, value in frame.f_locals.items():  # which the printed function has not
        if isinstance(value, (int, torch.dtype)):
            line = line.replace(f"`{argument}`", str(value).removeprefix("torch."))
    return name.strip("_"), line if line.endswith(".") else None


def tensors_in(x: Any) -> list[Tensor]:
    """Return the tensors of a value: of a number its floats, of noise its pattern."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, (list, tuple)):
        return [z for y in x for z in tensors_in(y)]
    if isinstance(x, (Sum, Noise)):
        return [z for y in vars(x).values() for z in tensors_in(y)]
    return []


def record_calls(
    name: str,
    doc: str,
    function: Callable[..., Any],
    examples: Mapping[str, Tensor],
    results: Sequence[str] = (),
    folders: Sequence[str] = FOLDERS,
) -> Region:
    """Return what a function does with examples of its arguments; results have names."""
    region = Region(name, doc, list(examples.values()))
    region.names = {id(x): argument for argument, x in examples.items()}
    recorder, previous = Recorder(region, folders), sys.gettrace()
    try:
        sys.settrace(recorder.enter)
        with recorder:
            result = function(*examples.values())
    finally:
        sys.settrace(previous)
    region.returned = tensors_in(result)
    for x, own in zip(region.returned, results, strict=False):
        region.names.setdefault(id(x), own)
    region.steps.append(Region("", None, recorder.alive))  # keeps ids unique
    return region
