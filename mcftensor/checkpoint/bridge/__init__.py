"""Checkpoints of other programs: one reader for each layout, and one writer."""

from mcftensor.checkpoint.bridge.checkpoint_conversion import Conversion as Conversion
from mcftensor.checkpoint.bridge.checkpoint_conversion import (
    convert_checkpoint as convert_checkpoint,
)
