"""Multi-component floats as a PyTorch dtype."""

from mcftensor import dispatch as dispatch
from mcftensor import distributed as distributed
from mcftensor import edq as edq
from mcftensor import eft as eft
from mcftensor import expansion as expansion
from mcftensor import networks as networks
from mcftensor import tracing as tracing
from mcftensor import untraced as untraced
from mcftensor.auditing import audit as audit
from mcftensor.checkpoints import CheckpointError as CheckpointError
from mcftensor.convert import as_expansion as as_expansion
from mcftensor.convert import as_plain as as_plain
from mcftensor.edq import EDQ as EDQ
from mcftensor.edq import FrozenWeightWarning as FrozenWeightWarning
from mcftensor.exact import from_exact as from_exact
from mcftensor.exact import to_fraction as to_fraction
from mcftensor.finfo import FInfo as FInfo
from mcftensor.finfo import finfo as finfo
from mcftensor.formats import FORMATS as FORMATS
from mcftensor.formats import Format as Format
from mcftensor.formats import bf16x2 as bf16x2
from mcftensor.formats import bf16x3 as bf16x3
from mcftensor.formats import fp16x2 as fp16x2
from mcftensor.formats import fp32x2 as fp32x2
from mcftensor.formats import fp32x3 as fp32x3
from mcftensor.formats import fp64x2 as fp64x2
from mcftensor.functional import fma as fma
from mcftensor.optim import collage as collage
from mcftensor.selfcheck import SelfCheckError as SelfCheckError
from mcftensor.selfcheck import selfcheck as selfcheck
from mcftensor.tensor import MCFTensor as MCFTensor

__version__ = "0.1.0"
