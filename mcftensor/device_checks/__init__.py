"""Checks that the library gives right results on a device."""
