"""The parts of `pretrain.py`: the text, the model and the report."""
