"""What kernels are in machine code, and how long processors would take for it."""
