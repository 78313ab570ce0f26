"""All errors and warnings of the library's own, wherever they are raised."""

from mcftensor.checkpoint.checkpoint_error import CheckpointError
from mcftensor.meters.edq import FrozenWeightWarning
from mcftensor.patches.table import PatchWarning
from mcftensor.selfcheck import SelfCheckError
from mcftensor.tensor.implicit_rounding import RoundedError, RoundedWarning
from mcftensor.training.step_in_backward import StepInBackwardError
from mcftensor.training.step_warnings import (
    DetachedParameterWarning,
    NarrowStateWarning,
    PlainParameterWarning,
    SaturationWarning,
    ZeroMomentWarning,
)

__all__ = [
    "CheckpointError",
    "DetachedParameterWarning",
    "FrozenWeightWarning",
    "NarrowStateWarning",
    "PatchWarning",
    "PlainParameterWarning",
    "RoundedError",
    "RoundedWarning",
    "SaturationWarning",
    "SelfCheckError",
    "StepInBackwardError",
    "ZeroMomentWarning",
]
