"""Train a small GPT-2 with the Trainer of transformers, in plain bf16 and as expansions.

Both start from the same weights and see the same batches. The learning rate is small, as at the
end of a training, and plain bf16 loses most of the updates. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

import mcftensor as mcf

CONTEXT = 64


def texts() -> list[dict[str, Tensor]]:
    """Pieces of the source of PyTorch's optimizers, as bytes."""
    files = sorted(Path(torch.optim.__file__).parent.glob("*.py"))
    content = b"".join(file.read_bytes() for file in files)
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    rows = rows[: len(rows) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    return [{"input_ids": row, "labels": row} for row in rows]


def make_model() -> GPT2LMHeadModel:
    """The same weights at every call, in bf16."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config).bfloat16()


def train(model: GPT2LMHeadModel, steps: int, lr: float, folder: str) -> tuple[float, mcf.EDQ]:
    """Train a model, and return the mean loss of the last tenth and a meter of the updates."""
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=lr,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        logging_steps=max(1, steps // 10),
        save_strategy="no",
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.999), fused=True)
    if any(isinstance(p, mcf.MCFTensor) for p in model.parameters()):
        mcf.collage(optimizer, "plus")
    meter = mcf.EDQ(optimizer, every=max(1, steps // 10))
    trainer = Trainer(
        model=model, args=arguments, train_dataset=texts(), optimizers=(optimizer, None)
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return losses[-1], meter


def values(model: GPT2LMHeadModel) -> list[Tensor]:
    """The values of all parameters in float64, which holds them exactly."""
    return [mcf.as_plain(p, torch.float64) for p in model.parameters()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train twice and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate (%(default)s)")
    options = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    print(f"{'weights':<12}{'loss':>8}{'EDQ ratio':>11}{'updates lost':>14}")
    with tempfile.TemporaryDirectory() as folder:
        for name, model in {
            "bf16": make_model(),
            "expansions": mcf.checkpoint.store_as_terms(mcf.as_expansion(make_model())),
        }.items():
            loss, meter = train(model, options.steps, options.lr, folder)
            reading = meter.last
            assert reading is not None
            print(f"{name:<12}{loss:>8.3f}{reading['ratio']:>11.3f}{reading['lost']:>13.1%}")
        model.save_pretrained(folder)
        plain = GPT2LMHeadModel.from_pretrained(folder)
        print(f"Saved, and read by plain transformers as {plain.dtype}.")
        again = mcf.as_expansion(plain)
        mcf.load_file(folder, again, strict=False)
        same = all(map(torch.equal, values(again), values(model)))
        print(f"Read by mcf.load_file, {'the same' if same else 'NOT THE SAME'} in all terms.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
