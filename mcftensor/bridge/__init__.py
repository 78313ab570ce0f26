"""Checkpoints of other programs, and conversion from any layout and format to another."""

from mcftensor.bridge.checkpoint_conversion import Conversion as Conversion
from mcftensor.bridge.checkpoint_conversion import convert_checkpoint as convert_checkpoint
from mcftensor.bridge.folder_readers import reader_of as reader_of
from mcftensor.bridge.master_weights import complete as complete
