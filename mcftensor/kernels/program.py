"""Elementwise functions as programs: lists of instructions on machine numbers.

A function of tensors, written once in PyTorch, is run on single elements while every operation
is recorded. The recorded operations are eager PyTorch's, rounding by rounding. So a program has the
bits of its function in every language.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mcftensor.kernels.custom_ops import DEFINITIONS
from mcftensor.kernels.ranges import Range, range_of
from mcftensor.kernels.without_float64 import has_float64

aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

# dtype: the type in which machines compute.
COMPUTED = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
    torch.uint8: torch.int32,
    torch.uint16: torch.int32,
    torch.bool: torch.bool,
}

PATTERNS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a number: the integer dtype of its bits."""

READS = ("vector", "packed", "shared")
"""Instructions that read a vector: elements, halves of bytes, or values of blocks."""

CODES = 16
"""Codes of half a byte."""

# vectors, scalars, index of each element -> results
Body = Callable[[Sequence[Tensor], Sequence[Any], Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class Signature:
    """The dtypes of a program's inputs and outputs.

    It also holds the indices of vectors and then outputs with one value per block, or with two
    codes in a byte (`packed`), and whether the program may compute in float64. If it `accumulates`,
    outputs are not stored, but added to an accumulator for each set of tensors (`digit_body.py`).
    """

    vectors: tuple[torch.dtype, ...]
    scalars: tuple[torch.dtype, ...]
    outputs: tuple[torch.dtype, ...]
    shared: frozenset[int] = frozenset()
    has_float64: bool = True
    accumulates: bool = False
    packed: frozenset[int] = frozenset()

    def shares(self, output: int) -> bool:
        """Whether an output has one value per block."""
        return len(self.vectors) + output in self.shared

    def kind(self, i: int) -> str:
        """The instruction that reads a vector."""
        return "shared" if i in self.shared else "packed" if i in self.packed else "vector"


@dataclass(frozen=True)
class Instruction:
    """`dtype name(operands)`; an operand is the place of an earlier instruction, or a constant."""

    name: str
    operands: tuple[Any, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Place:
    """The place of an instruction in the program, as an operand."""

    index: int


@dataclass(frozen=True, eq=False)
class Program:
    """Instructions in order, the places of the results, and floats that are not NaNs."""

    signature: Signature
    instructions: tuple[Instruction, ...]
    results: tuple[Place, ...]
    numbers: frozenset[int] = frozenset()

    @functools.cached_property
    def varies(self) -> list[bool]:
        """Whether each instruction varies from element to element."""
        varies: list[bool] = []
        for x in self.instructions:
            varies.append(
                x.name in (*READS, "index")
                or any(isinstance(o, Place) and varies[o.index] for o in x.operands)
            )
        return varies

    @functools.cached_property
    def per_block(self) -> list[bool]:
        """Whether each instruction varies, and has one value for all elements of a block."""
        found: list[bool] = []
        for x in self.instructions:
            varying = [o.index for o in x.operands if isinstance(o, Place) and self.varies[o.index]]
            is_source = x.name in ("shared", "block_max", "unsigned_max")
            found.append(is_source or (varying != [] and all(found[i] for i in varying)))
        return found

    def tables(self) -> dict[int, int]:
        """Return the floats of a packed code alone that other values need, with the code."""
        found: dict[int, int] = {}
        sources: list[set[int]] = []  # packed codes by their places, and -1 for all else
        for i, x in enumerate(self.instructions):
            places = [o.index for o in x.operands if isinstance(o, Place)]
            is_constant = bool(places) or x.name == "constant"
            own = {i} if x.name == "packed" else set() if is_constant else {-1}
            sources.append(own.union(*(sources[k] for k in places)))
            for k in places if len(sources[i]) > 1 else ():
                if len(sources[k]) == 1 and sources[k] != {-1}:
                    (found[k],) = sources[k]
        return {k: i for k, i in found.items() if self.instructions[k].dtype == torch.float32}

    def before_scales(self) -> list[bool]:
        """Return whether values of blocks need each instruction."""
        found = [*self.per_block]
        for i in reversed(range(len(found))):
            if found[i]:
                for o in self.instructions[i].operands:
                    if isinstance(o, Place):
                        found[o.index] = True
        return found

    def users(self) -> list[set[int]]:
        """Return the places of the instructions that use each result; -1 for results of all."""
        users: list[set[int]] = [set() for _ in self.instructions]
        for i, x in enumerate(self.instructions):
            for o in x.operands:
                if isinstance(o, Place):
                    users[o.index].add(i)
        for place in self.results:
            users[place.index].add(-1)
        return users

    def branches(self) -> dict[int, list[int]]:
        """Return each choice between elements by a condition of their block, with instructions.

        The instructions serve only the first of the two, so a block can omit them.
        """
        users = self.users()
        found: dict[int, list[int]] = {}
        for i in reversed(range(len(users))):
            x = self.instructions[i]
            if x.name != "where" or self.per_block[i] or not self.per_block[x.operands[0].index]:
                continue
            own: list[int] = []
            condition, first, second = x.operands
            for k in reversed(range(i)):
                only_here = users[k] <= {i, *own} and Place(k) not in (condition, second)
                if only_here and self.varies[k] and self.instructions[k].name not in READS:
                    own.insert(0, k)
            if first.index in own:
                found[i] = own
        return found

    @functools.cached_property
    def last_zeros(self) -> list[int]:
        """How many last bits of each 32-bit pattern are known to be zero."""
        zeros: list[int] = []

        def of(x: Any) -> int:
            if isinstance(x, Place):
                return zeros[x.index]
            return (x & -x).bit_length() - 1 if isinstance(x, int) and x else 32 * (x == 0)

        for x in self.instructions:
            known = 0
            if x.dtype == torch.int32 or x.name == "bits":
                if x.name == "shift_left":
                    count = x.operands[1]
                    known = min(of(x.operands[0]) + (count if isinstance(count, int) else 0), 32)
                elif x.name == "and":
                    known = max(map(of, x.operands))
                elif x.name in ("constant", "bits", "add", "sub", "or", "xor", "maximum", "where"):
                    known = min(map(of, x.operands[-2:]))
            zeros.append(known)
        return zeros

    @functools.cached_property
    def ranges(self) -> dict[int, Range]:
        """The ranges of integers, by place, as far as they are known."""
        ranges: dict[int, Range] = {}
        for i, x in enumerate(self.instructions):
            found = range_of(x, ranges)
            if found is not None:
                ranges[i] = found
        return ranges

    @functools.cached_property
    def hides_nans(self) -> list[bool]:
        """Whether no result depends on the sign or the last bits of a NaN, by instruction."""
        hides = [True] * len(self.instructions)
        for place in self.results:
            hides[place.index] = False
        for i in reversed(range(len(hides))):
            x = self.instructions[i]
            passes = x.name in _PASSING and COMPUTED[x.dtype] == x.dtype
            for k, o in enumerate(x.operands):
                if isinstance(o, Place) and not (
                    o.index in self.numbers
                    or x.name in _NAN_BLIND
                    or (passes and hides[i] and (x.name, k) != ("copysign", 1))
                ):
                    hides[o.index] = False
        return hides

    def is_undefined(self, x: Instruction) -> bool:
        """Whether the result is machine-dependent for large operands or NaNs."""
        return (
            x.name == "to"
            and not x.dtype.is_floating_point
            and self.instructions[x.operands[0].index].dtype.is_floating_point
        )


def record(body: Body, signature: Signature) -> Program:
    """Return the program of a function for operands of these dtypes.

    Raises:
        NotImplementedError: an operation is not supported by programs.
    """
    recorder = _Recorder()
    size = (CODES if signature.packed else 1,)
    vectors = [
        recorder.enter(signature.kind(i), i, d, size) for i, d in enumerate(signature.vectors)
    ]
    scalars = [recorder.enter("scalar", i, d, ()) for i, d in enumerate(signature.scalars)]
    index = recorder.enter("index", 0, torch.int64, size)
    results = recorder.watch(body, vectors, scalars, index)
    outputs = zip(results, signature.outputs, strict=True)
    places = tuple(recorder.cast(x, dtype) for x, dtype in outputs)
    values = {recorder.places[id(x)].index: x for x in recorder.alive}
    return finished(Program(signature, tuple(recorder.instructions), places), values)


def finished(program: Program, values: Mapping[int, Tensor]) -> Program:
    """Leave out instructions without a use, and add tables, given the values of all codes."""
    is_used = [False] * len(program.instructions)
    for place in program.results:
        is_used[place.index] = True
    for i in reversed(range(len(is_used))):
        if is_used[i]:
            for x in program.instructions[i].operands:
                if isinstance(x, Place):
                    is_used[x.index] = True
    new: list[Place] = []  # by old places
    kept: list[Instruction] = []
    tables = program.tables()
    for i, (old, is_kept) in enumerate(zip(program.instructions, is_used, strict=True)):
        new.append(Place(len(kept)))
        if is_kept:
            operands = tuple([new[x.index] if isinstance(x, Place) else x for x in old.operands])
            kept.append(Instruction(old.name, operands, old.dtype))
            if i in tables and i in values:
                operands = (new[tables[i]], new[i], *values[i].tolist())
                new[i] = Place(len(kept))
                kept.append(Instruction("table", operands, old.dtype))
    results = tuple([new[place.index] for place in program.results])
    return Program(program.signature, tuple(kept), results)


# Operations on floats that take all NaNs for one, and those whose results are NaNs for NaNs.
_NAN_BLIND = {"quiet", "finite_or_zero", "eq", "ne", "lt", "le", "gt", "ge"}
_PASSING = {"add", "sub", "mul", "div", "neg", "abs", "sqrt", "fma", "maximum", "where", "copysign"}


# aten's name: the name of an instruction whose operands are converted to the type of the result.
_ARITHMETIC = {
    getattr(aten, name): name
    for name in (
        *("add", "sub", "mul", "div", "neg", "abs", "sqrt"),
        *("maximum", "minimum", "copysign", "sign"),
    )
} | {
    aten.bitwise_and: "and",
    aten.__and__: "and",
    aten.bitwise_or: "or",
    aten.__or__: "or",
    aten.bitwise_xor: "xor",
    aten.__xor__: "xor",
    aten.bitwise_not: "not",
    aten.logical_not: "not",
    aten.__rshift__: "shift_right",
    aten.bitwise_right_shift: "shift_right",
    aten.__lshift__: "shift_left",
    aten.bitwise_left_shift: "shift_left",
}
# Comparisons: operands are converted to their common type, and the result is a truth value.
_COMPARISONS = {
    getattr(aten, name): name for name in ("eq", "ne", "lt", "le", "gt", "ge", "signbit")
}
# Arithmetic on truth values; `where` and `eq` take them unchanged.
_LOGIC = {"add": "or", "mul": "and", "maximum": "or", "ne": "xor"} | {
    name: name for name in ("and", "or", "xor", "not", "eq")
}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Operators of this library with an instruction; others are recorded by their definitions.
_NATIVE = {
    "sqrt": _FLOATS,
    "narrow": _FLOATS,
    "fma": (torch.float32,),
    "block_max": (torch.int32,),
    "pack": (torch.uint8,),
    "unpack": (torch.uint8,),
    "spread": (torch.uint8, torch.int16, torch.int32, torch.bool),
}


def _is_native(name: str, dtype: torch.dtype) -> bool:
    """Whether an operator of this library has an instruction.

    Without float64, eager PyTorch has no fma of tiny products, and so programs have none.
    """
    return dtype in _NATIVE.get(name, ()) and (name != "fma" or has_float64())


@functools.lru_cache(maxsize=1024)
def _is_composite(func: Any) -> bool:
    """Whether an operator consists of others, into which inference mode does not decompose it."""
    return func.has_kernel_for_dispatch_key(_COMPOSITE)


_SAME = (aten.clone, aten.detach, aten.alias, aten.lift_fresh)
_CONSTANTS = {aten.zeros_like: 0, aten.ones_like: 1}


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.instructions: list[Instruction] = []
        self.known: dict[tuple[Any, ...], Place] = {}
        self.places: dict[int, Place] = {}
        self.alive: list[Tensor] = []  # keeps ids of tensors unique

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise PyTorch imports its compiler, which takes a second

    def watch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function within this mode, without gradients, and leave both contexts in any case.

        PyTorch's contexts exit in Python code, which a KeyboardInterrupt may cut.
        """
        depth, records_gradients = torch._C._len_torch_dispatch_stack(), torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            torch._C._push_on_torch_dispatch_stack(self)
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(records_gradients)
            while torch._C._len_torch_dispatch_stack() > depth:
                torch._C._pop_torch_dispatch_stack(None)

    def enter(self, name: str, number: int, dtype: torch.dtype, size: tuple[int, ...]) -> Tensor:
        if name == "packed":
            x = torch.arange(CODES, dtype=dtype, device="cpu")
        else:
            x = torch.ones(size, dtype=dtype, device="cpu")
        self._remember(x, self._add(name, (number,), dtype))
        return x

    def operand(self, x: Any) -> Any:
        return self.places[id(x)] if isinstance(x, Tensor) else x

    def _add(self, name: str, operands: tuple[Any, ...], dtype: torch.dtype) -> Place:
        if dtype not in COMPUTED:
            raise NotImplementedError(f"programs have no {dtype}")
        # Numbers by their text: 0.0 is -0.0, and 1 is True.
        key = (name, dtype, *[x.index if isinstance(x, Place) else repr(x) for x in operands])
        if key not in self.known:
            self.known[key] = Place(len(self.instructions))
            self.instructions.append(Instruction(name, operands, dtype))
        return self.known[key]

    def _remember(self, x: Tensor, place: Place) -> None:
        self.places[id(x)] = place
        self.alive.append(x)

    def cast(self, x: Any, dtype: torch.dtype) -> Any:
        """Return an operand converted to a dtype; numbers become constants."""
        place = self.operand(x)
        if not isinstance(place, Place) or self.instructions[place.index].dtype == dtype:
            return place
        if dtype == torch.bool:
            return self._add("ne", (place, 0), dtype)
        if self.instructions[place.index].name == "index" and dtype == torch.int32:
            return self._add("index", (0,), dtype)
        return self._add("to", (place,), dtype)

    def _operation(
        self, name: str, args: Sequence[Any], dtype: torch.dtype, result: torch.dtype
    ) -> Place:
        """Record an operation on operands converted to a dtype."""
        if dtype == torch.bool:
            if name not in _LOGIC:
                raise NotImplementedError(f"programs have no {name} of truth values")
            name = _LOGIC[name]
        if name == "minimum" and dtype.is_floating_point:
            raise NotImplementedError(f"programs have no minimum of {dtype}")
        if name.startswith("shift"):
            count = args[1]
            is_known = isinstance(count, Tensor) or count in range(8 * dtype.itemsize)
            if not is_known:
                raise NotImplementedError(f"programs have no shift of {dtype} by {count}")
        return self._add(name, tuple(self.cast(x, dtype) for x in args), result)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):
            return self.watch(func.decompose, *args, **kwargs)
        if func.namespace == "mcftensor" and not _is_native(func._opname, args[0].dtype):
            return self.watch(DEFINITIONS[func._opname], *args)
        if func.namespace == "mcftensor" and func._opname in ("pack", "unpack"):
            return args[0]  # programs have one code in each lane
        result = func(*args, **kwargs)
        self._remember(result, self._record(func, args, kwargs, result))
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> Place:
        packet, dtype = func.overloadpacket, result.dtype
        if func.namespace == "mcftensor" and func._opname == "spread":
            return self.operand(args[0])  # a single element has the shared value
        if func.namespace == "mcftensor":
            operands = tuple(self.operand(x) for x in args if isinstance(x, Tensor))
            return self._add(func._opname, operands, dtype)
        if packet in _ARITHMETIC and not kwargs:
            return self._operation(_ARITHMETIC[packet], args, dtype, dtype)
        if packet is aten.rsub and not kwargs:
            return self._operation("sub", args[::-1], dtype, dtype)
        if packet is aten.reciprocal:
            return self._operation("div", (1, *args), dtype, dtype)
        if packet in _COMPARISONS:
            common = args[0].dtype if len(args) == 1 else torch.result_type(*args)
            return self._operation(_COMPARISONS[packet], args, common, torch.bool)
        if func is aten.isnan.default:
            return self._add("ne", (self.operand(args[0]),) * 2, dtype)
        if func is aten.where.self:
            chosen = tuple(self.cast(x, dtype) for x in args[1:])
            return self._add("where", (self.operand(args[0]), *chosen), dtype)
        if func is aten.nan_to_num.default and args[1:] == (0.0, 0.0, 0.0):
            return self._add("finite_or_zero", (self.operand(args[0]),), dtype)
        if func is aten.nan_to_num.default and args[1] != args[1] and args[2] == -args[3] == inf:
            return self._add("quiet", (self.operand(args[0]),), dtype)
        if packet is aten._to_copy:
            return self.cast(args[0], dtype)
        if func is aten.view.dtype and dtype.itemsize == args[0].dtype.itemsize:
            return self._add("bits", (self.operand(args[0]),), dtype)
        if packet in _SAME:
            return self.operand(args[0])
        if packet in _CONSTANTS:
            return self._add("constant", (_CONSTANTS[packet],), dtype)
        if func in (aten.scalar_tensor.default, aten.full_like.default):
            return self._add("constant", (args[-1],), dtype)
        raise NotImplementedError(f"programs have no {func}")
