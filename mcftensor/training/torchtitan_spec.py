"""torchtitan: the specification of a model whose weights are expansions.

A specification names a function that shards a model, a function called with its optimizers, and
the adapter of its state dicts. This module wraps these. Read: torchtitan 0.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from mcftensor.checkpoint.module_hooks import store_as_terms
from mcftensor.checkpoint.state_dicts import names_of_terms
from mcftensor.convert import as_expansion
from mcftensor.dispatch.operands import count_of, name_counts
from mcftensor.formats import Format, require_format
from mcftensor.training.collage import Mode, collage

Spec = TypeVar("Spec")

_FIELDS = ("parallelize_fn", "post_optimizer_build_fn", "state_dict_adapter")


def in_expansions(
    spec: Spec,
    format: Format | str | None = None,
    mode: Mode | None = "plus",
    *,
    overrides: Mapping[str, Format | str | None] | None = None,
) -> Spec:
    """Return the specification of a torchtitan model with expansions as weights.

    Set it as `model_spec` of a `Trainer.Config`, which is otherwise unchanged. The trainer then
    converts the model before it shards it, chooses the states of every optimizer that its
    `OptimizersContainer` makes, and saves and loads all terms by its own checkpointer. Buffers
    keep their dtype. An export in Hugging Face's names is the plain bf16 model.

    torchtitan makes models on the meta device, where weights have no size yet. So embeddings that
    it fills from N(0, 1) get `bf16x2` like other matrices; `overrides` can give them `bf16x3`.

    Args:
        spec: a `ModelSpec` of torchtitan, such as `model_registry(flavor)` returns.
        format: as in `as_expansion`.
        mode: as in `collage`: a name, or a dict from names of states to formats; None leaves the
            states as the optimizers create them.
        overrides: as in `as_expansion`.

    Returns:
        A copy of the specification.

    Raises:
        TypeError: `spec` is not such a specification, or `format` not a format.

    Examples:
        A stand-in for torchtitan's class has the same fields:

        >>> import dataclasses, torch, mcftensor as mcf
        >>> from mcftensor.training.torchtitan_spec import in_expansions
        >>> ModelSpec = dataclasses.make_dataclass(
        ...     "ModelSpec", ["parallelize_fn", "post_optimizer_build_fn", "state_dict_adapter"]
        ... )
        >>> spec = ModelSpec(lambda model: model, None, None)
        >>> spec = in_expansions(spec, mcf.bf16i8, "compact")
        >>> spec.parallelize_fn(torch.nn.Linear(3, 2)).weight.format
        mcf.bf16i8
    """
    if not all(hasattr(spec, name) for name in _FIELDS) or not dataclasses.is_dataclass(spec):
        raise TypeError(
            f"in_expansions: got {type(spec).__name__}; give a ModelSpec of torchtitan, such as "
            "model_registry(flavor) returns"
        )
    if format is not None:
        format = require_format(format, "in_expansions", with_rules=True)
    given: Any = spec
    shard, finish = given.parallelize_fn, given.post_optimizer_build_fn
    adapter = given.state_dict_adapter

    def parallelize(model: nn.Module, **options: Any) -> nn.Module:
        chosen = {**(overrides or {}), **{name: None for name, _ in model.named_buffers()}}
        return shard(store_as_terms(as_expansion(model, format, overrides=chosen)), **options)

    def with_states(optimizers: Any, parts: list[nn.Module], *others: Any) -> None:
        if finish is not None:
            finish(optimizers, parts, *others)
        for part in parts:
            _begin_counts(part)
        if mode is not None:
            for optimizer in optimizers:
                collage(optimizer, mode)

    return dataclasses.replace(
        given,
        parallelize_fn=parallelize,
        post_optimizer_build_fn=with_states,
        state_dict_adapter=adapter and _of_leading_terms(adapter),
    )


def _begin_counts(model: nn.Module) -> None:
    """Start the counts of balanced rounding at the initialization of a model.

    A weight that torchtitan joins from others, such as fused queries, keys and values, continues
    from these counts.
    """
    for x in model.parameters():
        count = count_of(x)
        if count is not None:
            count.zero_()
    name_counts(model)


def _of_leading_terms(adapter: type[Any]) -> type[Any]:
    """Return an adapter of state dicts that gives Hugging Face's names to leading terms only."""

    class OfLeadingTerms(adapter):  # type: ignore[misc]
        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            return super().to_hf({name: state_dict[name] for name in names_of_terms(state_dict)})

    return OfLeadingTerms
