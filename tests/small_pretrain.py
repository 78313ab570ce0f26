"""`examples/pretrain.py` with a model small enough for seconds, for processes of its own."""

import sys

import torch

import pretrain
from pretraining import training
from pretraining.model import Shape

TINY = Shape(context=16, layers=1, width=32, heads=2)

if __name__ == "__main__":
    torch.set_num_threads(1)
    training.SHAPES["cpu"] = TINY
    sys.exit(pretrain.main())
