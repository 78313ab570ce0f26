"""Text of expansions: collapsed, with more digits than float64 where the format has more."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from decimal import Decimal

import numpy as np
import torch
from torch import Tensor
from torch._tensor_str import PRINT_OPTS

from mcftensor.arithmetic.decimals import decimal_of, digits_of
from mcftensor.formats import Format

_OF_FLOAT64, _OF_FLOAT32 = 15, 6  # decimal digits that these types always represent
_OF_ANY = 2000  # more digits than any sum of floats has


def text_of(collapsed: Tensor, terms: Sequence[Tensor], format: Format) -> str:
    """Return the numbers in nested brackets, with the options of `torch.set_printoptions`."""
    is_long, most = format.precision > 53, _OF_FLOAT64
    if collapsed.dtype == torch.float32:
        is_long, most = True, _OF_FLOAT32
    if is_long and PRINT_OPTS.precision > most and collapsed.numel():
        return _in_decimals(terms, format)
    text = repr(collapsed).removeprefix("tensor(").removesuffix(")")
    text = re.sub(r",\s*dtype=torch\.float64", "", text)
    return text.replace("\n" + " " * 7, "\n" + " " * 10)


def formatted(collapsed: float, terms: Sequence[Tensor], format: Format, spec: str) -> str:
    """Return one number as text by a format specification of Python, with all digits asked for."""
    asked = re.search(r"\.(\d+)", spec)
    if asked is None or format.rules is not None or not math.isfinite(collapsed):
        return f"{collapsed:{spec}}"
    numbers, digits = [float(x) for x in terms], int(asked[1])
    if spec[-1] in "fF%" or (digits > _OF_FLOAT64 and format.precision > 53):
        exact = decimal_of(numbers, _OF_ANY)
        if "_" in spec and "," not in spec:  # which decimals do not know
            return f"{exact:{spec.replace('_', ',')}}".replace(",", "_")
        return f"{exact:{spec}}"
    significant = digits + 1 if spec[-1] in "eE" else max(digits, 1)
    # A float64 holds these digits, and decimals have another style of exponents.
    rounded = collapsed if digits > _OF_FLOAT64 else float(decimal_of(numbers, significant))
    return f"{rounded:{spec}}"


def sum_on_host(terms: Sequence[Tensor]) -> np.ndarray:
    """Return the sums of terms of at most 32 bits, rounded once to float64."""
    arrays = [_in_numpy(x) for x in terms]
    if len(arrays) <= 2:
        return functools.reduce(np.add, arrays)
    rows = zip(*(x.reshape(-1).tolist() for x in arrays), strict=True)
    sums = [math.fsum(row) if math.isfinite(row[0]) else row[0] for row in rows]
    return np.array(sums, dtype=np.float64).reshape(arrays[0].shape)


def _in_numpy(x: Tensor) -> np.ndarray:
    """Return floats as a float64 array, converted by NumPy."""
    x = x.detach()
    return (x if x.dtype == torch.float64 else x.float()).cpu().numpy().astype(np.float64)


def _in_decimals(terms: Sequence[Tensor], format: Format) -> str:
    columns = [_in_numpy(x).reshape(-1).tolist() for x in terms]
    numbers = np.empty(terms[0].numel(), dtype=object)
    for i, parts in enumerate(zip(*columns, strict=True)):
        numbers[i] = decimal_of(parts, digits_of(format.precision))
    sizes = [abs(x) for x in numbers if x.is_finite() and x]
    is_wide = bool(sizes) and (max(sizes) >= 10**8 or min(sizes) < Decimal("1e-4"))
    kind = "e" if is_wide or PRINT_OPTS.sci_mode else "f"
    return np.array2string(
        numbers.reshape(tuple(terms[0].shape)),
        formatter={"all": lambda x: f"{x:.{PRINT_OPTS.precision}{kind}}"},
        separator=", ",
        prefix="MCFTensor(",
        max_line_width=PRINT_OPTS.linewidth,
        threshold=int(PRINT_OPTS.threshold),
        edgeitems=PRINT_OPTS.edgeitems,
    )
