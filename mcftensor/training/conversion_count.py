"""How many modules have been converted, by which others notice that one was."""

_count = 0


def latest_conversion() -> int:
    """The number of the latest conversion of a module."""
    return _count


def note_conversion() -> None:
    """Count a conversion."""
    global _count  # noqa: PLW0603
    _count += 1
