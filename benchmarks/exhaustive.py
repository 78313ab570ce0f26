"""Error-free transformations of 16-bit floats over all their operands.

Every pair of bit patterns, NaN and infinities included, is given to `two_sum`, `fast_two_sum` and
`two_prod`, every pattern to `split` and `sqrt`. What comes back is held against integers and exact
float64, by what the functions document: the result rounded, its error exact under the
requirements, and the special values. Prints a table and writes it as JSON; fails if anything is
wrong. `--sample N` takes one leading operand of every N, with all that can follow.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from mcftensor.arithmetic import eft
from patterns import BASES, EVERY_PATTERN, Base, Numbers, root_to_odd

# Wrong cases that are named.
SHOWN = 8

Pair = tuple[Tensor, Tensor]
# What a judge says: where a result is wrong, and where no more than special values is promised.
Judgement = Pair


def _equal(base: Base, result: Tensor, rounded: Tensor, exact: Tensor) -> Tensor:
    """Where results are exact numbers rounded, to the sign of zero; all NaN are alike."""
    bits = result.view(torch.int16)
    return torch.where(exact.isnan(), base.is_nan(bits), bits == rounded.view(torch.int16))


def exact_sum(base: Base, a: Numbers, b: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, the same rounded, and what that loses."""
    # Where float64 is not exact, it is close enough to round to the larger operand; what is lost
    # is the smaller one.
    exact = a.values + b.values
    rounded = base.round(exact)
    smaller = torch.where(a.exponents < b.exponents, a.values, b.values)
    error = torch.where(base.adds_exactly(a, b), exact - rounded.double(), smaller)
    return exact, rounded, error


def _judge(
    base: Base, results: Pair, exact: Tensor, rounded: Tensor, error: Tensor, required: Tensor
) -> Judgement:
    """Judge a rounded number and its error term; both are finite, or neither is."""
    finite = base.is_finite(rounded.view(torch.int16))
    right = torch.where(
        finite, results[1].double() == error, ~base.is_finite(results[1].view(torch.int16))
    )
    right &= _equal(base, results[0], rounded, exact)
    return (required | ~finite) & ~right, ~(required & finite)


def judge_two_sum(base: Base, results: Pair, a: Numbers, b: Numbers) -> Judgement:
    """Require an exact sum, unless an operation overflows: a + b, or s - a for the largest b."""
    exact, rounded, error = exact_sum(base, a, b)
    required = (rounded.double() - a.values).abs() < base.overflow(base.precision)
    return _judge(base, results, exact, rounded, error, required)


def judge_fast_two_sum(base: Base, results: Pair, a: Numbers, b: Numbers) -> Judgement:
    """Exact where a = 0, or has at least the exponent of b."""
    required = (a.values == 0) | (a.exponents >= b.exponents)
    return _judge(base, results, *exact_sum(base, a, b), required)


def judge_two_prod(base: Base, results: Pair, a: Numbers, b: Numbers) -> Judgement:
    """Exact for zeros, and where the exponents add up to at least e_min + p - 1."""
    exact = a.values * b.values  # at most 22 bits, and no exponent below -266
    rounded = base.round(exact)
    least = base.min_exponent + base.precision - 1
    required = (exact == 0) | (a.exponents + b.exponents >= least)
    return _judge(base, results, exact, rounded, exact - rounded.double(), required)


def judge_split(base: Base, results: Pair, a: Numbers) -> Judgement:
    """Require two halves of few bits; a number too large to split is returned whole."""
    high, low = (base.numbers(half.view(torch.int16)) for half in results)
    bits = {8: (4, 3), 11: (5, 5)}[base.precision]
    halves = _has_bits(high, bits[0]) & _has_bits(low, bits[1])
    one_number = base.adds_exactly(high, low) | (low.values == 0)
    exact = one_number & (high.values + low.values == a.values)
    too_large = a.values.abs() >= base.overflow(bits[0])
    whole = (high.patterns == a.patterns) | (high.values.isnan() & a.values.isnan())
    whole = whole & (low.values == 0)
    right = torch.where(a.values.isfinite(), exact & (halves | (too_large & whole)), whole)
    return ~right, torch.zeros_like(right)


def _has_bits(numbers: Numbers, bits: int) -> Tensor:
    """Where significands have at most so many bits between the first and the last one set."""
    lowest = numbers.significands & -numbers.significands
    return (numbers.significands < lowest << bits) | (numbers.significands == 0)


def judge_sqrt(base: Base, root: Tensor, a: Numbers) -> Judgement:
    """Rounded to nearest; NaN below 0."""
    fields = zip(a.significands.tolist(), a.exponents.tolist(), strict=True)
    roots = [root_to_odd(significand, e - base.precision + 1) for significand, e in fields]
    exact = torch.tensor(roots, dtype=torch.float64, device=root.device)
    exact = torch.where(a.values > 0, exact, torch.nan)
    exact = torch.where((a.values == 0) | (a.values == torch.inf), a.values, exact)
    wrong = ~_equal(base, root, base.round(exact), exact)
    return wrong, torch.zeros_like(wrong)


@dataclass(frozen=True)
class Transformation:
    """A function of one or two floats, and the judge of its results."""

    function: Callable[..., Tensor | Pair]
    judge: Callable[..., Judgement]
    operands: int = 2

    def check(self, base: Base, *operands: Numbers) -> Judgement:
        """Call the function and judge it."""
        return self.judge(base, self.function(*(x.floats for x in operands)), *operands)


TRANSFORMATIONS = {
    "two_sum": Transformation(eft.two_sum, judge_two_sum),
    "fast_two_sum": Transformation(eft.fast_two_sum, judge_fast_two_sum),
    "two_prod": Transformation(eft.two_prod, judge_two_prod),
    "split": Transformation(eft.split, judge_split, 1),
    "sqrt": Transformation(eft.sqrt, judge_sqrt, 1),
}


@dataclass(frozen=True)
class Count:
    """Cases checked, those outside the requirement, those wrong, and the first of these in hex."""

    cases: int = 0
    outside: int = 0
    wrong: int = 0
    first_wrong: tuple[str, ...] = ()

    def __add__(self, other: Count) -> Count:
        return Count(
            self.cases + other.cases,
            self.outside + other.outside,
            self.wrong + other.wrong,
            (self.first_wrong + other.first_wrong)[:SHOWN],
        )


@functools.cache
def _every_number(base: Base, device: str) -> Numbers:
    numbers = base.numbers(EVERY_PATTERN.to(device))
    # The judges read results by this conversion.
    if not torch.equal(numbers.floats.double().nan_to_num(7.0), numbers.values.nan_to_num(7.0)):
        raise RuntimeError(f"torch does not convert {base.name} to float64 exactly on {device}")
    return numbers


@functools.cache
def _compiled(judge: Callable[..., Judgement]) -> Callable[..., Judgement]:
    return torch.compile(judge, fullgraph=True, dynamic=False)


def count(
    transformation: Transformation,
    base: Base,
    device: str,
    compiled: bool,
    leading: Sequence[int],
) -> Count:
    """Check leading operands of these patterns, with every second one if there are two."""
    every = _every_number(base, device)
    patterns = torch.tensor(leading, dtype=torch.int16, device=device)
    if transformation.operands == 1:
        operands = [base.numbers(patterns)]
    else:
        operands = [base.numbers(patterns[:, None]), every]
        if compiled:
            transformation = replace(transformation, judge=_compiled(transformation.judge))
    wrong, outside = transformation.check(base, *operands)
    number = int(wrong.count_nonzero())
    first = _first(wrong, operands) if number else ()
    return Count(wrong.numel(), int(outside.count_nonzero()), number, first)


def _first(wrong: Tensor, operands: Sequence[Numbers]) -> tuple[str, ...]:
    places = wrong.nonzero()[:SHOWN].unbind(1)
    patterns = torch.broadcast_tensors(*(x.patterns for x in operands))
    bits = [(x[places].int() & 0xFFFF).tolist() for x in patterns]
    return tuple(" ".join(f"{x:04x}" for x in case) for case in zip(*bits, strict=True))


def leading_patterns(sample: int) -> list[int]:
    """One pattern of every `sample` consecutive ones, drawn with a fixed seed."""
    starts = torch.arange(0, len(EVERY_PATTERN), sample)
    drawn = starts + torch.randint(sample, starts.shape, generator=torch.Generator().manual_seed(0))
    return EVERY_PATTERN[drawn.clamp(max=len(EVERY_PATTERN) - 1)].tolist()


def run(
    name: str,
    base: Base,
    *,
    device: str = "cpu",
    sample: int = 1,
    jobs: int = 1,
    compiled: bool = False,
) -> dict[str, Any]:
    """Check one transformation of one base."""
    transformation = TRANSFORMATIONS[name]
    start = time.perf_counter()
    patterns = leading_patterns(sample)
    # With one leading operand at a time, intermediate tensors stay in a core's cache.
    rows = len(patterns) if transformation.operands == 1 else 1 if device == "cpu" else 256
    batches = [patterns[i : i + rows] for i in range(0, len(patterns), rows)]
    check = functools.partial(count, transformation, base, device, compiled)

    def total(counts: Iterable[Count]) -> Count:
        return sum(track(counts, f"{name}, {base.name}", len(batches)), Count())

    if jobs == 1 or len(batches) == 1:
        result = total(map(check, batches))
    else:
        with multiprocessing.get_context("spawn").Pool(jobs, torch.set_num_threads, [1]) as pool:
            result = total(pool.imap(check, batches, chunksize=64))
            pool.close()
            pool.join()
    seconds = time.perf_counter() - start
    return {"transformation": name, "base": base.name, **asdict(result), "seconds": seconds}


def show(results: Sequence[dict[str, Any]], console: Console) -> None:
    """The counts as a table."""
    table = Table("transformation", "base", title="Error-free transformations of bit patterns")
    for column in ("cases", "outside the requirement", "wrong", "seconds"):
        table.add_column(column, justify="right")
    table.add_column("first wrong")
    for row in results:
        table.add_row(
            row["transformation"],
            row["base"],
            *(f"{row[column]:,}" for column in ("cases", "outside", "wrong")),
            f"{row['seconds']:.1f}",
            "\n".join(row["first_wrong"]),
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, show, write; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", nargs="+", choices=BASES, default=list(BASES))
    parser.add_argument(
        "--transformation", nargs="+", choices=TRANSFORMATIONS, default=list(TRANSFORMATIONS)
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--sample", type=int, default=1, metavar="N", help="one leading operand of every N"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument(
        "--compile", action="store_true", help="compile what judges the results: thrice as fast"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/exhaustive.json"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    setting = {
        "device": options.device,
        "sample": options.sample,
        "jobs": options.jobs,
        "compiled": options.compile,
    }
    record: dict[str, Any] = {
        "machine": {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        },
        **setting,
        "results": [],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for base, name in itertools.product(options.base, options.transformation):
        record["results"].append(run(name, BASES[base], **setting))
        # A run that is stopped leaves what it has checked.
        options.out.write_text(json.dumps(record, indent=2) + "\n")
    show(record["results"], Console(width=120))
    return int(any(row["wrong"] for row in record["results"]))


if __name__ == "__main__":
    sys.exit(main())
