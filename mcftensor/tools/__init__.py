"""Tools: which weights are frozen, what training takes in memory, and whether a device is right."""

from mcftensor.tools.auditing import audit as audit
from mcftensor.tools.known_results import leaf_digest as leaf_digest
from mcftensor.tools.memory_summary import Summary as Summary
from mcftensor.tools.memory_summary import TensorMemory as TensorMemory
from mcftensor.tools.memory_summary import estimate as estimate
from mcftensor.tools.memory_summary import summary as summary
