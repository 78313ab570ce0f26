"""Checkpoints: expansions as plain tensors, in files that are replaced whole or not at all."""

from typing import TYPE_CHECKING

from mcftensor import wings
from mcftensor.checkpoint import adapters as adapters
from mcftensor.checkpoint import on_several_ranks as on_several_ranks
from mcftensor.checkpoint.atomic_files import replacing as replacing
from mcftensor.checkpoint.checkpoint_error import CheckpointError as CheckpointError
from mcftensor.checkpoint.loading import load_file as load_file
from mcftensor.checkpoint.module_hooks import store_as_terms as store_as_terms
from mcftensor.checkpoint.saving import save_file as save_file
from mcftensor.checkpoint.state_dicts import as_terms as as_terms
from mcftensor.checkpoint.state_dicts import from_terms as from_terms

if TYPE_CHECKING:
    from mcftensor.bridge import Conversion as Conversion
    from mcftensor.bridge import convert_checkpoint as convert_checkpoint
    from mcftensor.serving import Delta as Delta
    from mcftensor.serving import apply_deltas as apply_deltas

__getattr__ = wings.names_of_wings(
    __name__,
    {
        **dict.fromkeys(("Conversion", "convert_checkpoint"), "bridge"),
        **dict.fromkeys(("Delta", "apply_deltas"), "serving"),
    },
)
