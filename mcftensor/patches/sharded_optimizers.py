"""Optimizers of torch that DTensor lacks operations for, or that need more of a matrix than a
shard."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcftensor.kernels.without_float64 import widest
from mcftensor.patches.table import by_name, patch
from mcftensor.tensor.components import format_of, local, placed_like
from mcftensor.tensor.shard_exchange import Division
from mcftensor.tensor.step_context import outside
from mcftensor.tensor.step_tensors import gradient_tensor

Lists = Sequence[list[Any]]


def _are_sharded(parameters: Sequence[Tensor]) -> bool:
    """Whether some of these parameters are DTensors of expansions."""
    return any(local(p) is not p and format_of(p) is not None for p in parameters)


# ------------------------------------------------------------------------------ element by element


@patch(
    "torch.optim.rprop._single_tensor_rprop",
    "torch.optim.rprop._multi_tensor_rprop",
    "torch.optim.sgd._fused_sgd",
    "torch.optim.adagrad._fused_adagrad",
    why="DTensor has no sharding rule for one of its operations, though the operation is "
    "elementwise.",
    loss="Rprop, and SGD and Adagrad with fused=True, raise for sharded expansions.",
)
def _on_shards(step: Callable[..., None]) -> Callable[..., None]:
    """Return the step of an elementwise optimizer, over the shards of this rank."""

    @functools.wraps(step)
    def over_shards(params: list[Tensor], *lists: list[Any], **options: Any) -> None:
        if not _are_sharded(params):
            step(params, *lists, **options)
            return
        own: list[list[Any]] = [[x if x is None else local(x) for x in xs] for xs in lists]
        step([local(p) for p in params], *own, **options)
        for xs, new in zip(lists, own, strict=True):  # SGD makes its buffers within
            for i, x in enumerate(xs):
                if x is None and new[i] is not None:
                    xs[i] = placed_like(params[i], new[i])

    return over_shards


# -------------------------------------------------------------------------------- whole matrices


def _in_turns(xs: Sequence[Any]) -> Iterator[tuple[Division | None, list[int]]]:
    """Group the tensors that are exchanged together: one for each rank, sharded over the same
    ranks. Whole tensors come one by one."""
    waiting: dict[Division, list[int]] = {}
    for i, x in enumerate(xs):
        division = Division.of(x)
        if division is None:
            yield None, [i]
            continue
        turn = waiting.setdefault(division, [])
        turn.append(i)
        if len(turn) == division.size:
            yield division, waiting.pop(division)
    yield from waiting.items()


@patch(
    "torch.optim._adafactor._single_tensor_adafactor",
    "torch.optim._adafactor._multi_tensor_adafactor",
    why="Adafactor needs norms of rows, of columns and of whole parameters. DTensor sums by "
    "shards, in another order, and lacks in-place operations.",
    loss="Adafactor raises for sharded expansions.",
)
def _by_owners(step: Callable[..., None]) -> Callable[..., None]:
    """Return a step that needs whole parameters and gradients, taken by the owner of each."""

    @functools.wraps(step)
    def by_owners(*lists: list[Any], **options: Any) -> None:
        if not _are_sharded(lists[0]):
            step(*lists, **options)
            return
        for division, turn in _in_turns(lists[0]):
            if division is None:
                step(*([local(xs[i]) for i in turn] for xs in lists), **options)
            else:
                _exchanged(step, division, [[xs[i] for i in turn] for xs in lists], options)

    return by_owners


def _exchanged(
    step: Callable[..., None], division: Division, lists: Lists, options: dict[str, Any]
) -> None:
    """Step each parameter on its owner; the written tensors are sent back to all ranks."""
    wholes = [division.to_owners(xs) for xs in lists]
    if division.rank < len(lists[0]):
        step(*([x] for x in wholes), **options)
    for i, (xs, whole) in enumerate(zip(lists, wholes, strict=True)):
        if i != 1:  # gradients
            for x, new in zip(xs, division.from_owners(whole, xs), strict=True):
                if x is not None:
                    x.copy_(new)


@patch(
    "torch.optim._muon._single_tensor_muon",
    why="DTensor computes each product of Muon's iteration over all ranks, with its own order of "
    "summation and leading terms only.",
    loss="Muon over sharded expansions is only as exact as bf16, and sharded bits differ from "
    "unsharded ones.",
)
def _orthogonalized_in_turns(step: Callable[..., None]) -> Callable[..., None]:
    """Return the step of Muon: only updates are sent, to owners that orthogonalize them."""

    @functools.wraps(step)
    def in_turns(
        params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], **options: Any
    ) -> None:
        if not _are_sharded(params):
            step(params, grads, buffers, **options)
            return
        for division, turn in _in_turns(params):
            given = [[xs[i] for i in turn] for xs in (params, grads, buffers)]
            if division is None:
                step(*([local(x) for x in xs] for xs in given), **options)
            else:
                _muon(division, *given, **options)

    return in_turns


def _muon(
    division: Division,
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    *,
    lr: Any,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_coefficients: tuple[float, float, float],
    ns_steps: int,
    eps: float,
    adjust_lr_fn: str | None,
    **others: Any,
) -> None:
    torch._foreach_lerp_(buffers, grads, 1 - momentum)
    pairs = zip(grads, buffers, strict=True)
    updates = [g.lerp(x, momentum) for g, x in pairs] if nesterov else buffers
    updates = [update.bfloat16() for update in updates]  # as the iteration begins
    whole = division.to_owners(updates)
    if whole is not None:
        iterate = torch.optim._muon._zeropower_via_newtonschulz
        whole = iterate(whole, ns_coefficients, ns_steps, eps)
    lr = float(lr)
    for p, update in zip(params, division.from_owners(whole, updates), strict=True):
        p.mul_(1 - lr * weight_decay)
        p.add_(update, alpha=-torch.optim._muon._adjust_lr(lr, adjust_lr_fn, p.shape))


@patch(
    "torch.optim._muon._zeropower_via_newtonschulz",
    why="It divides a bfloat16 argument by its norm in place. Without Nesterov's momentum the "
    "argument is the momentum buffer itself.",
    loss="Muon with nesterov=False divides its buffers by their norms at each step, as in plain "
    "bf16.",
    takes=("grad",),
)
@by_name
def _of_a_copy(orthogonalize: Callable[[], Tensor], given: dict[str, Any]) -> Tensor:
    if format_of(given["grad"]) is not None:
        given["grad"] = given["grad"].clone()
    return orthogonalize()


# ------------------------------------------------------------------------------- all at once


_OF_LBFGS: dict[str, str] = {
    "why": "LBFGS concatenates all gradients into a vector, and DTensor does not flatten uneven "
    "shards.",
    "loss": "LBFGS raises for sharded expansions.",
}


def _whole_gradient(p: Any) -> Any:
    """Return the parameter with its whole gradient on every rank, as LBFGS reads it."""
    if local(p) is p:
        return p
    grad, format = p.grad, format_of(p)
    whole = None if grad is None else outside(grad.full_tensor)
    if whole is not None and format is not None:
        whole = gradient_tensor(whole, format)
    return SimpleNamespace(grad=whole, numel=p.numel, new=local(p).new)


@patch("torch.optim.LBFGS._gather_flat_grad", takes=("self",), **_OF_LBFGS)
@by_name
def _gathered(gather: Callable[[], Tensor], given: dict[str, Any]) -> Tensor:
    optimizer = given["self"]
    if not _are_sharded(optimizer._params):
        return gather()
    stand_ins = {"_params": list(map(_whole_gradient, optimizer._params))}
    given["self"] = SimpleNamespace(**vars(optimizer) | stand_ins)
    return gather()


@patch("torch.optim.LBFGS._add_grad", takes=("self", "step_size", "update"), **_OF_LBFGS)
@by_name
def _added_to_shards(add: Callable[[], None], given: dict[str, Any]) -> None:
    optimizer, offset = given["self"], 0
    if not _are_sharded(optimizer._params):
        add()
        return
    for p in optimizer._params:
        part = given["update"][offset : offset + p.numel()].view(p.shape)
        offset += p.numel()
        if local(p) is not p:
            part = outside(functools.partial(_shard_of, part, p))
        p.add_(part, alpha=given["step_size"])


def _shard_of(whole: Tensor, p: Any) -> Tensor:
    everywhere = [torch.distributed.tensor.Replicate()] * p.device_mesh.ndim
    placed = type(p).from_local(whole, p.device_mesh, everywhere, run_check=False)
    return placed.redistribute(placements=p.placements)


def mean_over_ranks(parameters: Iterable[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a closure whose value is the mean over the ranks that share parameters, so that a line
    search takes the same steps on all ranks."""
    mesh = next((p.device_mesh for p in parameters if local(p) is not p), None)
    if mesh is None:
        return function

    @functools.wraps(function)
    def mean(*args: Any, **kwargs: Any) -> Any:
        loss = function(*args, **kwargs)
        device = torch.device(mesh.device_type)
        total = torch.as_tensor(loss, dtype=widest(device), device=device).detach().clone()
        for axis in range(mesh.ndim):
            dist.all_reduce(total, group=mesh.get_group(axis))
        total /= mesh.size()
        return total.to(loss) if isinstance(loss, Tensor) else total.item()

    return mean
