"""A row of the page "Works with": one framework, tried column by column."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import mcftensor as mcf
from mcftensor.meters.edq import Diagnosis

COLUMNS = (
    "train",
    "save",
    "resume to the bit",
    "load elsewhere",
    "merge or export",
    "EDQ",
    "messages",
)


@dataclass
class Row:
    """What was found of a framework: a cell for each column that was tried."""

    packages: tuple[str, ...]
    cells: dict[str, str] = field(default_factory=dict)
    failed: bool = False

    def works(self, column: str, check: Callable[[], object], line: str = "") -> None:
        """A check that must pass; `line` is what a user adds for it."""
        self._note(column, check, f"works, with `{line}`" if line else "works")

    def refuses(self, column: str, check: Callable[[], object]) -> None:
        """What must raise an error of the library that says what to do instead."""
        try:
            check()
        except Exception as error:  # noqa: BLE001
            text = str(error).partition("\n")[0]
            own = "mcf" in text or "expansion" in text
            self.cells[column] = f"refuses: {text}" if own else f"FAILS: {text}"
            self.failed |= not own
        else:
            self.cells[column], self.failed = "FAILS: nothing was raised", True

    def says(self, column: str, text: str) -> None:
        """What needs no trial, or cannot have one here."""
        self.cells[column] = text

    def _note(self, column: str, check: Callable[[], object], good: str) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                check()
            except Exception as error:  # noqa: BLE001
                text = f"{type(error).__name__}: {error}".partition("\n")[0]
                self.cells[column], self.failed = f"FAILS: {text}", True
                return
        self.cells[column] = good
        own = [str(x.message) for x in caught if "mcf" in str(x.message)]
        if own:
            self.cells["messages"] = own[0].partition("\n")[0]

    @property
    def versions(self) -> dict[str, str]:
        """Of the packages."""
        found = {}
        for name in self.packages:
            installed = importlib.metadata.distributions(name=name)
            found[name] = next((x.version for x in installed), "")
        return found


def terms(model: nn.Module) -> list[Tensor]:
    """All components of all parameters, as they are now."""
    found = []
    for p in model.parameters():
        found += [
            x.detach().clone() for x in (p.components if isinstance(p, mcf.MCFTensor) else (p,))
        ]
    return found


def are_same(xs: list[Tensor], ys: list[Tensor]) -> None:
    """Raise AssertionError unless the bits are the same."""
    assert len(xs) == len(ys), "other terms"
    different = sum(not torch.equal(x, y) for x, y in zip(xs, ys, strict=True))
    assert not different, f"{different} of {len(xs)} tensors differ"


def moves(model: nn.Module, train: Callable[[], object]) -> None:
    """Raise AssertionError unless a training moves second terms, and keeps every format."""
    before = terms(model)
    formats = [getattr(p, "format", None) for p in model.parameters()]
    train()
    assert formats == [getattr(p, "format", None) for p in model.parameters()], "other formats"
    after = terms(model)
    moved = sum(not torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert moved > sum(f is not None for f in formats), f"{moved} of {len(after)} terms moved"
    assert all(x.isfinite().all() for x in after if x.is_floating_point()), "not finite"


def measured(train: Callable[[], object]) -> None:
    """Raise AssertionError unless a training has a verdict that finds nothing lost."""
    with Diagnosis(every=1) as diagnosis:
        train()
    assert "the effective learning rate is 1.00" in diagnosis.verdict(), diagnosis.verdict()
