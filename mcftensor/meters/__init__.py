"""Meters: what updates lose, which weights are frozen, and what training takes in memory."""

from mcftensor.meters import edq as edq
from mcftensor.meters.auditing import audit as audit
from mcftensor.meters.edq import EDQ as EDQ
from mcftensor.meters.memory_summary import Summary as Summary
from mcftensor.meters.memory_summary import TensorMemory as TensorMemory
from mcftensor.meters.memory_summary import estimate as estimate
from mcftensor.meters.memory_summary import summary as summary
