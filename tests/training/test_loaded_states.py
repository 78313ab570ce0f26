"""What the states of an optimizer are after `load_state_dict`: those of its run, or of another."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import mcftensor as mcf
from support.helpers import assert_same_bits

SHAPES = ((4, 3), (5,), ())


class Momentum(torch.optim.Optimizer):
    """Makes its states in the dtype that parameters have within a step."""

    def __init__(self, parameters, nested=False, beside=False):
        super().__init__(parameters, {"nested": nested, "beside": beside})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    wide = torch.zeros_like(p, dtype=p.dtype)
                    state["wide"] = [wide] if group["nested"] else wide
                    state["mask"] = torch.ones_like(p, dtype=torch.bool)
                    if group["beside"]:
                        state["beside"] = torch.zeros_like(p)
                wide = state["wide"][0] if group["nested"] else state["wide"]
                wide.mul_(0.9).add_(p.grad)
                p.add_(wide * state["mask"], alpha=-0.01)


def parameters(format):
    torch.manual_seed(0)
    weights = [torch.rand(shape, dtype=torch.float64) for shape in SHAPES]
    return [
        nn.Parameter(
            x.to(format) if isinstance(format, torch.dtype) else mcf.as_expansion(x, format)
        )
        for x in weights
    ]


def train(weights, optimizer, steps=2):
    torch.manual_seed(1)
    for _ in range(steps):
        for p in weights:
            p.grad = torch.randn(p.shape).to(p.dtype)
        optimizer.step()


def run(format, cls=Momentum, **options):
    weights = parameters(format)
    optimizer = cls(weights, **options)
    train(weights, optimizer)
    return weights, optimizer


def saved(optimizer):
    content = io.BytesIO()
    torch.save(optimizer.state_dict(), content)
    content.seek(0)
    return torch.load(content, weights_only=True)


def kinds(optimizer, name="wide"):
    found = (tree_leaves(state[name])[0] for state in optimizer.state.values())
    return [getattr(x, "format", x.dtype) for x in found]


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize(
    "format",
    [mcf.bf16x2, mcf.bf16x3, mcf.fp16x2, mcf.fp32x2, mcf.fp64x2, mcf.bf16i16],
    ids=lambda f: f.name,
)
@pytest.mark.parametrize("options", [{}, {"nested": True}, {"beside": True}], ids=str)
def test_those_of_the_same_format_stay_as_they_are(format, options):
    weights, optimizer = run(format, **options)
    other = copy.deepcopy(weights)
    resumed = Momentum(other, **options)
    resumed.load_state_dict(saved(optimizer))
    own, its = optimizer.state_dict(), resumed.state_dict()
    assert own.get("mcftensor_formats") == its.get("mcftensor_formats")
    assert_same_bits(its["state"], own["state"])
    train(weights, optimizer)
    train(other, resumed)
    assert_same_bits([p.detach() for p in other], [p.detach() for p in weights])


@pytest.mark.parametrize("source", [torch.float32, torch.float64, mcf.fp32x2])
@pytest.mark.parametrize("nested", [False, True])
def test_those_of_another_run_take_the_format(source, nested):
    _, optimizer = run(source, nested=nested)
    resumed = Momentum(parameters(mcf.bf16x2), nested=nested)
    resumed.load_state_dict(saved(optimizer))
    assert kinds(resumed) == [mcf.bf16x2] * 3


def test_a_parameter_that_was_plain_is_none_of_the_others():
    weights = parameters(mcf.bf16x2)
    weights[1] = nn.Parameter(torch.rand(5))
    optimizer = Momentum(weights)
    train(weights, optimizer)
    assert saved(optimizer)["mcftensor_formats"] == {0: "bf16x2", 2: "bf16x2"}
    resumed = Momentum(parameters(mcf.bf16x2))
    resumed.load_state_dict(saved(optimizer))
    assert kinds(resumed) == [torch.float32, mcf.bf16x2, torch.float32]


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad", "ASGD", "Adafactor", "RMSprop"])
@pytest.mark.parametrize("mode", [None, "light", "full"])
def test_state_dicts_of_torch_are_as_torch_makes_them(name, mode):
    weights = parameters(mcf.bf16x2)
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(weights, **options)
    if mode is not None:
        mcf.collage(optimizer, mode)
    assert list(optimizer.state_dict()) == ["state", "param_groups"]
    train(weights, optimizer)
    assert list(optimizer.state_dict()) == ["state", "param_groups"]


def test_those_of_plain_parameters_are_not_looked_at():
    _, optimizer = run(torch.bfloat16)
    assert list(optimizer.state_dict()) == ["state", "param_groups"]


def test_what_is_said_leaves_with_the_states():
    """A state dict that somebody has made anew, as `torch.distributed.checkpoint` does, tells by
    expansions alone."""
    for options, kind in (({"beside": True}, torch.float32), ({}, mcf.bf16x2)):
        weights, optimizer = run(mcf.bf16x2, **options)
        again = {name: saved(optimizer)[name] for name in ("state", "param_groups")}
        resumed = Momentum(weights, **options)
        resumed.load_state_dict(again)
        assert kinds(resumed) == [kind] * 3


def test_hooks_of_users_see_it_and_may_change_numbers():
    weights, optimizer = run(mcf.bf16x2)
    seen = []

    def shift(numbers, by):
        return {number + by: x for number, x in numbers.items()}

    def leave(_, state_dict):
        seen.append(state_dict["mcftensor_formats"])
        for group in state_dict["param_groups"]:
            group["params"] = [number + 7 for number in group["params"]]
        return state_dict | {
            name: shift(state_dict[name], 7) for name in ("state", "mcftensor_formats")
        }

    optimizer.register_state_dict_post_hook(leave)
    moved = saved(optimizer)
    assert seen == [dict.fromkeys(range(3), "bf16x2")]
    assert list(moved["mcftensor_formats"]) == [7, 8, 9]

    def enter(_, state_dict):
        groups = copy.deepcopy(state_dict["param_groups"])
        for group in groups:
            group["params"] = [number - 7 for number in group["params"]]
        changed = {name: shift(state_dict[name], -7) for name in ("state", "mcftensor_formats")}
        return state_dict | changed | {"param_groups": groups}

    for hook in (None, enter):
        resumed = Momentum(weights)
        if hook is not None:
            resumed.register_load_state_dict_pre_hook(hook)
        resumed.load_state_dict(moved)
        assert kinds(resumed) == [torch.float32] * 3


def test_a_run_within_another_one_and_one_that_raises_leave_nothing():
    weights, optimizer = run(mcf.bf16x2)
    kept, plain = saved(optimizer), saved(run(torch.float32)[1])
    resumed, inner = Momentum(weights), Momentum(weights)
    hook = resumed.register_load_state_dict_pre_hook(lambda *_: inner.load_state_dict(kept))
    resumed.load_state_dict(plain)
    assert kinds(inner) == [torch.float32] * 3
    assert kinds(resumed) == [mcf.bf16x2] * 3
    hook.remove()
    with pytest.raises(ValueError, match="number of parameter groups"):
        resumed.load_state_dict(kept | {"param_groups": kept["param_groups"] * 2})
    resumed.load_state_dict(plain)
    assert kinds(resumed) == [mcf.bf16x2] * 3
    for hooks in ("_optimizer_load_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"):
        assert not getattr(resumed, hooks)


def test_a_mode_has_the_last_word():
    weights, optimizer = run(mcf.bf16x2)
    resumed = mcf.collage(Momentum(weights), {"wide": mcf.bf16x3})
    resumed.load_state_dict(saved(optimizer))
    assert kinds(resumed) == [mcf.bf16x3] * 3
