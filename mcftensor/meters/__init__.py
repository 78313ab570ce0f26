"""Meters: what updates lose, which weights are frozen, and what training takes in memory."""

from mcftensor.meters import edq as edq
from mcftensor.meters.auditing import audit as audit
from mcftensor.meters.edq import EDQ as EDQ
from mcftensor.meters.estimating import estimate as estimate
from mcftensor.meters.summary import Held as Held
from mcftensor.meters.summary import Summary as Summary
from mcftensor.meters.summary import summary as summary
