"""Files of torch.save, looked through before anything in them is built.

A pickle of a kilobyte can ask for gigabytes: `torch.load` builds a tensor whose elements share
memory, a storage of any length, `bytearray(2**31)`. What a file asks for is added up here, by the
operations of its pickles, and has to be of the size of the file.
"""

from __future__ import annotations

import math
import pickletools
import re
import warnings
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from mcftensor.checkpoint.checkpoint_error import CheckpointError, reading

MOST = 4
"""The largest ratio of the total size of tensors to the size of their file. It exceeds 1 because
tensors may share memory, such as views of a flat one."""

_IN_LEGACY_FILES = 5  # pickles: a number, a version, the system, the content, names of storages
_TENSORS = re.compile(r"torch\._utils\._rebuild_(tensor(_v[23])?|qtensor)")
_CLASSES = re.compile(r"torch\.(?!sparse\.)(\w+\.)*\w*(Tensor|Storage)")
_STORAGES = {
    **dict.fromkeys(["HalfStorage", "BFloat16Storage", "ShortStorage"], 2),
    **dict.fromkeys(["FloatStorage", "IntStorage", "QInt32Storage"], 4),
    **dict.fromkeys(["DoubleStorage", "LongStorage", "ComplexFloatStorage"], 8),
    "ComplexDoubleStorage": 16,
}
"""Bytes of an element; one of those that are not here."""
_COPY = "torch._utils._rebuild_device_tensor_from_cpu_tensor"
_BY_TYPE = "torch._tensor._rebuild_from_type_v2"


def unpickled(path: Path, verify: bool) -> Any:
    """Return the content of a file of torch.save, perhaps checked by `require_whole`; tensors are
    read at their use.
    """
    with reading(path), path.open("rb") as file, warnings.catch_warnings():
        if verify:
            require_whole(path)
        require_bounded(file, path.stat().st_size, path)
        warnings.simplefilter("ignore")  # Of pickle protocols, which are no concern here.
        # Before torch 1.6 files were no zip archives, and such cannot be mapped.
        is_zip = file.read(2) == b"PK"
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


def require_whole(path: Path) -> None:
    """Check the CRC-32 of everything in a file of torch.save, which PyTorch does not."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            if file.read(2) == b"PK":
                raise CheckpointError(f"{path} is damaged: it is cut short")
        return  # before torch 1.6 there was none
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise CheckpointError(
            f"{path} is damaged, or was altered: {damaged} in it does not have the CRC-32 that it "
            "says. verify=False reads it all the same"
        )


def require_bounded(file: IO[bytes], size: int, path: Path) -> None:
    """Look through a file of torch.save of so many bytes, or such a part of a file.

    Raises:
        CheckpointError: it asks for more memory than its size accounts for, has compressed records,
            or is of another kind.
    """
    claims = _Claims(size, path)
    start = file.tell()
    is_archive = file.read(2) == b"PK"
    file.seek(start)
    if not is_archive:
        for _ in range(_IN_LEGACY_FILES):
            claims.read(file)
        file.seek(start)
        return
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        # PyTorch maps the records as numbers, without decompression.
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise CheckpointError(
                f"cannot read {path}: its records are compressed, and torch.save compresses "
                "nothing; load it with torch.load(mmap=False) and save it again"
            )
        names = {record.filename.lower() for record in records}  # PyTorch finds any case
        if len(names) < len(records) or sum(record.file_size for record in records) > size:
            raise CheckpointError(
                f"cannot read {path}: its records overlap, or several have one name"
            )
        for record in records:
            if record.filename.lower().endswith("data.pkl"):
                with archive.open(record) as pickled:
                    claims.read(pickled)
    file.seek(start)


def require_pickle(file: IO[bytes], path: Path) -> None:
    """Look through a pickle without tensors, from its start."""
    _Claims(0, path).read(file)
    file.seek(0)


class _Global(str):
    """The qualified name of a function or class."""


@dataclass(frozen=True)
class _Storage:
    key: object
    elements: int
    itemsize: int


@dataclass(frozen=True)
class _Tensor:
    elements: int


class _Claims:
    """The functions and storages that the pickles of a file ask for.

    The stack of an unpickler is followed, with numbers, texts, tuples, storages and tensors on it,
    and None in the place of all else.
    """

    def __init__(self, size: int, path: Path) -> None:
        self.size, self.path = size, path
        self.stored = 0
        self.storages: dict[object, int] = {}
        self.tensors: set[object] = set()
        self.total = 0

    def read(self, file: IO[bytes]) -> None:
        """Read one pickle."""
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        try:
            for i, (opcode, argument, _) in enumerate(pickletools.genops(file)):
                self._follow(opcode, argument, i)
        except CheckpointError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise self._refusal("it is damaged, incomplete or no checkpoint") from error

    def _follow(self, opcode: pickletools.OpcodeInfo, argument: Any, position: int) -> None:
        stack, name = self.stack, opcode.name
        if name in ("GLOBAL", "STACK_GLOBAL"):
            if name == "STACK_GLOBAL":
                last, first = stack.pop(), stack.pop()
            else:
                first, last = argument.split(" ", 1)
            first, last = NAME_MAPPING.get((first, last), (IMPORT_MAPPING.get(first, first), last))
            stack.append(_Global(f"{first}.{last}"))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = stack.pop(), stack.pop()
            stack.append(self._called(function, arguments))
        elif name == "BUILD":
            state = stack.pop()
            if isinstance(state, tuple) and state and isinstance(state[0], _Storage):
                self._tensor(*state[:4])
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "BINPERSID":
            stack.append(self._stored(stack.pop()))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            # Unpicklers make a list of this length.
            index = len(self.memo) if argument is None else argument
            if not 0 <= index <= position:
                raise self._refusal(f"it numbers {position} objects up to {index}")
            self.memo[index] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name == "MARK":
            self.marks.append(stack)
            self.stack = []
        elif pickletools.markobject in opcode.stack_before:
            items = tuple(stack)
            self.stack = self.marks.pop()
            for _ in range(opcode.stack_before.index(pickletools.markobject)):
                self.stack.pop()
            for _ in opcode.stack_after:
                self.stack.append(items if name == "TUPLE" else None)
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("NEWTRUE", "NEWFALSE"):
            stack.append(name == "NEWTRUE")
        else:
            for _ in opcode.stack_before:
                stack.pop()
            value = () if name == "EMPTY_TUPLE" else argument
            stack.extend([value] * len(opcode.stack_after))

    def _called(self, function: Any, arguments: Any) -> Any:
        """Return the result of a function, by its name."""
        if not isinstance(function, _Global) or not isinstance(arguments, tuple):
            return None
        first = arguments[0] if arguments else None
        if function == _BY_TYPE and len(arguments) > 2:
            return self._called(first, arguments[2])
        if _TENSORS.fullmatch(function):
            dtype = arguments[6] if function.endswith("_v3") else None
            storage, offset, size, stride = arguments[:4]
            return self._tensor(storage, offset, size, stride, dtype)
        if function == _COPY:
            x, kind = arguments[:2]
            self._claim(object(), x.elements * _itemsize(kind), (x.elements,))
            return x
        if function in ("torch.Size", "torch.nn.parameter.Parameter") or re.fullmatch(
            r"torch\._utils\._rebuild_parameter\w*", function
        ):
            return first
        by_number = function == "builtins.bytearray" and isinstance(first, int)
        grows = function == "_codecs.encode" and arguments[1:] != ("latin1",)
        if by_number or grows or (arguments and _CLASSES.fullmatch(function)):
            raise self._refusal(f"it calls {function} for memory, which torch.save never does")
        return None

    def _stored(self, identity: Any) -> _Storage:
        kind, key, _, elements = identity[1:5]
        if not isinstance(key, str | int) or elements < 0:
            raise ValueError
        itemsize = _itemsize(kind)
        known = self.storages.get(key, 0)
        self.storages[key] = max(elements * itemsize, known)
        self.stored += self.storages[key] - known
        if self.stored > self.size:
            raise self._refusal(
                f"it says that it holds {self.stored:,} bytes of tensors, and has {self.size:,}"
            )
        return _Storage(key, elements, itemsize)

    def _tensor(
        self,
        storage: _Storage,
        offset: int,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: Any = None,
    ) -> _Tensor:
        if not all(type(n) is int and n >= 0 for n in (offset, *size, *stride)):
            raise ValueError
        itemsize = storage.itemsize if dtype is None else _itemsize(dtype)
        elements = math.prod(size)
        end = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
        if elements and end * itemsize > storage.elements * storage.itemsize:
            # PyTorch lengthens some storages with uninitialized memory.
            raise self._refusal(f"a tensor of shape {size} goes beyond the end of its storage")
        # The same part twice is one tensor: weights that are tied.
        self._claim((storage.key, offset, size, stride), elements * itemsize, size)
        return _Tensor(elements)

    def _claim(self, which: object, size: int, shape: tuple[int, ...]) -> None:
        if which in self.tensors:
            return
        self.tensors.add(which)
        self.total += size
        if self.total > MOST * self.size:
            raise self._refusal(
                f"its tensors take {self.total:,} bytes with that of shape {shape}, and it has "
                f"{self.size:,}: elements share memory, as those of x.expand(...) do; save "
                "x.contiguous()"
            )

    def _refusal(self, reason: str) -> CheckpointError:
        return CheckpointError(f"cannot read {self.path}: {reason}")


def _itemsize(kind: str) -> int:
    """Return the bytes of an element, by the name of a storage class or dtype."""
    name = kind.rpartition(".")[2]
    dtype = getattr(torch, name, None)
    return dtype.itemsize if isinstance(dtype, torch.dtype) else _STORAGES.get(name, 1)
