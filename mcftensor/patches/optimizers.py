"""Changes to `torch.optim`: code that runs before an expansion is dispatched, and steps."""

from __future__ import annotations

import functools
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.optim import Optimizer

from mcftensor.kernels.facts import facts_of
from mcftensor.patches.objects import HOSTS
from mcftensor.patches.sharded_optimizers import mean_over_ranks
from mcftensor.patches.table import by_name, calls, patch, rows, wherever_imported
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.components import any_format_of, format_of, is_held, local
from mcftensor.tensor.dtensor import with_gradient_tensors
from mcftensor.tensor.implicit_rounding import asking
from mcftensor.tensor.step_context import Step, closure, current_step, in_step

_has_rules = attrgetter("_has_rules")


@patch(
    "torch.optim.optimizer._foreach_supported_types",
    "torch.utils._foreach_utils._foreach_supported_types",
    why="Optimizers and clipping choose foreach kernels by default, as on CUDA, for listed types "
    "of parameters.",
    loss="optimizers and clipping use the for-loop over expansions, unless foreach=True or "
    "fused=True is given.",
    kind=list,
)
def _with_expansions(types: list[type]) -> list[type]:
    types.append(MCFTensor)  # in place: others have imported the list
    return types


@patch(
    "torch.utils._foreach_utils._group_tensors_by_device_and_dtype",
    why="The foreach paths and averages of models group the tensors of several lists. PyTorch "
    "refuses most lists of unlike dtypes, and before 2.13 a list in bfloat16 beside another too.",
    loss="foreach=True and AveragedModel raise if states or averages have another dtype than the "
    "weights, as those of fp16i16; use foreach=False.",
    releases="2.9 to 2.14",
    takes=("tensorlistlist",),
)
@wherever_imported
@by_name
def _by_the_first_list(group: Callable[[], Any], given: dict[str, Any]) -> Any:
    try:
        return group()
    except RuntimeError:
        lists: list[list[Any]] = given["tensorlistlist"]
        if not any(any_format_of(x) for x in itertools.chain(*lists)):
            raise
        places: dict[Any, list[int]] = {}
        for i, x in enumerate(lists[0]):
            places.setdefault((x.device, x.dtype), []).append(i)
        return {
            key: ([[each[i] for i in chosen] if each else [] for each in lists], chosen)
            for key, chosen in places.items()
        }


def plan_of(optimizer: Optimizer) -> Any:
    """Return the plan of the mode that `collage` has given an optimizer, or None."""
    return optimizer.__dict__.get("_collage")


def _after_the_plan(initialize: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(initialize, "_asks_plan"):
        return initialize

    @functools.wraps(initialize)
    def init_group(self: Optimizer, group: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        plan = plan_of(self)
        if (
            plan is not None
            and is_of_torch(initialize)
            and all(map(self.state.get, group["params"]))
        ):
            with torch._C.DisableTorchFunctionSubclass():  # it reads attributes of each parameter
                found = initialize(self, group, *args, **kwargs)
        else:
            if plan is not None:
                plan.make_states(self, initialize, group, *args, **kwargs)
            found = initialize(self, group, *args, **kwargs)
        if plan is not None and found:
            plan.after_initializing(self, group, found)
        return found

    init_group._asks_plan = True  # type: ignore[attr-defined]
    return init_group


(_MAKES_STATES,) = rows(
    "torch.optim.Adam._init_group",
    why="A Collage mode converts each state when the optimizer creates it, so the first step "
    "needs no more memory than later steps. The patch changes classes of optimizers, not objects, "
    "because compilers read the class and copies of an optimizer do not inherit the mode.",
    loss="states are converted at the end of the first step, which needs memory for both kinds.",
    when="mcf.collage(optimizer, mode)",
    change=_after_the_plan,
)


def have_states_made_by_plan(cls: type[Optimizer]) -> None:
    """Create the states of optimizers of this class by their plans."""
    owner = next((base for base in cls.__mro__ if "_init_group" in vars(base)), None)
    if owner is None:  # of torch's own, LBFGS and SparseAdam never had it
        _MAKES_STATES.found_in(torch.optim.Adam)
    else:
        _MAKES_STATES.install(owner)


@patch(
    "torch.optim.swa_utils.AveragedModel.update_parameters",
    why="On a CPU the default average is computed from `average - weight`, which outside of a step "
    "has only the leading term of a weight.",
    loss="averages in float32 of models that are expansions see only the leading terms, unless "
    "they are made with a multi_avg_fn.",
)
@by_name
def _of_all_terms(update: Callable[[], None], given: dict[str, Any]) -> None:
    in_step(lambda step: update())


@patch(
    "torch.amp.grad_scaler.GradScaler._unscale_grads_",
    why="`GradScaler` refuses gradients in float16 without a word of what helps.",
    loss="the error for float16 gradients does not name the repair: fused=True, or gradients in "
    "bfloat16.",
    takes=("optimizer",),
)
@by_name
def _naming_what_helps(unscale: Callable[[], Any], given: dict[str, Any]) -> Any:
    try:
        return unscale()
    except ValueError as error:
        optimizer = given["optimizer"]
        if "FP16" not in str(error) or not has_expansions(optimizer):
            raise
        raise ValueError(
            f"{error} Parameters in float16 formats have float16 gradients. Give "
            f"{type(optimizer).__name__} fused=True, whose step unscales them; or, to call "
            "scaler.unscale_(optimizer), have the gradients in bfloat16: p.grad_dtype = "
            "torch.bfloat16 for each parameter, with torch 2.10 or newer"
        ) from error


_OF_CALL = ("capturable", "decoupled_weight_decay", "differentiable", "has_complex")
_ONE = torch.ones((), dtype=torch.float32, device="cpu")


@patch(
    "torch.optim.adam._fused_adam",
    why="PyTorch groups all tensors by device and dtype, and counts the step of each parameter in "
    "a call of its own, which takes most of its time over small tensors.",
    loss="fused steps of Adam and AdamW over thousands of small tensors take 1.2 times as long.",
    takes=("state_steps", *_OF_CALL),
)
def _in_one_call(fused: Callable[..., None]) -> Callable[..., None]:
    """Return the step of Adam; expansions on a CPU need no grouping, and are counted together."""

    @functools.wraps(fused)
    def take(*lists: list[Tensor], **options: Any) -> None:
        if is_compiling() or not _are_on_cpu(lists) or _is_special(options):
            fused(*lists, **options)
            return
        _count(lists[-1])
        own = {name: options[name] for name in options.keys() - _OF_CALL}
        step = torch._fused_adamw_ if options["decoupled_weight_decay"] else torch._fused_adam_
        step(*lists, **own)

    return take


def _are_on_cpu(lists: Sequence[list[Tensor]]) -> bool:
    """Whether the first list has expansions and the last their step counts, float32 on a CPU."""
    parameters, steps = lists[0], lists[-1]
    return (
        set(map(type, parameters)) == {MCFTensor}
        and not any(map(_has_rules, parameters))
        and set(map(type, steps)) == {Tensor}
        and facts_of(steps)[:2] == (torch.float32, -1)
        and not any(map(Tensor.dim, steps))
    )


def _is_special(options: dict[str, Any]) -> bool:
    """Whether there are settings on a device, or settings that the fused step refuses."""
    return options["differentiable"] or any(isinstance(x, Tensor) for x in options.values())


def _count(steps: list[Tensor]) -> None:
    """Add one to each step count, by the fastest of PyTorch's steps over scalars."""
    torch._fused_sgd_(
        steps,
        [_ONE] * len(steps),
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=-1.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


# --------------------------------------------------------------------------------------- steps
#
# The kernels of a step are opaque to the compiler, so that it has nothing to make faster, and a
# graph of some thousand calls of them takes it minutes. So steps over expansions run as they are.


_compiler = torch._C._dynamo.eval_frame.get_eval_frame_callback


@torch._disable_dynamo  # unlike torch.compiler.disable, it does not import the compiler
def _away_from_compiler(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _may_be_traced() -> bool:
    return torch.compiler.is_compiling() or _compiler() is not None


def untraced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of a function, which compilers do not trace."""
    if _may_be_traced():
        return _away_from_compiler(function, *args, **kwargs)
    return function(*args, **kwargs)


def breaks_graphs(optimizer: Optimizer) -> bool:
    """Whether compiled code ends at a step in any case, so that hooks of it may be left out too."""
    return getattr(type(optimizer).step, "_breaks_graphs", False)


# These end compiled graphs by themselves. Adafactor, Muon and optimizers of other packages do not:
# over plain parameters they can be compiled as a whole.
_BREAKING = {
    *("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
}


def is_of_torch(step: Callable[..., Any]) -> bool:
    """Return whether a step belongs to a class of torch."""
    return str(inspect.unwrap(step).__module__).startswith("torch.optim.")


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Return the parameters of all groups."""
    return (p for group in optimizer.param_groups for p in group["params"])


def named_parameters_of(optimizer: Optimizer) -> Iterator[tuple[str, tuple[int, int], Tensor]]:
    """Yield each parameter with its name or `"group.index"`, and the numbers of group and index."""
    for g, group in enumerate(optimizer.param_groups):
        names = group.get("param_names", ())
        for i, p in enumerate(group["params"]):
            yield names[i] if i < len(names) else f"{g}.{i}", (g, i), p


def has_expansions(optimizer: Optimizer) -> bool:
    """Whether parameters of it are expansions, also sharded ones."""
    return any(format_of(p) is not None for p in parameters_of(optimizer))


_OFTEN = 16
"""Steps from one look at the scales of states to the next."""

_WINDOW = 8
"""Parameters of each group that a step looks at, in turn; the first step looks at all."""

STEPS: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""The steps of optimizers since one that had states to look at. A conversion of a module clears
it."""

CHECKED: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers whose parameters were looked at since the latest conversion of a module."""

WATCHING: weakref.WeakSet[Any] = weakref.WeakSet()
"""Handles that look at each optimizer before its step, and may raise."""

RELEASING: weakref.WeakSet[Any] = weakref.WeakSet()
"""Handles that take gradients in backward, and are told of parameters whose gradients are about to
be clipped; they may raise."""


def looked_at(optimizer: Optimizer) -> Iterator[Tensor]:
    """Return the parameters that a step looks at."""
    number = STEPS.get(optimizer)
    for group in optimizer.param_groups:
        params = group["params"]
        stride = 1 if number is None else max(1, -(-len(params) // _WINDOW))
        yield from params[(number or 0) % stride :: stride]


def _is_as_meant(optimizer: Optimizer) -> bool:
    """Return whether parameters are expansions that their modules hold, with gradients, and the
    optimizer has been looked at before."""
    return (
        optimizer in STEPS
        and None not in map(any_format_of, parameters_of(optimizer))
        and all(is_held(p) and p.grad is not None for p in looked_at(optimizer))
    )


def _outside_of_it(x: Any, optimizer: Optimizer) -> Any:
    """Return an argument of a step, with a closure made to run outside of the step."""
    if not callable(x) or isinstance(x, (Tensor, type)):
        return x
    if isinstance(optimizer, torch.optim.LBFGS):
        x = mean_over_ranks(parameters_of(optimizer), x)
    return closure(x)


def _is_fused(optimizer: Optimizer, step: Callable[..., Any]) -> bool:
    """Whether all that a step does with gradients is to give them to torch's fused kernels."""
    groups = optimizer.param_groups
    if not (is_of_torch(step) and all(group.get("fused") for group in groups)):
        return False
    if all(map(optimizer.state.get, parameters_of(optimizer))):
        return True
    # SGD makes its buffers like them; and states whose rounding is balanced are told apart.
    if isinstance(optimizer, torch.optim.SGD):
        return not any(group["momentum"] for group in groups)
    formats = map(format_of, parameters_of(optimizer))
    return all(format is None or format.rounding != "balanced" for format in formats)


def _taken(
    optimizer: Optimizer,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_assigned: bool = False,
) -> Any:
    """Return the result of a function that runs as a step of an optimizer."""
    args = tuple([_outside_of_it(x, optimizer) for x in args])
    kwargs = {name: _outside_of_it(x, optimizer) for name, x in kwargs.items()}
    plan = plan_of(optimizer)
    sharded = [p for p in parameters_of(optimizer) if local(p) is not p]

    def over_gradients(own: Step) -> Any:
        own.has_plain_states = plan is not None and plan.makes_plain
        own.is_assigned = is_assigned
        if not sharded:
            return function(*args, **kwargs)
        return with_gradient_tensors(own, sharded, lambda: function(*args, **kwargs))

    return in_step(over_gradients)


def _sums_gradients(optimizer: Optimizer) -> bool:
    """Whether gradients of plain parameters are expansions, which somebody wants to be rounded."""
    return not torch.compiler.is_compiling() and any(
        format_of(p.grad) is not None for p in parameters_of(optimizer)
    )


def _identities(optimizer: Optimizer) -> list[int]:
    """Return the identities of all states. torch's optimizers keep the tensors that they make."""
    states = [state.values() for state in optimizer.state.values() if type(state) is dict]
    return list(map(id, itertools.chain.from_iterable(states)))


def _over_numbers(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step within which expansion parameters act as their decoded numbers."""
    name = inspect.unwrap(step).__qualname__.partition(".")[0]
    is_torchs = is_of_torch(step) and name in _BREAKING

    def take(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if _is_fused(self, step):
            result = step(self, *args, **kwargs)
        else:
            result = _taken(self, functools.partial(step, self), args, kwargs)
        if (plan := plan_of(self)) is not None and is_torchs:
            found = _identities(self)
            if found != plan.formatted:
                plan.apply(self)
                plan.formatted = found
        return result

    def choose(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if has_expansions(self):
            taking = _beside_handles(take) if _may_be_traced() else take
            return untraced(taking, self, *args, **kwargs)
        if _sums_gradients(self):
            return untraced(asking, functools.partial(step, self, *args, **kwargs))
        return step(self, *args, **kwargs)

    chosen = choose
    if is_torchs:
        # Nor is the choice compiled, to which every parameter would be an input.
        chosen = torch._disable_dynamo(choose, recursive=False)
        chosen._breaks_graphs = True  # type: ignore[attr-defined]
    # The function under two decorators stays the step without its graph break, to compile whole.
    return functools.update_wrapper(chosen, getattr(step, "__wrapped__", step))


def _beside_handles(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that handles look at before it, and that hosts are told of."""

    def take(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        for handle in list(WATCHING):
            handle.look_at(self)
        result = step(self, *args, **kwargs)
        for host in list(HOSTS):
            host.after_optimizer(self)
        return result

    return take


def _subclasses(cls: type[Optimizer]) -> Iterator[type[Optimizer]]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def _apart(hooked: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step with its hooks and warnings, separate from an assigned step that calls it."""

    def watched(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not _is_as_meant(self):
            calls.before_step(self, *args, *kwargs.values())
        result = hooked(self, *args, **kwargs)
        if self in STEPS:
            STEPS[self] += 1
            if STEPS[self] % _OFTEN == 0:
                calls.now_and_then(self)
        elif self.state or any(p.grad is not None for p in parameters_of(self)):
            STEPS[self] = 0
            calls.after_step(self)
        return result

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return hooked(self, *args, **kwargs)
        outer = current_step()
        is_apart = outer is not None and outer.is_assigned
        taking = closure(watched) if is_apart else watched
        return _beside_handles(taking)(self, *args, **kwargs)

    functools.update_wrapper(step, hooked)
    step.__wrapped__ = hooked.__wrapped__  # type: ignore[attr-defined]  # as deep as torch's
    return step


@patch(
    "torch.optim.Optimizer.profile_hook_step",
    why="Within a step of any optimizer, code sees the full value of a parameter, its gradient "
    "reads as an expansion, and operations are deferred on a tape until the step ends or raises. "
    "PyTorch calls no hook when a step raises.",
    loss="steps use leading terms where parameters meet plain gradients, as forward passes do. "
    "They take longer, warn of nothing, and torch.compile traces them, which may take minutes. "
    "fused=True stays exact.",
    when="import mcftensor",
    before="Schedulers and Accelerate keep the step that an optimizer has when they are "
    "constructed, and its parameters may become expansions later, for example by `mcf.collage`.",
)
def _hooking_steps_over_numbers(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def hook_step(step: Callable[..., Any]) -> Any:
        return _apart(hook(_over_numbers(step)))

    for cls in _subclasses(Optimizer):  # classes that may have been instantiated before
        step: Any = vars(cls).get("step")
        if getattr(step, "hooked", False):
            hooked: Any = hook_step(step.__wrapped__)
            hooked.hooked = True
            cls.step = hooked  # type: ignore[method-assign]
    return hook_step


# ------------------------------------------------------------------------------- assigned steps


def _assigned(
    function: Callable[..., Any], optimizer: Optimizer | None = None
) -> Callable[..., Any]:
    """Return a function that was assigned to an optimizer or class as its step, to run as a step.

    Steps of classes that it calls run, with their hooks, as they would alone.
    """
    if isinstance(function, types.MethodType):  # schedulers bind its function again
        return types.MethodType(_assigned(function.__func__, optimizer), function.__self__)
    known = (lambda: None) if optimizer is None else weakref.ref(optimizer)

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        own = args[0] if args and isinstance(args[0], Optimizer) else known()
        if own is None or not has_expansions(own):
            return function(*args, **kwargs)
        return untraced(_taken, own, function, args, kwargs, is_assigned=True)

    return step


def _goes_on(step: Any) -> bool:
    """Return whether a step is already wrapped, or only calls one, as schedulers' steps do."""
    while True:
        step = getattr(step, "__func__", step)
        module = getattr(step, "__globals__", {}).get("__name__", "")  # wrappers copy the rest
        package = module.partition(".")[0]
        if package != "torch" or not hasattr(step, "__wrapped__"):
            return package in ("accelerate", "mcftensor")
        step = step.__wrapped__  # also of decorators, such as no_grad


_LOSES = (
    "use leading terms where parameters meet plain gradients, as forward passes do; derive a class "
    "that has the step."
)


@patch(
    "torch.optim.Optimizer.__setattr__",
    why="A function assigned to an optimizer as its step replaces the step of the class, and must "
    "see full values. Schedulers and Accelerate assign functions that only call the previous "
    "step.",
    loss=f"steps that are assigned to an optimizer {_LOSES}",
    when="import mcftensor",
    before="The parameters may become expansions after the assignment. Nothing then distinguishes "
    "the function from one that only calls the previous step.",
    kind=type(object.__setattr__),  # whose name torch.compile knows
)
def _assigning_steps(set_attribute: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(set_attribute)
    def assign(self: Optimizer, name: str, value: Any, /) -> None:
        if name == "step" and callable(value) and not _goes_on(value):
            value = _assigned(value, self)
        object.__setattr__(self, name, value)

    return assign


@patch(
    "torch.optim.Optimizer.zero_grad",
    why="PyTorch has no hook for a function assigned to a class as its step. It looks when an "
    "optimizer is constructed; optimizers constructed before are handled here.",
    loss=f"steps that are assigned to a class that has optimizers {_LOSES}",
)
def _looking_at_the_class(zero_grad: Callable[..., None]) -> Callable[..., None]:
    @torch._disable_dynamo  # as torch's own
    @functools.wraps(zero_grad)
    def look(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        step = type(self).step
        if not _goes_on(step) and inspect.isfunction(step) and has_expansions(self):
            owner = next(cls for cls in type(self).__mro__ if vars(cls).get("step") is step)
            owner.step = _assigned(step)  # type: ignore[attr-defined]
        zero_grad(self, *args, **kwargs)

    return look


@by_name
def _asking_first(clip: Callable[[], None], given: dict[str, Any]) -> None:
    if not isinstance(given["parameters"], Tensor):
        given["parameters"] = list(given["parameters"])
    chosen = given["parameters"]
    for handle in list(RELEASING):
        handle.require_held([chosen] if isinstance(chosen, Tensor) else chosen)
    clip()


CLIPS = rows(
    "torch.nn.utils.clip_grad._clip_grads_with_norm_",
    "torch.nn.utils.clip_grads_with_norm_",
    "torch.nn.utils.clip_grad.clip_grad_value_",
    "torch.nn.utils.clip_grad_value_",
    why="When gradients are released in backward, or are on the host, `clip_grad_norm_` and "
    "`clip_grad_value_` find no gradients and clip nothing.",
    loss="clip_grad_norm_ returns 0 and clips nothing when gradients are released; give "
    "mcf.step_in_backward clip_by_previous_norm, and clip the parameters of mcf.host.weights.",
    when="mcf.step_in_backward(model, optimizer)",
    change=_asking_first,
    takes=("parameters",),
)


@by_name
def _asked_of_others(measure: Callable[[], Tensor], given: dict[str, Any]) -> Tensor:
    tensors = given["tensors"]
    tensors = given["tensors"] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    is_euclidean = float(given.get("norm_type", 2.0)) == 2.0
    norm = calls.norm_of_gradients(tensors) if is_euclidean else None
    if norm is None:
        return measure()
    if given.get("error_if_nonfinite") and not torch.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order 2 of the gradients is {norm.item()}, so it cannot be "
            "clipped. error_if_nonfinite=False scales the gradients by it anyway"
        )
    return norm


NORMS = rows(
    "torch.nn.utils.clip_grad._get_total_norm",
    "torch.nn.utils.get_total_norm",
    why="The norm of gradients is a sum over elements and processes, and its order depends on "
    "the sharding.",
    loss="clip_grad_norm_ under fully_shard gives other bits on other numbers of processes; "
    "clip by value.",
    when="mcf.order_free_gradients(model, microbatches=...)",
    change=_asked_of_others,
    takes=("tensors", "norm_type", "error_if_nonfinite"),
)
