"""Arithmetic on machine floats and their sums: roundings, error-free transformations, numbers."""
