"""What the speed benchmarks `steps.py` and `train.py` are made of."""
