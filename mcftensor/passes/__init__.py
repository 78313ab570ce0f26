"""Passes over memory: components in, numbers computed, components out, for many tensors."""
