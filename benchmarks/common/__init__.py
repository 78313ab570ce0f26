"""What tests and benchmarks judge by: exact arithmetic, hard operands, databases, probes."""
