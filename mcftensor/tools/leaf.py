"""The forward and backward pass of a small network, and a digest of its gradients.

Unlike the computations of `known_results.py`, it uses torch's operations, whose bits differ between
processors, releases and numbers of threads. Machines that compute the leaves of one step must
agree.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mcftensor.tools.hard_inputs import full_bits, hashes
from mcftensor.tools.known_results import bits_digest

_WIDTH, _WORDS, _LENGTH, _BATCH = 96, 101, 33, 3


def leaf_digest(device: torch.device) -> str:
    """Return the digest of the gradients of one microbatch, in bfloat16."""
    return bits_digest(_gradients(device))


def _gradients(device: torch.device) -> tuple[Tensor, ...]:
    """Gradients of an attention and a GELU layer, with norms, an embedding and a cross entropy."""
    shapes = {
        "embedding": (_WORDS, _WIDTH),
        "queries, keys, values": (3 * _WIDTH, _WIDTH),
        "up": (4 * _WIDTH, _WIDTH),
        "down": (_WIDTH, 4 * _WIDTH),
        "gain": (_WIDTH,),
        "offset": (_WIDTH,),
    }
    weights = [
        (full_bits(torch.bfloat16, name, *shape) / 64).to(device).requires_grad_()
        for name, shape in shapes.items()
    ]
    words = ((hashes("words", _BATCH, _LENGTH) >> 8) % _WORDS).to(device)
    with torch.enable_grad():
        loss = _loss(weights, words)
        return torch.autograd.grad(loss, weights)


def _loss(weights: list[Tensor], words: Tensor) -> Tensor:
    embedding, projection, up, down, gain, offset = weights
    x = functional.embedding(words[:, :-1], embedding)
    normed = functional.layer_norm(x, (_WIDTH,), gain, offset)
    queries, keys, values = functional.linear(normed, projection).chunk(3, -1)
    shares = (queries @ keys.transpose(-1, -2) / _WIDTH**0.5).softmax(-1)
    x = x + shares @ values
    normed = functional.layer_norm(x, (_WIDTH,), gain, offset)
    x = x + functional.linear(functional.gelu(functional.linear(normed, up)), down)
    logits = functional.linear(x, embedding).float()
    return functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
