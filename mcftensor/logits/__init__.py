"""Log-probabilities of logits, whose bits do not depend on the batch."""
