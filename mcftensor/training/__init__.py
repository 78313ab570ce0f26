"""Training: which states of an optimizer are expansions, sums of gradients, steps on copies."""

from mcftensor.training import narrow_states as narrow_states
