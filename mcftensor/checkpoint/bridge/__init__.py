"""Checkpoints of other programs: one reader for each layout, and one writer."""

from mcftensor.checkpoint.bridge.conversion import Conversion as Conversion
from mcftensor.checkpoint.bridge.conversion import convert_checkpoint as convert_checkpoint
