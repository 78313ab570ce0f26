"""Formulas in the language FPCore: read, evaluated, and compared with exact results."""
