"""The Trainer of Hugging Face's transformers trains, saves and resumes expansions."""

import pytest
import torch
from transformers import (
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    get_cosine_schedule_with_warmup,
)

import huggingface
import mcftensor as mcf
from support.helpers import all_terms, over_one
from support.tiny_gpt2 import CONFIG, counting

STEPS = 8


def make_model(format=None) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return mcf.checkpoint.store_as_terms(mcf.as_expansion(GPT2LMHeadModel(CONFIG), format))


def make_trainer(model, folder, accumulated=1, bf16=False, **options):
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulated,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        logging_steps=1,
        save_steps=4,
        use_cpu=True,
        bf16=bf16,
        report_to=[],
        disable_tqdm=True,
    )
    return Trainer(model=model, args=arguments, train_dataset=counting(), **options)


def losses(trainer) -> list[float]:
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def by_hand(format, trainer, batches, accumulated):
    """What the trainer is to do with these batches."""
    model = make_model(format)
    decayed = set(trainer.get_decay_parameter_names(model))
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if n in decayed], "weight_decay": 0.1},
            {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
        ],
        lr=1e-2,
        fused=True,
    )
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, STEPS)
    model.train()
    for step in range(STEPS):
        part = batches[step * accumulated : (step + 1) * accumulated]
        count = sum((batch["labels"] != -100).sum() for batch in part)
        for batch in part:
            model(**batch, num_items_in_batch=count).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        model.zero_grad()
    return model


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("accumulated", [1, 2])
@over_one
def test_training_is_that_of_a_loop_by_hand(tmp_path, format, accumulated):
    model, batches = make_model(format), []

    def collate(rows):
        batches.append(default_data_collator(rows))
        return batches[-1]

    trainer = make_trainer(model, tmp_path, accumulated, data_collator=collate)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0] - 0.2
    expected = by_hand(format, trainer, batches, accumulated)
    assert all(map(torch.equal, all_terms(model), all_terms(expected)))


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("bf16", [False, True])
@over_one
def test_resuming(tmp_path, format, bf16):
    model, second = make_model(format), make_model(format)
    make_trainer(model, tmp_path, bf16=bf16).train()
    trainer = make_trainer(second, tmp_path, bf16=bf16)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert all(map(torch.equal, all_terms(second), all_terms(model)))
    assert second.lm_head.weight is second.transformer.wte.weight


class Kinds(TrainerCallback):
    """What gradients are when the optimizer meets them."""

    def __init__(self):
        self.seen = set()

    def on_pre_optimizer_step(self, args, state, control, model=None, **unused):
        self.seen |= {type(p.grad) for p in model.parameters()}


def test_modes_and_sums_of_gradients(tmp_path):
    model, kinds = make_model(), Kinds()
    mcf.accumulate_gradients(model)
    optimizer = mcf.collage(torch.optim.AdamW(model.parameters(), fused=True), "plus")
    make_trainer(
        model, tmp_path, accumulated=4, optimizers=(optimizer, None), callbacks=[kinds]
    ).train()
    assert kinds.seen == {mcf.MCFTensor}
    state = optimizer.state[model.transformer.wte.weight]
    assert type(state["exp_avg"]) is torch.Tensor
    assert type(state["exp_avg_sq"]) is mcf.MCFTensor


@over_one
def test_what_is_saved(tmp_path, format):
    """Plain transformers reads the leading terms, and `load_file` all."""
    model = make_model(format)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.001)
    model.save_pretrained(tmp_path)
    plain = GPT2LMHeadModel.from_pretrained(tmp_path)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert type(p) is torch.nn.Parameter
        assert torch.equal(p, q.components[0])
    again = mcf.as_expansion(plain, format)
    mcf.load_file(tmp_path, again)
    assert all(map(torch.equal, all_terms(again), all_terms(model)))
    assert again.lm_head.weight is again.transformer.wte.weight


def test_the_model_is_saved_plain_when_it_is_plain(tmp_path):
    mcf.as_plain(make_model()).save_pretrained(tmp_path)
    assert set(mcf.load_file(tmp_path)) == {n for n, _ in make_model().named_parameters()}


@pytest.mark.thinned(of=2)  # what is saved is a matter of the format, and of tests/files
@over_one
def test_without_the_line(tmp_path, format):
    """Conversion sees to it that the Trainer can save, and that what it saves is whole."""

    def make():
        torch.manual_seed(0)
        return mcf.as_expansion(GPT2LMHeadModel(CONFIG), format)

    model, second = make(), make()
    make_trainer(model, tmp_path).train()
    make_trainer(second, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert all(map(torch.equal, all_terms(second), all_terms(model)))


class Wrapped(torch.nn.Module):
    """A model of transformers within one of the user's own."""

    def __init__(self):
        super().__init__()
        self.inner = GPT2LMHeadModel(CONFIG)
        self.head = torch.nn.Linear(2, 2)


def test_a_pretrained_model_within_another(tmp_path):
    model = mcf.as_expansion(Wrapped())
    assert any("term1" in name for name in model.inner.state_dict())
    model.inner.save_pretrained(tmp_path)
    found = mcf.load_file(tmp_path)
    assert torch.equal(
        found["transformer.wpe.weight"].components[1],
        model.inner.transformer.wpe.weight.components[1],
    )
    second = mcf.as_expansion(Wrapped())
    second.load_state_dict(model.state_dict())
    assert all(map(torch.equal, all_terms(second), all_terms(model)))


def test_the_example(capsys):
    huggingface.main(["--steps", "5"])
    _, bf16, expansions, saved, read = capsys.readouterr().out.splitlines()
    assert (bf16.split()[0], expansions.split()[0]) == ("bf16", "expansions")
    lost = [float(row.split()[3].rstrip("%")) for row in (bf16, expansions)]
    assert lost[0] > 15
    assert lost[1] < 1
    assert "torch.bfloat16" in saved
    assert "the same in all terms" in read
