"""Balanced rounding: what counts the writes to a tensor, and what it does to the count."""

import copy
import hashlib
import io

import pytest
import torch
from torch import nn

import mcftensor as mcf

ALONE = mcf.Format(torch.bfloat16, 1, rounding="balanced")
LONG = mcf.bf16x2.with_rounding("balanced")
FORMATS = [mcf.bf16i8, ALONE, LONG, mcf.fp32x2.with_rounding("balanced")]

by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)


def made(format, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return mcf.as_expansion(x, format)


def plain(x):
    return mcf.as_plain(x.detach(), torch.float64)


def same(x, y):
    return all(torch.equal(a, b) for a, b in zip(x.components, y.components, strict=True))


def saved_and_loaded(x):
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.parametrize("format", [LONG], ids=lambda f: f.name)
def test_results_of_their_own_go_on_from_their_operand(format):
    """Or an average that is computed out of place would be rounded alike each time."""
    unit = 2.0 ** (1 - format.precision)
    x = mcf.as_expansion(torch.ones(50, dtype=torch.float64), format)
    for count in range(2, 1002):
        x = x + 0.07 * unit
        assert x.writes == count
    assert (plain(x) - (1 + 70 * unit)).abs().max() < 4 * unit


def test_counts_of_files_are_checked():
    x = made(mcf.bf16i8, 3)
    terms = mcf.checkpoint.as_terms({"x": x})
    assert list(terms) == ["x", "x.bf16i8.tail", "x.bf16i8.writes"]
    for wrong in (torch.zeros(3, dtype=torch.int64), torch.tensor(1.0), 3):
        with pytest.raises(mcf.errors.CheckpointError, match="count of writes"):
            mcf.checkpoint.from_terms(terms | {"x.bf16i8.writes": wrong})
    del terms["x.bf16i8.writes"]
    assert mcf.checkpoint.from_terms(terms)["x"].writes == 0


def test_a_format_without_tails_is_told_by_what_stands_beside():
    for rounding in ("balanced", "stochastic"):
        format = mcf.Format(torch.bfloat16, 1, rounding=rounding)
        terms = mcf.checkpoint.as_terms({"x": made(format, 3)})
        assert list(terms) == ["x", f"x.{format.name}.writes"]
        assert mcf.checkpoint.from_terms(terms)["x"].format is format


def salt(x):
    """By which sequences a tensor is rounded, as its files have it."""
    return mcf.checkpoint.as_terms({"x": x.detach()})[f"x.{x.format.name}.writes"].item() >> 32


def salt_of(*names):
    """The sum of hashes of names, as a number of 32 bits with its sign."""
    digests = (hashlib.blake2b(name.encode(), digest_size=4).digest() for name in names)
    total = sum(int.from_bytes(x, "little") for x in digests)
    return (total + 2**31) % 2**32 - 2**31


def correlation(a, b):
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()


def after_steps(model, gradients, *, fused=False, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused, **options)
    for step in gradients:
        for p, g in zip(model.parameters(), step, strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()
    return optimizer


@by_format
class TestTheSalt:
    def test_is_that_of_the_name_in_the_module(self, format):
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3, bias=False)})
        model["b"].weight = model["a"].weight
        mcf.as_expansion(model, format)
        assert {name: salt(p) for name, p in model.named_parameters()} == {
            "a.weight": salt_of("a.weight"),
            "a.bias": salt_of("a.bias"),
        }
        assert all(p.writes == 1 for p in model.parameters())
        mcf.as_expansion(model, format)  # stays as it is
        other = mcf.bf16x3.with_rounding("balanced")
        assert salt(mcf.as_expansion(model["a"].weight.detach(), other)) == salt_of("a.weight")
        assert salt(made(format, 3)) == 0

    @pytest.mark.thinned(of=4)
    @pytest.mark.parametrize("fused", [False, True])
    def test_each_state_has_its_own(self, format, fused):
        def trained(*other_tensors):
            model = mcf.as_expansion(nn.Linear(3, 2, bias=False), format)
            _ = [torch.zeros_like(model.weight) for _ in other_tensors]
            gradients = torch.ones(2, 1, 2, 3)
            optimizer = after_steps(model, gradients, fused=fused, amsgrad=True)
            return [salt(x) for x in optimizer.state[model.weight].values() if x.dim()]

        assert trained() == trained(1, 2, 3) == [salt_of("weight", f"{i}") for i in range(3)]

    @pytest.mark.parametrize(
        "take",
        [
            torch.clone,
            copy.deepcopy,
            saved_and_loaded,
            torch.t,
            nn.Parameter,
            lambda x: torch.cat([x, x]),
            lambda x: torch.empty_like(x).copy_(x),
            lambda x: mcf.checkpoint.from_terms(mcf.checkpoint.as_terms({"x": x}))["x"],
        ],
    )
    def test_goes_along(self, format, take):
        x = mcf.as_expansion(nn.Linear(3, 2), format).weight.detach()
        assert salt(take(x)) == salt(x) == salt_of("weight")

    def test_what_had_none_goes_on_as_it_did(self, format):
        """Files of a count alone, which others than this release have written."""
        model = mcf.as_expansion(nn.Linear(3, 2), format)
        old = made(format, 2, 3).mul_(0.3)
        terms = mcf.checkpoint.as_terms({"weight": old, "bias": model.bias.detach()})
        assert terms[f"weight.{format.name}.writes"] == 2
        model.load_state_dict(mcf.checkpoint.from_terms(terms))
        assert salt(model.weight) == 0
        with torch.no_grad():
            model.weight.mul_(0.7)
        assert same(model.weight, old.mul_(0.7))

    def test_a_model_that_was_on_meta_gets_its_own_when_it_is_loaded(self, format):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 2))
        model = mcf.as_expansion(model, format).to_empty(device="cpu")
        plain_model = nn.Sequential(nn.Linear(3, 2))
        model.load_state_dict(plain_model.state_dict())
        assert salt(model[0].weight) == salt_of("0.weight")
        assert model[0].weight.writes == 1
        assert same(model[0].weight, mcf.as_expansion(plain_model, format)[0].weight)

    def test_states_of_other_runs_get_that_of_their_names(self, format):
        gradients = torch.ones(1, 1, 2, 3)
        other = nn.Linear(3, 2, bias=False, dtype=torch.float64)
        states = after_steps(other, gradients).state_dict()
        model = mcf.as_expansion(nn.Linear(3, 2, bias=False), format)
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.load_state_dict(states)
        state = optimizer.state[model.weight]
        for name in ("exp_avg", "exp_avg_sq"):
            assert salt(state[name]) == salt_of("weight", name)

    @pytest.mark.thinned(of=2)
    @pytest.mark.with_float64("a file has a tensor of it")
    @pytest.mark.parametrize("size", [1 << 10, 1 << 19])
    def test_a_converted_checkpoint_has_that_of_names(self, format, size, tmp_path):
        plain_model = nn.Linear(size // 8, 8, bias=False, dtype=torch.float64)
        torch.save(plain_model.state_dict(), tmp_path / "old.pt")
        path = tmp_path / "new.safetensors"
        mcf.checkpoint.convert_checkpoint(tmp_path / "old.pt", path, format, lossy=True)
        found = mcf.load_file(path)["weight"]
        expected = mcf.as_expansion(plain_model, format).weight
        assert same(found, expected)
        assert found.writes == expected.writes == 1
        assert salt(found) == salt_of("weight")


@by_format
class TestPieces:
    """What is cut off goes on as it would have done within the whole."""

    @pytest.mark.thinned(of=6)
    @pytest.mark.parametrize(
        "cut",
        [
            lambda x: x[2:],
            lambda x: x[2:][1:],
            lambda x: x.unbind()[3],
            lambda x: x.chunk(2)[1],
            lambda x: x.view(-1)[5:].detach(),
            lambda x: x.split([1, 4, 1])[1].data,
            lambda x: x.narrow(0, 2, 3).flatten(),
        ],
    )
    @pytest.mark.parametrize(
        "take",
        [
            lambda x: x,
            torch.clone,
            copy.deepcopy,
            saved_and_loaded,
            lambda x: torch.empty_like(x).copy_(x),
            lambda x: x + 0 if x.format.result is x.format else x.clone(),
            lambda x: mcf.checkpoint.from_terms(mcf.checkpoint.as_terms({"x": x}))["x"],
        ],
        ids=["itself", "clone", "deepcopy", "save", "copy_", "result", "terms"],
    )
    def test_rounds_as_the_whole_does(self, format, cut, take):
        model = mcf.as_expansion(nn.Linear(4, 6), format)
        x, whole = model.weight.detach().clone(), model.weight.detach().clone()
        before = x.writes.item()
        piece = take(cut(x))
        others = int(piece.writes) - before  # a result is one write
        for _ in range(2 + others):
            whole.mul_(0.999)
        for _ in range(2):
            piece.mul_(0.999)
        expected = cut(whole)
        if not others:
            assert same(piece, expected)
        assert salt(piece) == salt(expected)

    def test_into_a_piece_of_something_longer(self, format):
        """As shards are stored, beside which there is room."""
        x = mcf.as_expansion(nn.Linear(4, 6), format).weight.detach()
        room = x.new_zeros(20)
        room[:12].copy_(x.flatten()[12:])
        piece = room.view(5, 4)[:3]
        for y in (x, piece):
            y.mul_(0.999)
        assert same(piece, x[3:])
        room[4:].copy_(x[4:].flatten().repeat(2))
        assert salt(room[4:]) == salt(x[4:])

    @pytest.mark.thinned(of=2)
    @pytest.mark.parametrize("backend", ["aot_eager"])
    def test_compiled(self, format, backend):
        if format.dtype == torch.float32:
            pytest.skip("as bf16x2")

        def write(x):
            x[2:].mul_(0.999)
            x.mul_(0.999)
            return x[4:].clone().mul_(0.999)

        x = mcf.as_expansion(nn.Linear(4, 6), format).weight.detach()
        y = x.clone()
        pairs = [(x, y), (x[1:], y[1:])]
        for a, b in pairs:
            result, expected = torch.compile(write, backend=backend)(a), write(b)
            assert same(result, expected)
            assert salt(result) == salt(expected)
            assert same(x, y)
            assert x.writes == y.writes


def test_errors_of_two_tensors_have_nothing_to_do_with_each_other():
    """Where they begin with the same numbers and are pushed alike, as norm weights are; with the
    same sequences they correlate by 0.8."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(100, 2, 64, 64, generator=generator) + 1
    for fused in (False, True):
        model = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(2)])
        for p in model.parameters():
            nn.init.ones_(p)
        exact = copy.deepcopy(model).double()
        optimizers = [
            after_steps(mcf.as_expansion(model, ALONE), gradients, fused=fused),
            after_steps(exact, gradients.bfloat16()),
        ]
        pairs = list(zip(model.parameters(), exact.parameters(), strict=True))
        for of in (
            lambda p, _: p,
            lambda p, optimizer: optimizer.state[p]["exp_avg"],
            lambda p, optimizer: optimizer.state[p]["exp_avg_sq"],
        ):
            errors = [
                mcf.as_plain(of(p, optimizers[0]), torch.float64) - of(q, optimizers[1]).detach()
                for p, q in pairs
            ]
            assert abs(correlation(*errors)) < 5 / 64
        names = ("exp_avg", "exp_avg_sq")
        p, q = pairs[0]
        errors = [
            mcf.as_plain(optimizers[0].state[p][n], torch.float64) - optimizers[1].state[q][n]
            for n in names
        ]
        assert abs(correlation(*errors)) < 5 / 64


def test_states_made_by_a_compiled_step_have_the_salts_of_an_eager_one():
    class Averaging(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                if not state:
                    state |= {name: torch.zeros_like(p) for name in ("slow", "fast")}
                state["slow"].lerp_(p.grad, 0.01)
                state["fast"].lerp_(p.grad, 0.1)
                p.add_(state["fast"] + state["slow"], alpha=-0.1)

    def trained(compiled):
        torch.manual_seed(0)
        model = mcf.as_expansion(nn.Linear(5, 3), mcf.bf16i8)
        optimizer = Averaging(model.parameters())
        step = optimizer.step
        if compiled:
            step = torch.compile(step, backend="aot_eager")
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.randn(p.shape).bfloat16()
            step()
        return [x for p in model.parameters() for x in (p, *optimizer.state[p].values())]

    for a, b in zip(trained(False), trained(True), strict=True):
        assert same(a, b)
        assert (salt(a), a.writes) == (salt(b), b.writes)


def test_data_of_a_piece_is_rounded_as_the_piece_is():
    pieces = [made(mcf.bf16i8, 8, 4)[4:] for _ in range(2)]
    taken = torch.zeros_like(pieces[0])
    taken.data = pieces[0]
    for x in (taken, pieces[1]):
        for _ in range(3):
            x.add_(1e-5)
    assert same(taken, pieces[1])


def test_only_the_balanced_tensors_of_a_list_count():
    with torch.no_grad():
        new = torch._foreach_mul([made(mcf.bf16x2, 4), made(LONG, 4)], 0.9)
    assert new[0].writes is None
    assert new[1].writes == 2


@pytest.mark.parametrize("format", [mcf.mxfp8, mcf.ue5m3, mcf.q4, mcf.ue4], ids=lambda f: f.name)
def test_a_deferred_factor_is_rounded_as_the_product_is(format):
    """It is applied when a part is written."""
    deferred = mcf.as_expansion(torch.zeros(4, 64), format)
    deferred.copy_(torch.rand(4, 64, generator=torch.Generator().manual_seed(0)) + 0.5)
    at_once = deferred.clone()
    deferred.mul_(0.3)
    deferred[:1].fill_(1.0)
    at_once.copy_(mcf.as_plain(at_once, torch.float32) * 0.3)
    for x, y in zip(deferred.components, at_once.components, strict=True):
        assert torch.equal(x[1:].view(torch.uint8), y[1:].view(torch.uint8))
