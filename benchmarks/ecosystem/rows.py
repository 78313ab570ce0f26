"""The rows: the documented use of each framework, over expansions."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

import mcftensor as mcf
from ecosystem.models import Regression, batch, gpt, loop, sentences, tokenizer, tokens
from ecosystem.row import Row, are_same, measured, moves, terms

EXAMPLES = Path(__file__).parents[2] / "examples"
ROWS: dict[str, tuple[tuple[str, ...], Callable[[Row, Path], None]]] = {}


def row(name: str, *packages: str) -> Callable[[Callable[[Row, Path], None]], Any]:
    """Add a row, of the packages whose versions are named."""

    def add(function: Callable[[Row, Path], None]) -> Callable[[Row, Path], None]:
        ROWS[name] = packages, function
        return function

    return add


def _adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    chosen = [p for p in model.parameters() if p.requires_grad]
    return mcf.collage(torch.optim.AdamW(chosen, lr=1e-3, fused=True, **options), "plus")


# ------------------------------------------------------------------------------------ Hugging Face


def _trainer(cls: Any, settings: Any, model: Any, folder: Path, **options: Any) -> Any:
    given = settings(
        output_dir=str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options.pop("arguments", {}),
    )
    return cls(model=model, args=given, **options)


def _resumed(make: Callable[[Any, str], Any], model: Callable[[], Any], folder: Path) -> None:
    """Take four steps, and two and two, with the second two from a checkpoint."""
    whole, second = model(), model()
    make(whole, "whole").train()
    checkpoint = next((folder / "whole").glob("checkpoint-2"))
    make(second, "second").train(resume_from_checkpoint=str(checkpoint))
    are_same(terms(whole), terms(second))


def _trained(
    row: Row, make: Callable[[Any, str], Any], model: Callable[[], Any], folder: Path
) -> Any:
    """Try what all Trainers have, and return a model that one has trained."""
    first = model()
    row.works("train", lambda: moves(first, make(first, "first").train))
    row.works("resume to the bit", lambda: _resumed(make, model, folder))
    row.works("EDQ", lambda: measured(make(model(), "measured").train))
    return first


def _saved_pretrained(row: Row, first: Any, other: Callable[[], Any], folder: Path) -> None:
    """Try whether another model has all terms of what was saved."""

    def save() -> None:
        first.save_pretrained(folder / "saved")
        again = other()
        mcf.load_file(folder / "saved", again)
        are_same(terms(first), terms(again))

    row.works("save", save, "mcf.load_file(folder, model)")


@row("transformers Trainer", "transformers")
def _transformers(row: Row, folder: Path) -> None:
    from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

    def make(model: Any, name: str) -> Any:
        return _trainer(Trainer, TrainingArguments, model, folder / name, train_dataset=tokens())

    def model() -> Any:
        return mcf.as_expansion(gpt())

    def loaded() -> Any:
        return mcf.as_expansion(GPT2LMHeadModel.from_pretrained(folder / "saved"))

    first = _trained(row, make, model, folder)
    _saved_pretrained(row, first, loaded, folder)

    def elsewhere() -> None:
        plain = GPT2LMHeadModel.from_pretrained(folder / "saved", dtype=torch.bfloat16)
        own = [mcf.as_plain(p) for p in first.parameters()]
        are_same(terms(plain), [x.detach() for x in own])

    row.works("load elsewhere", elsewhere)

    def export() -> None:
        mcf.as_plain(model()).save_pretrained(folder / "plain")
        assert type(next(GPT2LMHeadModel.from_pretrained(folder / "plain").parameters())) is (
            nn.Parameter
        )

    row.works("merge or export", export, "mcf.as_plain(model)")
    row.says("messages", "on loading elsewhere: names of tails are UNEXPECTED")


def _adapters(row: Row, folder: Path, **options: Any) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import Trainer, TrainingArguments

    def model() -> Any:
        config = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, **options)
        return mcf.as_expansion(get_peft_model(gpt(), config))

    def make(model: Any, name: str) -> Any:
        return _trainer(
            Trainer,
            TrainingArguments,
            model,
            folder / name,
            train_dataset=tokens(),
            arguments={"label_names": ["labels"]},
        )

    first = _trained(row, make, model, folder)

    def save() -> None:
        first.save_pretrained(folder / "adapter")
        again = model()
        again.load_adapter(str(folder / "adapter"), "default", is_trainable=True)
        are_same(terms(first), terms(again))

    row.works("save", save)

    def elsewhere() -> None:
        plain = PeftModel.from_pretrained(gpt().bfloat16(), folder / "adapter")
        for (name, p), q in zip(plain.named_parameters(), first.parameters(), strict=True):
            if "lora" in name:
                assert torch.equal(p.bfloat16(), mcf.as_plain(q)), name

    row.works("load elsewhere", elsewhere)

    def merge() -> None:
        merged = first.merge_and_unload()
        assert not any(isinstance(p, mcf.MCFTensor) for p in merged.parameters())
        merged.save_pretrained(folder / "merged")

    row.works("merge or export", merge)


@row("peft LoRA", "peft", "transformers")
def _lora(row: Row, folder: Path) -> None:
    _adapters(row, folder)


@row("peft DoRA", "peft", "transformers")
def _dora(row: Row, folder: Path) -> None:
    _adapters(row, folder, use_dora=True)


@row("peft, base unfrozen late", "peft", "transformers")
def _unfrozen(row: Row, folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    def tuned() -> Any:
        config = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        model = mcf.as_expansion(get_peft_model(gpt(), config))
        for p in model.parameters():
            p.requires_grad_(True)
        return model

    def step(model: Any) -> None:
        row_ = tokens()[0]["input_ids"][None]
        optimizer = _adamw(model)
        for _ in range(2):
            model(input_ids=row_, labels=row_).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    model = tuned()
    row.works(
        "train", lambda: moves(mcf.as_expansion(model), partial(step, model)), "as_expansion(model)"
    )
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(tuned())
    said = [str(x.message) for x in caught if "as_expansion" in str(x.message)]
    row.says(
        "messages", said[0].partition(". ")[0] if said else "FAILS: plain weights train in silence"
    )


def _trl(row: Row, folder: Path, cls: Any, settings: Any, data: Any, **options: Any) -> None:
    from datasets import Dataset

    given = options.pop("arguments", {})

    def make(model: Any, name: str) -> Any:
        return _trainer(
            cls,
            settings,
            model,
            folder / name,
            train_dataset=Dataset.from_list(data),
            processing_class=tokenizer(),
            arguments={"bf16": False, **given},
            **options,
        )

    def model() -> Any:
        return mcf.as_expansion(gpt())

    first = _trained(row, make, model, folder)
    _saved_pretrained(row, first, model, folder)
    row.works("load elsewhere", lambda: type(first).from_pretrained(folder / "saved"))


@row("TRL SFT", "trl", "transformers")
def _sft(row: Row, folder: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    _trl(row, folder, SFTTrainer, SFTConfig, [{"text": x} for x in sentences()])


@row("TRL DPO", "trl", "transformers")
def _dpo(row: Row, folder: Path) -> None:
    from trl import DPOConfig, DPOTrainer

    texts = sentences()
    data = [
        {"prompt": x[:9], "chosen": x[9:], "rejected": y[9:]}
        for x, y in zip(texts, reversed(texts), strict=True)
    ]
    _trl(row, folder, DPOTrainer, DPOConfig, data, ref_model=gpt().bfloat16())


@row("TRL GRPO", "trl", "transformers")
def _grpo(row: Row, folder: Path) -> None:
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **others: Any) -> list[float]:
        return [float(sum(map(ord, text)) % 7) for text in completions]

    _trl(
        row,
        folder,
        GRPOTrainer,
        GRPOConfig,
        [{"prompt": x[:9]} for x in sentences()],
        reward_funcs=reward,
        arguments={"num_generations": 2, "max_completion_length": 4},
    )


@row("sentence-transformers", "sentence-transformers", "transformers")
def _sentence_transformers(row: Row, folder: Path) -> None:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
        models,
    )
    from transformers import BertConfig, BertModel

    def model() -> Any:
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        BertModel(config).save_pretrained(folder / "bert")
        tokenizer().save_pretrained(folder / "bert")
        words = models.Transformer(str(folder / "bert"), max_seq_length=16)
        pooling = models.Pooling(16)
        return mcf.checkpoint.store_as_terms(
            mcf.as_expansion(SentenceTransformer(modules=[words, pooling], device="cpu"))
        )

    texts = sentences()
    data = Dataset.from_list([{"anchor": x, "positive": y} for x, y in itertools.pairwise(texts)])

    def make(model: Any, name: str) -> Any:
        return _trainer(
            SentenceTransformerTrainer,
            SentenceTransformerTrainingArguments,
            model,
            folder / name,
            train_dataset=data,
            loss=losses.MultipleNegativesRankingLoss(model),
        )

    first = _trained(row, make, model, folder)
    row.works("save", lambda: first.save(str(folder / "saved")))

    def elsewhere() -> None:
        plain = SentenceTransformer(str(folder / "saved"), device="cpu")
        x, y = (m.encode(texts[:2], convert_to_tensor=True).float() for m in (plain, first))
        torch.testing.assert_close(x, y, rtol=0.05, atol=0.05)

    row.works("load elsewhere", elsewhere)
    row.works("merge or export", lambda: mcf.as_plain(model()).save(str(folder / "plain")))


@row("Accelerate", "accelerate")
def _accelerate(row: Row, folder: Path) -> None:
    from accelerate import Accelerator

    def prepared() -> tuple[Any, Any, Any]:
        model = mcf.checkpoint.store_as_terms(mcf.as_expansion(Regression()))
        accelerator = Accelerator(cpu=True)
        return (accelerator, *accelerator.prepare(model, _adamw(model)))

    def train(accelerator: Any, model: Any, optimizer: Any, start: int, end: int) -> None:
        for step in range(start, end):
            accelerator.backward(model(batch(step)).float().square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    first = prepared()
    row.works("train", lambda: moves(first[1], partial(train, *first, 0, 2)))
    row.works("save", lambda: first[0].save_state(str(folder / "state")), "store_as_terms(model)")

    def resume() -> None:
        second = prepared()
        second[0].load_state(str(folder / "state"))
        for each in (first, second):
            train(*each, 2, 4)
        are_same(terms(first[1]), terms(second[1]))

    row.works("resume to the bit", resume)

    def elsewhere() -> None:
        from safetensors.torch import load_file

        plain = Regression().bfloat16()
        missing, unexpected = plain.load_state_dict(
            load_file(folder / "state/model.safetensors"), strict=False
        )
        assert not missing, missing
        assert all(".bf16x" in name for name in unexpected), unexpected

    row.works("load elsewhere", elsewhere, "strict=False")
    other = prepared()
    row.works("EDQ", lambda: measured(partial(train, *other, 0, 4)))


# ------------------------------------------------------------------------------------- Lightning


@row("Lightning", "lightning")
def _lightning(row: Row, folder: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = mcf.as_expansion(Regression())

        def training_step(self, given: torch.Tensor, index: int) -> torch.Tensor:
            return self.model(given).float().square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _adamw(self)

    data = torch.utils.data.DataLoader([x for i in range(4) for x in batch(i)], batch_size=8)

    def fit(module: Any, epochs: int, path: Any = None) -> Any:
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, data, ckpt_path=path)
        return trainer

    first = Module()
    trainers: list[Any] = []
    row.works("train", lambda: moves(first, lambda: trainers.append(fit(first, 1))))
    row.works("save", lambda: trainers[0].save_checkpoint(folder / "last.ckpt"))

    def resume() -> None:
        whole, second = Module(), Module()
        fit(whole, 2)
        fit(second, 2, folder / "last.ckpt")
        are_same(terms(whole), terms(second))

    row.works("resume to the bit", resume)
    row.works(
        "load elsewhere",
        lambda: Regression().load_state_dict(mcf.as_plain(first.model).state_dict()),
        "mcf.as_plain(model)",
    )
    row.works("EDQ", lambda: measured(lambda: fit(Module(), 1)))


@row("Fabric", "lightning")
def _fabric(row: Row, folder: Path) -> None:
    import lightning

    def made() -> tuple[Any, Any, Any]:
        fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-true")
        model = mcf.as_expansion(Regression())
        return (fabric, *fabric.setup(model, _adamw(model)))

    def train(fabric: Any, model: Any, optimizer: Any, start: int, end: int) -> None:
        for step in range(start, end):
            fabric.backward(model(batch(step)).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()

    first = made()
    row.works("train", lambda: moves(first[1], partial(train, *first, 0, 2)))
    path = folder / "state.ckpt"
    row.works("save", lambda: first[0].save(path, {"model": first[1], "optimizer": first[2]}))

    def resume() -> None:
        second = made()
        second[0].load(path, {"model": second[1], "optimizer": second[2]})
        for each in (first, second):
            train(*each, 2, 4)
        are_same(terms(first[1]), terms(second[1]))

    row.works("resume to the bit", resume)
    other = made()
    row.works("EDQ", lambda: measured(partial(train, *other, 0, 4)))


# ----------------------------------------------------------------------------------- many processes


@row("Ray Train", "ray")
def _ray(row: Row, folder: Path) -> None:
    """The example: a training, one whose worker is killed, and two that stop and are resumed."""
    said: list[str] = []

    def train() -> None:
        command = [sys.executable, str(EXAMPLES / "ray_train.py"), "--folder", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        said.extend(x for x in done.stdout.splitlines() if "differing bits" in x)

    def resume() -> None:
        assert len(said) == 3, said
        assert all(": 0 differing bits, after 8 steps" in x for x in said), said

    row.works("train", train)
    row.works("resume to the bit", resume)
    states: dict[str, Any] = {}

    def save() -> None:
        path = max(folder.rglob("state.pt"), key=lambda path: path.stat().st_mtime)
        states.update(torch.load(path, weights_only=True)["model"])
        assert all(isinstance(x, mcf.MCFTensor) for x in states.values())

    row.works("save", save)

    def elsewhere() -> None:
        plain = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))
        plain.load_state_dict({name: mcf.as_plain(x) for name, x in states.items()})

    row.works("load elsewhere", elsewhere, "mcf.as_plain(x)")
    row.works("EDQ", lambda: measured(partial(_one_by_hand, Regression())))


def _one_by_hand(model: nn.Module) -> None:
    model = mcf.as_expansion(model)
    loop(model, _adamw(model))


@row("ZeroRedundancyOptimizer", "torch")
def _zero(row: Row, folder: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def made() -> tuple[nn.Module, Any]:
        model = mcf.as_expansion(Regression())
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    first = made()
    row.works("train", lambda: moves(first[0], lambda: loop(*first, 0, 2)))

    def save() -> None:
        first[1].consolidate_state_dict()
        state = {"model": first[0].state_dict(), "optimizer": first[1].state_dict()}
        torch.save(state, folder / "state.pt")

    row.works("save", save)

    def resume() -> None:
        second = made()
        state = torch.load(folder / "state.pt", weights_only=True)
        second[0].load_state_dict(state["model"])
        second[1].load_state_dict(state["optimizer"])
        for each in (first, second):
            loop(*each, 2, 4)
        are_same(terms(first[0]), terms(second[0]))

    row.works("resume to the bit", resume)
    other = made()
    row.works("EDQ", lambda: measured(lambda: loop(*other)))
    dist.destroy_process_group()


def _titan(folder: Path, format: str, mode: str, kill_at: int = 0) -> list[str]:
    """What each process of a training of torchtitan's debug model says at its end, or nothing where
    all are killed when the first one has taken a step."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(
            str(EXAMPLES / "torchtitan_train.py"),
            "--format",
            format,
            "--mode",
            mode,
            "--folder",
            str(folder),
        ),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if kill_at and re.search(rf"step: *{kill_at} ", line):
            started = psutil.Process(process.pid)
            for each in (*started.children(recursive=True), started):
                each.kill()
    if process.wait() and not kill_at:
        raise RuntimeError(next((x for x in reversed(said) if "Error" in x), said[-1]).strip())
    return [line.strip() for line in said if line.startswith("process ")]


@row("torchtitan", "torchtitan")
def _torchtitan(row: Row, folder: Path) -> None:
    """Its Trainer over two processes, which stands for a GPU in a few places: the example does."""
    formats = {"bf16x2": ("plus", 12.0), "bf16i8": ("compact", 7.1)}
    whole: dict[str, list[str]] = {}

    def train() -> None:
        for format, (mode, size) in formats.items():
            whole[format] = _titan(folder / f"whole-{format}", format, mode)
            held = [float(re.findall(r"([\d.]+) bytes a parameter", x)[0]) for x in whole[format]]
            assert len(held) == 2, whole
            assert all(abs(x - size) < 0.05 for x in held), held

    def resume() -> None:
        for format, (mode, _) in formats.items():
            ended = _titan(folder / f"killed-{format}", format, mode, kill_at=5)
            assert not ended, "it was not killed"
            assert sorted(_titan(folder / f"killed-{format}", format, mode)) == sorted(
                whole[format]
            ), "other bits"

    row.works("train", train, "in_expansions(model_spec, format, mode)")
    row.works("resume to the bit", resume)
    row.says("save", row.cells["resume to the bit"])
    row.works("EDQ", partial(_containers, folder))


def _containers(folder: Path) -> None:
    """Its container of optimizers, over shards of one process, with a meter."""
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = mcf.as_expansion(Regression())
    fully_shard(model)
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})
    config = OptimizersContainer.Config(param_groups=[group], implementation="fused")
    container = OptimizersContainer(config, model_parts=[model])
    for optimizer in container:
        mcf.collage(optimizer, "plus")
    measured(lambda: loop(model, container))
    dist.destroy_process_group()


@row("DeepSpeed", "deepspeed")
def _deepspeed(row: Row, folder: Path) -> None:
    for column in ("train", "save", "resume to the bit"):
        row.says(
            column,
            "cannot: `deepspeed.initialize` raises `Couldn't swap Linear.weight` in stages 0, 1 "
            "and 2 (0.19.8, run by hand); ZeRO sets `p.data` to views of flat buffers. Use "
            "`fully_shard`",
        )
    row.says("load elsewhere", "its checkpoints convert: `python -m mcftensor convert`")


@row("Megatron-LM", "megatron-core")
def _megatron(row: Row, folder: Path) -> None:
    for column in ("train", "save", "resume to the bit"):
        row.says(
            column,
            "cannot: its parameters and gradients are views of flat buffers (read, not run)",
        )
    row.says("load elsewhere", "its checkpoints convert: `python -m mcftensor convert`")


# ------------------------------------------------------------------------------------- libraries


@row("diffusers UNet2DModel", "diffusers")
def _unet(row: Row, folder: Path) -> None:
    from diffusers import DDPMScheduler, UNet2DModel

    schedule = DDPMScheduler(num_train_timesteps=100)

    def made() -> Any:
        torch.manual_seed(0)
        blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
        shape = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "norm_num_groups": 4}
        return UNet2DModel(block_out_channels=(16,), layers_per_block=1, **shape, **blocks)

    def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            images, noise = torch.randn(2, 4, 1, 8, 8, generator=generator)
            times = torch.randint(100, (4,), generator=generator)
            noisy = schedule.add_noise(images, noise, times)
            out = model(noisy.to(model.dtype), times).sample
            nn.functional.mse_loss(out.float(), noise).backward()
            optimizer.step()
            optimizer.zero_grad()

    def released() -> None:
        model = mcf.as_expansion(made(), mcf.bf16i8)
        optimizer = mcf.collage(torch.optim.AdamW(model.parameters(), lr=1e-4), "compact")
        mcf.step_in_backward(model, optimizer)
        moves(model, lambda: train(model, optimizer))
        assert all(p.grad is None for p in model.parameters())

    model = mcf.checkpoint.store_as_terms(mcf.as_expansion(made()))
    row.works("train", lambda: (moves(model, lambda: train(model, _adamw(model))), released()))

    def save() -> None:
        model.save_pretrained(folder / "unet")
        again = mcf.as_expansion(made())
        mcf.load_file(folder / "unet/diffusion_pytorch_model.safetensors", again)
        are_same(terms(model), terms(again))

    row.works("save", save, "store_as_terms(model)")

    def elsewhere() -> None:
        plain = UNet2DModel.from_pretrained(folder / "unet", torch_dtype=torch.bfloat16)
        are_same(list(plain.parameters()), [mcf.as_plain(p) for p in model.parameters()])

    row.works("load elsewhere", elsewhere)
    other = mcf.as_expansion(made())
    row.works("EDQ", lambda: measured(lambda: train(other, _adamw(other))))


@row("adv_optm", "adv_optm")
def _adv_optm(row: Row, folder: Path) -> None:
    import adv_optm

    row.works("train", lambda: [_as_in_float32(getattr(adv_optm, x)) for x in adv_optm.__all__])


@row("prodigy-plus-schedule-free", "prodigy-plus-schedule-free")
def _prodigy_plus(row: Row, folder: Path) -> None:
    from prodigyplus import ProdigyPlusScheduleFree

    row.works("train", lambda: _as_in_float32(ProdigyPlusScheduleFree))


def _as_in_float32(make: Callable[..., torch.optim.Optimizer]) -> None:
    """Raise AssertionError unless an optimizer moves expansions 0.98 to 1.02 of the way it moves
    float32, at a rate at which it moves plain bf16 only by rounding at random."""

    def way(model: nn.Module) -> torch.Tensor:
        optimizer = make(model.parameters(), lr=1e-5)
        start = [mcf.as_plain(p.detach(), torch.float64) for p in model.parameters()]
        generator = torch.Generator().manual_seed(1)
        for _ in range(60):
            for p in model.parameters():
                noise = torch.randn(p.shape, generator=generator)
                p.grad = (0.1 * noise + 0.05).bfloat16().to(p.dtype)
            optimizer.step()
        after = [mcf.as_plain(p.detach(), torch.float64) for p in model.parameters()]
        return torch.cat([(y - x).flatten() for x, y in zip(start, after, strict=True)])

    def model() -> nn.Module:
        torch.manual_seed(0)
        norm = nn.LayerNorm(48)
        return nn.Sequential(nn.Linear(32, 48, bias=False), norm, nn.Linear(48, 16)).bfloat16()

    right, own = way(model().float()), way(mcf.as_expansion(model(), mcf.bf16i16))
    made = float(own @ right / (right @ right))
    assert 0.98 < made < 1.02, f"{made:.3f} of the way"


@row("diffusers EMAModel", "diffusers")
def _diffusers(row: Row, folder: Path) -> None:
    from diffusers.training_utils import EMAModel

    def averaged(foreach: bool) -> None:
        model = mcf.as_expansion(Regression())
        ema = EMAModel(model.parameters(), decay=0.9999, use_ema_warmup=False, foreach=foreach)
        start = [mcf.as_plain(p, torch.float64) for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01)
        ema.optimization_step = 100_000
        for _ in range(10):
            ema.step(model.parameters())
        for p, q, x in zip(ema.shadow_params, model.parameters(), start, strict=True):
            y = mcf.as_plain(q.detach(), torch.float64)
            expected = y + (x - y) * (1 - ema.cur_decay_value * 0 - 1 + ema.cur_decay_value) ** 10
            torch.testing.assert_close(
                mcf.as_plain(p, torch.float64), expected, rtol=1e-4, atol=2e-6
            )

    row.works("train", lambda: (averaged(False), averaged(True)))

    def save() -> None:
        model = mcf.as_expansion(Regression())
        ema = EMAModel(model.parameters())
        torch.save(ema.state_dict(), folder / "ema.pt")
        other = EMAModel(mcf.as_expansion(Regression(1)).parameters())
        other.load_state_dict(torch.load(folder / "ema.pt", weights_only=False))
        for p, q in zip(ema.shadow_params, other.shadow_params, strict=True):
            are_same(list(p.components), list(q.components))

    row.works("save", save)

    def copied() -> None:
        model, other = mcf.as_expansion(Regression()), mcf.as_expansion(Regression(1))
        EMAModel(model.parameters()).copy_to(other.parameters())
        are_same(terms(model), terms(other))

    row.works("merge or export", copied)


@row("bitsandbytes", "bitsandbytes")
def _bitsandbytes(row: Row, folder: Path) -> None:
    import bitsandbytes

    def train() -> None:
        model = mcf.as_expansion(Regression())
        optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), min_8bit_size=1)
        moves(model, lambda: loop(model, optimizer))

    row.refuses("train", train)


@row("torchdiffeq", "torchdiffeq")
def _torchdiffeq(row: Row, folder: Path) -> None:
    """Weights as expansions, states plain; its solvers control their steps by the states' bits."""
    from torchdiffeq import odeint, odeint_adjoint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
            self.evaluations = 0

        def forward(self, t: Any, y: Any) -> Any:
            self.evaluations += 1
            return self.layers(y)

    times = torch.linspace(0, 1, 4)

    def steps(field: Field, dtype: torch.dtype, **options: Any) -> None:
        optimizer = torch.optim.AdamW(field.parameters(), lr=1e-3, fused=True)
        for solve in (odeint, odeint_adjoint):
            for method in ("rk4", "dopri5"):
                solve(field, torch.ones(2, dtype=dtype), times, method=method, **options)[
                    -1
                ].square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    def train() -> None:
        wide, narrow = mcf.as_expansion(Field(), mcf.fp32x2), mcf.as_expansion(Field())
        moves(wide, lambda: steps(wide, torch.float32))
        moves(narrow, lambda: steps(narrow, torch.bfloat16, rtol=1e-2, atol=1e-2))

    row.works("train", train, "mcf.fp32x2, or rtol=1e-2, atol=1e-2 in bf16")
    counts = []
    for field, dtype in (
        (Field(), torch.float32),
        (Field().bfloat16(), torch.bfloat16),
        (mcf.as_expansion(Field()), torch.bfloat16),
    ):
        odeint(field, torch.ones(2, dtype=dtype), times, method="dopri5")
        counts.append(field.evaluations)
    row.says(
        "messages",
        f"at its default rtol=1e-7, dopri5 evaluates a field {counts[0]} times in float32, "
        f"{counts[1]} times in plain bf16 and {counts[2]} times over bf16x2, since a state in bf16 "
        "resolves 4e-3",
    )


@row("gpytorch", "gpytorch")
def _gpytorch(row: Row, folder: Path) -> None:
    import gpytorch

    class Model(gpytorch.models.ExactGP):
        def __init__(self, x: Any, y: Any, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    def train() -> None:
        x = torch.linspace(0, 1, 12)
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        model = Model(x, torch.sin(6 * x), likelihood)
        mcf.as_expansion(model, mcf.fp32x2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)

        def steps() -> None:
            for _ in range(4):
                (-objective(model(x), torch.sin(6 * x))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        moves(model, steps)

    row.works("train", train, "mcf.fp32x2")


@row("safetensors", "safetensors")
def _safetensors(row: Row, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = mcf.as_expansion(Regression())
    row.refuses("train", lambda: save_file(dict(model.state_dict()), folder / "direct.safetensors"))
    row.cells["save"] = row.cells.pop("train")
    row.says("train", "–")

    def resume() -> None:
        mcf.save_file(model, folder / "model.safetensors")
        again = mcf.as_expansion(Regression(1))
        mcf.load_file(folder / "model.safetensors", again)
        are_same(terms(model), terms(again))

    row.works("resume to the bit", resume, "mcf.save_file(model, path)")

    def elsewhere() -> None:
        held = load_file(folder / "model.safetensors")
        plain = mcf.as_plain(model).state_dict()
        assert all(torch.equal(held[name], x) for name, x in plain.items())

    row.works("load elsewhere", elsewhere)


@row("ONNX export", "onnx", "onnxscript")
def _onnx(row: Row, folder: Path) -> None:
    import onnx

    def export(model: nn.Module) -> None:
        torch.onnx.export(
            model, (batch(0),), str(folder / "model.onnx"), dynamo=True, verbose=False
        )
        onnx.checker.check_model(str(folder / "model.onnx"))

    row.works(
        "merge or export",
        lambda: export(mcf.as_plain(mcf.as_expansion(Regression()))),
        "mcf.as_plain(model)",
    )
    try:
        export(mcf.as_expansion(Regression()))
    except Exception as error:  # noqa: BLE001
        row.says("messages", f"expansions themselves: torch raises {type(error).__name__}")
