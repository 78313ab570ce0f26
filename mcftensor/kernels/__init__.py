"""Elementwise functions of many tensors in one pass over memory.

`run` takes a function written in PyTorch and columns of tensors. For large amounts of work, the
function becomes a `program` in C++ (`cpp`, `cpu`) or in Triton (`triton`, `cuda`), with the bits of
the function itself. Otherwise the function runs as it is, in chunks (`eager`).
"""

from __future__ import annotations

from mcftensor.kernels.columns import Column as Column
from mcftensor.kernels.columns import Columns as Columns
from mcftensor.kernels.columns import Scalar as Scalar
from mcftensor.kernels.execute import LOCK as LOCK
from mcftensor.kernels.execute import run as run
from mcftensor.kernels.execute import run_alike as run_alike
from mcftensor.kernels.program import Body as Body
from mcftensor.kernels.program import Signature as Signature
