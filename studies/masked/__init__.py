"""The parts of `bert.py`."""
