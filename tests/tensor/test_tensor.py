"""MCFTensor itself: what it is, its roles, how it leaves the format, and hazards."""

import copy
import importlib
import io

import numpy as np
import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.helpers import assert_same_terms, exact, parameter, sample, small_model


class TestWhatItIs:
    def test_metadata_is_that_of_a_term(self, format, device):
        x = sample(format, 3, 5, device=device).t()
        assert x.shape == (5, 3)
        assert x.stride() == x.components[0].stride() == (1, 5)
        assert x.dtype == format.base
        assert x.device == x.components[0].device
        assert x.format == format
        assert len(x.components) == format.terms
        assert x.is_floating_point()
        assert x.element_size() == format.base.itemsize

    def test_components_are_checked(self):
        ones = torch.ones(3, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="1 components"):
            mcf.MCFTensor([ones], mcf.bf16x2)
        with pytest.raises(TypeError, match=r"float32 in a format of torch\.bfloat16"):
            mcf.MCFTensor([ones, torch.zeros(3)], mcf.bf16x2)
        with pytest.raises(ValueError, match="must be alike"):
            mcf.MCFTensor([ones, torch.zeros(4, dtype=torch.bfloat16)], mcf.bf16x2)
        square = torch.ones(3, 3, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="must be alike"):
            mcf.MCFTensor([square, square.t()], mcf.bf16x2)
        with pytest.raises(ValueError, match="components on cpu and meta"):
            mcf.MCFTensor([ones, ones.to("meta")], mcf.bf16x2)
        with pytest.raises(TypeError, match="'bf16x9' is not a format"):
            mcf.MCFTensor([ones, ones], "bf16x9")

    def test_printing_shows_value_and_format(self):
        x = mcf.as_expansion(torch.tensor([0.5, 0.75], dtype=torch.float64), mcf.fp32x2)
        assert repr(x) == "MCFTensor([0.5000, 0.7500], format=fp32x2)"
        assert repr(nn.Parameter(x)) == (
            "Parameter containing:\nMCFTensor([0.5000, 0.7500], format=fp32x2, requires_grad=True)"
        )
        assert "float64" not in repr(sample(mcf.bf16x2, 3, 40))
        assert "format=bf16x2" in repr(sample(mcf.bf16x2, 3).to("meta"))
        # The tail shows: the leading term alone is 1.
        close = mcf.as_expansion(torch.tensor(0.999, dtype=torch.float64), mcf.bf16x2)
        assert repr(close) == "MCFTensor(0.9990, format=bf16x2)"

    def test_foreach_is_chosen_by_default_where_torch_would(self, monkeypatch):
        module = importlib.import_module("torch.optim.optimizer")
        monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
        chosen = module._default_to_fused_or_foreach(
            [parameter(mcf.bf16x2, 3)], differentiable=False, use_fused=False
        )
        assert chosen == (False, True)


class TestRoles:
    def test_module_and_parameter_make_parameters_and_nothing_else_does(self):
        x = sample(mcf.bf16x2, 3)
        p = nn.Parameter(x)
        assert x.role == "value"
        assert p.role == "parameter"
        assert isinstance(p, nn.Parameter)
        assert not isinstance(x, nn.Parameter)
        assert not isinstance(p.detach(), nn.Parameter)
        for y in (p.detach(), p.clone(), p[1:], p.view(3, 1), p.new_zeros(2), copy.deepcopy(p)):
            assert y.role == "parameter"
        for y in (torch.zeros_like(p), torch.empty_like(p), torch.full_like(p, 2.0)):
            assert y.role == "value"
            assert y.format == p.format

    def test_a_value_keeps_all_terms_whatever_it_meets(self, format):
        x, p = sample(format, 4), parameter(format, 4, seed=1)
        plain = torch.ones(4, dtype=format.base)
        for y in (x + plain, plain * x, x + 1, x * p, x / plain, x + torch.tensor(2.0)):
            assert isinstance(y, mcf.MCFTensor)
            assert y.role == "value"

    def test_a_parameter_computes_as_its_leading_term(self, format):
        p = parameter(format, 4, 4)
        x = torch.randn(2, 4).to(format.base)
        leading = p.components[0]
        for mine, theirs in [
            (x @ p, x @ leading),
            (nn.functional.linear(x, p), nn.functional.linear(x, leading)),
            (p + x[0], leading + x[0]),
            (x[0] * p, x[0] * leading),
            (p.sum(), leading.sum()),
            (p.exp(), leading.exp()),
            (torch.cat([p, x]), torch.cat([leading, x])),
            (torch.where(x[0] > 0, p, x[0]), torch.where(x[0] > 0, leading, x[0])),
        ]:
            assert type(mine) is torch.Tensor
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)

    def test_parameters_among_themselves_keep_all_terms(self, format):
        p, q = parameter(format, 4), parameter(format, 4, seed=1)
        scalar = torch.tensor(0.5, dtype=format.base)
        for y in (p + q, p * 0.999, p * scalar, torch.lerp(p, q, 0.1), torch.cat([p, q]), p - q):
            assert isinstance(y, mcf.MCFTensor)
            assert y.role == "parameter"

    def test_updates_in_place_reach_all_terms(self):
        p = nn.Parameter(mcf.as_expansion(torch.ones(4), mcf.bf16x2))
        with torch.no_grad():
            for _ in range(100):
                p.add_(torch.full((4,), -1e-4, dtype=torch.bfloat16))
        assert p.components[0][0] != 1
        torch.testing.assert_close(exact(p), torch.full((4,), 0.99).double(), rtol=2e-4, atol=0)


class TestGradientsOfParametersArePlain:
    @pytest.mark.parametrize("shape", [(), (3,)])
    def test_through_products_of_parameters(self, shape):
        w = nn.Parameter(mcf.as_expansion(torch.full(shape, 1.5), mcf.bf16x2))
        x = torch.full(shape, 2.0, dtype=torch.bfloat16)
        loss = (x * w + 0.25 * w * w).sum()
        loss.backward()
        assert type(w.grad) is torch.Tensor
        torch.testing.assert_close(w.grad, torch.full(shape, 2.75, dtype=torch.bfloat16))

    def test_where_the_loss_is_an_expansion_itself(self):
        w = nn.Parameter(mcf.as_expansion(torch.tensor(1.5), mcf.bf16x2))
        loss = 0.25 * w * w
        assert isinstance(loss, mcf.MCFTensor)
        (by_grad,) = torch.autograd.grad(loss, w, retain_graph=True)
        loss.backward()
        for gradient in (w.grad, by_grad):
            assert type(gradient) is torch.Tensor
            assert gradient == 0.75

    def test_where_the_weight_itself_starts_the_backward_pass(self):
        w = nn.Parameter(mcf.as_expansion(torch.tensor(1.5), mcf.bf16x2))
        w.backward()
        assert type(w.grad) is torch.Tensor
        (w * w).backward(torch.ones_like(w))
        assert type(w.grad) is torch.Tensor
        assert w.grad == 4

    def test_in_a_model(self):
        model = mcf.as_expansion(small_model())
        model(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
        plain = mcf.as_plain(copy.deepcopy(model))
        plain.zero_grad()
        plain(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert type(p.grad) is torch.Tensor
            assert torch.equal(p.grad, q.grad)


class TestLeaving:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    def test_conversion_collapses_once_in_both_roles(self, format, dtype):
        for x in (sample(format, 50), parameter(format, 50)):
            y = x.to(dtype)
            if dtype == format.base:
                assert y is x
            else:
                assert type(y) is torch.Tensor
                assert torch.equal(y.detach(), mcf.as_plain(x, dtype))

    def test_conversion_is_differentiable(self):
        p = parameter(mcf.bf16x2, 3)
        (p.float() * 2).sum().backward()
        assert type(p.grad) is torch.Tensor
        assert p.grad.tolist() == [2, 2, 2]

    def test_python_and_numpy_see_the_whole_value(self):
        x = mcf.as_expansion(torch.tensor([1 + 2.0**-12, 0.25], dtype=torch.float64), mcf.bf16x2)
        assert float(x[0]) == x[0].item() == 1 + 2.0**-12
        assert x.tolist() == [1 + 2.0**-12, 0.25]
        assert x.numpy().dtype == np.float64
        assert np.asarray(x).tolist() == x.tolist()
        with pytest.raises(RuntimeError, match="requires grad"):
            nn.Parameter(x).numpy()
        assert nn.Parameter(x).detach().numpy().tolist() == x.tolist()

    def test_autocast(self):
        model = mcf.as_expansion(nn.Linear(4, 4))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(torch.ones(2, 4)).dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.float16):
            assert model(torch.ones(2, 4)).dtype == torch.float16

    def test_a_module_refuses_another_dtype_and_stays(self):
        model = mcf.as_expansion(small_model())
        before = copy.deepcopy(model)
        for convert in (lambda: model.to(torch.float32), model.half, model.double):
            with pytest.raises(TypeError, match=r"mcf\.as_plain\(module\)"):
                convert()
        for p, q in zip(model.parameters(), before.parameters(), strict=True):
            assert_same_terms(p, q)
        assert model.bfloat16() is model
        assert model.to("cpu")[0].weight.format == mcf.bf16x2


class TestInferenceMode:
    def test_gives_what_no_grad_gives(self):
        p, x = parameter(mcf.bf16x2, 4, 4), sample(mcf.bf16x2, 4, 4, seed=1)
        calls = [
            lambda t: t.to(torch.float64),
            lambda t: t.float(),
            lambda t: t.reshape(-1),
            lambda t: t.view(-1),
            lambda t: t.T,
            lambda t: t[1, :2],
            lambda t: t.chunk(2)[1],
            lambda t: torch.subtract(t, 3),
            lambda t: t.clip(0.1, 0.3),
            lambda t: torch.true_divide(t, 3),
            lambda t: torch.vstack([t, t]),
            lambda t: mcf.as_plain(t, torch.float64),
        ]
        for call in calls:
            for t in (p, x):
                with torch.no_grad():
                    expected = call(t)
                with torch.inference_mode():
                    result = call(t)
                    # Of either, the terms may not be computed yet, which shows in its type.
                    assert isinstance(result, mcf.MCFTensor) is isinstance(expected, mcf.MCFTensor)
                    assert torch.equal(result, expected)
                    if isinstance(result, mcf.MCFTensor):
                        assert (result.role, result.format) == (expected.role, expected.format)

    def test_a_model_with_a_sliced_parameter(self):
        class Positions(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Parameter(torch.randn(8, 4))
                self.linear = nn.Linear(4, 4)

            def forward(self, x):
                return self.linear(x + self.table[: len(x)])

        model = mcf.as_expansion(Positions())
        x = torch.randn(3, 4).bfloat16()
        with torch.inference_mode():
            y = model(x)
            assert model.table[0, 0].item() == model.table.tolist()[0][0]
        assert torch.equal(y, model(x).detach())


class TestHazards:
    def test_assigning_data(self):
        p = parameter(mcf.bf16x2, 4)
        new = sample(mcf.bf16x2, 4, seed=3)
        p.data = new
        assert_same_terms(p.detach(), new)
        p.data.add_(1)
        torch.testing.assert_close(exact(p), exact(new))  # data shares memory, both ways
        with pytest.raises(TypeError, match=r"plain torch\.float32"):
            p.data = torch.ones(4)
        wider = sample(mcf.bf16x3, 4)
        p.data = wider  # nothing is rounded: the format is taken over
        assert_same_terms(p.detach(), wider)
        wider.mul_(2)
        assert_same_terms(p.detach(), wider)
        p.data = sample(mcf.bf16x2, 4)
        with pytest.raises(TypeError, match="fp32x2"):
            p.data = sample(mcf.fp32x2, 4)
        with pytest.raises(ValueError, match="shape"):
            p.data = sample(mcf.bf16x2, 5)
        assert p.shape == p.components[0].shape == (4,)

    def test_assigning_data_of_another_layout(self):
        p, q = parameter(mcf.bf16x2, 3, 3), sample(mcf.bf16x2, 3, 3, seed=1)
        p.data = q.t()
        assert p.stride() == p.components[0].stride() == (1, 3)
        assert_same_terms(p.detach(), q.t())
        with torch.no_grad():
            p.add_(1)
        assert_same_terms(p.detach(), q.t())
        p.sum().backward()
        assert torch.equal(p.grad, torch.ones(3, 3, dtype=torch.bfloat16))

    @pytest.mark.parametrize("format", [None, mcf.bf16i16, mcf.e4m3i8, mcf.fp32x2])
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_weights_that_are_tied_by_data(self, when, format):
        embed, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)  # of bf16x3 and bf16x2
        model = nn.Sequential(embed, head)
        if when == "before":
            head.weight.data = embed.weight.data
        mcf.as_expansion(model, format)
        if when == "after":
            head.weight.data = embed.weight.data
        for p, q in ((embed.weight, head.weight), (head.weight, embed.weight)):
            with torch.no_grad():
                p.add_(1e-3)
            assert p.format == q.format
            assert torch.equal(exact(p), exact(q))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for p in model.parameters():
            p.grad = torch.ones(p.shape, dtype=p.dtype)
        before = exact(head.weight)
        optimizer.step()
        torch.testing.assert_close(
            before - exact(head.weight), torch.full((7, 4), 0.1).double(), rtol=0.1, atol=0
        )
        assert torch.equal(exact(embed.weight), exact(head.weight))
        mcf.as_plain(model)
        with torch.no_grad():
            head.weight.fill_(3)
        assert torch.equal(embed.weight, head.weight)

    def test_a_parameter_takes_no_format_of_states(self):
        p = nn.Parameter(mcf.as_expansion(torch.ones(2, 32), mcf.bf16i8))
        state = mcf.as_expansion(torch.ones(2, 32), mcf.mxfp8)
        with pytest.raises(TypeError, match="mxfp8"):
            p.data = state

    def test_vectors_of_parameters(self):
        model = mcf.as_expansion(small_model())
        before = copy.deepcopy(model)
        vector = nn.utils.parameters_to_vector(model.parameters())
        with torch.no_grad():
            nn.utils.vector_to_parameters(vector * 2, model.parameters())
        for p, q in zip(model.parameters(), before.parameters(), strict=True):
            assert torch.equal(exact(p), 2 * exact(q))

    def test_set_raises(self):
        x = sample(mcf.bf16x2, 4)
        with pytest.raises(TypeError, match="set_"):
            x.set_(torch.ones(4, dtype=torch.bfloat16))
        with pytest.raises(TypeError, match="set_"):
            torch.ones(4, dtype=torch.bfloat16).set_(x)

    def test_sharing_memory_moves_the_terms(self):
        x = sample(mcf.bf16x3, 4)
        before = x.clone()
        assert x.share_memory_() is x
        assert x.is_shared()
        assert_same_terms(x, before)

    def test_deepcopy_and_pickle(self, format):
        p = parameter(format, 4)
        q = copy.deepcopy(p)
        assert isinstance(q, nn.Parameter)
        assert_same_terms(p.detach(), q.detach())
        with torch.no_grad():
            q.add_(1)
        assert not torch.equal(p, q)
        buffer = io.BytesIO()
        torch.save({"p": p}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)["p"]
        assert isinstance(loaded, nn.Parameter)
        assert_same_terms(p.detach(), loaded.detach())


# --------------------------------------------------------------------------------- in a notebook


def test_a_notebook_shows_a_few_numbers_with_their_terms():
    x = mcf.exact.from_exact([1, "0.001"], mcf.bf16x2)
    page = x._repr_html_()
    for term in x.components:
        for value in term.tolist():
            assert f"<td>{value:.17g}</td>" in page
    assert page.count("<tr>") == 3
    assert "bf16x2 (bfloat16 + bfloat16), value, shape (2,), 8 B" in page


def test_a_notebook_shows_the_terms_of_eight_numbers_at_most():
    for count, rows in ((8, 9), (9, 0)):
        page = mcf.as_expansion(torch.ones(count), mcf.bf16x2)._repr_html_()
        assert page.count("<tr>") == rows


@pytest.mark.parametrize("kind", [mcf.bf16x2, mcf.bf16i8, mcf.mxfp8, mcf.e4m3i8], ids=str)
def test_a_notebook_shows_how_larger_tensors_are_stored(kind):
    page = mcf.as_expansion(torch.ones(64, 64), kind)._repr_html_()
    assert page.count("<tr>") == 0
    assert f"{kind.name} (" in page
    assert "value, shape (64, 64)" in page


def test_a_notebook_shows_what_has_no_numbers():
    page = mcf.exact.from_exact([1, "0.001"], mcf.bf16x2).to("meta")._repr_html_()
    assert page.count("<tr>") == 0
    assert "bf16x2 (bfloat16 + bfloat16), value, shape (2,), 8 B" in page
