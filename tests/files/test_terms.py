"""State dicts as terms, and what torch.distributed.checkpoint makes of both in one process."""

import io
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.format_utils
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import mcftensor as mcf
from support.helpers import SCALED, STORED, assert_same_terms, exact, sample, small_model

STOCHASTIC = mcf.Format(torch.bfloat16, 3, rounding="stochastic")


def trained(seed=0):
    model = mcf.as_expansion(small_model(seed))
    optimizer = mcf.collage(torch.optim.AdamW(model.parameters(), 1e-2, foreach=False), "plus")
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    model(torch.randn(3, 4).bfloat16()).square().sum().backward()
    optimizer.step()


def states(model, optimizer):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def copied(state):
    if isinstance(state, dict):
        return {name: copied(x) for name, x in state.items()}
    return state.detach().clone() if isinstance(state, torch.Tensor) else state


def assert_same(x, y):
    assert type(x) is type(y) or isinstance(x, dict)  # or an OrderedDict
    if isinstance(x, dict):
        assert x.keys() == y.keys()
        for name in x:
            assert_same(x[name], y[name])
    elif isinstance(x, mcf.MCFTensor):
        assert_same_terms(x, y)
    elif isinstance(x, torch.Tensor):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)
    else:
        assert x == y


class TestAsTerms:
    @pytest.mark.parametrize(
        "format", [*mcf.formats.FORMATS, STOCHASTIC, *STORED, *SCALED], ids=lambda f: f.name
    )
    def test_there_and_back(self, format):
        x = sample(format, 3, 2)
        terms = mcf.checkpoint.as_terms(
            {"x": x, "n": {"p": nn.Parameter(x)}, 3: {"step": 4, "e": x[1:]}}
        )
        assert all(type(t) is torch.Tensor for t in [*terms["n"].values(), terms["x"]])
        back = mcf.checkpoint.from_terms(terms)
        assert_same(back, {"x": x, "n": {"p": x}, 3: {"step": 4, "e": x[1:]}})
        assert back["n"]["p"].role == "value"

    def test_memory_is_shared(self):
        x = sample(mcf.bf16x2, 3)
        leading, tail = (terms := mcf.checkpoint.as_terms({"x": x})).values()
        mcf.checkpoint.from_terms(terms)["x"].mul_(3)
        for term, other in zip(x.components, (leading, tail), strict=True):
            assert term.data_ptr() == other.data_ptr()
        assert_same_terms(x, sample(mcf.bf16x2, 3) * 3)

    def test_states_of_optimizers(self):
        state = states(*trained())
        assert_same(mcf.checkpoint.from_terms(mcf.checkpoint.as_terms(state)), state)
        _, optimizer = trained()
        assert_same(
            mcf.checkpoint.from_terms(mcf.checkpoint.as_terms(optimizer.state_dict())),
            optimizer.state_dict(),
        )

    @pytest.mark.parametrize(
        ("state", "match"),
        [
            ({"x": [sample(mcf.bf16x2, 2)]}, "a list that holds expansions"),
            ({"x": [{"y": (1, sample(mcf.bf16x2, 2))}]}, "a list that holds expansions"),
            ({0: sample(mcf.bf16x2, 2)}, "under 0, which is no name"),
            ({"x": sample(mcf.bf16x2, 2), "x.bf16x2.term1": 3}, "is taken"),
            ({"x.bf16x2.term1": torch.ones(2)}, "would be terms of x"),
        ],
    )
    def test_what_has_no_terms(self, state, match):
        with pytest.raises(mcf.errors.CheckpointError, match=match):
            mcf.checkpoint.as_terms(state)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda t: t.pop("x"), "consists of x, x.bf16x3.term1"),
            (lambda t: t.pop("x.bf16x3.term1"), "x.bf16x3.term2 would be terms"),
            (lambda t: t.pop("x.bf16x3.term2"), "x.bf16x3.term1 would be terms"),
            (lambda t: t.update({"x.bf16x3.term3": t["x"]}), "consists of"),
            (lambda t: t.update({"x.bf16x2.term1": t["x"]}), "consists of"),
            (lambda t: t.update({"y.bf16x9.term1": t["x"]}), "term of no format"),
            (lambda t: t.update({"x": t["x"].float()}), "make no expansion"),
            (lambda t: t.update({"x": t["x"][1:]}), "make no expansion"),
            (lambda t: t.update({"x": 3}), "make no expansion"),
            (lambda t: t.update({"x": {}}), "make no expansion"),
        ],
    )
    def test_what_is_no_expansion(self, change, match):
        terms = mcf.checkpoint.as_terms({"x": sample(mcf.bf16x3, 4)})
        change(terms)
        with pytest.raises(mcf.errors.CheckpointError, match=match):
            mcf.checkpoint.from_terms(terms)


def changed(format, change, count=256):
    """Terms of which another program has changed the leading one alone."""
    terms = copied(mcf.checkpoint.as_terms({"x": sample(format, count)}, sums=True))
    terms["x"] = change(terms["x"])
    return terms


HALF = torch.arange(256) % 2 == 0
CHANGES = {
    "pruned": lambda x: x * HALF,
    "replaced": lambda x: x.flip(0),
    "merged": lambda x: x * 0.75 + 0.1,
    "an ulp": lambda x: torch.where(HALF, x, x.nextafter(2 * x)),
    "one ulp of one": lambda x: torch.where(torch.arange(256) == 3, x.nextafter(2 * x), x),
}


WITH_TAILS = [f for f in STORED if len(f.components) > 1]


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize(
    "format", [*mcf.formats.FORMATS, STOCHASTIC, *WITH_TAILS], ids=lambda f: f.name
)
class TestTermsThatAnotherProgramHasChanged:
    def test_are_refused(self, format, how):
        terms = changed(format, CHANGES[how])
        with pytest.raises(mcf.errors.CheckpointError, match=r"the terms of x in .*tails=False"):
            mcf.checkpoint.from_terms(terms)

    def test_leading_ones_are_taken_if_asked_for(self, format, how):
        terms = changed(format, CHANGES[how])
        x = mcf.checkpoint.from_terms(terms, tails=False)["x"]
        assert torch.equal(x.components[0], terms["x"])
        assert not any(tail.any() for tail in x.components[1:])

    @pytest.mark.thinned(of=2)
    def test_or_all(self, format, how):
        """Which are normalized then; any integer tail is."""
        terms = changed(format, CHANGES[how])
        x = mcf.checkpoint.from_terms(terms, verify=False)["x"]
        parts = [t for name, t in terms.items() if not name.endswith(("sum", "writes"))]
        if format in STORED:
            number = format.decode(parts)[0]
            torch.testing.assert_close(exact(x), number.double(), rtol=0, atol=0, equal_nan=True)
        else:
            assert_same_terms(x, mcf.MCFTensor(mcf.expansion.renormalize(parts), format))


@pytest.mark.parametrize("format", [*SCALED, mcf.mxfp8], ids=lambda f: f.name)
def test_codes_that_another_program_has_changed(format):
    x = sample(format, 4, 40)
    terms = copied(mcf.checkpoint.as_terms({"x": x}, sums=True))
    terms["x"][1, 3] ^= 1
    with pytest.raises(mcf.errors.CheckpointError, match=r"the terms of x in .*tails=False"):
        mcf.checkpoint.from_terms(terms)
    codes = terms["x"].view(torch.float8_e4m3fn).double()
    scales = x.components[-1].double().repeat_interleave(32, 1)[:, :40]
    leading = mcf.checkpoint.from_terms(terms, tails=False)["x"]
    assert torch.equal(exact(leading), codes * torch.exp2(scales - 127))
    found = mcf.checkpoint.from_terms(terms, verify=False)["x"]
    assert all(
        torch.equal(a, terms[n]) for a, n in zip(found.components, names(terms), strict=True)
    )


def names(terms):
    """Of components."""
    return [name for name in terms if not name.endswith(("sum", "writes"))]


@pytest.mark.parametrize("format", mcf.formats.FORMATS, ids=lambda f: f.name)
class TestTermsThatAreNotNormalized:
    def test_without_a_sum_those_that_do_not_fit_are_refused(self, format):
        terms = changed(format, CHANGES["pruned"])
        del terms[f"x.{format.name}.sum"]
        with pytest.raises(mcf.errors.CheckpointError, match=r"\d\d of 256 elements"):
            mcf.checkpoint.from_terms(terms)

    @pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("verify", [True, False])
    def test_tails_that_are_no_numbers(self, format, wrong, verify):
        terms = copied(mcf.checkpoint.as_terms({"x": sample(format, 5)}))
        terms[f"x.{format.name}.term1"][2] = wrong
        with pytest.raises(mcf.errors.CheckpointError, match="terms of x"):
            mcf.checkpoint.from_terms(terms, verify=verify)

    def test_numbers_of_two_forms(self, format):
        """1 and an ulp is two floats, and the leading one is the even one."""
        ulp = torch.finfo(format.dtype).eps
        one, next_, after = (torch.tensor([1 + i * ulp], dtype=format.dtype) for i in range(3))
        half = torch.full_like(one, ulp / 2)
        zeros = [torch.zeros_like(one)] * (format.terms - 2)
        names = [f"x.{format.name}.term{i}" for i in range(1, format.terms)]
        odd, even = (
            mcf.checkpoint.from_terms(
                {"x": leading, **dict(zip(names, [tail, *zeros], strict=True))}
            )["x"]
            for leading, tail in ((next_, half), (after, -half))
        )
        assert torch.equal(odd, even)
        assert torch.equal(odd.components[0], after)
        assert one.item() == 1

    def test_special_values(self, format):
        x = sample(format, 4)
        x[0], x[1], x[2] = torch.inf, -torch.inf, torch.nan
        back = mcf.checkpoint.from_terms(copied(mcf.checkpoint.as_terms({"x": x})))["x"]
        assert_same_terms(back, x)

    def test_sums_of_terms_that_were_left_out_are_left_out(self, format):
        terms = mcf.checkpoint.as_terms({"x": sample(format, 4)}, sums=True)
        sums = {name: x for name, x in terms.items() if "term" not in name}
        assert mcf.checkpoint.from_terms(sums) == {"x": terms["x"]}


@pytest.mark.parametrize("format", mcf.formats.FORMATS, ids=lambda f: f.name)
class TestPickles:
    def reloaded(self, components, format):
        content = io.BytesIO()
        torch.save(mcf.MCFTensor(components, format), content)
        content.seek(0)
        return torch.load(content, weights_only=True)

    def test_are_normalized(self, format):
        parts = [x * 2.0**i for i, x in enumerate(sample(format, 50).components)]
        x = self.reloaded(parts, format)
        assert_same_terms(x, mcf.MCFTensor(mcf.expansion.renormalize(parts), format))

    def test_tails_that_are_no_numbers(self, format):
        first, *others = sample(format, 3).components
        with pytest.raises(ValueError, match="not finite while"):
            self.reloaded([first, *others[:-1], torch.full_like(first, torch.nan)], format)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
class TestDistributedCheckpoint:
    def test_saved_as_it_is(self, tmp_path):
        (model, optimizer), (other, its_optimizer) = trained(), trained(seed=1)
        dcp.save(states(model, optimizer), checkpoint_id=tmp_path)
        state = states(other, its_optimizer)
        dcp.load(state, checkpoint_id=tmp_path)
        set_state_dict(
            other,
            its_optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        assert_same(states(model, optimizer), states(other, its_optimizer))

    def test_saved_as_terms(self, tmp_path):
        (model, optimizer), (other, its_optimizer) = trained(), trained(seed=1)
        dcp.save(mcf.checkpoint.as_terms(states(model, optimizer)), checkpoint_id=tmp_path)
        dcp.load(
            mcf.checkpoint.as_terms(states(other, its_optimizer)), checkpoint_id=tmp_path
        )  # in place
        assert_same(states(model, optimizer), states(other, its_optimizer))

    def test_loaded_into_another_format_with_one_rounding(self, tmp_path):
        x = sample(mcf.bf16x3, 5)
        dcp.save({"x": x, "y": x, "z": torch.rand(5)}, checkpoint_id=tmp_path)
        found = {"x": mcf.as_expansion(torch.zeros(5), mcf.bf16x2), "y": torch.zeros(5)}
        dcp.load(found, checkpoint_id=tmp_path)
        assert_same(
            found, {"x": mcf.as_expansion(x, mcf.bf16x2), "y": mcf.as_plain(x, torch.float32)}
        )

    def test_terms_of_another_format_are_missing(self, tmp_path):
        dcp.save(mcf.checkpoint.as_terms({"x": sample(mcf.bf16x3, 5)}), checkpoint_id=tmp_path)
        x = sample(mcf.bf16x2, 5)
        with pytest.raises(CheckpointException, match=r"Missing key.* x\.bf16x2\.term1"):
            dcp.load(mcf.checkpoint.as_terms({"x": x}), checkpoint_id=tmp_path)
        assert_same_terms(x, sample(mcf.bf16x2, 5))

    def loaded(self, saved, folder, **options):
        """What is in expansions of zeros when terms that another program saved have been loaded."""
        names = [name for name in saved if "." not in name]
        state = {name: mcf.as_expansion(torch.zeros(2), mcf.bf16x2) for name in names}
        dcp.save({"state": saved}, checkpoint_id=folder)
        try:
            dcp.load({"state": mcf.checkpoint.as_terms(state, **options)}, checkpoint_id=folder)
        except CheckpointException as error:
            return state, str(error)
        return state, ""

    def test_terms_loaded_in_place_are_normalized(self, tmp_path):
        parts = torch.tensor([[1 + 2**-7, 1.0], [2**-8, -0.0]], dtype=torch.bfloat16)
        state, error = self.loaded({"x": parts[0], "x.bf16x2.term1": parts[1]}, tmp_path)
        assert error == ""
        assert [t.tolist() for t in state["x"].components] == [[1 + 2**-6, 1.0], [-(2**-8), 0.0]]

    @pytest.mark.parametrize(
        ("tail", "words", "sums"),
        [
            (0.5, "1 of 2 elements have terms that do not fit together", [1.5, 1.0]),
            (torch.nan, "a term1 is not finite while its leading component is", [1.0, 1.0]),
            (-torch.inf, "a term1 is not finite while its leading component is", [1.0, 1.0]),
        ],
    )
    def test_terms_loaded_in_place_are_refused(self, tail, words, sums, tmp_path):
        ones = torch.ones(2).bfloat16()
        odd = {"a": ones + 2**-7, "a.bf16x2.term1": ones * 2**-8}
        saved = {"x": ones, "x.bf16x2.term1": torch.tensor([tail, 0.0]).bfloat16()}
        last = {name.replace("a", "z", 1): x for name, x in odd.items()}
        state, error = self.loaded(odd | saved | last, tmp_path)
        assert f"CheckpointError: the terms of x {'make' if 'term1' in words else 'in'}" in error
        assert words in error
        # All are normalized nonetheless, those after it too.
        assert [t.tolist() for t in state["z"].components] == [[1 + 2**-6] * 2, [-(2**-8)] * 2]
        assert state["x"].components[0].tolist() == sums
        assert state["x"].components[1].tolist() == [0.0, 0.0]

    def test_leading_terms_that_another_program_changed(self, tmp_path):
        terms = mcf.checkpoint.as_terms({"x": sample(mcf.bf16x2, 2)}, sums=True)
        terms["x"] = torch.full((2,), 3.0).bfloat16()
        _, error = self.loaded(terms, tmp_path / "one", sums=True)
        assert "the sum beside them is not that of its leading term" in error
        # On purpose:
        dcp.format_utils.dcp_to_torch_save(tmp_path / "one", tmp_path / "one.pt")
        state = torch.load(tmp_path / "one.pt")["state"]
        assert mcf.checkpoint.from_terms(state, tails=False)["x"].tolist() == [3.0, 3.0]

    def test_a_term_by_itself_is_refused(self, tmp_path):
        terms = mcf.checkpoint.as_terms({"x": sample(mcf.bf16x2, 2)})
        dcp.save(terms, checkpoint_id=tmp_path)
        with pytest.raises(CheckpointException, match=r"x\.bf16x2\.term1 would be terms of x"):
            dcp.load({"x.bf16x2.term1": terms["x.bf16x2.term1"]}, checkpoint_id=tmp_path)

    def test_whole_expansions_are_normalized_or_refused(self, tmp_path):
        parts = torch.tensor([[1 + 2**-7, 1.0], [2**-8, 0.0]], dtype=torch.bfloat16)
        dcp.save({"x": mcf.MCFTensor(list(parts), mcf.bf16x2)}, checkpoint_id=tmp_path / "tie")
        x = mcf.as_expansion(torch.zeros(2), mcf.bf16x2)
        dcp.load({"x": x}, checkpoint_id=tmp_path / "tie")
        assert [t.tolist() for t in x.components] == [[1 + 2**-6, 1.0], [-(2**-8), 0.0]]
        before = x.clone()
        parts[1, 0] = torch.nan
        dcp.save({"x": mcf.MCFTensor(list(parts), mcf.bf16x2)}, checkpoint_id=tmp_path / "nan")
        with pytest.raises(CheckpointException, match="a term1 is not finite while its leading"):
            dcp.load({"x": x}, checkpoint_id=tmp_path / "nan")
        assert_same_terms(x, before)

    def test_readers_and_planners_of_users_see_what_they_did(self, tmp_path):
        x = sample(mcf.bf16x2, 2)
        reader, planner = dcp.FileSystemReader(tmp_path), dcp.DefaultLoadPlanner()
        dcp.save(mcf.checkpoint.as_terms({"x": x}), checkpoint_id=tmp_path)
        terms = mcf.checkpoint.as_terms({"x": torch.zeros_like(x)})
        dcp.load(terms, storage_reader=reader, planner=planner)
        assert_same_terms(mcf.checkpoint.from_terms(terms)["x"], x)

    @pytest.mark.parametrize(
        "form", [lambda state: state, mcf.checkpoint.as_terms], ids=["whole", "terms"]
    )
    def test_async_save_is_of_the_moment_it_was_called(self, form, tmp_path, monkeypatch):
        model, optimizer = trained()
        expected = copied(states(model, optimizer))
        write = dcp.FileSystemWriter.write_data
        monkeypatch.setattr(
            dcp.FileSystemWriter,
            "write_data",
            lambda *args: step(model, optimizer) or write(*args),
        )
        dcp.async_save(
            form(states(model, optimizer)), checkpoint_id=tmp_path, no_dist=True
        ).result()
        with pytest.raises(AssertionError):
            assert_same(expected, states(model, optimizer))
        found = form(states(model, optimizer))
        dcp.load(found, checkpoint_id=tmp_path)
        assert_same(
            expected, states(model, optimizer) if form is mcf.checkpoint.as_terms else found
        )

    def test_deferred_results(self, tmp_path):
        with torch.no_grad():
            state = {name: sample(mcf.bf16x2, 4) * 3 for name in ("save", "async")}
            dcp.save({"x": state["save"]}, checkpoint_id=tmp_path / "save")
            dcp.async_save(
                {"x": state["async"]}, checkpoint_id=tmp_path / "async", no_dist=True
            ).result()
        for name, x in state.items():
            found = {"x": torch.zeros_like(x)}
            dcp.load(found, checkpoint_id=tmp_path / name)
            assert_same_terms(found["x"], sample(mcf.bf16x2, 4) * 3)


class TestPlainModelsThatLoadExpansions:
    def load(self, dtype, format, **options):
        state = mcf.as_expansion(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), format)
        plain = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).to(dtype)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plain.load_state_dict(state.state_dict(), **options)
        return plain, [str(w.message) for w in caught]

    @pytest.mark.parametrize("format", [mcf.bf16x2, mcf.bf16x3], ids=lambda f: f.name)
    def test_it_is_said_by_name_before_they_step(self, format):
        plain, said = self.load(torch.bfloat16, format)
        assert said == []
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        match = "0.weight and 3 more were loaded from expansions.*as_expansion"
        with pytest.warns(mcf.errors.PlainParameterWarning, match=match):
            optimizer.step()

    @pytest.mark.parametrize(
        ("dtype", "format", "options"),
        [
            (torch.float32, mcf.bf16x2, {}),  # which holds all terms
            (torch.float32, mcf.bf16x3, {}),
            (torch.float64, mcf.fp32x2, {}),
            (torch.bfloat16, mcf.bf16x2, {"assign": True}),  # the expansions themselves
        ],
        ids=str,
    )
    def test_where_nothing_is_lost_nothing_is_said(self, dtype, format, options):
        _, said = self.load(dtype, format, **options)
        assert said == []

    def test_files_are_rounded_as_their_page_says(self, tmp_path):
        model, plain = mcf.as_expansion(nn.Linear(3, 2)), nn.Linear(3, 2).bfloat16()
        mcf.save_file(model, tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mcf.load_file(tmp_path, plain)
        assert torch.equal(plain.weight, model.weight.components[0])
