"""Parameters that are plain in a model of expansions are named before they lose their updates."""

import copy
import warnings

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.helpers import small_model


def step(model, optimizer):
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.ones_like(mcf.as_plain(p))
    optimizer.step()


def half_frozen():
    model = small_model()
    model[0].requires_grad_(False)
    return mcf.as_expansion(model)


def sgd(model):
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1e-6)


def test_frozen_weights_are_plain_and_nothing_is_said():
    model = half_frozen()
    assert model[0].weight.dtype == torch.bfloat16
    step(model, sgd(model))
    mcf.collage(sgd(model), "plus")


def test_weights_that_are_unfrozen_are_named_once():
    model = half_frozen()
    model.requires_grad_(True)
    optimizer = sgd(model)
    match = r"SGD: .*plain torch\.bfloat16.*: 0\.weight, 0\.bias\. .*as_expansion\(model\) again"
    with pytest.warns(mcf.errors.PlainParameterWarning, match=match):
        step(model, optimizer)
    step(model, optimizer)
    with pytest.warns(mcf.errors.PlainParameterWarning, match=r"0\.weight"):
        mcf.collage(sgd(model), "plus")


def test_weights_that_are_unfrozen_in_the_middle():
    model = half_frozen()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    step(model, optimizer)
    model[0].bias.requires_grad_(True)
    with pytest.warns(mcf.errors.PlainParameterWarning, match=r": 0\.bias\. "):
        step(model, optimizer)


def test_an_optimizer_of_nothing_else():
    model = half_frozen()
    model[0].requires_grad_(True)
    with pytest.warns(mcf.errors.PlainParameterWarning, match=r"0\.weight"):
        step(model[0], torch.optim.SGD(model[0].parameters(), lr=1e-6))


def test_what_is_added_is_named_too():
    model = half_frozen()
    model.append(nn.Linear(2, 2, dtype=torch.bfloat16))
    with pytest.warns(mcf.errors.PlainParameterWarning, match=r"4\.weight, 4\.bias"):
        step(model, sgd(model))


def test_many_are_counted():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)]).requires_grad_(False)
    mcf.as_expansion(model).requires_grad_(True)
    with pytest.warns(
        mcf.errors.PlainParameterWarning, match=r"0\.weight, 0\.bias, 1\.weight and 5 more"
    ):
        step(model, sgd(model))


def test_parameters_of_no_model_are_left_alone():
    p, q = (nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)) for _ in range(2))
    p = nn.Parameter(mcf.as_expansion(p.detach()))
    p.grad = q.grad = torch.ones(2, 2, dtype=torch.bfloat16)
    torch.optim.SGD([p, q], lr=1e-6).step()


@pytest.mark.parametrize(
    "make",
    [
        lambda: mcf.as_expansion(small_model().bfloat16(), overrides={"0.*": None}),
        lambda: mcf.as_expansion(small_model(), overrides={"0.*": None}),
        lambda: small_model().bfloat16(),
        lambda: mcf.as_plain(half_frozen()).requires_grad_(True),
    ],
    ids=["left plain", "left in float32", "plain", "plain again"],
)
def test_what_is_meant_to_be_plain_is_not(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = make()
        step(model, sgd(model))


class TestAnotherCall:
    def test_converts_what_is_unfrozen(self):
        model = half_frozen()
        terms = model[3].weight.components
        model.requires_grad_(True)
        weight, value = model[0].weight, model[0].weight.detach().clone()
        assert mcf.as_expansion(model)[0].weight is weight
        assert (weight.format, model[0].bias.format) == (mcf.bf16x2, mcf.bf16x3)
        assert torch.equal(mcf.as_plain(weight), value)
        assert all(map(torch.equal, model[3].weight.components, terms))
        step(model, mcf.collage(torch.optim.AdamW(model.parameters()), "plus"))

    @pytest.mark.parametrize(
        ("format", "weight", "bias"),
        [
            ("fp32x2", "fp32x2", "fp32x2"),
            ("bf16i8", "bf16i8", "bf16i8"),
            ("e4m3i8", "e4m3i8", "bf16i16"),
            (None, "bf16x2", "bf16x3"),
        ],
    )
    def test_what_is_new_follows_what_is_there(self, format, weight, bias):
        model = mcf.as_expansion(nn.Sequential(nn.Linear(4, 4)), format)
        model.append(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
        mcf.as_expansion(model)
        names = [x.format.name for x in (model[1][0].weight, model[1][0].bias, model[1][1].weight)]
        assert names == [weight, bias, bias]
        assert model[1][1].running_mean.dtype == model[0].weight.dtype

    def test_the_message_of_collage_names_it(self):
        model = half_frozen()
        with pytest.raises(ValueError, match="or again where parameters were frozen"):
            mcf.collage(torch.optim.SGD(model[0].parameters(), lr=1e-6), "plus")


class TestPlainAgain:
    """`as_plain` in the middle of a training."""

    @pytest.mark.parametrize("dtype", [None, torch.float32])
    @pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
    def test_the_next_step_warns_once(self, kind, dtype):
        model = mcf.as_expansion(small_model())
        optimizer = kind(model.parameters(), lr=1e-3, foreach=False)
        step(model, optimizer)
        mcf.as_plain(model, dtype)
        for state in optimizer.state.values():
            state.clear()
        match = rf"{kind.__name__} has stepped expansions, and 0\.weight and \d more.*deepcopy"
        with pytest.warns(mcf.errors.PlainParameterWarning, match=match):
            step(model, optimizer)
        step(model, optimizer)

    def test_part_of_a_model(self):
        model = mcf.as_expansion(small_model())
        optimizer = mcf.collage(torch.optim.SGD(model.parameters(), lr=1e-3), "plus")
        mcf.as_plain(model[3], torch.float32)
        with pytest.warns(
            mcf.errors.PlainParameterWarning, match="and weight and 1 more are plain"
        ):
            step(model, optimizer)

    def test_what_is_meant_is_not_told(self):
        model = mcf.as_expansion(small_model())
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        mcf.as_plain(copy.deepcopy(model))
        step(model, optimizer)
        mcf.as_plain(model)
        mcf.as_expansion(model)
        step(model, optimizer)
        mcf.as_plain(model)
        step(model, torch.optim.AdamW(model.parameters()))


SURGERIES = {
    "cat": lambda p, new: torch.cat((p, new)),
    "stack": lambda p, new: torch.stack((p, new)).flatten(0, 1),
    "where": lambda p, new: torch.where(torch.ones(2, 3, dtype=torch.bool), p, new),
    "index_put": lambda p, new: p.index_put((torch.tensor([1]),), new[:1]),
    "scatter": lambda p, new: p.scatter(0, torch.ones(1, 3, dtype=torch.int64), new),
    "block_diag": torch.block_diag,
    "masked_scatter": lambda p, new: p.masked_scatter(new == 0, new),
    "select_scatter": lambda p, new: p.select_scatter(new[0], 0, 1),
}


class TestSurgery:
    """Weights made of an expansion and a plain tensor, as densification and pruning make them."""

    @staticmethod
    def steps(q, optimizer, count):
        for _ in range(count):
            q.grad = torch.ones_like(mcf.as_plain(q))
            optimizer.step()

    @pytest.mark.parametrize("grows", [torch.no_grad, torch.enable_grad])
    @pytest.mark.parametrize("surgery", SURGERIES)
    @pytest.mark.parametrize("place", ["group", "module", "other optimizer"])
    def test_it_is_told_and_the_line_that_it_names_keeps_all(self, place, surgery, grows):
        model = nn.ParameterDict({"p": torch.ones(2, 3)})
        mcf.as_expansion(model, mcf.bf16x2)
        p, new = model["p"], torch.ones(2, 3, dtype=torch.bfloat16)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        self.steps(p, optimizer, 5)
        kept = SURGERIES[surgery](mcf.as_expansion(p), new)
        with grows():
            grown = SURGERIES[surgery](p.detach(), new)
        assert kept.format == mcf.bf16x2
        assert type(grown) is torch.Tensor
        for q, is_told in ((nn.Parameter(grown), True), (nn.Parameter(kept), False)):
            if place == "module":
                model["p"] = q
            if place == "other optimizer":
                optimizer = torch.optim.Adam([q], lr=1e-4)
            else:
                optimizer.state.clear()
                optimizer.param_groups[0]["params"][0] = q
            match = (
                r"plain torch\.bfloat16, .*made of expansions.*torch\.cat\(\[mcf\.as_expansion\(p\)"
            )
            if is_told:
                with pytest.warns(mcf.errors.PlainParameterWarning, match=match) as caught:
                    self.steps(q, optimizer, 10)
                assert len(caught) == 1
                assert q.flatten()[0] == 1
            else:
                self.steps(q, optimizer, 10)
                assert 0.998 < mcf.as_plain(q.detach(), torch.float64).flatten()[0] < 0.9986

    def test_a_plain_parameter_beside_expansions_from_the_start(self):
        parameters = [
            nn.Parameter(mcf.as_expansion(torch.ones(2))),
            nn.Parameter(torch.ones(2).half()),
        ]
        optimizer = torch.optim.SGD(parameters, lr=1e-3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for q in parameters:
                self.steps(q, optimizer, 2)
        late = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        optimizer.add_param_group({"params": [late]})
        with pytest.warns(
            mcf.errors.PlainParameterWarning, match=r"came in .*: one of shape \(2,\)"
        ):
            self.steps(late, optimizer, 2)


def test_an_embedding_is_resized_as_the_error_says():
    """`resize_token_embeddings` of transformers assigns data of another shape."""
    layer = mcf.as_expansion(nn.Embedding(6, 4), mcf.bf16i16)
    with torch.no_grad():
        layer.weight.mul_(1 + 2.0**-12)
    before = mcf.as_plain(layer.weight.detach(), torch.float32)
    rows = torch.zeros(2, 4, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"To resize, .* nn\.Parameter\(torch\.cat\(\[mcf\.as_exp"):
        layer.weight.data = torch.cat([layer.weight.detach(), rows])
    layer.weight = nn.Parameter(torch.cat([mcf.as_expansion(layer.weight), rows]))
    assert layer.weight.format == mcf.bf16i16
    assert torch.equal(mcf.as_plain(layer.weight.detach(), torch.float32)[:6], before)
