"""Optimizers as files that need PyTorch alone, printed from the rules of the library."""
