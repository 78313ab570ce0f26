"""How expansions are shown: collapsed, and with more digits than a float64 has where they have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

import numpy as np
from torch import Tensor
from torch._tensor_str import PRINT_OPTS

from mcftensor.arithmetic.decimals import decimal_of, digits_of
from mcftensor.formats import Format

_OF_FLOAT64 = 15  # digits that it always has
_OF_ANY = 2000  # more than any sum of floats has


def text_of(collapsed: Tensor, terms: Sequence[Tensor], format: Format) -> str:
    """The numbers, in nested brackets, by the options of `torch.set_printoptions`."""
    if format.precision > 53 and PRINT_OPTS.precision > _OF_FLOAT64 and collapsed.numel():
        return _in_decimals(terms, format)
    text = repr(collapsed).removeprefix("tensor(").removesuffix(")")
    text = re.sub(r",\s*dtype=torch\.float64", "", text)
    return text.replace("\n" + " " * 7, "\n" + " " * 10)


def formatted(collapsed: Tensor, terms: Sequence[Tensor], format: Format, spec: str) -> str:
    """One number by a format specification of Python's, with the digits that it asks for."""
    asked = re.search(r"\.(\d+)", spec)
    if format.precision <= 53 or asked is None or int(asked[1]) <= _OF_FLOAT64:
        return f"{collapsed.item():{spec}}"
    return f"{decimal_of([float(x) for x in terms], _OF_ANY):{spec}}"


def _in_decimals(terms: Sequence[Tensor], format: Format) -> str:
    columns = [x.detach().double().reshape(-1).tolist() for x in terms]
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
