"""Results that do not depend on an order: exact sums, gradients, and losses of logits."""

from mcftensor.reproducible.exact_sums import cumsum as cumsum
from mcftensor.reproducible.exact_sums import dot as dot
from mcftensor.reproducible.exact_sums import mean as mean
from mcftensor.reproducible.exact_sums import norm as norm
from mcftensor.reproducible.exact_sums import sum as sum
from mcftensor.reproducible.log_probabilities import log_softmax as log_softmax
from mcftensor.reproducible.log_probabilities import logsumexp as logsumexp
from mcftensor.reproducible.log_probabilities import (
    selective_log_softmax as selective_log_softmax,
)
from mcftensor.reproducible.logit_losses import cross_entropy as cross_entropy
from mcftensor.reproducible.logit_losses import kl_div as kl_div
from mcftensor.reproducible.order_free import order_free_gradients as order_free_gradients
