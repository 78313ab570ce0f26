"""Conversion of models and tensors to scaled formats and back."""

from __future__ import annotations

import functools
import weakref
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map_only

from mcftensor.patches.objects import exchange
from mcftensor.scaling.fp8 import Fp8Linear
from mcftensor.scaling.rule_table import follow_rule, rule
from mcftensor.scaling.scaled import ScaledTensor, is_scaled
from mcftensor.scaling.scaled_format import ScaledFormat, of_dtype
from mcftensor.scaling.structure_rules import encoded
from mcftensor.tensor import MCFTensor

M = TypeVar("M", bound=nn.Module)


def as_scaled(x: Tensor, format: ScaledFormat) -> ScaledTensor:
    """Convert a tensor to a scaled format; `mcf.as_expansion` is the public function."""
    if not x.is_floating_point() or x.layout != torch.strided:
        raise TypeError(
            f"as_expansion: the tensor of shape {tuple(x.shape)} is of {x.dtype}, {x.layout}; "
            f"{format.name} is made from dense floating tensors: convert it with "
            ".to(torch.float32) or .to_dense()"
        )
    return encoded(x.detach(), format)


def scalify(
    model: M,
    format: ScaledFormat | None = None,
    *,
    overrides: dict[str, ScaledFormat | None] | None = None,
    products: str | None = None,
) -> M:
    """Convert the parameters of a model to a scaled format, in place, and return the model.

    Activations, gradients and states of the optimizer are then scaled too, without a loss scale.
    Parameters keep their identity, so tied weights stay tied and an optimizer built before still
    works. Buffers stay unchanged: running statistics are float32. Inputs need no conversion; plain
    tensors that meet a scaled tensor are converted.

    Args:
        model: any module whose operations have rules; others raise, and name the repair.
        format: the format of all floating parameters; by default `scaled(torch.float16)` with
            stochastic rounding, so that steps too small for 11 bits survive in the mean.
        overrides: patterns (fnmatch) of parameter names, and the formats of these parameters; None
            leaves a parameter plain. The first pattern that matches decides.
        products: `"fp8"` makes `nn.Linear` multiply 8-bit data: E4M3 forward, E5M2 for gradients.

    Raises:
        TypeError: `format` is not a scaled format.
        ValueError: `products` has another value, or a pattern matches no parameter.
        RuntimeError: a parameter has weak references to it, or belongs to a recurrent layer.
        NotImplementedError: a parameter is sharded.

    *Source*: arXiv 2407.17353. The rules of embeddings, attention, convolutions, batch norms and
    losses are this library's, since the paper has none for them.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> model = mcf.scaling.scalify(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()))
        >>> opt = torch.optim.AdamW(model.parameters())
        >>> model(torch.ones(2, 8) * 1e-6).square().mean().backward()
        >>> opt.step()
        >>> model[0].weight.grad.format, opt.state[model[0].weight]["exp_avg"].dtype
        (mcf.scaling.scaled(torch.float16), torch.float16)
    """
    format = of_dtype(torch.float16, None, "stochastic") if format is None else format
    if not isinstance(format, ScaledFormat):
        raise TypeError(
            f"scalify: {format!r} is no scaled format; give mcf.scaling.scaled(torch.float16)"
        )
    if products not in (None, "fp8"):
        raise ValueError(f"scalify: products={products!r}; give 'fp8' or None")
    overrides = overrides or {}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in overrides:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"scalify: the pattern {pattern!r} in overrides matches none of the parameters: "
                f"{', '.join(names) or 'the module has none'}"
            )
    chosen: list[tuple[Tensor, ScaledFormat]] = []
    for name, p in model.named_parameters():
        matching = [x for x in overrides if fnmatchcase(name, x)]
        wanted = overrides[matching[0]] if matching else format
        if wanted is None or not p.is_floating_point():
            continue
        if is_scaled(p) and p.format is wanted:
            continue
        _require_exchangeable(name, p)
        chosen.append((p, wanted))
    for own, wanted in chosen:
        exchange(own, nn.Parameter(as_scaled(own, wanted), requires_grad=own.requires_grad))
        if own.grad is not None:
            own.grad = as_scaled(own.grad, wanted.lead)
    for module in model.modules():
        if isinstance(module, _ConvNd) and _with_scale not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_with_scale)
        if isinstance(module, nn.RNNBase) and _with_plain not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_with_plain)
            module.register_forward_hook(functools.partial(_scaled_again, format.lead))
        if products == "fp8" and type(module) is nn.Linear:
            module.__class__ = Fp8Linear
    return model


def _require_exchangeable(name: str, p: Tensor) -> None:
    if hasattr(p, "_local_tensor"):
        raise NotImplementedError(
            f"scalify: {name} of shape {tuple(p.shape)} is sharded, and scales do not travel "
            "between processes; train a scaled model in one process, or shard one in mcf.bf16i8"
        )
    if weakref.getweakrefs(p):
        layer = name.rpartition(".")[0]
        raise RuntimeError(
            f"scalify: {name} of shape {tuple(p.shape)} has weak references to it, which "
            "become invalid if its contents are replaced. Recurrent layers have no rules: leave "
            f"them plain, with overrides={{'{layer + '.' if layer else ''}*': None}}; they get "
            "plain inputs then, and give scaled results. Make averaged copies of a model after "
            "converting it"
        )


def _converted(x: Tensor, target: ScaledFormat | torch.dtype) -> Tensor:
    """Return a tensor in a scaled format, or as a plain one; numbers are rounded once."""
    if isinstance(target, ScaledFormat):
        return encoded(x, target)
    return x._collapsed(target) if is_scaled(x) else x.to(target)


class _Conversion(torch.autograd.Function):
    """A conversion whose gradient is converted back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: ScaledFormat | torch.dtype) -> Tensor:
        ctx.source = x.format.lead if is_scaled(x) else x.dtype
        return _converted(x, target)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _converted(gradient, ctx.source), None


def _with_scale(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert the input, since PyTorch compares the dtypes of a convolution before dispatch."""
    x, *others = inputs
    weight = module.weight
    if is_scaled(weight) and isinstance(x, Tensor):
        x = x if is_scaled(x) else _Conversion.apply(x, weight.format.lead)
    return (x, *others)


def _with_plain(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Convert inputs to float32 for a layer without rules."""
    return tree_map_only(
        MCFTensor, lambda x: _Conversion.apply(x, torch.float32) if is_scaled(x) else x, inputs
    )


def _scaled_again(format: ScaledFormat, module: nn.Module, inputs: Any, results: Any) -> Any:
    return tree_map_only(Tensor, lambda x: _Conversion.apply(x, format), results)


class _ScalingRules:
    """The rules of scaled formats."""

    carry_out = staticmethod(follow_rule)

    def convert(self, x: Tensor, format: ScaledFormat) -> Tensor:
        """Convert a tensor, placed by size; gradients of plain tensors pass through."""
        if torch.is_grad_enabled() and x.requires_grad and not is_scaled(x):
            return _Conversion.apply(x, format)
        return as_scaled(x, format)

    def convert_module(self, module: M, format: ScaledFormat, overrides: Any) -> M:
        """Convert the parameters of a module by `scalify`."""
        return scalify(module, format, overrides=overrides)

    def module_as_plain(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        """Convert the scaled parameters of a model to plain ones, in place."""
        for p in filter(is_scaled, list(module.parameters())):
            grad, plain = p.grad, p._collapsed(dtype or p.dtype)
            exchange(p, nn.Parameter(plain, requires_grad=p.requires_grad))
            p.grad = None if grad is None else _converted(grad, p.dtype)


rule(torch.ops.mcftensor._as_plain.default)(lambda x, dtype: x._collapsed(dtype))


ScaledFormat.rules = _ScalingRules()
