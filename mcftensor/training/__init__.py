"""Training: states that are expansions, sums of gradients, steps in backward, steps on copies."""

from mcftensor.training import narrow_states as narrow_states
