"""Changes of the library to PyTorch and related packages, where no public hook exists.

`table` says what a patch is. Each of the other files defines some, as functions from what torch has
to what takes its place. This folder imports the tensor and its dispatch, and nothing built on them:
patches that need files of checkpoints are in `checkpoint/`, and `calls` has functions of training.
"""

from mcftensor.patches import distributed as distributed
from mcftensor.patches import dynamo as dynamo
from mcftensor.patches import objects as objects
from mcftensor.patches import optimizers as optimizers
from mcftensor.patches import rounding_functions as rounding_functions
from mcftensor.patches import states as states
from mcftensor.patches.table import PatchWarning as PatchWarning
