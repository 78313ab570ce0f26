"""Training: which states of an optimizer are expansions, sums of gradients, steps on copies."""
