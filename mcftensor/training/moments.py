"""What the states of optimizers are, by name."""

FIRST_MOMENTS = frozenset({"exp_avg", "momentum_buffer", "grad_avg", "exp_avg_diff", "mu", "m"})
"""Names of states that follow the gradient."""

SECOND_MOMENTS = frozenset(
    {"exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "acc_delta", "exp_inf", "nu", "v"}
)
"""Names of states that follow the square or magnitude of the gradient or of updates."""
