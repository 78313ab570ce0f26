"""PyTorch's operations on tensors that write to the first of them, found by their schemas.

For each there is an example that runs in float64; tests put other tensors into its places.
"""

import functools
import itertools
import warnings

import torch

aten = torch.ops.aten

SHAPES = ((3, 3), (3,), (2, 3, 3), ())
PLACES = {
    "index": lambda: torch.tensor([2, 0, 1]),
    "mask": lambda: torch.tensor([True, False, True]),
    "indices": lambda: [torch.tensor([2, 0, 1])],
}
NUMBERS = {"number": 0.3, "float": 0.3, "int": 0, "bool": False, "List[number]": [0.3, 0.7]}

# They depend on the dtype; are for float64 alone; fail within PyTorch over bf16; share memory.
EXCEPT = ("nextafter_", "float_power_.Tensor", "_add_relu_.Tensor", "set_.source_Tensor")


@functools.lru_cache
def operations():
    """By name the overload, and for each of its arguments its kind and a shape or a value."""
    found = {}
    for name in sorted(x.removeprefix("aten::") for x in torch._C._dispatch_get_all_op_names()):
        packet_name, _, overload = name.partition(".")
        if not packet_name.endswith("_") or packet_name.startswith("_fused"):
            continue
        packet = getattr(aten, packet_name, None)
        func = getattr(packet, overload or "default", None)
        if func is None or name in EXCEPT or torch.Tag.nondeterministic_seeded in func.tags:
            continue
        places = _example(func)
        if places is not None:
            found[name] = func, places
    return found


def _example(func):
    arguments = func._schema.arguments
    if not arguments or arguments[0].alias_info is None or not arguments[0].alias_info.is_write:
        return None
    places = [_place(i, x) for i, x in enumerate(arguments)]
    if None in places or places[0][0] not in ("tensor", "tensors"):
        return None
    others = [i for i, (kind, _) in enumerate(places) if i and kind in ("tensor", "tensors")]
    if not others:
        return None
    count = 1 + len(others)
    for shapes in itertools.product(SHAPES, repeat=count):
        given = list(places)
        for i, shape in zip((0, *others), shapes, strict=True):
            given[i] = (places[i][0], shape)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call(func, given, numbers)
        except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError):
            continue
        return given
    return None


def _place(i, argument):
    kind = str(argument.type)
    if argument.name in PLACES and "Tensor" in kind:
        return "value", PLACES[argument.name]
    if kind == "Tensor":
        return "tensor", None
    if kind == "List[Tensor]":
        return "tensors", None
    if argument.name == "reduce":
        return "value", lambda: "amax"
    if argument.has_default_value():
        if argument.name in ("alpha", "value", "beta") and "List" not in kind:
            return "value", lambda: 0.3
        return "default", None
    return ("value", lambda: NUMBERS[kind]) if kind in NUMBERS else None


def numbers(i, shape):
    """Numbers for a place, above zero, most of which bf16 does not hold."""
    count = max(1, torch.Size(shape).numel())
    return (torch.arange(1, count + 1, dtype=torch.float64) / (7.3 + i) + 0.1).view(shape)


def call(func, places, make):
    """Run an operation on what `make(place, shape)` gives; returns its first argument."""
    args, named = [], {}
    for i, ((kind, x), argument) in enumerate(zip(places, func._schema.arguments, strict=True)):
        if kind == "default":
            continue
        value = (
            x() if kind == "value" else make(i, x) if kind == "tensor" else [make(i, x), make(i, x)]
        )
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            args.append(value)
    func(*args, **named)
    return args[0]
