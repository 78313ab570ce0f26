"""EDQ, effective descent quality: what updates lose, measured on any optimizer.

1. `meter`: the hooks, and when to measure.
2. `reading`: one measurement, from the step on copies to the figures.
3. `report`: a table, a figure, TensorBoard.
"""

from mcftensor.meters.edq.meter import EDQ as EDQ
from mcftensor.meters.edq.meter import FrozenWeightWarning as FrozenWeightWarning
from mcftensor.meters.edq.readings import Reading as Reading
from mcftensor.meters.edq.report import to_tensorboard as to_tensorboard
