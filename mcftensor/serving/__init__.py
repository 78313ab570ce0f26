"""Serving: files of what changed in the weights, for inference engines and between checkpoints."""

from mcftensor.serving.delta_files import Delta as Delta
from mcftensor.serving.delta_files import apply_deltas as apply_deltas
from mcftensor.serving.increments import changes_since as changes_since
from mcftensor.serving.increments import put_together as put_together
from mcftensor.serving.weight_deltas import deltas as deltas
