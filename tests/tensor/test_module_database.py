"""PyTorch's database of modules over expansion parameters, beside plain bf16 and float64."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

import mcftensor as mcf
from support.rotation import rotated

database = pytest.importorskip("torch.testing._internal.common_modules")

INFOS = {info.name: info for info in database.module_db}
LR = 2.0**-10
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=LR),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=LR),
}


def cases(info):
    """Yield modules in float32, each in its mode, and bf16 arguments of their forward passes."""
    for training in (True, False) if info.train_and_eval_differ else (True,):
        torch.manual_seed(0)
        for given in info.module_inputs_func(
            info, device="cpu", dtype=torch.bfloat16, requires_grad=True, training=training
        ):
            made, call = given.constructor_input, given.forward_input
            module = info.module_cls(*made.args, **made.kwargs)
            if info.is_lazy:
                with torch.no_grad():
                    module(*widened(call.args), **widened(call.kwargs))
            yield module.float().train(training), call.args, call.kwargs


def widened(tree):
    return tree_map_only(
        torch.Tensor, lambda x: x.detach().float() if x.is_floating_point() else x, tree
    )


def outcome(module, args, kwargs):
    """Return the tensors of a forward and a backward pass by name, or the error."""
    args, kwargs = tree_map_only(
        torch.Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), (args, kwargs)
    )
    torch.manual_seed(1)  # the module may draw numbers
    try:
        made = tree_leaves(module(*args, **kwargs))
        found = {f"result {i}": x for i, x in enumerate(made) if isinstance(x, torch.Tensor)}
        floats = [x for x in found.values() if x.requires_grad]
        if floats:
            torch.manual_seed(2)
            torch.autograd.backward(floats, [torch.randn_like(x) for x in floats])
    except Exception as error:  # noqa: BLE001
        return error
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    found |= {f"gradient of argument {i}": x.grad for i, x in enumerate(given)}
    found |= {f"gradient of {name}": p.grad for name, p in module.named_parameters()}
    return found | dict(module.named_buffers())


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("name", rotated(INFOS))
def test_module(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules about their arguments
        for module, args, kwargs in cases(INFOS[name]):
            check(module, args, kwargs)


def check(module, args, kwargs):
    """Compare results and gradients with plain bf16 to the bit, and buffers with float64."""
    expanded = mcf.as_expansion(copy.deepcopy(module))
    plain = mcf.as_plain(copy.deepcopy(expanded))
    wide = copy.deepcopy(module).double()
    for p, w in zip(expanded.parameters(), wide.parameters(), strict=True):
        w.data = p.components[0].double()
    expected, found = outcome(plain, args, kwargs), outcome(expanded, args, kwargs)
    if isinstance(expected, Exception) and isinstance(found, Exception):
        return
    exact = outcome(wide, *tree_map_only(torch.Tensor, in_float64, (args, kwargs)))
    if isinstance(expected, Exception):  # PyTorch has no kernel for bf16
        expected = {name: x if x is None else rounded(x) for name, x in exact.items()}
    assert found.keys() == expected.keys()
    for name, x in found.items():
        if not isinstance(x, mcf.MCFTensor):
            torch.testing.assert_close(x, expected[name], rtol=0, atol=0, equal_nan=True, msg=name)
    if any("running" in name for name in found):
        assert_averages(expanded, wide, args)
    gradients = [p.grad for p in expanded.parameters()]
    if any(g is not None for g in gradients):
        for optimizer in OPTIMIZERS.values():
            assert_nearer(expanded, plain, gradients, optimizer)


def in_float64(x):
    return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x


def rounded(x):
    return x.bfloat16() if x.is_floating_point() else x


def assert_averages(expanded, wide, args):
    """Averages of one batch reach its statistics; of momentum 0.1, plain bf16 stops at 2^-5.

    The error is relative to the magnitudes of the means that InstanceNorm rounds, and then adds.
    """
    sizes, (x,) = copy.deepcopy(wide), map(in_float64, args)
    if isinstance(wide, nn.modules.instancenorm._InstanceNorm):
        x = x * x.mean(tuple(range(1 - wide._get_no_batch_dim(), 0)), keepdim=True).sign()
    with torch.no_grad():
        for _ in range(30):
            expanded(*args), wide(*map(in_float64, args)), sizes(x)
    for name, exact in wide.named_buffers():
        if "running" in name:
            found = mcf.as_plain(expanded.get_buffer(name), torch.float64)
            bound = 2.0**-7 * sizes.get_buffer(name).abs()
            assert ((found - exact).abs() <= bound).all(), name


def assert_nearer(expanded, plain, gradients, optimizer):
    """One step is as exact as the format, and nearer to that of float64 than of plain bf16."""
    expanded, plain = copy.deepcopy(expanded), copy.deepcopy(plain)
    wide = [nn.Parameter(mcf.as_plain(p, torch.float64)) for p in expanded.parameters()]
    for parameters in (list(expanded.parameters()), list(plain.parameters()), wide):
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = None if g is None else g.to(p.dtype)
        optimizer(parameters).step()
    own, others = 0.0, 0.0
    for p, q, w in zip(expanded.parameters(), plain.parameters(), wide, strict=True):
        error = (mcf.as_plain(p, torch.float64) - w).abs()
        size = w.abs() + LR * (0 if w.grad is None else w.grad.abs().clamp_min(1))
        assert (error <= 4 * size * p.format.u**p.format.terms).all()
        own, others = own + error.sum().item(), others + (q - w).abs().sum().item()
    assert own < others or own == others == 0
