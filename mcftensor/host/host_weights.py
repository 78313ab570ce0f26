"""`weights`: the weights of a model as expansions in host memory, which the model follows."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from mcftensor.checkpoint.checkpoint_error import some
from mcftensor.convert import Overrides, as_expansion
from mcftensor.formats import Format, bf16x2, require_format
from mcftensor.host.transfers import Link
from mcftensor.kernels.execute import is_dense
from mcftensor.patches.objects import HOSTS, ZEROES
from mcftensor.patches.optimizers import CLIPS, RELEASING, WATCHING, parameters_of
from mcftensor.patches.table import install_once
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.components import any_format_of, local, on_local
from mcftensor.training.ddp_buckets import OF_DDP, pass_on_reduced, require_own_gradients
from mcftensor.training.gradient_hooks import (
    Handle,
    HandleHook,
    RefusesDDP,
    assigned,
    at_end_of_backward,
    beside_backward,
    call_hooks,
    is_beside_backward,
    trained,
)
from mcftensor.training.step_warnings import PlainParameterWarning, warn

Ends = dict[Callable[[], None], None]
"""What is to be called at the end of a backward pass, in order."""

Writes = list[tuple[Tensor, int]]
"""Tensors that are one in memory, and how often each was written to."""


class _Part(nn.Module):
    """A module of the host: its parameters have the names that they have in the model.

    Buffers and frozen parameters are the model's own, on the device.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse, since the model computes on the device."""
        raise TypeError(
            "mcf.host.weights holds the weights of a model and computes nothing; call the model"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Part:
        made = memo[id(self)] = _Part()
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            setattr(made, name, copy.deepcopy(getattr(self, name), memo))
        return made


class HostWeights(_Part, Handle):
    """The weights of a model on the host, by the names of the model; see `weights`.

    It is a module without a forward pass, for all that takes a module: `parameters()`,
    `named_parameters()`, `state_dict()`, `load_state_dict()`, `mcf.EDQ`, `mcf.step_in_backward`,
    `mcf.accumulate_gradients`, `mcf.deltas`, `mcf.meters.summary`. As a context manager it ends
    with the block.
    """

    def __init__(
        self,
        model: nn.Module,
        names: dict[Tensor, str],
        convert: Callable[[nn.Module], object],
        staging_bytes: int,
    ) -> None:
        super().__init__()
        self._model: Callable[[], nn.Module | None] = weakref.ref(model)
        self._names = names
        self._host = {p: nn.Parameter(on_local(_to_host, p.detach())) for p in names}
        copied: dict[nn.Module, _Part] = {model: self}
        _build(model, copied, self._host)
        convert(self)
        for p, host in self._host.items():
            if host.dtype != p.dtype:
                found = any_format_of(host)
                raise ValueError(
                    f"mcf.host.weights: {names[p]} of shape {tuple(p.shape)} is {p.dtype} on the "
                    f"device, and {found.name if found else 'a plain tensor'} has terms of "
                    f"{host.dtype}; choose a format of that base, or convert the model before"
                )
        for module, part in copied.items():  # what stays on the device
            own = module._parameters.items()
            part._parameters = {name: self._host.get(p, p) for name, p in own}  # type: ignore[arg-type]
            part._buffers = module._buffers
            part._non_persistent_buffers_set = module._non_persistent_buffers_set
        self._device = {id(h): p for p, h in self._host.items()}
        self._stepping: list[Tensor] = []  # the parameters that a step has gradients of
        self._lock = threading.RLock()  # backward runs one thread for each device
        self._jobs: list[Future[None]] = []
        self._ends: dict[int, Ends] = {}
        self._worker: ThreadPoolExecutor | None = None
        self._staging_bytes = staging_bytes
        self._links: dict[torch.device, Link] = {}
        self._sent: dict[Tensor, tuple[Writes, Writes]] = {}  # on the device, on the host
        self._undo = contextlib.ExitStack()

    # ---------------------------------------------------------------------------------- reports

    @property
    def device_bytes(self) -> int:
        """Bytes of the model on the device: the weights that it computes with, and buffers."""
        model = self._model()
        held = () if model is None else [*model.parameters(), *model.buffers()]
        return sum(local(x).nbytes for x in held)

    def __repr__(self) -> str:
        state = "" if self._active else ", removed"
        return f"HostWeights({len(self._names)} parameters{state})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "mcf.host.weights cannot be pickled; save its state_dict(), and load that into the "
            "weights of a model in another process"
        )

    # ------------------------------------------------------------------------------------ copies

    def push(self) -> None:
        """Copy the leading terms of weights that were written to on the host to the device.

        After `optimizer.step()` and `load_state_dict` this is done already. Call it after another
        program has written to the weights on the host.

        Raises:
            TypeError: a weight on the host has another dtype now than the one on the device.
            RuntimeError: a weight was written to on the device, too.
        """
        written = [p for p in self._names if not self._is_sent(p)]
        for p in written:
            if p in self._sent and _are_written(self._sent[p][0]):
                raise self._is_torn(p)
        self._push(written)
        self._wait()

    @torch.no_grad()
    def pull(self) -> None:
        """Take over the elements of weights that were written to on the device.

        Other elements keep all their terms. Writes under `torch.no_grad()` and `load_state_dict`
        of the model are seen by the next step; what is written to `p.data` is not. Call this after
        that.
        """
        for p in self._names:
            self._take_over(p)

    def _take_over(self, p: Tensor) -> None:
        own, host = local(p.detach()).to("cpu"), local(self._host[p])
        changed = _bits(own) != _bits(_leading(host))
        if changed.any():
            if not self._is_sent(p):
                raise self._is_torn(p)
            host[changed] = own[changed]
        self._note(p)

    def _is_torn(self, p: Tensor) -> RuntimeError:
        return RuntimeError(
            f"mcf.host.weights: {self._names[p]} of shape {tuple(p.shape)} was written to on the "
            "host and on the device; call push() after the one, before the other"
        )

    @torch.no_grad()
    def _push(self, parameters: Iterable[Tensor]) -> None:
        # Beside backward, the device has used a parameter before its gradient arrived.
        held_up = set() if is_beside_backward() else set(self._links.values())
        for p in parameters:
            source, target = _leading(local(self._host[p])), local(p.detach())
            if source.dtype != target.dtype:
                raise TypeError(
                    f"mcf.host.weights: {self._names[p]} of shape {tuple(p.shape)} is "
                    f"{source.dtype} on the host now, and the model computes in {target.dtype}; "
                    "change the format to one of that base"
                )
            self._sent.pop(p, None)  # until the copy is made
            link = self._link(target.device)
            if link is None or source.stride() != target.stride() or not is_dense(target):
                target.copy_(source)
            else:
                if link in held_up:
                    link.wait_before()
                    held_up.discard(link)
                link.up(source, target)
            self._note(p)

    def _note(self, p: Tensor) -> None:
        """Note that the device has the leading terms of a parameter."""
        self._sent[p] = _writes(p), _writes(self._host[p])

    def _is_sent(self, p: Tensor) -> bool:
        """Whether nobody has written to a parameter on the host since `_note`."""
        if p not in self._sent:
            return False
        known, now = self._sent[p][1], _writes(self._host[p])
        return all(x is y for (x, _), (y, _) in zip(known, now, strict=False)) and not _are_written(
            known
        )

    # --------------------------------------------------------------------------------- gradients

    def takes(self, p: Tensor) -> bool:
        """Whether a gradient of a parameter goes to the host."""
        return self._active and p in self._host

    def take(self, p: Tensor) -> None:
        """Send a finished gradient to the host."""
        if p.grad is None or p.grad.requires_grad or not self.takes(p):
            return  # one with a graph is about to be differentiated
        with self._lock:
            self._send(p, torch._C._current_graph_task_id())

    def _send(self, p: Tensor, backward: int) -> None:
        """Send a gradient to the host; `backward` is the number of a pass, or -1 outside of one."""
        if backward not in self._ends:
            self._ends[backward] = {}
            if backward >= 0:
                at_end_of_backward(lambda: self._finish(backward))
        submit = functools.partial(self._submit, self._ends[backward])
        assert p.grad is not None
        grad = p.grad.detach()
        own = local(grad)
        link = self._link(own.device)
        if link is None or type(own) is not Tensor or not is_dense(own):
            arriving = own.to("cpu", copy=own._is_view())
        else:
            arriving = link.down(own, submit)
        p.grad = None
        submit(self._arrive, self._host[p], on_local(lambda _: arriving, grad))

    def _arrive(self, host: Tensor, grad: Tensor) -> None:
        """Add a gradient on the host, and call the hooks of its parameter."""
        if host.grad is None:
            host.grad = grad
        elif grad.is_sparse:
            host.grad = host.grad + grad
        else:
            host.grad.add_(grad)
        call_hooks(host)

    def _submit(self, ends: Ends, function: Callable[..., None], *args: Any) -> None:
        """Call a function in the thread beside backward, after those before."""

        def work() -> None:
            with beside_backward(ends), torch.no_grad():
                function(*args)

        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "mcftensor-host")
        self._jobs.append(self._worker.submit(work))

    def _finish(self, backward: int) -> None:
        """Wait until all gradients have arrived, and raise what was raised beside backward."""
        jobs, self._jobs = self._jobs, []
        errors = [error for job in jobs if (error := job.exception()) is not None]
        ends = self._ends.pop(backward, {})
        try:
            if errors:
                raise errors[0]
            for end in ends:
                end()
        finally:
            self._wait()

    def _wait(self) -> None:
        """Have devices compute on after the copies to them."""
        for link in self._links.values():
            link.wait_after()

    def _link(self, device: torch.device) -> Link | None:
        if device.type == "cpu":
            return None
        if device not in self._links:
            self._links[device] = Link(device, self._staging_bytes)
        return self._links[device]

    # ------------------------------------------------------------------------------------- hooks

    def look_at(self, optimizer: Optimizer) -> None:
        """Before a step on these weights, see that they have what the device has."""
        if not self._active or is_beside_backward():
            return
        self._require_own(optimizer)
        if not self._concerns(optimizer):
            return
        self._require_known(optimizer)
        for p in self._names:
            if p.grad is not None:  # set by hand, or with a graph
                self._send(p, -1)
        self._finish(-1)
        self._ends.clear()  # of backward passes that raised
        self._take_writes()
        self._stepping = [h for h in self._host.values() if h.grad is not None]

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """Send what a step of all of an optimizer has stepped to the device."""
        if self._concerns(optimizer):
            self.after_step(self._stepping)

    def after_step(self, parameters: Iterable[Tensor]) -> None:
        """Send parameters that were stepped to the device; fused steps do not count writes."""
        stepped = [self._device[i] for h in parameters if (i := id(h)) in self._device]
        if self._active and stepped:
            failed = [p for p in self._names if p not in self._sent]
            self._push([*failed, *stepped])
            if not is_beside_backward():
                self._wait()

    @torch.no_grad()
    def _take_writes(self) -> None:
        """Take over what was written to the model, other than through `p.data`."""
        for p in self._names:
            if p in self._sent and _are_written(self._sent[p][0]):
                self._take_over(p)

    def _concerns(self, optimizer: Optimizer) -> bool:
        return any(id(p) in self._device for p in parameters_of(optimizer))

    def _require_own(self, optimizer: Optimizer) -> None:
        names = [self._names[p] for p in parameters_of(optimizer) if p in self._names]
        if names:
            name = type(optimizer).__name__
            raise RuntimeError(
                f"mcf.host.weights: {name} has {some(names)} of the model, whose gradients go "
                f"to the host. Make the optimizer of {name}(host.parameters(), ...)"
            )

    def _require_known(self, optimizer: Optimizer) -> None:
        model = self._model()
        current = {} if model is None else {p: name for name, p in model.named_parameters()}
        gone = [name for p, name in self._names.items() if p not in current]
        if gone:
            raise RuntimeError(
                f"mcf.host.weights: the model no longer has the parameters {some(gone)} whose "
                "weights are on the host. load_state_dict(assign=True), for one, makes parameters "
                "anew. Make the weights on the host, and the optimizer, after that"
            )
        stepped = {id(p) for p in parameters_of(optimizer)}  # which warns of them itself
        new = [
            name
            for p, name in current.items()
            if p.grad is not None and p not in self._host and id(p) not in stepped
        ]
        if new:
            warn(
                f"mcf.host.weights: the gradients of {some(new)} stay on the device, since these "
                "parameters were added or unfrozen later, and their weights are not on the host. "
                "Make the weights on the host, and the optimizer, when all parameters are there",
                PlainParameterWarning,
            )

    def require_held(self, parameters: list[Tensor]) -> None:
        """Raise RuntimeError where gradients that are to be clipped are on the host."""
        if not self._active:
            return
        names = [self._names[p] for p in parameters if p.grad is None and p in self._names]
        if names:
            raise RuntimeError(
                f"clip_grad_norm_ or clip_grad_value_: the gradients of {some(names)} are on the "
                "host. Clip the parameters of mcf.host.weights: "
                "clip_grad_norm_(host.parameters(), max_norm)"
            )

    def zero_gradients_of(self, module: nn.Module, set_to_none: bool) -> None:
        """Clear the gradients of parameters of a module."""
        for p in module.parameters():
            host = self._host.get(p)
            if host is not None and host.grad is not None:
                host.grad = None if set_to_none else torch.zeros_like(host.grad)

    def remove(self) -> None:
        """Leave gradients on the device from now on; weights on the host stay as they are."""
        super().remove()
        self._finish(-1)
        self._undo.close()
        for handles in (WATCHING, RELEASING, HOSTS):
            handles.discard(self)
        if self._worker is not None:
            self._worker.shutdown()

    def after_loading(self) -> None:
        """Send what `load_state_dict` has loaded to the device."""
        if self._device.keys() != {id(h) for h in self.parameters() if h.requires_grad}:
            raise RuntimeError(
                "mcf.host.weights: load_state_dict(assign=True) makes parameters anew, which the "
                "optimizer and the model do not have; leave out assign=True"
            )
        self.push()

    def attach_to(self, model: nn.Module) -> None:
        """Set all hooks, and keep other programs from what would go wrong."""
        hook = HandleHook(self)
        if isinstance(model, DistributedDataParallel):
            pass_on_reduced(model, self.takes, hook)
        else:
            hook.attach(self._names)
        refusal = RefusesDDP(f"mcf.host.weights: {OF_DDP}", self)
        for module in model.modules():
            self._undo.enter_context(assigned(module, "_ddp_params_and_buffers_to_ignore", refusal))
        self.register_load_state_dict_post_hook(lambda host, *unused: host.after_loading())
        self.register_state_dict_pre_hook(lambda host, *unused: host._take_writes())
        for handles in (WATCHING, RELEASING, HOSTS):
            handles.add(self)


def weights(
    model: nn.Module,
    format: Format | str | None = None,
    *,
    overrides: Overrides | None = None,
    lr: float | None = None,
    staging_bytes: int = 1 << 26,
) -> HostWeights:
    """Keep the weights of a model as expansions on the host, where any optimizer steps them.

    The device has the plain model: the leading terms, with which it computes, and a gradient at a
    time. Gradients go down to the host as backward makes them, and the leading terms of stepped
    weights go up. Tails and optimizer states are in host memory alone. Weights and states have the
    bits of the same optimizer over `as_expansion(model, format)`, for the same gradients.

    `optimizer.step()` begins when backward is through. With `mcf.step_in_backward(host, optimizer)`
    weights step in a thread of the host while backward goes on, and gradients are released there
    too. With `mcf.accumulate_gradients(host)` microbatches are summed without rounding.

    Args:
        model: a plain module in the dtype it computes in, on its device; after `fully_shard`, if
            that is used, so that each rank's host has its own shards; or a
            DistributedDataParallel.
        format: of parameters in the dtype of its base, as in `as_expansion`: by default bf16x2, and
            bf16x3 for some. Parameters of another dtype, such as float32 norms in a bf16 model,
            are plain on the host, in that dtype. Frozen parameters and buffers stay on the device.
        overrides: as in `as_expansion`.
        lr: as in `as_expansion`.
        staging_bytes: bytes of pinned host memory for copies, for each device. The weights
            themselves are not pinned.

    Returns:
        A module with the parameters on the host by the names of the model, for an optimizer,
        `state_dict()` and everything else that takes a module. Its `remove()` ends this; so does
        the end of a `with` block.

    Raises:
        TypeError: `model` is not a module; a parameter that `as_expansion` rejects.
        ValueError: no parameter that requires grad in the base of the format; a parameter that is
            an expansion already, has no data, or has gradients taken by another handle; a format
            of another base; FullyShardedDataParallel, or a DistributedDataParallel within the
            model or with unused parameters.
        RuntimeError: in `optimizer.step()`, where the model has lost a parameter, or the optimizer
            has parameters of the model; where those of the model are clipped, whose gradients are
            on the host.

    *Cost*: of the link, 4 bytes a parameter and step. On the host `bf16i8` and "compact" states
    take 5.1 bytes a parameter, `bf16i16` and float32 states 12, and 2 for gradients unless they
    step in backward.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
        >>> host = mcf.host.weights(model, mcf.bf16i8)
        >>> optimizer = mcf.collage(torch.optim.AdamW(host.parameters(), fused=True), "compact")
        >>> model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        >>> model.weight.grad is None, host.weight.grad.dtype
        (True, torch.bfloat16)
        >>> optimizer.step()
        >>> bool((model.weight == host.weight).all())
        True

    !!! note
        - `clip_grad_norm_(host.parameters(), 1.0)`, `optimizer.zero_grad()`; `model.zero_grad()`
          works too.
        - Writes to the model on the device, such as `load_state_dict` or clamping under
          `torch.no_grad()`, are taken over by the next step, element by element. Those to `p.data`
          are seen after `host.pull()` alone.
        - Checkpoints of `host.state_dict()` load into a model of expansions, and the reverse.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"mcf.host.weights: got {type(model).__name__}; give a module")
    if not staging_bytes > 0:
        raise ValueError(f"mcf.host.weights: staging_bytes={staging_bytes!r}; give bytes above 0")
    require_own_gradients("mcf.host.weights", model)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    names = trained(inner)
    base = bf16x2.dtype if format is None else require_format(format, "mcf.host.weights").dtype
    if not overrides and not any(p.dtype == base for p in names):
        raise ValueError(
            f"mcf.host.weights: {type(model).__name__} has no parameter of {base} that requires "
            f"grad; convert the model first, with model.to({base})"
        )
    for p, name in names.items():
        found = any_format_of(p)
        if found is not None:
            raise ValueError(
                f"mcf.host.weights: {name} of shape {tuple(p.shape)} is in {found.name} already; "
                "make the weights of a plain model, and load the expansions into them: "
                "state = model.state_dict(); mcf.as_plain(model); "
                "host = mcf.host.weights(model); host.load_state_dict(state)"
            )
        if p.is_meta or is_lazy(p):
            raise ValueError(
                f"mcf.host.weights: {name} has no data yet; materialize the model first"
            )
    for handle in RELEASING:
        if not handle._names.keys().isdisjoint(names):
            raise ValueError(
                f"mcf.host.weights: {handle!r} takes the gradients of this model; remove() that "
                "one first. To step in backward, give host to mcf.step_in_backward"
            )
    install_once(CLIPS)
    install_once(ZEROES)
    plain = {name: None for p, name in names.items() if p.dtype != base}
    chosen: Overrides = {**(overrides or {}), **plain}
    host = HostWeights(
        inner,
        names,
        lambda part: as_expansion(part, format, overrides=chosen, lr=lr),
        staging_bytes,
    )
    host.attach_to(model)
    host.push()
    return host


def _build(module: nn.Module, parts: dict[nn.Module, _Part], host: dict[Tensor, Any]) -> None:
    """Give the part of a module its parameters on the host, and parts for its children."""
    part = parts[module]
    part._parameters = {name: host[p] for name, p in module._parameters.items() if p in host}
    for name, child in module._modules.items():
        if child is not None and child not in parts:
            parts[child] = _Part()
            _build(child, parts, host)
        part._modules[name] = None if child is None else parts[child]


def _to_host(x: Tensor) -> Tensor:
    return x.to("cpu", copy=True)


def _leading(x: Tensor) -> Tensor:
    """Return what a model computes with."""
    return x.compute_tensor if isinstance(x, MCFTensor) else x.detach()


def _writes(x: Tensor) -> Writes:
    """Return a tensor, its shard and its components: each kind of write counts in one of them."""
    own = local(x)
    parts = own._held() if isinstance(own, MCFTensor) else ()
    return [(y, y._version) for y in (x, own, *parts)]


def _are_written(known: Writes) -> bool:
    return any(x._version != count for x, count in known)


def _bits(x: Tensor) -> Tensor:
    return x.view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(x.element_size(), torch.int64)
    )
