"""What older releases of torch lack, over plain tensors too: marks of the tests that need it."""

import pytest
import torch


def _since(release: str, lack: str) -> pytest.MarkDecorator:
    """Skip on releases before one; on the page of limits the lack is told too."""
    return pytest.mark.skipif(torch.__version__ < release, reason=f"before torch {release}, {lack}")


GRAD_DTYPE = _since("2.10", "gradients have the dtype of their parameters")
MEANS_OF_SHARDS = _since("2.10", "DTensor averages the means of shards of unlike sizes")
COMPILED_SETS = _since("2.10", "the compiler reads no set of weak references")
LDEXP = _since("2.11", "torch.ldexp is a product with a power of two, rounded to the format")
GRADIENTS_OF_AMINMAX = _since("2.13", "aminmax has no gradient")
COMPILED_ATTRIBUTES = _since("2.13", "compiled steps set no attributes of optimizers")
