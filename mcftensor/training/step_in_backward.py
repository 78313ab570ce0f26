"""Steps in backward: a parameter steps as soon as its gradient is there, which is then freed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from mcftensor.checkpoint.checkpoint_error import some
from mcftensor.patches.optimizers import CLIPS, RELEASING
from mcftensor.patches.table import install_once
from mcftensor.tensor.components import local
from mcftensor.training.ddp_buckets import OF_DDP, pass_on_reduced, require_own_gradients
from mcftensor.training.gradient_hooks import (
    Handle,
    HandleHook,
    RefusesDDP,
    assigned,
    at_end_of_backward,
    trained,
)
from mcftensor.training.separability import step_alone, why_inseparable
from mcftensor.training.shadow import require_single
from mcftensor.training.step_warnings import warn_of_plain_parameters


class StepInBackwardError(RuntimeError):
    """A step in backward has failed, or would be a second one before `optimizer.step()`.

    Attributes:
        stepped: names of the parameters that have stepped since `optimizer.step()`.
        failed: names of those whose step has raised. They may have stepped, and their gradients
            are gone.
    """

    def __init__(self, message: str, stepped: list[str], failed: list[str]) -> None:
        super().__init__(message)
        self.stepped = stepped
        self.failed = failed


class StepInBackward(Handle):
    """The handle of `step_in_backward`; as a context manager it ends with the block.

    Attributes:
        norm: the norm of all gradients of the latest `measure_norm()`, or step with
            `clip_by_previous_norm`; None before. It may be set, as when a run is resumed.
    """

    def __init__(
        self,
        names: dict[Tensor, str],
        optimizer: Optimizer,
        clip_value: float | None,
        clip_by_previous_norm: float | None,
        bucket_bytes: int,
    ) -> None:
        self.norm: Tensor | None = None
        self._names = names
        self._optimizer = optimizer
        self._clip_value = clip_value
        self._max_norm = clip_by_previous_norm
        self._bucket_bytes = bucket_bytes
        self._mode: Literal["step", "hold", "measure"] = "step"
        self._lock = threading.RLock()  # backward runs one thread for each device
        self._groups: dict[Tensor, int] = {}  # of this iteration, the groups of parameters
        self._stepped: dict[Tensor, None] = {}
        self._failed: dict[Tensor, None] = {}
        self._norms: dict[Tensor, Tensor] = {}
        self._measured: tuple[float, Tensor] | None = None
        self._buckets: dict[Any, dict[Tensor, None]] = {}  # by streams
        self._bytes = 0
        self._undo = contextlib.ExitStack()

    # ---------------------------------------------------------------------------------- reports

    @property
    def stepped(self) -> list[str]:
        """Names of the parameters that have stepped since the last `optimizer.step()`."""
        return [self._names[p] for p in self._stepped]

    @property
    def failed(self) -> list[str]:
        """Names of the parameters whose step has raised since the last `optimizer.step()`."""
        return [self._names[p] for p in self._failed]

    def __repr__(self) -> str:
        count = f"{len(self._stepped)} of {len(self._names)} parameters have stepped"
        state = count if self._active else "removed"
        return f"StepInBackward({type(self._optimizer).__name__}, {state})"

    # -------------------------------------------------------------------------------- internals

    def remove(self) -> None:
        """Let backward leave gradients to `optimizer.step()`, as ever."""
        super().remove()
        self._undo.close()
        RELEASING.discard(self)

    def no_step(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward sums gradients without steps, as usual.

        For all microbatches but the last, and for steps that need all gradients at once: what has
        a gradient when `optimizer.step()` is called steps there.
        """
        return self._in_mode("hold")

    @contextlib.contextmanager
    def measure_norm(self, max_norm: float) -> Iterator[None]:
        """Return a context in which backward measures gradients and drops them.

        The next backward clips by the norm of all gradients, as `torch.nn.utils.clip_grad_norm_`
        would, and steps.

        It costs a second backward, with `retain_graph=True` in the first, or a second forward too.

        Args:
            max_norm: the largest norm of all gradients together after clipping.

        Raises:
            ValueError: gradients exist already, as of microbatches, and would be dropped.
            RuntimeError: no gradient was measured.
        """
        held = [name for p, name in self._names.items() if p.grad is not None]
        if held:
            raise ValueError(
                f"measure_norm: {some(held)} have gradients, which would be dropped. Over "
                "several microbatches let all run within no_step(), clip with "
                "torch.nn.utils.clip_grad_norm_, and call optimizer.step()"
            )
        self._norms.clear()
        try:
            with self._in_mode("measure"):
                yield
            if not self._norms:
                raise RuntimeError("measure_norm: no gradient was measured; call backward within")
            self.norm = self._total_norm()
            self._measured = max_norm, self.norm
        finally:
            self._norms.clear()

    @contextlib.contextmanager
    def _in_mode(self, mode: Literal["hold", "measure"]) -> Iterator[None]:
        outer, self._mode = self._mode, mode
        try:
            yield
        finally:
            self._mode = outer

    # ------------------------------------------------------------------------------------- hooks

    def takes(self, p: Tensor) -> bool:
        """Whether a gradient of a parameter is to be taken."""
        return self._active and self._mode != "hold" and p in self._names

    def take(self, p: Tensor) -> None:
        """Take a finished gradient, and step if it is complete."""
        grad = p.grad
        # A gradient with a graph is about to be differentiated, and so may be the parameter.
        if not self._active or self._mode == "hold" or grad is None or grad.requires_grad:
            return
        with self._lock:
            if not self._groups:
                self._groups = _groups_of(self._optimizer)
            if p not in self._groups:
                return
            if p in self._stepped or p in self._failed:
                p.grad = None
                raise self._error(
                    f"{self._names[p]} has got another gradient after its step. Gradients of "
                    "several backward passes are summed within no_step(), but for the last; "
                    "optimizer.step() ends an iteration, also one that has failed; and where "
                    "checkpointed activations share parameters, they need use_reentrant=False"
                )
            if self._mode == "measure":
                self._norms[p] = torch.linalg.vector_norm(grad)
                p.grad = None
                return
            on_cpu = grad.device.type == "cpu"
            stream = None if on_cpu else torch.accelerator.current_stream(grad.device)
            self._buckets.setdefault(stream, {})[p] = None
            self._bytes += local(grad).numel() * grad.element_size()
            if self._bytes >= self._bucket_bytes:
                self._step(self._buckets.pop(stream))
                self._bytes = 0
            else:
                at_end_of_backward(self._step_all)

    def _step_all(self) -> None:
        """Step the remaining parameters at the end of backward."""
        with self._lock:
            self._bytes = 0
            while self._buckets:
                stream, parameters = self._buckets.popitem()
                with _on(stream):
                    self._step(parameters)

    def _step(self, parameters: Iterable[Tensor]) -> None:
        """Step some parameters alone, and free their gradients."""
        chosen: dict[int, list[Tensor]] = {}
        for p in parameters:
            if p.grad is not None:  # else somebody has dropped it
                chosen.setdefault(self._groups[p], []).append(p)
        stepping = [p for group in chosen.values() for p in group]
        self._failed |= dict.fromkeys(stepping)
        try:
            with torch.no_grad():
                self._clip(stepping)
            step_alone(self._optimizer, chosen)
        except Exception as error:
            raise self._error(
                f"the step of {some([self._names[p] for p in stepping])} raised "
                f"{type(error).__name__}: {error}"
            ) from error
        else:
            for p in stepping:
                del self._failed[p]
            self._stepped |= dict.fromkeys(stepping)
        finally:
            for p in stepping:
                p.grad = None

    def _clip(self, parameters: Sequence[Tensor]) -> None:
        if self._max_norm is not None:
            for p in parameters:
                assert p.grad is not None
                self._norms[p] = torch.linalg.vector_norm(p.grad)
        # As PyTorch's clipping, whose own functions are patched to reject released gradients.
        clip = self._measured
        if clip is None and self._max_norm is not None and self.norm is not None:
            clip = self._max_norm, self.norm
        factor = None if clip is None else torch.clamp(float(clip[0]) / (clip[1] + 1e-6), max=1.0)
        for p in parameters:
            assert p.grad is not None
            if factor is not None:
                p.grad.mul_(factor.to(p.grad.device))
            if self._clip_value is not None:
                p.grad.clamp_(-self._clip_value, self._clip_value)

    def _total_norm(self) -> Tensor:
        return get_total_norm([self._norms[p] for p in self._names if p in self._norms])

    def _error(self, what: str) -> StepInBackwardError:
        return StepInBackwardError(
            f"step_in_backward: {what}. {len(self._stepped)} of {len(self._names)} parameters have "
            "stepped in this iteration, see the handle's stepped and failed. Load a checkpoint, or "
            "call optimizer.step() to go on from here",
            self.stepped,
            self.failed,
        )

    def require_held(self, parameters: list[Tensor]) -> None:
        """Raise RuntimeError where gradients that are to be clipped have been released."""
        gone = {*self._stepped, *self._failed, *self._norms}
        names = [self._names[p] for p in parameters if p.grad is None and p in gone]
        if names:
            raise RuntimeError(
                f"clip_grad_norm_ or clip_grad_value_: the gradients of {some(names)} were "
                "released in backward, and there is nothing left to clip. Give the norm to "
                "step_in_backward, as clip_by_previous_norm or clip_value, or to the handle's "
                "measure_norm(max_norm), and leave out this call"
            )

    # --------------------------------------------------------------------------------- iterations

    def attach_to(self, model: nn.Module) -> None:
        """Set all hooks, and keep other programs from what would go wrong."""
        optimizer, gradients = self._optimizer, _Gradients(self)
        if isinstance(model, DistributedDataParallel):
            pass_on_reduced(model, gradients.wants, gradients)
        else:
            gradients.attach(self._names)
        for handle in (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._end),
            optimizer.register_load_state_dict_post_hook(self._end),
        ):
            self._undo.callback(handle.remove)
        # GradScaler gives its scale to optimizers that say so, which _before_step can see.
        self._undo.enter_context(assigned(optimizer, "_step_supports_amp_scaling", True))
        refusal = RefusesDDP(f"step_in_backward: {OF_DDP}")
        for module in model.modules():
            self._undo.enter_context(assigned(module, "_ddp_params_and_buffers_to_ignore", refusal))
        RELEASING.add(self)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if getattr(optimizer, "grad_scale", None) is not None:
            raise TypeError(
                "step_in_backward: GradScaler wants to see all gradients before any parameter "
                "steps, and they have stepped by scaled ones. Train in bfloat16, which needs no "
                "scaling, or take off the handle"
            )

    def _end(self, optimizer: Optimizer, *arguments: Any) -> None:
        """End an iteration, or discard the state from before a checkpoint."""
        if self._max_norm is not None and self._norms:
            self.norm = self._total_norm()
        for content in (self._groups, self._stepped, self._failed, self._norms, self._buckets):
            content.clear()
        self._measured = None
        self._bytes = 0


def step_in_backward(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    clip_value: float | None = None,
    clip_by_previous_norm: float | None = None,
    bucket_bytes: int = 1 << 22,
) -> StepInBackward:
    """Step each parameter in backward, as soon as its gradient is complete, and free the gradient.

    Gradients of the whole model are never in memory at once. The training loop stays the same:
    `optimizer.step()` ends an iteration. It steps parameters that still have a gradient, calls
    the hooks on steps, and counts for schedulers. Parameters and states have the same bits as
    after a step that follows backward, except that stochastic rounding, and optimizers that draw
    numbers, draw them in another order.

    Args:
        model: a module, its parameters expansions or plain; after `fully_shard`, if that is used;
            or a DistributedDataParallel, whose buckets still hold all gradients.
        optimizer: an optimizer of its parameters that updates each parameter from its own gradient
            only. This is tested on small tensors.
        clip_value: clamp gradients between minus and plus this value.
        clip_by_previous_norm: clip to this norm as `clip_grad_norm_` does, by the norm that all
            gradients had in the step *before*. The first step is not clipped. For the
            norm of the same step see `measure_norm`.
        bucket_bytes: gradients wait until there are so many bytes of them, or backward ends, and
            their parameters step together.

    Returns:
        A handle. Its `remove()` ends this; so does the end of a `with` block. Its `no_step()` and
        `measure_norm(max_norm)` are contexts for backward passes that do not step.

    Raises:
        TypeError: `model` is not a module, or `optimizer` not an optimizer that calls hooks.
        ValueError: the optimizer needs all gradients at once, or steps other optimizers; it has no
            parameter of the model that requires grad; the model or the optimizer has a handle; the
            model is in FullyShardedDataParallel, or a DistributedDataParallel that looks for unused
            parameters or is only a part of it; an option that is not above 0.
        StepInBackwardError: raised in backward, where the step of a parameter raises, and where a
            parameter gets a second gradient before `optimizer.step()`.

    *Cost*: a bucket of gradients, and the largest of them. Steps are as many operations as ever.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> model = mcf.as_expansion(torch.nn.Linear(3, 2))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> handle = mcf.step_in_backward(model, optimizer)
        >>> model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        >>> sorted(handle.stepped), model.weight.grad
        (['bias', 'weight'], None)
        >>> optimizer.step()
        >>> handle.stepped
        []

    References:
        K. Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited
        Resources" (LOMO), 2023, arXiv:2306.09782, for plain SGD.
    """
    for name, given in (
        ("clip_value", clip_value),
        ("clip_by_previous_norm", clip_by_previous_norm),
    ):
        if given is not None and not given > 0:
            raise ValueError(f"step_in_backward: {name}={given!r}; give a number above 0")
    if bucket_bytes < 0:
        raise ValueError(f"step_in_backward: bucket_bytes={bucket_bytes!r}; give 0 or more")
    _check_model(model)
    require_single("step_in_backward", optimizer, "give the one in {}")
    name = type(optimizer).__name__
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise TypeError(f"step_in_backward: {name} does not call hooks on its step")
    reason = why_inseparable(optimizer)
    if reason is not None:
        raise ValueError(
            f"step_in_backward: {name} cannot step one parameter after another: {reason}"
        )
    own = _groups_of(optimizer)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    names = {p: name for p, name in trained(inner).items() if p in own}
    if not names:
        raise ValueError(
            f"step_in_backward: this {name} has no parameter of "
            f"{type(model).__name__} that requires grad; make it after the model is sharded"
        )
    for other in _handles():
        if other._optimizer is optimizer or not other._names.keys().isdisjoint(names):
            raise ValueError(
                "step_in_backward: this model or optimizer has a handle; remove() that one first"
            )
    warn_of_plain_parameters(optimizer)  # whose first step comes before optimizer.step()
    install_once(CLIPS)
    handle = StepInBackward(names, optimizer, clip_value, clip_by_previous_norm, bucket_bytes)
    handle.attach_to(model)
    return handle


def _handles() -> list[StepInBackward]:
    return [handle for handle in RELEASING if isinstance(handle, StepInBackward)]


def are_released(parameters: Iterable[Tensor]) -> bool:
    """Whether some of these parameters step in backward."""
    chosen = set(parameters)
    return any(not chosen.isdisjoint(handle._names) for handle in _handles())


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"step_in_backward: got {type(model).__name__}; give a module")
    require_own_gradients("step_in_backward", model)


def _groups_of(optimizer: Optimizer) -> dict[Tensor, int]:
    return {p: g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}


class _Gradients(HandleHook):
    """The hook of parameters with a handle."""

    def wants(self, p: Tensor) -> bool:
        """Whether a gradient is not left to `optimizer.step()`."""
        handle = self.handle()
        return handle is not None and handle.takes(p)


# ------------------------------------------------------------------------------------- streams


@contextlib.contextmanager
def _on(stream: torch.Stream | None) -> Iterator[None]:
    """Return a context in which work runs on a stream, after its earlier work and before later
    work.
    """
    if stream is None:
        yield
        return
    current = torch.accelerator.current_stream(stream.device)
    stream.wait_stream(current)
    with stream:
        yield
    current.wait_stream(stream)
