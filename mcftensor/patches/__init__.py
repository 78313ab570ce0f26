"""Changes of the library to PyTorch and related packages, where no public hook exists.

`table` says what a patch is. Each of the other files defines some, as functions from what torch has
to what takes its place. What these call is theirs to look up at the time, or is handed in by those
who need the patch: this folder imports the tensor and its dispatch, and nothing built on them.
"""

from mcftensor.patches import adapters as adapters
from mcftensor.patches import distributed as distributed
from mcftensor.patches import distributions as distributions
from mcftensor.patches import dynamo as dynamo
from mcftensor.patches import masked as masked
from mcftensor.patches import objects as objects
from mcftensor.patches import optimizers as optimizers
from mcftensor.patches import registries as registries
from mcftensor.patches import states as states
from mcftensor.patches.table import PatchWarning as PatchWarning
