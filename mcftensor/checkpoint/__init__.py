"""Checkpoints: expansions as plain tensors, in files that are replaced whole or not at all."""

from mcftensor.checkpoint.atomic_files import replacing as replacing
from mcftensor.checkpoint.bridge import Conversion as Conversion
from mcftensor.checkpoint.bridge import convert_checkpoint as convert_checkpoint
from mcftensor.checkpoint.checkpoint_error import CheckpointError as CheckpointError
from mcftensor.checkpoint.delta_files import Delta as Delta
from mcftensor.checkpoint.delta_files import apply_deltas as apply_deltas
from mcftensor.checkpoint.loading import load_file as load_file
from mcftensor.checkpoint.module_hooks import store_as_terms as store_as_terms
from mcftensor.checkpoint.saving import save_file as save_file
from mcftensor.checkpoint.state_dicts import as_terms as as_terms
from mcftensor.checkpoint.state_dicts import from_terms as from_terms
