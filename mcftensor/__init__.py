"""Multi-component floats as a PyTorch dtype."""

__version__ = "0.1.0"

from mcftensor import options as _options  # noqa: F401  # tells mistakes before torch is imported

# isort: split
import importlib
import os
import warnings
from typing import TYPE_CHECKING, Any

from mcftensor import checkpoint, errors, exact, formats, functional, meters, wings
from mcftensor import operators as _operators  # noqa: F401  # registers its handlers
from mcftensor.arithmetic import eft, networks
from mcftensor.checkpoint import load_file, save_file
from mcftensor.convert import as_expansion, as_plain
from mcftensor.formats import (
    Format,
    bf16i8,
    bf16i16,
    bf16x2,
    bf16x3,
    e4m3i8,
    e4m3i16,
    finfo,
    fp16i8,
    fp16i16,
    fp16x2,
    fp32x2,
    fp32x3,
    fp64x2,
    mxfp8,
    q4,
    ue4,
    ue5m3,
)
from mcftensor.functional import fma
from mcftensor.kernels.fast_products import fast_products
from mcftensor.kernels.without_float64 import without_float64
from mcftensor.meters import EDQ
from mcftensor.meters.edq.diagnosis import diagnose_process as _diagnose_process
from mcftensor.passes import expansion
from mcftensor.selfcheck import selfcheck
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.implicit_rounding import when_rounded
from mcftensor.training.accumulation import accumulate_gradients
from mcftensor.training.collage import collage
from mcftensor.training.format_change import change_format, prepare
from mcftensor.training.precision_schedule import PrecisionSchedule
from mcftensor.training.step_in_backward import step_in_backward

if TYPE_CHECKING:
    from mcftensor import host, scaling
    from mcftensor.reproducible import order_free_gradients
    from mcftensor.serving import apply_deltas, deltas

__all__ = [
    "EDQ",
    "Format",
    "MCFTensor",
    "PrecisionSchedule",
    "accumulate_gradients",
    "apply_deltas",
    "as_expansion",
    "as_plain",
    "bf16i8",
    "bf16i16",
    "bf16x2",
    "bf16x3",
    "change_format",
    "checkpoint",
    "collage",
    "deltas",
    "e4m3i8",
    "e4m3i16",
    "eft",
    "errors",
    "exact",
    "expansion",
    "fast_products",
    "finfo",
    "fma",
    "formats",
    "fp16i8",
    "fp16i16",
    "fp16x2",
    "fp32x2",
    "fp32x3",
    "fp64x2",
    "functional",
    "host",
    "load_file",
    "meters",
    "mxfp8",
    "networks",
    "order_free_gradients",
    "prepare",
    "q4",
    "save_file",
    "scaling",
    "selfcheck",
    "step_in_backward",
    "ue4",
    "ue5m3",
    "when_rounded",
    "without_float64",
]

_MOVED = {
    name: place
    for place, names in {
        "checkpoint": "as_terms convert_checkpoint from_terms store_as_terms",
        "errors": "CheckpointError DetachedParameterWarning FrozenWeightWarning NarrowStateWarning "
        "PatchWarning PlainParameterWarning RoundedError RoundedWarning SaturationWarning "
        "SelfCheckError StepInBackwardError ZeroMomentWarning",
        "exact": "from_exact to_decimal to_fraction",
        "formats": "Component FInfo FORMATS",
        "meters": "Summary audit edq estimate summary",
        "scaling": "ScaledFormat ScaledTensor rescale rescale_grad scaled scalify",
        "training.step_in_backward": "StepInBackward",
    }.items()
    for name in names.split()
}
"""Names that the next release has in their new place alone."""


if os.environ.get("MCFTENSOR_EDQ"):
    _diagnose_process(os.environ["MCFTENSOR_EDQ"])


_of_wings = wings.names_of_wings(
    __name__,
    {
        "apply_deltas": "serving",
        "deltas": "serving",
        "host": "host",
        "order_free_gradients": "reproducible",
        "scaling": "scaling",
    },
)


def __getattr__(name: str) -> Any:
    place = _MOVED.get(name)
    if place is None:
        return _of_wings(name)
    warnings.warn(
        f"mcf.{name} is now mcf.{place}.{name}, and has its old name for one more release",
        DeprecationWarning,
        2,
    )
    return getattr(importlib.import_module(f"{__name__}.{place}"), name)


def __dir__() -> list[str]:
    return __all__
