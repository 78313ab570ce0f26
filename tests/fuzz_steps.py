"""Random programs inside a step: with a tape and at once, all tensors must have the same bits.

A program is a seed. It makes a few expansions, parameters, gradients and views, and does some
operations on them, in place, out of place and in lists, reads in between, and changes whatever it
gave before: lists of numbers and of tensors, tensors without dimensions, NumPy arrays, gradients,
dicts of settings. Some operations raise, some errors are caught, and some steps end by an error.

    python tests/fuzz_steps.py                       # 100,000 programs
    python tests/fuzz_steps.py --programs 500 --seed 7
    python tests/fuzz_steps.py --replay 123          # show what one program does, and compare it
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import mcftensor as mcf
from mcftensor.passes import decoded_traces
from mcftensor.passes.format_conversion import decode_columns
from mcftensor.tensor import TapedTensor, tape
from support.helpers import bits, sample

TERMS = (mcf.bf16x2, mcf.bf16x2, mcf.bf16x3, mcf.fp16x2, mcf.fp32x2)
STORED = (mcf.bf16i16, mcf.bf16i16, mcf.bf16i8, mcf.Format.from_name("bf16i8sr"), mcf.e4m3i8)
STATES = (mcf.mxfp8, mcf.ue5m3)
FORMATS = TERMS + STORED
SHAPES = ((3, 5), (4,), (2, 3))

UNARY = ("sqrt", "square", "reciprocal")
BINARY = ("add", "sub", "mul", "div")
NUMBERS = (0.5, 0.999, 2, 1, 1.0, -0.1, 1e-3, 3)


class Failure(Exception):
    """What a program raises by itself."""


class Broken(RuntimeError):
    """What is raised while the tape runs."""


class Program:
    """What a seed does; at once or on a tape it draws the same numbers."""

    def __init__(self, seed: int, say: Callable[[str], None] = lambda line: None) -> None:
        self.rng = random.Random(seed)
        self.say = say
        self.read: list[object] = []
        self.errors: list[str] = []
        rng = self.rng
        self.shape = rng.choice(SHAPES)
        format = rng.choice([x for x in FORMATS if x != mcf.e4m3i8 or len(self.shape) > 1])
        alike = [
            x for x in FORMATS if x.dtype == format.dtype and x != mcf.e4m3i8
        ]  # others raise, in lists as a whole
        other = rng.choice(alike) if rng.random() < 0.2 else format
        self.tensors: list[Tensor] = []
        for i in range(rng.randint(2, 5)):
            own = rng.choice((format, format, other))
            if format in STORED and i > 1 and len(self.shape) > 1:
                own = rng.choice((own, *STATES))
            x = sample(mcf.bf16x3, *self.shape, seed=seed + i)
            self.tensors.append(mcf.as_expansion(x.abs().add(0.5), own))
        self.parameters = [nn.Parameter(x) for x in self.tensors[: rng.randint(1, 2)]]
        for i, p in enumerate(self.parameters):
            generator = torch.Generator().manual_seed(seed + i)
            p.grad = torch.randn(self.shape, generator=generator).to(p.dtype)
            self.tensors[i] = p
        # What a caller gives, and may change later.
        self.numbers = [rng.choice(NUMBERS) for _ in range(2)]
        self.list = [rng.choice(self.tensors), rng.choice(self.tensors)]
        self.scalar = torch.tensor(rng.choice(NUMBERS), dtype=torch.float64)
        self.array = np.full(self.shape, float(rng.choice(NUMBERS)), dtype=np.float32)
        self.given = torch.from_numpy(self.array)
        self.settings = {"alpha": rng.choice(NUMBERS)}

    def run(self) -> None:
        """Do it, within an optimizer's step."""
        program = self

        class Stepping(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self) -> None:
                for _ in range(program.rng.randint(4, 24)):
                    program.do_something()

        optimizer = Stepping(self.parameters, {})
        for _ in range(self.rng.randint(1, 2)):
            with contextlib.suppress(Failure):
                optimizer.step()
                continue
            self.say("the step ended by an error")

    def found(self) -> list[object]:
        """All that the program has left."""
        grads = [p.grad for p in self.parameters]
        tensors = [*self.tensors, *grads, *self.read, self.given, self.scalar, *self.list]
        found = [bits(_with_one_nan(x)) if isinstance(x, Tensor) else x for x in tensors]
        # Of plain tensors in lists some functions of PyTorch's count versions, and others do not.
        ours = [x for x in self.tensors if isinstance(x, mcf.MCFTensor)]
        return [*found, self.errors, [x._version for x in ours]]

    # ------------------------------------------------------------------------ what it does

    def do_something(self) -> None:
        kinds = [
            *[self.in_place] * 5,
            *[self.out_of_place] * 5,
            *[self.in_lists] * 4,
            *[self.change] * 4,
            *[self.look] * 2,
            self.alias,
            self.forget,
            self.go_wrong,
        ]
        self.rng.choice(kinds)()

    def tensor(self) -> Tensor:
        return self.rng.choice(self.tensors)

    def operand(self) -> object:
        """What an operation meets."""
        rng = self.rng
        return rng.choice(
            [
                *[self.tensor] * 6,
                *[lambda: rng.choice(NUMBERS)] * 3,
                lambda: rng.choice(self.parameters).grad,
                lambda: self.given,
                lambda: self.scalar,
                lambda: self.given.to(torch.bfloat16),
            ]
        )()

    def arguments(self) -> tuple[str, list[object], dict[str, object]]:
        """A name, operands after the first one, and settings."""
        rng = self.rng
        kind = rng.choice(("unary", "binary", "binary", "binary", "lerp", "three"))
        if kind == "unary":
            return rng.choice(UNARY), [], {}
        if kind == "binary":
            name = rng.choice(BINARY)
            with_alpha = name in ("add", "sub") and rng.random() < 0.4
            return name, [self.operand()], self.settings if with_alpha else {}
        if kind == "lerp":
            return "lerp", [self.tensor(), rng.choice((0.1, 0.9, 0.5))], {}
        value = {"value": rng.choice(NUMBERS)} if rng.random() < 0.5 else {}
        return rng.choice(("addcmul", "addcdiv")), [self.tensor(), self.tensor()], value

    def called(self, what: str, function: Callable[..., object], *args: object, **kw: object):
        """The result of a call; an error is noted and goes no further."""
        self.say(what)
        try:
            return function(*args, **kw)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            self.errors.append(type(error).__name__)
            self.say(f"    raised {type(error).__name__}")
            return None

    def in_place(self) -> None:
        name, operands, settings = self.arguments()
        x = self.tensor()
        what = f"{self.name_of(x)}.{name}_({self.names(operands)}, {settings})"
        self.called(what, getattr(x, name + "_"), *operands, **settings)

    def out_of_place(self) -> None:
        name, operands, settings = self.arguments()
        x = self.tensor()
        what = f"new = {self.name_of(x)}.{name}({self.names(operands)}, {settings})"
        made = self.called(what, getattr(x, name), *operands, **settings)
        if isinstance(made, Tensor) and made.shape == self.shape:
            self.keep(made)

    def in_lists(self) -> None:
        rng = self.rng
        name = rng.choice((*BINARY, "sqrt", "lerp", "addcmul", "addcdiv"))
        in_place = rng.random() < 0.6
        targets = self.list if rng.random() < 0.5 else [self.tensor(), self.tensor()]
        others: list[object] = []
        if name in BINARY:
            others = [rng.choice((self.numbers, self.list, rng.choice(NUMBERS)))]
        elif name == "lerp":
            others = [self.list, 0.1]
        elif name != "sqrt":
            others = [self.list, [self.tensor(), self.tensor()]]
            others += [rng.choice((self.numbers, 0.5))] if rng.random() < 0.6 else []
        function = getattr(torch, f"_foreach_{name}" + "_" * in_place)
        what = f"{function.__name__}({self.names([targets, *others])})"
        made = self.called(what, function, targets, *others)
        if not in_place and made is not None:
            for x in made:
                if isinstance(x, Tensor) and x.shape == self.shape:
                    self.keep(x)

    def change(self) -> None:
        """What was given before, anew or emptied."""
        rng = self.rng
        number = float(rng.choice(NUMBERS))
        kind = rng.choice(("numbers", "list", "scalar", "array", "gradient", "settings", "view"))
        self.say(f"change {kind}: {number}")
        if kind == "numbers":
            self.numbers[:] = [] if rng.random() < 0.2 else [number, rng.choice(NUMBERS)]
        elif kind == "list":
            self.list[:] = [self.tensor(), self.tensor()]
        elif kind == "scalar":
            self.scalar.fill_(number)
        elif kind == "array":
            self.array.fill(number)
        elif kind == "gradient":
            p = rng.choice(self.parameters)
            assert p.grad is not None
            self.called("    p.grad.mul_()", p.grad.mul_, number)
        elif kind == "settings":
            self.settings["alpha"] = number
        else:
            self.called("    a view of a row", lambda: self.tensor()[:1].mul_(number))

    def look(self) -> None:
        x = self.tensor()
        kind = self.rng.choice(("components", "tolist", "sum", "clone", "detach"))
        self.say(f"look at {self.name_of(x)}: {kind}")
        if kind == "components" and isinstance(x, mcf.MCFTensor):
            self.read += [c.clone() for c in x.components]
        elif kind in ("tolist", "sum"):
            numbers = mcf.as_plain(x, torch.float64)
            self.read.append(repr(numbers.tolist() if kind == "tolist" else numbers.sum().item()))
        elif kind == "clone":
            self.read.append(x.clone())
        else:
            self.keep(x.detach())

    def alias(self) -> None:
        x = self.tensor()
        self.say(f"new = an alias of {self.name_of(x)}")
        made = self.called("    ", self.rng.choice((lambda: x.view(self.shape), lambda: x.data)))
        if made is not None:
            self.keep(made)

    def forget(self) -> None:
        if len(self.tensors) > len(self.parameters) + 1:
            i = self.rng.randrange(len(self.parameters), len(self.tensors))
            self.say(f"forget {self.name_of(self.tensors[i])}")
            del self.tensors[i]

    def go_wrong(self) -> None:
        rng = self.rng
        kind = rng.choice(("shape", "type", "the tape", "the step", "the tape"))
        x = self.tensor()
        self.say(f"go wrong: {kind}, {self.name_of(x)}")
        if kind == "shape":
            self.called("    ", lambda: x.add_(torch.ones(7)))
        elif kind == "type":
            self.called("    ", lambda: x.mul_("2"))
        elif kind == "the step" and rng.random() < 0.3:
            raise Failure
        elif kind == "the tape" and isinstance(x, TapedTensor):
            with breaking(), contextlib.suppress(Broken):
                x.materialize()

    # -------------------------------------------------------------------------------- names

    def keep(self, x: Tensor) -> None:
        self.tensors.append(x)
        if len(self.tensors) > 12:
            del self.tensors[len(self.parameters)]

    def name_of(self, x: object) -> str:
        for i, y in enumerate(self.tensors):
            if x is y:
                return f"t{i}"
        known = {"given": self.given, "scalar": self.scalar, "list": self.list}
        known["numbers"] = self.numbers
        return next((name for name, y in known.items() if x is y), type(x).__name__)

    def names(self, operands: list[object]) -> str:
        return ", ".join(
            repr(x) if isinstance(x, (int, float)) else self.name_of(x) for x in operands
        )


def _with_one_nan(x: Tensor) -> Tensor:
    """Formats that only store numbers have one NaN; plain results may have its sign or not."""
    is_plain = not isinstance(x, mcf.MCFTensor) and x.is_floating_point()
    return torch.where(x.isnan(), torch.nan, x.detach()) if is_plain else x


@contextlib.contextmanager
def breaking() -> Iterator[None]:
    """The next run of the tape raises, before anything is computed."""
    errors = [Broken()]

    def broken(*args: object) -> None:
        raise Broken

    def broken_once(*args: object) -> None:
        if errors:
            raise errors.pop()
        decode_columns(*args)

    with (
        mock.patch.object(tape, "run_alike", broken),
        mock.patch.object(decoded_traces, "decode_columns", broken_once),
    ):
        yield


def outcome(seed: int, *, at_once: bool, say: Callable[[str], None] = lambda line: None) -> object:
    """All that a program leaves."""
    where = "mcftensor.dispatch.defer.open_tape"
    with (
        mock.patch(where, return_value=None) if at_once else contextlib.nullcontext(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        program = Program(seed, say)
        program.run()
        return program.found()


def differs(seed: int) -> str:
    """What differs between a tape and none, or nothing."""
    try:
        found = [outcome(seed, at_once=x) for x in (False, True)]
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    same = [repr(a) == repr(b) for a, b in zip(*found, strict=False)]
    return "" if all(same) and len(found[0]) == len(found[1]) else f"place {same.index(False)}"


def replay(seed: int) -> str:
    """Print what a program does, and compare it."""
    with contextlib.suppress(Exception):
        outcome(seed, at_once=False, say=print)
    return differs(seed)


def _checked(seed: int) -> tuple[int, str]:
    torch.set_num_threads(1)
    return seed, differs(seed)


def main(arguments: list[str] | None = None) -> int:
    """Run programs, and say which differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--programs", type=int, default=100_000, help="how many (100,000)")
    add("--seed", type=int, default=0, help="of the first; the others follow (0)")
    add("--workers", type=int, default=1, help="processes (1)")
    add("--replay", type=int, metavar="SEED", help="show one program, and compare it")
    given = parser.parse_args(arguments)
    if given.replay is not None:
        what = replay(given.replay)
        print(f"program {given.replay}: {what or 'the same bits'}")
        return int(bool(what))
    seeds, start, bad = range(given.seed, given.seed + given.programs), time.monotonic(), []
    with contextlib.ExitStack() as stack:
        run: Callable[..., Iterator[tuple[int, str]]] = map
        if given.workers > 1:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(given.workers))
            run = functools.partial(pool.imap_unordered, chunksize=50)
        for count, (seed, what) in enumerate(run(_checked, seeds), 1):
            if what:
                bad.append(seed)
                print(f"program {seed} differs: {what}; --replay {seed} shows it", flush=True)
            if count % 1000 == 0 or count == given.programs:
                seconds = time.monotonic() - start
                print(f"{count} programs, {len(bad)} differ, {seconds:.0f} s", flush=True)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
