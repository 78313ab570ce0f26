"""The parts that `pretrain.py` and `edq_study.py` share: text, model, training, reports."""
