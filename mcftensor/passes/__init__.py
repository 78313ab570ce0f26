"""Passes over memory: components in, numbers computed, components out, for any number of tensors."""
