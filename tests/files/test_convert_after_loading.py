"""A plain model that has loaded expansions goes on with all of them once it is converted."""

import copy
import gc
import io
import warnings
import weakref

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.helpers import assert_same_bits

BALANCED = mcf.bf16x2.with_rounding("balanced")
FORMATS = [None, mcf.fp32x2, mcf.bf16x2, mcf.bf16x3, mcf.bf16i16, mcf.bf16i8, mcf.e4m3i8, BALANCED]
MODES = [None, "plus", "compact", "released"]


class Net(nn.Module):
    """Tied embeddings, a norm, a buffer that is an average, and a constant."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.hidden = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.rand(8))

    def forward(self, x):
        return self.head(self.norm(self.hidden(self.embed(x) + self.shift)))


class Trained:
    """A model in training, its optimizer and, where gradients are released, the handle."""

    def __init__(self, model, mode):
        self.model = model
        fused = None if mode == "compact" else True
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        if mode in ("plus", "compact"):
            mcf.collage(self.optimizer, mode)
        if mode == "released":
            self.handle = mcf.step_in_backward(model, self.optimizer)

    def train(self, steps, seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            x = torch.randint(7, (16,), generator=generator)
            self.optimizer.zero_grad()
            self.model(x).float().square().mean().backward()
            self.optimizer.step()
        return self

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def new(seed=0, dtype=None):
    torch.manual_seed(seed)
    return Net().to(dtype)


def reloaded(state):
    content = io.BytesIO()
    torch.save(state, content)
    content.seek(0)
    return torch.load(content, weights_only=True)


def trained(format=mcf.bf16x2, mode=None, steps=3):
    return Trained(mcf.as_expansion(new(), format), mode).train(steps, seed=1)


@pytest.mark.thinned(of=18)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: getattr(f, "name", "default"))
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_both_orders_resume_to_the_bit(format, mode, dtype):
    if format is mcf.fp32x2 and dtype is not None:
        pytest.skip("plain float32 buffers of the run are rounded by a model of bf16")
    run = trained(format, mode)
    checkpoint = reloaded(run.state())
    model = new(seed=5, dtype=dtype)
    model.load_state_dict(checkpoint["model"])
    model.to("cpu")
    resumed = Trained(mcf.as_expansion(model), mode)
    resumed.optimizer.load_state_dict(checkpoint["optimizer"])
    assert_same_bits(resumed.state(), run.state())
    assert_same_bits(resumed.train(3, seed=2).state(), run.train(3, seed=2).state())


@pytest.mark.parametrize("format", [mcf.bf16x3, mcf.fp32x2, mcf.bf16i16], ids=lambda f: f.name)
def test_into_another_format_by_one_rounding(format):
    run = trained(mcf.bf16x3)
    model, other = new(seed=5), mcf.as_expansion(new(seed=5), format)
    with mcf.when_rounded("ignore"):
        for each in (model, other):
            each.load_state_dict(run.model.state_dict())
    mcf.as_expansion(model, format)
    assert_same_bits(
        {name: p.detach() for name, p in model.named_parameters()},
        {name: p.detach() for name, p in other.named_parameters()},
    )


def test_what_is_loaded_is_kept_as_it_was():
    """The run that the state dict is of may go on."""
    run = trained()
    before = copy.deepcopy(run.model.state_dict())
    model = new()
    model.load_state_dict(run.model.state_dict())
    run.train(2, seed=3)
    assert_same_bits(mcf.as_expansion(model).state_dict(), before)


def tails(model):
    return [p.components[1] for p in model.parameters()]


def written(model, write):
    with torch.no_grad():
        for p in model.parameters():
            write(p)


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.mul_(1),  # absorbed
        lambda p: p.data.mul_(2),
        lambda p: setattr(p, "data", p.data * 2),
        lambda p: p.copy_(torch.ones_like(p)),
    ],
)
def test_until_it_is_written_to(write):
    run = trained()
    model = new(dtype=torch.bfloat16)
    model.load_state_dict(run.model.state_dict())
    written(model, write)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    mcf.as_expansion(model)
    assert not any(tail.any() for tail in tails(model))
    for name, p in model.named_parameters():
        assert torch.equal(mcf.as_plain(p), values[name])


def test_the_latest_load_counts():
    one, two = trained(), trained(steps=5)
    model = new()
    for run in (one, two):
        model.load_state_dict(run.model.state_dict())
    assert_same_bits(mcf.as_expansion(model).state_dict(), two.model.state_dict())
    model = new()
    plain = copy.deepcopy(model.state_dict())
    model.load_state_dict(one.model.state_dict())
    model.load_state_dict(plain)
    mcf.as_expansion(model, mcf.fp32x2)
    assert not any(tail.any() for tail in tails(model))


def test_another_dtype_on_the_way():
    run = trained(mcf.bf16x3)
    model = new()
    model.load_state_dict(run.model.state_dict())
    assert_same_bits(mcf.as_expansion(model.bfloat16()).state_dict(), run.model.state_dict())


def test_parameters_that_a_module_has_made_anew():
    run = trained()
    model = new()
    model.load_state_dict(run.model.state_dict())
    hidden = model.hidden
    hidden.weight = nn.Parameter(hidden.weight.data.to(torch.bfloat16))
    assert_same_bits(mcf.as_expansion(model).state_dict(), run.model.state_dict())


def test_names_that_a_hook_changes():
    run = trained()
    model = new()

    def rename(module, state_dict, prefix, *unused):
        for name in [name for name in state_dict if name.startswith("old.")]:
            state_dict[name.removeprefix("old.")] = state_dict.pop(name)

    model.register_load_state_dict_pre_hook(rename)
    model.load_state_dict({f"old.{name}": x for name, x in run.model.state_dict().items()})
    assert_same_bits(mcf.as_expansion(model).state_dict(), run.model.state_dict())


def test_parts_of_a_model():
    run = trained()
    model = new(seed=5)
    model.hidden.load_state_dict(run.model.hidden.state_dict())
    mcf.as_expansion(model)
    assert_same_bits(model.hidden.state_dict(), run.model.hidden.state_dict())


def test_frozen_parameters():
    run = trained()
    model = new().requires_grad_(False)
    model.load_state_dict(run.model.state_dict())
    assert_same_bits(mcf.as_expansion(model).state_dict(), run.model.state_dict())


def test_overrides_have_the_last_word():
    run = trained()
    model = new()
    model.load_state_dict(run.model.state_dict())
    mcf.as_expansion(model, overrides={"hidden.weight": None, "hidden.bias": mcf.bf16x3})
    assert model.hidden.weight.dtype == torch.float32
    assert model.hidden.bias.format == mcf.bf16x3
    assert_same_bits(model.hidden.bias.components[:2], run.model.hidden.bias.components)


def kept(model):
    """Weak references to what is kept of parameters."""
    from mcftensor.checkpoint.module_hooks import KEPT  # noqa: PLC0415

    return [
        weakref.ref(x.whole._component0)
        for part in model.modules()
        for x in KEPT.get(part, {}).values()
    ]


class TestMemory:
    @pytest.fixture
    def model(self):
        return self.make()

    @staticmethod
    def make():
        model = new(dtype=torch.bfloat16)
        model.load_state_dict(trained().model.state_dict())
        return model

    @pytest.mark.thinned(of=2)
    @pytest.mark.parametrize(
        "end",
        [
            mcf.as_expansion,
            mcf.as_plain,
            lambda model: model.load_state_dict(new().state_dict()),
            lambda model: mcf.as_expansion(model, overrides={"*": None}),
        ],
    )
    def test_it_is_freed(self, model, end):
        references = kept(model)
        assert len(references) == 9
        end(model)
        gc.collect()
        assert not any(reference() is not None for reference in references)

    def test_with_the_model(self):
        model = self.make()
        references = kept(model)
        del model
        gc.collect()
        assert not any(reference() is not None for reference in references)

    def test_by_a_step(self, model):
        references = kept(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.warns(mcf.errors.PlainParameterWarning):
            optimizer.step()
        gc.collect()
        alive = [reference for reference in references if reference() is not None]
        assert len(alive) == 3  # the buffers


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        (mcf.bf16x2, torch.bfloat16),
        (mcf.bf16x3, torch.float32),
        (mcf.bf16i16, torch.bfloat16),
        (mcf.fp32x2, torch.float32),
    ],
)
def test_a_step_of_what_was_rounded_warns(format, dtype, released):
    model = new(dtype=dtype)
    model.load_state_dict(trained(format).model.state_dict())
    match = (
        rf"AdamW: hidden.weight and 4 more were loaded from expansions in {format.name} and are "
        rf"plain {dtype}, so they were rounded.*as_expansion\(model\).*as_plain\(model\)"
    )
    with pytest.warns(mcf.errors.PlainParameterWarning, match=match):
        run = Trained(model, "released" if released else None).train(1, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.train(1, seed=1)


@pytest.mark.parametrize(
    "meant",
    [
        mcf.as_plain,
        lambda model: model.load_state_dict(new().state_dict()),
        mcf.as_expansion,
    ],
)
def test_a_step_of_what_is_meant_does_not(meant):
    model = new()
    model.load_state_dict(trained().model.state_dict())
    meant(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trained(model, None).train(1, seed=0)


def test_nor_one_of_what_was_not_rounded():
    model = new()
    model.load_state_dict(trained(mcf.bf16i16).model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trained(model, None).train(1, seed=0)


class TestTermsAmongTheKeys:
    """As other readers of safetensors files give them."""

    @pytest.fixture
    def file(self, tmp_path):
        self.run = trained(mcf.bf16x3)
        mcf.save_file(self.run.model, tmp_path / "model.safetensors")
        safetensors = pytest.importorskip("safetensors.torch")
        return safetensors.load_file(tmp_path / "model.safetensors")

    @pytest.mark.parametrize("convert_first", [False, True])
    def test_are_found(self, file, convert_first):
        model = new(seed=5)
        if convert_first:
            mcf.as_expansion(model, mcf.bf16x3)
        result = model.load_state_dict(file, strict=False)
        assert result.unexpected_keys == []
        assert result.missing_keys == ["head.weight"]  # which is tied
        if not convert_first:
            mcf.as_expansion(model)
        assert_same_bits(model.state_dict(), self.run.model.state_dict())

    def test_strictly(self, file):
        model = mcf.as_expansion(new(seed=5), mcf.bf16x3)
        model.load_state_dict(
            file
            | {"head.weight": file["embed.weight"]}
            | {
                name.replace("embed", "head"): x
                for name, x in file.items()
                if name.startswith("embed.")
            }
        )
        assert_same_bits(model.state_dict(), self.run.model.state_dict())

    def test_what_does_not_belong_together_is_refused(self, file):
        file["hidden.weight"] = file["hidden.weight"] * 2
        model = mcf.as_expansion(new(), mcf.bf16x3)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(mcf.errors.CheckpointError, match=r"hidden\.weight"):
            model.load_state_dict(file, strict=False)
        assert_same_bits(model.state_dict(), before)

    def test_of_models_stored_as_terms_as_before(self, file):
        model = mcf.checkpoint.store_as_terms(mcf.as_expansion(new(seed=5), mcf.bf16x3))
        file = {name: x for name, x in file.items() if name != "hidden.bias.bf16x3.sum"}
        for name in ("hidden.bias.bf16x3.term1", "hidden.bias.bf16x3.term2"):
            del file[name]
        missing = model.load_state_dict(file, strict=False).missing_keys
        assert "hidden.bias.bf16x3.term1" in missing
        outer = nn.Sequential(model, nn.Linear(2, 2))
        missing = outer.load_state_dict(
            {f"0.{name}": x for name, x in file.items()}, strict=False
        ).missing_keys
        assert "0.hidden.bias.bf16x3.term1" in missing


def test_load_file_keeps_it_too(tmp_path):
    run = trained(mcf.bf16x3)
    mcf.save_file(run.model, tmp_path / "model.safetensors")
    model = new(seed=5)
    mcf.load_file(tmp_path / "model.safetensors", model)
    assert_same_bits(mcf.as_expansion(model).state_dict(), run.model.state_dict())


@pytest.mark.parametrize(
    ("saved", "own", "is_told"),
    [
        (mcf.bf16i16, None, True),
        (mcf.fp32x2, mcf.bf16x3, True),
        (mcf.bf16i8, mcf.bf16x2, False),
        (mcf.bf16x2, mcf.bf16i16, False),
        (mcf.bf16x3, mcf.bf16i16, False),
    ],
    ids=str,
)
def test_a_narrower_format_is_told_by_name(saved, own, is_told):
    state = mcf.as_expansion(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), saved).state_dict()
    model = mcf.as_expansion(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), own)
    if not is_told:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.load_state_dict(state)
        return
    match = rf"load_state_dict: 0\.weight and \d more, saved in {saved.name}, is rounded to bf16x"
    with pytest.warns(mcf.errors.RoundedWarning, match=match) as caught:
        model.load_state_dict(state)
    assert len(caught) == 1
    before = copy.deepcopy(model.state_dict())
    other = {name: x + 1 for name, x in state.items()}
    with (
        mcf.when_rounded("raise"),
        pytest.raises(mcf.errors.RoundedError, match="would be rounded"),
    ):
        model.load_state_dict(other)
    assert_same_bits(model.state_dict(), before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with mcf.when_rounded("ignore"):
            model.load_state_dict(state)
        model.load_state_dict(state, assign=True)
