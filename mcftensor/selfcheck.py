"""A check of the arithmetic on a device against exact rationals, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic import eft
from mcftensor.arithmetic.base_types import BASES
from mcftensor.formats import FORMATS, ExpansionFormat
from mcftensor.kernels.without_float64 import has_float64
from mcftensor.passes import expansion
from mcftensor.passes.expansion import Terms
from mcftensor.wings import wing_or_none

_COUNT = 256
_UNITS = 10
"""Bound of the errors of expansion arithmetic, in u^n; every documented bound is smaller."""


class SelfCheckError(RuntimeError):
    """The arithmetic is wrong on a device; the message names the device and the functions.

    Attributes:
        failures: the names of the failed checks.
    """

    def __init__(self, message: str, failures: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.failures = list(failures)


class SelfCheck(int):
    """The number of checks, all of which passed, and a digest of this machine.

    Attributes:
        digest: twelve hexadecimal digits, the digest of the gradients of a small network by torch's
            operations on the device; or None, if the device lacks one of them. Machines that share
            the steps of a training must have the same digest.
        threads: the number of the host's threads, on which the digest of a CPU depends.
    """

    digest: str | None
    threads: int


def selfcheck(device: str | torch.device = "cpu", *, compiled: bool = True) -> SelfCheck:
    """Run the arithmetic of the library on a device and compare it with exact rationals.

    Error-free transformations measure roundings. Compilers, fast-math flags and drivers that flush
    subnormals can remove roundings. Run this check once on a new machine or release of PyTorch. The
    command `python -m mcftensor selfcheck` also checks kernels, optimizer steps, large tensors,
    streams and graphs, and prints the digest that this function returns.

    On a device without float64, as Apple's MPS, and within `mcf.without_float64()`, float64 and
    formats of it are left out, and other formats are checked as they are computed there.

    Args:
        device: the device to check, such as `"cuda"`.
        compiled: also inline the operations in a compiled function, and compare the bits. This
            takes half a minute; the rest takes seconds.

    Returns:
        The number of checks, if all passed: an int, with the `digest` of a forward and backward
        pass, to compare machines that will share the steps of a training, and the number of
        `threads` that it depends on.

    Raises:
        SelfCheckError: some checks failed; the message names each, and `failures` lists them.

    Examples:
        >>> import mcftensor as mcf
        >>> checks = mcf.selfcheck(compiled=False)
        >>> checks, len(checks.digest)
        (48, 12)
    """
    found = [found_broken(torch.device(device), compiled=x) for x in (False, True)[: 1 + compiled]]
    count = sum(part for part, _ in found)
    failures = [name for _, names in found for name in names]
    if failures:
        raise SelfCheckError(
            f"selfcheck: on {device}, {len(failures)} of {count} checks failed: "
            f"{'; '.join(failures)}. Expansions cannot be trusted there: look for fast-math flags, "
            "flushing of subnormals, or a compiler that fuses roundings away",
            failures,
        )
    found_all = SelfCheck(count)
    found_all.digest, _ = machine_digest(torch.device(device))
    found_all.threads = torch.get_num_threads()
    return found_all


def machine_digest(device: torch.device) -> tuple[str | None, str]:
    """Return the digest of a backward pass, or None and why there is none."""
    tools = wing_or_none("tools")
    if tools is None:
        return None, "mcftensor.tools is not installed"
    try:
        return tools.leaf_digest(device), ""
    except Exception as error:  # noqa: BLE001  # such as an operation that the device lacks
        return None, str(error).partition("\n")[0]


def found_broken(device: torch.device, *, compiled: bool) -> tuple[int, list[str]]:
    """Return the number of functions, and the names of those with wrong results.

    Results are compared with exact rationals, or, if `compiled`, with the bits of eager code.
    """
    checks = list(_checks(device))
    if not compiled:
        return len(checks), [x.name for x in checks if not x.is_right(x.function(*x.numbers))]
    failures = []
    for part in dict.fromkeys(check.part for check in checks):
        together = [check for check in checks if check.part == part]
        expected = [check.function(*check.numbers) for check in together]
        inlined = _compiled(together)
        for check, a, b in zip(together, expected, inlined, strict=True):
            if not all(torch.equal(x, y) for x, y in zip(a, b, strict=True)):
                failures.append(f"{check.name}, compiled")
    return len(checks), failures


def _compiled(checks: list[_Check]) -> list[Terms]:
    """Return the results of functions compiled in one graph, which is faster than many graphs."""
    functions = [check.function for check in checks]

    def inline(numbers: list[list[Terms]]) -> list[Terms]:
        return [function(*x) for function, x in zip(functions, numbers, strict=True)]

    torch.compiler.reset()
    compiled = torch.compile(inline, fullgraph=True)
    return compiled([check.numbers for check in checks])


@dataclass
class _Check:
    """A function of numbers, given as terms, and its exact result."""

    name: str
    function: Callable[..., Terms]
    numbers: list[Terms]
    exact: Callable[..., Fraction]
    """The exact result; for a square root, its square."""
    tolerance: Fraction
    smallest: Fraction = Fraction(0)
    """The magnitude below which the tolerance is absolute."""

    @property
    def part(self) -> str:
        """The dtype or format of the check."""
        return self.name.rpartition(" ")[2]

    def is_right(self, result: Terms) -> bool:
        """Whether all elements are within the tolerance, relative to the exact result."""
        columns = map(_rationals, (result, *self.numbers))
        for found, *operands in zip(*columns, strict=True):
            exact = self.exact(*operands)
            found = found * found if self.name.startswith("sqrt") else found
            if abs(found - exact) > self.tolerance * max(abs(exact), self.smallest):
                return False
        return True


def _checks(device: torch.device) -> Iterator[_Check]:
    exactly = Fraction(0)
    in_float64 = has_float64(device)
    for base in BASES:
        if base == torch.float64 and not in_float64:
            continue
        a, b, c = (_numbers(base, seed).to(device) for seed in range(3))
        ordered = [torch.where(a.abs() >= b.abs(), *pair) for pair in ((a, b), (b, a))]
        u = Fraction(1, 2 ** BASES[base].precision)
        for name, inputs, exact, tolerance in (
            ("two_sum", [a, b], lambda x, y: x + y, exactly),
            ("fast_two_sum", ordered, lambda x, y: x + y, exactly),
            ("two_prod", [a, b], lambda x, y: x * y, exactly),
            ("split", [a], lambda x: x, exactly),
            ("fma", [a, b, c], lambda x, y, z: x * y + z, u),
            ("sqrt", [a.abs()], lambda x: x, 2 * u * (1 + u)),
        ):
            label = f"{name} in {str(base).removeprefix('torch.')}"
            function = _of_single_terms(getattr(eft, name))
            yield _Check(label, function, [(x,) for x in inputs], exact, tolerance)
    for format in FORMATS:
        if format.base == torch.float64 and not in_float64:
            continue
        x, y = (_expansion(format, seed, device) for seed in range(2))
        bound = Fraction(_UNITS, 2**format.precision)
        smallest = Fraction(format.full_precision_min)
        for name, numbers, exact in (
            ("add", [x, y], lambda p, q: p + q),
            ("mul", [x, y], lambda p, q: p * q),
            ("div", [x, y], lambda p, q: p / q),
            ("sqrt", [tuple(t * x[0].sign() for t in x)], lambda p: p),
        ):
            label = f"{name} in {format.name}"
            yield _Check(label, getattr(expansion, name), numbers, exact, bound, smallest)


def _numbers(base: torch.dtype, seed: int) -> Tensor:
    """Return numbers with full significands and exponents near 0, where no product underflows."""
    generator = torch.Generator().manual_seed(seed)
    bits = BASES[base].precision
    significands = torch.randint(
        2 ** (bits - 1), 2**bits, (_COUNT,), generator=generator, device="cpu"
    )
    exponents = torch.randint(0, 7, (_COUNT,), generator=generator, device="cpu") - bits + 1
    signs = torch.randint(0, 2, (_COUNT,), generator=generator, device="cpu") * 2 - 1
    wide = torch.float64 if base == torch.float64 else torch.float32
    return ((signs * significands).to(wide) * torch.exp2(exponents.to(wide))).to(base)


def _expansion(format: ExpansionFormat, seed: int, device: torch.device) -> Terms:
    terms = [_numbers(format.base, 3 * seed + i) * format.u**i / 16 for i in range(format.terms)]
    return tuple(t.to(device) for t in expansion.renormalize([terms[0] * 16, *terms[1:]]))


def _rationals(terms: Terms) -> list[Fraction]:
    """Return the elements of the sum of terms as rationals."""
    columns = zip(*(term.tolist() for term in terms), strict=True)
    return [sum(map(Fraction, column), Fraction(0)) for column in columns]


def _of_single_terms(function: Callable[..., Any]) -> Callable[..., Terms]:
    """Return a function of floats as a function of one-term numbers."""

    def on_numbers(*numbers: Terms) -> Terms:
        result = function(*[x for (x,) in numbers])
        return (result,) if isinstance(result, Tensor) else result

    return on_numbers
