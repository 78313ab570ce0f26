"""Facts about thousands of tensors, read by compiled code.

Python asks a tensor for its facts one by one, and waits for memory each time. The exchange API of
DLPack, C functions that PyTorch offers, gives all facts in one call, and the next tensors come
into the caches meanwhile.
"""

from __future__ import annotations

import operator
from array import array

import torch
from torch import Tensor

from mcftensor.kernels import cpu
from mcftensor.kernels.columns import Column

Facts = tuple[torch.dtype | None, int | None, list[int], list[int], bool]
"""Facts about a column for kernels: the dtype and the device index (-1 for the CPU), or None if
they differ within it; numbers of elements, addresses, and whether all tensors are contiguous."""

_FEW = 128
_dtype = operator.attrgetter("dtype")

# The number of elements that reading the facts of a tensor counts as.
_OF_A_TENSOR = 1 << 5

SOURCE = """\
#include <cstddef>
#include <cstdint>

struct Tensor {  // DLTensor of DLPack 1
  char *data;
  int32_t device, index, dimensions;
  uint8_t kind, bits;
  uint16_t lanes;
  const int64_t *sizes, *strides;
  uint64_t offset;
};

struct Exchange {  // DLPackExchangeAPI of DLPack 1
  uint32_t major, minor;
  void *others[4];
  int (*read)(void *object, Tensor *found);
};

extern "C" {
int PyGILState_Ensure();
void PyGILState_Release(int);
void PyErr_Clear();
void *PyCapsule_GetPointer(void *, const char *);
void *PyList_GetItem(void *, ptrdiff_t);

// Writes the length and the address of each tensor of a list, in two columns, and then a number:
// 0 if a tensor could not be read, else 1, and 2 more if dtypes differ, 4 more if devices differ,
// 8 more if a tensor is not contiguous.
void launch(int64_t *out, void *capsule, int64_t count, int64_t column) {
  int state = PyGILState_Ensure();
  auto tensor = [column](int64_t i) { return PyList_GetItem((void *)column, i); };
  auto exchange = (Exchange *)PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  int64_t said = exchange && exchange->major == 1 && exchange->read;
  Tensor first, x;
  for (int64_t i = 0; said && i < count; ++i) {
    if (i + 16 < count) __builtin_prefetch(tensor(i + 16));
    if (i + 8 < count) {
      char *contents = ((char **)tensor(i + 8))[2];  // most often, after the header of an object
      for (int line = 0; line < 3; ++line) __builtin_prefetch(contents + 64 * line);
    }
    if (exchange->read(tensor(i), &x)) {
      said = 0;
      break;
    }
    if (i == 0) first = x;
    if (x.kind != first.kind || x.bits != first.bits || x.lanes != first.lanes) said |= 2;
    if (x.device != first.device || x.index != first.index) said |= 4;
    int64_t length = 1;
    bool is_dense = true;
    for (int k = x.dimensions - 1; k >= 0; --k) {
      is_dense &= x.sizes[k] == 1 || x.strides[k] == length;
      length *= x.sizes[k];
    }
    if (length && !is_dense) said |= 8;
    out[i] = length;
    out[count + i] = (int64_t)x.data + x.offset;
  }
  out[2 * count] = said;
  if (!said) PyErr_Clear();
  PyGILState_Release(state);
}
}
"""


def facts_of(column: Column) -> Facts:
    """Return the facts of a column, which may have thousands of tensors."""
    if len(column) >= _FEW and _EXCHANGE is not None:
        launch = COMPILED.get(_OF_A_TENSOR * len(column))
        found = None if launch is None else _read(launch, column)
        if found is not None:
            return found
    return _asked(column)


def _read(launch: cpu.Launch, column: Column) -> Facts | None:
    """Return the facts of a column, or None if DLPack does not know its tensors."""
    tensors, count = column if type(column) is list else list(column), len(column)
    out = array("q", bytes(16 * count + 8))
    launch(out.buffer_info()[0], id(_EXCHANGE), count, id(tensors))
    if not (said := out.pop()):
        return None
    first = tensors[0]
    return (
        None if said & 2 else first.dtype,
        None if said & 4 else first.get_device(),
        out[:count].tolist(),
        out[count:].tolist(),
        not said & 8,
    )


def _asked(column: Column) -> Facts:
    """Return the facts of a column, asked tensor by tensor."""
    first = column[0]
    dtype, device = first.dtype, first.get_device()
    if len(column) == 1:
        return dtype, device, [first.numel()], [first.data_ptr()], first.is_contiguous()
    lengths: list[int] = []
    addresses: list[int] = []
    dtypes, devices, are_contiguous = {dtype}, {device}, True
    for i in range(0, len(column), _FEW):
        part = column[i : i + _FEW]
        dtypes.update(map(_dtype, part))
        devices.update(map(Tensor.get_device, part))
        lengths += map(Tensor.numel, part)
        addresses += map(Tensor.data_ptr, part)
        are_contiguous &= all(map(Tensor.is_contiguous, part))
    return (
        dtype if len(dtypes) == 1 else None,
        device if len(devices) == 1 else None,
        lengths,
        addresses,
        are_contiguous,
    )


def _is_right(launch: cpu.Launch) -> bool:
    """Whether compiled code reads the facts of tensors of several layouts and dtypes."""
    x = torch.zeros(3, 4, 5, device="cpu")
    some = [x, x[1:], x[:, :1], x[0, 0, 0], x[:0, ::2], torch.nn.Parameter(x), x[1:2, :1, 3:]]
    columns = [some, [*some, x.mT], [*some, x.bfloat16()], [x.to(torch.int64)]]
    return all(_read(launch, column) == _asked(column) for column in columns)


_EXCHANGE = getattr(Tensor, "__dlpack_c_exchange_api__", None)

COMPILED = cpu.OnDemand(lambda: SOURCE, _is_right)
"""The compiled code of this process."""
