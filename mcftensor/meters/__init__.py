"""Meters: what updates lose, which weights are frozen, and what training takes in memory."""

from typing import TYPE_CHECKING

from mcftensor import wings
from mcftensor.meters import edq as edq
from mcftensor.meters.edq import EDQ as EDQ

if TYPE_CHECKING:
    from mcftensor.tools import Summary as Summary
    from mcftensor.tools import TensorMemory as TensorMemory
    from mcftensor.tools import audit as audit
    from mcftensor.tools import estimate as estimate
    from mcftensor.tools import summary as summary

__getattr__ = wings.names_of_wings(
    __name__, dict.fromkeys(("Summary", "TensorMemory", "audit", "estimate", "summary"), "tools")
)
