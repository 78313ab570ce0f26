"""Operators on expansions: rows of the table in `dispatch/registry.py`, registered on import."""

from mcftensor.operators import batch_norm as batch_norm
from mcftensor.operators import collectives as collectives
from mcftensor.operators import comparison as comparison
from mcftensor.operators import elementwise as elementwise
from mcftensor.operators import floor_and_remainder as floor_and_remainder
from mcftensor.operators import fused as fused
from mcftensor.operators import powers_of_two as powers_of_two
from mcftensor.operators import structure as structure
