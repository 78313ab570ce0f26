"""Hugging Face Accelerate trains, saves and resumes expansions."""

import copy

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mcftensor as mcf
from support.helpers import all_terms, over_one, small_model


@pytest.fixture(autouse=True)
def fresh_state():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def batches() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=generator).bfloat16()
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)


def parts(format=None):
    """A model, its optimizer and its scheduler."""
    model = mcf.checkpoint.store_as_terms(mcf.as_expansion(small_model(), format))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if format is None:
        mcf.collage(optimizer, "plus")
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def train(accelerator, model, optimizer, scheduler, data, epochs=1):
    for _ in range(epochs):
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x).float(), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


def by_hand(model, optimizer, scheduler, epochs, accumulated, autocast):
    for _ in range(epochs):
        for i, (x, y) in enumerate(batches(), 1):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(x).float(), y)
            (loss / accumulated).backward()
            if i % accumulated == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulated", [1, 4])
@over_one
def test_training_is_that_of_a_loop_by_hand(format, mixed_precision, accumulated):
    reference = parts(format)
    by_hand(*reference, 2, accumulated, mixed_precision == "bf16")
    model, optimizer, scheduler = parts(format)
    before = all_terms(copy.deepcopy(model))
    accelerator = Accelerator(
        cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=accumulated
    )
    prepared = accelerator.prepare(model, optimizer, scheduler, batches())
    train(accelerator, *prepared, epochs=2)
    assert not all(map(torch.equal, all_terms(model), before))
    assert all(map(torch.equal, all_terms(model), all_terms(reference[0])))


@over_one
def test_sums_of_gradients(format):
    model, optimizer, _ = parts(format)
    mcf.accumulate_gradients(model)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=8)
    model, optimizer, data = accelerator.prepare(model, optimizer, batches())
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x).float(), y))
            optimizer.step()
    assert all(isinstance(p.grad, mcf.MCFTensor) for p in model.parameters())


@over_one
@pytest.mark.parametrize("safe_serialization", [True, False])
def test_resuming(tmp_path, format, safe_serialization):
    accelerator = Accelerator(cpu=True)
    first = accelerator.prepare(*parts(format))
    data = accelerator.prepare(batches())
    train(accelerator, *first, data)
    accelerator.save_state(tmp_path / "state", safe_serialization=safe_serialization)
    saved = [x.clone() for x in all_terms(first[0])]
    train(accelerator, *first, data)
    assert not all(map(torch.equal, all_terms(first[0]), saved))

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    second = accelerator.prepare(*parts(format))
    data = accelerator.prepare(batches())
    accelerator.load_state(tmp_path / "state")
    assert all(map(torch.equal, all_terms(second[0]), saved))
    train(accelerator, *second, data)
    assert all(map(torch.equal, all_terms(second[0]), all_terms(first[0])))


@over_one
def test_saving_a_model(tmp_path, format):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(parts(format)[0])
    accelerator.save_model(model, tmp_path)
    plain = small_model(1).bfloat16()
    mcf.load_file(tmp_path / "model.safetensors", plain)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q.components[0])
    other = mcf.as_expansion(small_model(1), format)
    mcf.load_file(tmp_path / "model.safetensors", other)
    assert all(map(torch.equal, all_terms(other), all_terms(model)))


def test_without_the_line(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(mcf.as_expansion(small_model()))
    with pytest.raises(TypeError, match="store_as_terms"):
        accelerator.save_model(model, tmp_path)


def test_modes_are_for_the_optimizer_within():
    model, optimizer, _ = parts()
    prepared = Accelerator(cpu=True).prepare(optimizer)
    with pytest.raises(TypeError, match=r"AcceleratedOptimizer .*optimizer\.optimizer"):
        mcf.collage(prepared, "light")
    mcf.collage(prepared.optimizer, "light")
    F.cross_entropy(model(torch.ones(1, 4).bfloat16()), torch.tensor([1])).backward()
    prepared.step()
    assert type(optimizer.state[model[0].weight]["exp_avg_sq"]) is torch.Tensor
