"""A model of transformers is loaded in the dtype of its file, bf16: what does fine-tuning learn?

A small Llama learns the standard library in float32 and is saved in bf16, as models are published.
Then it is loaded and fine-tuned on the C headers of Python: as it comes, which since transformers 5
is in bf16; in float32, with autocast and without; with optimizers of other libraries that round
stochastically or carry the rounding error along; and as expansions. All see the same batches.
Nothing is downloaded. Optimizers of libraries that are not installed are left out.

Each run is kept in a file, so the study resumes where it was stopped. It writes `loaded.json`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import mcftensor as mcf
from pretraining.command import exit_status, make_folder
from pretraining.text import load
from pretraining.training import machine

CONTEXT, BATCH = 64, 16
SHAPE: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3}
PRETRAINING, PRETRAINING_LR = 2000, 2e-3
STEPS, RATES, BETAS = 600, (5e-5, 1e-5), (0.9, 0.999)
HELD_OUT = 256


class Way(NamedTuple):
    """How a model is loaded and trained.

    Attributes:
        dtype: the argument of `from_pretrained`; None leaves it out.
        library: whose AdamW it is.
        options: of that AdamW.
        autocast: whether the forward pass runs under bf16 autocast.
        expansions: whether the model is converted.
    """

    dtype: torch.dtype | None = None
    library: str = "torch.optim"
    options: dict[str, bool] = {}  # noqa: RUF012
    autocast: bool = False
    expansions: bool = False


REFERENCE = "float32"
WAYS = {
    REFERENCE: Way(torch.float32),
    "as loaded": Way(),
    "float32, autocast": Way(torch.float32, autocast=True),
    "Kahan summation (optimi)": Way(library="optimi", options={"kahan_sum": True}),
    "stochastic rounding (torchao)": Way(
        library="torchao.optim", options={"bf16_stochastic_round": True}
    ),
    "mcftensor, plus": Way(expansions=True),
}


def windows(text: Tensor, seed: int, count: int) -> Tensor:
    """(count, context) tokens, of places that the seed draws."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT)].long()


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean cross-entropy in nats a byte, in float32."""
    logits = model(input_ids=tokens).logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(
    model: nn.Module, optimizer: Optimizer, text: Tensor, seed: int, steps: int, autocast: bool
) -> None:
    """A linear decay to zero, and gradients clipped to norm 1, as of transformers' Trainer."""
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            value = loss(model, windows(text, 10**6 * (seed + 1) + step, BATCH))
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def published(folder: Path, steps: int) -> Path:
    """A model that learned the standard library in float32, saved in bf16; made if missing."""
    path = folder / f"published-{steps}"
    if not path.exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256, num_attention_heads=4, max_position_embeddings=CONTEXT, **SHAPE
        )
        model: Any = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAINING_LR, betas=BETAS)
        train(model, optimizer, load(None, CONTEXT)[0], 0, steps, False)
        unfinished = path.with_suffix(".new")
        model.to(torch.bfloat16).save_pretrained(unfinished)
        unfinished.replace(path)
    return path


def start(path: Path, way: Way, lr: float) -> tuple[nn.Module, Optimizer]:
    """The lines of a script in which the ways differ."""
    options: dict[str, Any] = {} if way.dtype is None else {"dtype": way.dtype}
    model = LlamaForCausalLM.from_pretrained(path, **options)
    if way.expansions:
        mcf.as_expansion(model)
    make = importlib.import_module(way.library)
    adamw = getattr(make, "AdamW", None) or make._AdamW
    optimizer: Optimizer = adamw(
        model.parameters(), lr=lr, betas=BETAS, eps=1e-8, weight_decay=0.0, **way.options
    )
    return model, mcf.collage(optimizer, "plus") if way.expansions else optimizer


def weights(model: nn.Module) -> dict[str, Tensor]:
    """All terms, in float64."""
    return {name: mcf.as_plain(p.detach(), torch.float64) for name, p in model.named_parameters()}


def evaluate(model: nn.Module, path: Path, tokens: Tensor) -> float:
    """The loss of the weights in float32, however they were trained."""
    judge = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    judge.load_state_dict({name: w.float() for name, w in weights(model).items()}, strict=False)
    with torch.no_grad():
        return statistics.fmean(loss(judge, part).item() for part in tokens.split(64))


def tune(path: Path, name: str, lr: float, seed: int, steps: int) -> dict[str, Any]:
    """Fine-tune in one way: what it learned, what moved, and how far in all."""
    headers = load(Path(sysconfig.get_paths()["include"]), CONTEXT)
    tokens = windows(headers[1], 0, HELD_OUT)
    model, optimizer = start(path, WAYS[name], lr)
    dtype = str(next(iter(model.parameters())).dtype)
    before, first = evaluate(model, path, tokens), weights(model)
    stock = WAYS[name].library == "torch.optim"
    diagnosis = mcf.meters.edq.Diagnosis(max(1, steps // 6), file=path.with_name("verdict.txt"))
    with diagnosis if stock else nullcontext():
        train(model, optimizer, headers[0], seed, steps, WAYS[name].autocast)
    moves = {name: w - first[name] for name, w in weights(model).items()}
    norms = torch.cat([x.flatten() for name, x in moves.items() if "norm" in name])
    every = torch.cat([x.flatten() for x in moves.values()])
    return {
        "dtype": dtype,
        "before": before,
        "after": evaluate(model, path, tokens),
        "moved": (every != 0).double().mean().item(),
        "norms moved": (norms != 0).double().mean().item(),
        "bytes": mcf.meters.summary(model, optimizer).bytes_per_parameter,
        "verdict": diagnosis.verdict() if stock else None,
        "moves": every,
    }


def kept(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The outcome of a run, from its file if it is done."""
    if not path.exists():
        with mcf.checkpoint.replacing(path) as temporary:
            torch.save(make(), temporary)
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def together(runs: list[dict[str, Any]], references: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds; gain and movement are shares of those of float32."""
    names = ("before", "after", "moved", "norms moved", "bytes")
    found = {name: statistics.fmean(run[name] for run in runs) for name in names}
    pairs = list(zip(runs, references, strict=True))
    found["gain"] = statistics.fmean(
        (a["before"] - a["after"]) / (b["before"] - b["after"]) for a, b in pairs
    )
    found["made"] = statistics.fmean(
        float(a["moves"] @ b["moves"] / (b["moves"] @ b["moves"])) for a, b in pairs
    )
    return {"dtype": runs[0]["dtype"], "verdict": runs[0]["verdict"], **found}


def main(arguments: Sequence[str] | None = None) -> int:
    """Fine-tune in each way, and compare."""
    parser = argparse.ArgumentParser(prog="loaded", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--pretraining", type=int, default=PRETRAINING)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args(arguments)

    def job() -> None:
        logging.disable_progress_bar()
        torch.set_num_threads(1)
        folder = args.out / "loaded"
        make_folder(folder)
        path = published(folder, args.pretraining)
        ways = [name for name, way in WAYS.items() if find_spec(way.library.partition(".")[0])]
        runs: dict[tuple[float, str], list[dict[str, Any]]] = {}
        for lr, name, seed in product(RATES, ways, args.seeds):
            file = folder / f"{args.pretraining}-{args.steps}-{lr:g}-{name}-{seed}.pt"
            run = kept(file, partial(tune, path, name, lr, seed, args.steps))
            runs.setdefault((lr, name), []).append(run)
        rows = [
            {"lr": lr, "way": name, **together(own, runs[lr, REFERENCE])}
            for (lr, name), own in runs.items()
        ]
        parameters = sum(p.numel() for p in start(path, Way(), 1.0)[0].parameters())
        found = {
            "parameters": parameters,
            "steps": args.steps,
            "seeds": args.seeds,
            "machine": machine("cpu"),
            "rows": rows,
        }
        (args.out / "loaded.json").write_text(json.dumps(found, indent=1) + "\n")
        for row in rows:
            print(
                f"lr {row['lr']:g}, {row['way']}: {row['after']:.4f} nats, gain {row['gain']:.1%}"
            )

    return exit_status("loaded", job)


if __name__ == "__main__":
    sys.exit(main())
