"""EDQ, effective descent quality: what updates lose, measured on any optimizer."""

from mcftensor.meters.edq.diagnosis import Diagnosis as Diagnosis
from mcftensor.meters.edq.meter import EDQ as EDQ
from mcftensor.meters.edq.meter import FrozenWeightWarning as FrozenWeightWarning
from mcftensor.meters.edq.readings import Reading as Reading
from mcftensor.meters.edq.readings import StateReading as StateReading
from mcftensor.meters.edq.report import to_tensorboard as to_tensorboard
