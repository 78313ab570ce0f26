"""Training: states that are expansions, sums of gradients, steps in backward, steps on copies."""

from mcftensor.training import step_warnings as step_warnings
