"""Formats passed by callers, as objects or names, and errors for other arguments."""

from __future__ import annotations

import torch

from mcftensor.formats.expansion_format import FORMATS, ExpansionFormat
from mcftensor.formats.format import (
    PLAIN,
    Format,
    PlainFormat,
    named,
    names_of_storage,
    registered,
)


def require_format(format: object, where: str, *, with_rules: bool = False) -> Format:
    """Return `format` if it is a Format, or the format of this name.

    Otherwise raise a TypeError that names the caller `where`. Formats with rules are accepted only
    if `with_rules` is set.
    """
    found = registered(format) if isinstance(format, str) else format
    if isinstance(found, Format) and not isinstance(found, PlainFormat):
        if found.rules is None or with_rules:
            return found
        raise TypeError(
            f"{where}: {found.name} has one scale for each tensor, and is not accepted here; "
            "mcf.as_expansion(x, format) and mcf.scaling.scalify(model, format) take it"
        )
    known = ", ".join(f"mcf.{name}" for name in [*(f.name for f in FORMATS), *names_of_storage()])
    plain = isinstance(format, torch.dtype) or isinstance(found, PlainFormat)
    raise TypeError(
        f"{where}: {format!r} is {'a plain dtype' if plain else 'not a format'}; give one of "
        f"{known}, its name as a string, or build one with mcf.Format"
        + ("; None leaves a tensor as it is" if plain and "overrides" in where else "")
    )


def require_floats(format: object, where: str) -> Format:
    """Return a format of floats: `format` itself, or the format of a dtype or a name.

    Raises:
        TypeError: for other arguments; the message names the caller `where`.
    """
    found = PLAIN[format] if isinstance(format, torch.dtype) else format
    found = named(found) if isinstance(found, str) else found
    if isinstance(found, Format) and found.dtype.is_floating_point:
        return found
    raise TypeError(
        f"{where}: {format!r} is no format of floats; give mcf.bf16i16, torch.float32, or the name "
        "of one"
    )


def require_expansion_format(format: object, where: str) -> ExpansionFormat:
    """Return an expansion format; raise a TypeError for formats that do not consist of terms."""
    if isinstance(found := require_format(format, where), ExpansionFormat):
        return found
    raise TypeError(f"{where}: {format!r} does not consist of terms")
