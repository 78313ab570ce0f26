"""Sums that do not depend on the order of their terms."""
