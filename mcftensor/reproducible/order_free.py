"""Gradients whose bits do not depend on processes: sums of leaves that have no order."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import struct
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from mcftensor.kernels.execute import is_dense
from mcftensor.kernels.without_float64 import widest
from mcftensor.patches.distributed import REDUCES
from mcftensor.patches.optimizers import NORMS, WATCHING
from mcftensor.patches.table import calls, install_once
from mcftensor.reproducible.binned_sums import DTYPES, layout_of
from mcftensor.reproducible.order_free_exchange import (
    IDENTITY,
    BucketSum,
    OwnerExchange,
    all_gather,
    sum_over_replicas,
)
from mcftensor.reproducible.order_free_leaves import Leaves, most_kept
from mcftensor.reproducible.order_free_norm import norm_of
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.components import local, placed_like
from mcftensor.training.ddp_buckets import holds_fsdp1
from mcftensor.training.gradient_hooks import (
    Handle,
    HandleHook,
    RefusesDDP,
    assigned,
    at_end_of_backward,
    trained,
)
from mcftensor.training.step_in_backward import are_released


class OrderFree(Handle):
    """The handle of `order_free_gradients`; as a context manager it ends with the block.

    Attributes:
        microbatches: leaves of a step, on all processes.
    """

    def __init__(self, model: nn.Module, names: dict[Tensor, str], microbatches: int) -> None:
        self.microbatches = microbatches
        self._model = weakref.ref(model)
        self._names = names
        self._layout = layout_of(microbatches)
        self._leaves: dict[Tensor, Leaves] = {}
        self._given: dict[Tensor, weakref.ref[Tensor]] = {}  # gradients of complete steps
        self._passes = self._own = 0  # in this step; without padding
        self._complete = False
        self._task: int | None = None  # the backward pass that is running
        self._is_padding = self._is_digest = False
        self._undo = contextlib.ExitStack()
        self._ddp: nn.parallel.DistributedDataParallel | None = None
        self._exchange: OwnerExchange | None = None
        self._counts: list[int] | None = None
        self._memory: list[Tensor] = []
        self._waiting: list[tuple[BucketSum, torch.futures.Future[Tensor]]] = []

    # ---------------------------------------------------------------------------------- reports

    @property
    def passes(self) -> int:
        """Backward passes of this process in the step, those in `padding` too."""
        return self._passes

    def __repr__(self) -> str:
        if not self._active:
            return "OrderFree(removed)"
        kind = "DDP" if self._ddp else "fully_shard" if self._exchange else "one process"
        return f"OrderFree({kind}, {self.microbatches} microbatches, {self._passes} passes done)"

    # -------------------------------------------------------------------------------- internals

    def remove(self) -> None:
        """Let gradients be summed by torch again. Leaves of an unfinished step are lost."""
        super().remove()
        if self._exchange is not None:
            self._exchange.is_active = False
        if not self._complete:
            self.reset()
        self._undo.close()
        WATCHING.discard(self)

    def reset(self) -> None:
        """Drop the leaves of a step that is not complete, as after an error in backward, and all
        gradients.

        `zero_grad` does not: it finds no gradients before the last backward pass of a step.
        """
        for content in (self._leaves, self._given, self._waiting):
            content.clear()
        for p in self._names:
            p.grad = None
        self._passes = self._own = 0
        self._complete = False
        self._task = self._counts = None

    def look_at(self, optimizer: Optimizer) -> None:
        """Raise if an optimizer is about to step on gradients that are not complete.

        Raises:
            RuntimeError: leaves of a step are missing, or the model has other parameters.
        """
        model = self._model()
        if model is None:
            return
        current = trained(model)
        known = {id(p) for p in (*current, *self._names)}  # as compilers compare sets by values
        if not any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
            return
        if current.keys() != self._names.keys():
            raise RuntimeError(
                "order_free_gradients: the model has other trained parameters than when the handle "
                "was made; call it after fully_shard, and again after freezing"
            )
        if self._passes and not self._complete:
            raise RuntimeError(
                f"order_free_gradients: the step is not complete: {self!r}. Let the other "
                "microbatches run, the last one without no_sync(); or reset() the handle"
            )

    @contextlib.contextmanager
    def padding(self) -> Iterator[None]:
        """Return a context in which leaves count for nothing.

        A process with fewer microbatches than others runs backward passes in it, to take part in
        their collectives.
        """
        outer, self._is_padding = self._is_padding, True
        if self._exchange is not None:
            self._exchange.is_padding = True
        try:
            yield
        finally:
            self._is_padding = outer
            if self._exchange is not None:
                self._exchange.is_padding = outer

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of numbers over elements and processes, such as losses or counts of
        tokens.

        All processes call it, with as many numbers as each has.

        Args:
            values: losses of this process's microbatches, say, of any shape and real dtype.

        Returns:
            A tensor () in shape: of float64, or float32 without float64, the exact sum rounded
            once; or of int64, for integers.
        """
        own = values.detach().reshape(-1)
        exact = widest(values.device) if own.is_floating_point() else torch.int64
        numbers: list[float] = own.tolist()
        if self._ddp is not None or self._exchange is not None:
            every: list[Any] = [None] * dist.get_world_size(self._group())
            dist.all_gather_object(every, numbers, group=self._group())
            numbers = [x for part in every for x in part]
        total = _total(numbers, odd=exact == torch.float32)
        return torch.tensor(total, dtype=exact, device=values.device)

    def digest(self, backward: Callable[[], Any]) -> str:
        """Return a digest of the leaf of one backward pass on this process, which no step counts.

        Steps have the same bits only where each leaf has, whichever process computes it. Compute
        one and the same microbatch on all processes, or on two machines, and compare.

        Args:
            backward: makes the forward and backward pass. Under DistributedDataParallel or
                `fully_shard` give the model as it was before.

        Returns:
            Sixteen hexadecimal digits.

        Raises:
            ValueError: the model is in DistributedDataParallel or sharded.
        """
        if self._ddp is not None or self._exchange is not None:
            raise ValueError(
                "digest: what gradients are here is a sum over processes; make another handle for "
                "the model before it is in DistributedDataParallel or sharded"
            )
        self._is_digest = True
        try:
            for p in self._names:
                p.grad = None
            backward()
            text = hashlib.sha256()
            for p, name in self._names.items():
                if p.grad is not None:
                    pattern = p.grad.detach().contiguous().view(-1).view(torch.uint8)
                    text.update(name.encode() + pattern.cpu().numpy().tobytes())
        finally:
            self._is_digest = False
            for p in self._names:  # of a pass that has failed, too
                p.grad = None
        return text.hexdigest()[:16]

    # -------------------------------------------------------------------------------------- setup

    def attach(self) -> None:
        """Set all hooks."""
        model = self._model()
        assert model is not None
        inner = [m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)]
        if inner:
            (self._ddp,) = inner
            at = _attachments.get(self._ddp)
            if at is None:
                at = _Attachment()
                self._ddp.register_comm_hook(at, _order_free_sum)
                _attachments[self._ddp] = at
            at.handle, at.group = weakref.ref(self), self._group()
            self._undo.callback(self._ddp.register_forward_pre_hook(at.before_forward).remove)
            self._undo.callback(self._ddp.register_forward_hook(at.after_forward).remove)
        HandleHook(self).attach(self._names)
        self._note_given()
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        sharded = [m for m in model.modules() if fsdp and isinstance(m, fsdp.FSDPModule)]
        if sharded:
            self._exchange = OwnerExchange()
            install_once((REDUCES,))
            for module in sharded:
                module.set_custom_reduce_scatter(self._exchange)
        refusal = RefusesDDP(
            "order_free_gradients: the model has a handle, whose leaves are those of one process; "
            "call it again, with the model in DistributedDataParallel, and remove() this handle",
            self,
        )
        for module in model.modules():
            self._undo.enter_context(assigned(module, "_ddp_params_and_buffers_to_ignore", refusal))
        WATCHING.add(self)
        install_once(NORMS)

    def _group(self) -> Any:
        return self._ddp.process_group if self._ddp is not None else None

    # -------------------------------------------------------------------------------------- leaves

    def take(self, p: Tensor) -> None:
        """Take a finished gradient as the leaf of a backward pass."""
        grad = p.grad
        if not self._active or self._is_digest or grad is None:
            return
        if grad.requires_grad or local(grad).is_sparse:
            raise RuntimeError(
                f"order_free_gradients: the gradient of {self._names[p]} is sparse or has a graph; "
                "leaves are dense and have none (sparse=False, create_graph=False)"
            )
        if isinstance(x := local(grad), MCFTensor) or grad.dtype not in DTYPES:
            kind = f"an expansion in {x.format.name}" if isinstance(x, MCFTensor) else grad.dtype
            raise RuntimeError(
                f"order_free_gradients: the gradient of {self._names[p]} is {kind} of "
                f"shape {tuple(grad.shape)}; leaves are plain, of bfloat16, float16 or float32. "
                "Remove the handle of accumulate_gradients, or do not convert the model afterwards"
            )
        self._begin_pass(p, grad)
        leaves = self._leaves.get(p)
        if getattr(grad, "placements", ()) != getattr(p, "placements", ()):
            grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
        own = local(grad)
        if leaves is None:
            leaves = Leaves(own.numel(), self._layout, self._accumulates(own.dtype))
            self._leaves[p] = leaves
        received = None if self._exchange is None else self._exchange.received
        if received is not None:
            start = own.storage_offset()
            leaves.add(*[x[start : start + own.numel()] for x in received])
            if self._expected == 1 and self._replicas is None:
                self._give(p, leaves, own)
                return
        elif not self._is_padding:
            leaves.add(own.reshape(-1))
        if self._ddp is None:  # which takes a parameter without a gradient for an unused one
            p.grad = None

    def _begin_pass(self, p: Tensor, grad: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            if self._task is not None:
                raise RuntimeError(
                    "order_free_gradients: a backward pass has begun before the end of another, "
                    "which has failed, or is one of checkpointed activations. Call reset() on the "
                    "handle, and give checkpoints use_reentrant=False"
                )
            if self._complete:
                self._complete = False
                self._passes = self._own = 0
                self._counts = None
            self._require_no_release()
            self._task = task
            at_end_of_backward(self._end_pass)
        given = self._given.get(p)
        if given is not None and given() is grad:
            raise RuntimeError(
                f"order_free_gradients: {self._names[p]} has got another gradient after the step's "
                f"{self.microbatches} microbatches. Call zero_grad() with set_to_none=True between "
                "steps; and checkpointed activations need use_reentrant=False"
            )
        self._given.pop(p, None)

    def _require_no_release(self) -> None:
        """Raise RuntimeError where gradients that are to be released come after backward."""
        is_at_once = self._exchange is not None and self._expected == 1 and self._replicas is None
        if not is_at_once and are_released(self._names):
            raise RuntimeError(
                f"order_free_gradients: {self!r} gives gradients at the end of a backward pass, "
                "when step_in_backward releases no more. It does under fully_shard over a mesh of "
                "one dimension, with one microbatch a process; else remove() the handle of "
                "step_in_backward"
            )

    def _accumulates(self, dtype: torch.dtype) -> bool:
        """Whether a process will have too many leaves to keep them as they are."""
        return (
            self._replicas is not None
            or self._expected > most_kept(dtype)
            or (self._exchange is not None and self._expected > 1)
        )

    @property
    def _expected(self) -> int:
        """The most backward passes that a process has in a step."""
        if self._ddp is not None:
            world = dist.get_world_size(self._group())
        else:
            world = 1 if self._exchange is None else self._exchange.processes
        return -(-self.microbatches // world)

    @property
    def _replicas(self) -> Any:
        return None if self._exchange is None else self._exchange.replicas

    def _end_pass(self) -> None:
        self._task = None
        self._passes += 1
        self._own += not self._is_padding
        if self._ddp is not None:
            if self._counts is not None:  # all are reduced
                self._complete = True
                at_end_of_backward(self._note_given)  # when they have been copied
            else:
                for p in self._leaves:
                    p.grad = None
            return
        if self._passes < self._expected:
            return
        self._check_counts()
        self._complete = True
        if self._replicas is not None:
            self._give_over_replicas()
        for p, leaves in list(self._leaves.items()):
            own = local(p)
            self._give(p, leaves, torch.empty(own.numel(), dtype=p.dtype, device=own.device))

    def _note_given(self) -> None:
        """Record existing gradients of parameters, to which no leaves may be added."""
        self._given = {p: weakref.ref(p.grad) for p in self._names if p.grad is not None}

    def _check_counts(self) -> None:
        own = self._own
        if self._exchange is not None:
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, own)
            own = sum(every) * self._exchange.processes // len(every)
        self._require(own)

    def _require(self, leaves: int) -> None:
        if leaves != self.microbatches:
            raise RuntimeError(
                f"order_free_gradients: a step of {leaves} microbatches on all processes, not of "
                f"the {self.microbatches} that were announced"
            )

    def _give(self, p: Tensor, leaves: Leaves, out: Tensor) -> None:
        """Let a parameter have its sum."""
        del self._leaves[p]
        leaves.sum_into(out.view(-1))
        self._set(p, out)

    def _set(self, p: Tensor, own: Tensor) -> None:
        if p.grad is None:
            p.grad = _like(p, own)
        self._given[p] = weakref.ref(p.grad)

    def _give_over_replicas(self) -> None:
        chosen = [p for p in self._names if p in self._leaves]
        if not chosen:
            return
        if local(chosen[0]).device.type != "cpu":
            torch.accelerator.synchronize()
        parts = [self._leaves.pop(p).accumulated(local(p).device) for p in chosen]
        outs = [
            torch.empty(x.numel(), dtype=p.dtype, device=x.device)
            for p, x in zip(chosen, parts, strict=True)
        ]
        sizes = [x.numel() for x in parts]
        sum_over_replicas(self._replicas, torch.cat(parts), sizes, outs, self._layout)
        for p, out in zip(chosen, outs, strict=True):
            self._set(p, out)

    # ------------------------------------------------------------------------------------- buckets

    def before_forward(self, ddp: nn.parallel.DistributedDataParallel) -> None:
        """Give parameters gradients that only earlier microbatches used; DistributedDataParallel
        needs them.
        """
        if ddp.require_backward_grad_sync and ddp.find_unused_parameters:
            for p in self._leaves:
                start = torch.full(p.shape, IDENTITY, dtype=p.dtype, device=p.device)
                p.grad = start.as_strided(p.shape, p.stride()) if is_dense(p) else start

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Return the sum over processes of a bucket of DistributedDataParallel. It is complete when
        the last bucket is; in between, its leaves are in transit.
        """
        group = self._group()
        if self._counts is None:
            own = torch.tensor([self._own + (not self._is_padding)], device=bucket.buffer().device)
            every = own.new_empty(group.size())
            all_gather(every, own, group=group)
            self._counts = every.tolist()
            self._require(sum(self._counts))
        device = bucket.buffer().device
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=None if device.type == "cpu" else [device]
        )
        dtype = bucket.buffer().dtype
        new = BucketSum(
            group,
            [self._leaves.pop(p, None) for p in bucket.parameters()],
            [
                view.as_strided(p.shape, p.stride(), view.storage_offset()) if is_dense(p) else view
                for p, view in zip(bucket.parameters(), bucket.gradients(), strict=True)
            ],
            bucket.buffer(),
            self._counts,
            self._accumulates(dtype),
            self._layout,
            self._passes == 0 and not self._is_padding,
            self._memory,
        )
        if self._waiting:
            self._waiting[-1][0].owned()
        self._waiting.append((new, future))
        if bucket.is_last():
            new.owned()
            for one, its_future in self._waiting:
                its_future.set_result(one.result())
            self._waiting.clear()
        return future


def order_free_gradients(model: nn.Module, *, microbatches: int) -> OrderFree:
    r"""Have a step's gradient be a sum that has no order: the same bits on any number of processes.

    Floating-point sums depend on their order. Here the gradient of a step is the sum of N *leaves*,
    each the gradient of one backward pass, and its bits depend on the multiset of leaves alone: not
    on which process had which, on how many processes there are, on the order of backward passes,
    on buckets, or on the library of collectives. `p.grad` is None until the last backward pass of
    a step; then it is the sum.

    It is the sum, not the mean over processes. Divide each loss by a number of the whole step,
    `loss / N` or `loss / tokens_of_the_step`, which is the same on any number of processes. It
    replaces the
    average that DistributedDataParallel and `fully_shard` take.

    `torch.nn.utils.clip_grad_norm_` over these gradients measures a norm without order, in float32.

    Args:
        model: a module, its parameters expansions or plain, of bfloat16, float16 or float32; in
            DistributedDataParallel, or after `fully_shard`, if these are used.
        microbatches: N, the leaves of a step on all processes together, at most 524,287. Under
            DistributedDataParallel processes may have different numbers of them: all but the last
            run within `no_sync()`. Under `fully_shard` each has the same number, rounded up; those
            with fewer take a pass within `handle.padding()`.

    Returns:
        A handle. Its `remove()` ends this; so does the end of a `with` block. `total(values)` sums
        losses and token counts without order, `reset()` drops the leaves of an unfinished step.

    *Error*: let M be the largest magnitude of an element's leaves, and g = 34 for N to 3, 30 for 8,
    24 for 64, 19 for 1,000 and 15 for 10,000. Where no leaf has a bit below 2^(1 - g) M the result
    is the exact sum, rounded once; else it is rounded once from a sum within N 2^-g M of the exact
    one. The proof is in `mcftensor/reproducible/binned_sums.py`.

    *Cost*: with one leaf a process, the bytes of a reduction in bf16, and no memory. Up to four
    bf16 leaves a process (two float32 ones) are kept and sent as they are; more take accumulators
    of 8 bytes an element until the step is complete. Under `fully_shard` these are of the shard
    alone.

    *Source*: Demmel and Nguyen, 2015; Ahrens, Demmel and Nguyen, 2020.

    *Special values*: infinities and NaN propagate as in a sum of IEEE 754, without overflow in
    between; the sum of negative zeros is one. One NaN is as good as another.

    Raises:
        TypeError: `model` is not a module.
        ValueError: no parameter that requires grad, or one of another dtype; `microbatches` out of
            range; the model has a handle, steps in backward already, or holds several
            DistributedDataParallel modules; FullyShardedDataParallel holds it; a
            DistributedDataParallel or a sharded module around it reduces its gradients, or has a
            static graph and several microbatches a process.
        RuntimeError: in backward, where a step has more leaves than N, gradients were not cleared,
            are not plain, or cannot be released; in `optimizer.step()`, where it has fewer. The
            DistributedDataParallel has another communication hook.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> model = torch.nn.Linear(1, 1, bias=False).bfloat16()
        >>> handle = mcf.order_free_gradients(model, microbatches=3)
        >>> for x in (1.0, 256.0, -256.0):  # in bf16, one after the other, 0.0
        ...     model(torch.full((1, 1), x).bfloat16()).sum().backward()
        >>> model.weight.grad
        tensor([[1.]], dtype=torch.bfloat16)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"order_free_gradients: got {type(model).__name__}; give a module")
    names = trained(model)
    try:
        layout_of(microbatches)
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"order_free_gradients: microbatches={microbatches!r}; {error}") from None
    _check(model, names, microbatches)
    handle = OrderFree(model, names, microbatches)
    handle.attach()
    return handle


def _check(model: nn.Module, names: dict[Tensor, str], microbatches: int) -> None:
    name = type(model).__name__
    if not names:
        raise ValueError(f"order_free_gradients: {name} has no parameter that requires grad")
    for p, its_name in names.items():
        if p.dtype not in DTYPES:
            raise ValueError(
                f"order_free_gradients: {its_name} is {p.dtype} of shape {tuple(p.shape)}; sums "
                "without order are of bfloat16, float16 or float32"
            )
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    modules = list(model.modules())
    if holds_fsdp1(model):
        raise ValueError(
            "order_free_gradients: FullyShardedDataParallel reduces gradients itself; shard with "
            "torch.distributed.fsdp.fully_shard"
        )
    parallel = [m for m in modules if isinstance(m, nn.parallel.DistributedDataParallel)]
    if len(parallel) > 1:
        raise ValueError(
            f"order_free_gradients: {name} holds several DistributedDataParallel modules; call it "
            "for each"
        )
    _check_containers(model, names, modules)
    if fsdp and any(isinstance(m, fsdp.FSDPModule) for m in modules):
        plain = [its_name for p, its_name in names.items() if local(p) is p]
        if plain:
            raise ValueError(
                f"order_free_gradients: {plain[0]} is not sharded, and fully_shard does not reduce "
                "its gradient; freeze it, or shard it"
            )
    for m in parallel:
        if m.static_graph and microbatches > (most := m.process_group.size()):
            raise ValueError(
                "order_free_gradients: DistributedDataParallel with static_graph=True reduces its "
                f"first backward pass, within no_sync() too: {most} microbatches at most, not "
                f"{microbatches}; leave static_graph out"
            )
    if are_released(names):
        raise ValueError(
            "order_free_gradients: the model steps in backward already, by single leaves; call "
            "order_free_gradients before step_in_backward"
        )
    if any(not handle._names.keys().isdisjoint(names) for handle in WATCHING):
        raise ValueError("order_free_gradients: the model has a handle; remove() that one first")


def _check_containers(model: nn.Module, names: dict[Tensor, str], modules: list[nn.Module]) -> None:
    """Raise ValueError if something around the model reduces its gradients."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kinds = (nn.parallel.DistributedDataParallel, *((fsdp.FSDPModule,) if fsdp else ()))
    inside = [m for m in modules if isinstance(m, kinds)]
    reduced = {p for m in inside for p in m.parameters()}
    left = names.keys() - reduced
    if not left:
        return
    ids = set(map(id, modules))
    # A module has no reference to its parent, so all objects are searched. A proxy may have lost
    # its object, so `__class__` is not read.
    for outer in gc.get_objects():
        if issubclass(type(outer), kinds) and id(outer) not in ids:
            its_own = next((p for p in outer.parameters() if p in left), None)
            if its_own is not None:
                raise ValueError(
                    f"order_free_gradients: {names[its_own]} is also in a {type(outer).__name__} "
                    f"around this {type(model).__name__}, which reduces its gradient; give that "
                    "one"
                )


# --------------------------------------------------------------------------------------- installed


class _Attachment:
    """A reference from a DistributedDataParallel, which takes only one communication hook, to its
    current handle. A copy of the module has none.
    """

    handle: Callable[[], OrderFree | None] = staticmethod(lambda: None)
    group: Any = None

    def active(self) -> OrderFree | None:
        """Return the handle, if it has not been removed."""
        handle = self.handle()
        return handle if handle is not None and handle._active else None

    @torch._disable_dynamo
    def before_forward(self, ddp: nn.parallel.DistributedDataParallel, args: Any) -> None:
        """Tell the handle."""
        handle = self.active()
        if handle is not None:
            handle.before_forward(ddp)

    @torch._disable_dynamo
    def after_forward(self, ddp: nn.Module, args: Any, output: Any) -> None:
        """Tell the handle: gradients that are views of buckets may be new, as these are."""
        handle = self.active()
        if handle is not None and handle._complete:
            handle._note_given()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Attachment, ()


_attachments: weakref.WeakKeyDictionary[nn.Module, _Attachment] = weakref.WeakKeyDictionary()


def _order_free_sum(state, bucket):  # type: ignore[no-untyped-def]
    handle = state.active()
    if handle is not None:
        return handle.reduce(bucket)
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (  # noqa: PLC0415
        allreduce_hook,
    )

    return allreduce_hook(state.group, bucket)


def _arranged(given: dict[str, Any]) -> None:
    comm = given["reduce_scatter_comm"]
    if isinstance(comm, OwnerExchange):
        comm.arrange(given)


def _norm(tensors: list[Tensor]) -> Tensor | None:
    """Return the norm, if some of the tensors are gradients of a model with a handle."""
    own = {id(p.grad) for handle in WATCHING for p in handle._names if p.grad is not None}
    return norm_of(tensors) if any(id(x) in own for x in tensors) else None


calls.around_reduction = _arranged
calls.norm_of_gradients = _norm


def _like(p: Tensor, own: Tensor) -> Tensor:
    """Return a gradient for this process's shard of a parameter, in its shape and strides."""
    of_process = local(p)
    own = own.view(of_process.shape)
    if is_dense(of_process) and own.stride() != of_process.stride():
        strided = own.new_empty_strided(own.shape, of_process.stride())
        own = strided.copy_(own)
    return placed_like(p, own)


def _total(numbers: Sequence[float], odd: bool) -> float:
    """Return the exact sum, rounded to nearest or, to be rounded once more, to odd."""
    special = [x for x in numbers if x - x != 0]
    if special:
        return sum(special)
    try:
        total = sum(map(Fraction, numbers), Fraction(0))
        if all(isinstance(x, int) for x in numbers):
            return int(total)
        rounded = float(total)
        is_even = struct.unpack("q", struct.pack("d", rounded))[0] % 2 == 0
        if odd and is_even and total != Fraction(rounded):
            return math.nextafter(rounded, math.inf if total > rounded else -math.inf)
        return rounded
    except OverflowError:
        return float("inf") if total > 0 else float("-inf")
