"""Text as tokens, for models that do not learn bytes; their tokenizer is trained here."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

import mcftensor as mcf
from pretraining import text
from pretraining.resuming import ResumeError

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
PAD, CLS, SEP, MASK = range(len(SPECIAL))
SHORTEST = 200  # Characters of a string in a source that counts as prose.
PIECE = 1 << 16  # Bytes that are encoded at once.


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on, tokens held out, and the number of different ones."""

    training: Tensor
    validation: Tensor
    vocabulary: int


def load(folder: Path, path: Path | None, vocabulary: int, window: int) -> Corpus:
    """The tokens of a text, by default of Python's standard library and PyTorch's docstrings.

    The tokenizer is trained on the training part. `folder` keeps it and the tokens, so that a run
    that goes on has the same.
    """
    saved = folder / f"corpus-{vocabulary}.pt"
    if not saved.exists():
        training, validation = text.load(path, window)
        parts = [training.numpy().tobytes(), validation.numpy().tobytes()]
        if path is None:
            root = Path(torch.__file__).parent
            extra = text.split_files(root, docstring_files(root), docstrings)
            parts = [own + b"\n" + more for own, more in zip(parts, extra, strict=True)]
        tokenizer = trained(parts[0], vocabulary)
        encoded = [encode(tokenizer, part) for part in parts]
        with mcf.checkpoint.replacing(saved) as temporary:
            torch.save({"tokens": encoded, "tokenizer": tokenizer.to_str()}, temporary)
    try:
        content = torch.load(saved, weights_only=True)
    except (OSError, EOFError, RuntimeError) as error:
        raise ResumeError(f"cannot read {saved}: {error}") from None
    size = Tokenizer.from_str(content["tokenizer"]).get_vocab_size()
    training, validation = content["tokens"]
    return Corpus(training, validation, size)


def docstring_files(root: Path) -> list[Path]:
    """The sources under `root`, tests aside."""
    files = sorted(root.rglob("*.py"))
    return [f for f in files if text.NOT_THE_LIBRARY.isdisjoint(f.relative_to(root).parts)]


def docstrings(file: Path) -> bytes:
    """The long strings of a source: docstrings, and documentation that functions are given."""
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:  # of a later Python
        return b""
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    prose = (x for x in strings if isinstance(x, str) and len(x) >= SHORTEST)
    return "".join(f"{x}\n" for x in prose).encode()


def trained(content: bytes, vocabulary: int) -> Tokenizer:
    """A byte-level tokenizer of pairs that are often beside each other."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces(content), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, content: bytes) -> Tensor:
    """The tokens of a text, in int16 or int32."""
    kind = torch.int16 if tokenizer.get_vocab_size() < 1 << 15 else torch.int32
    encoded = tokenizer.encode_batch(pieces(content))
    return torch.cat([torch.tensor(x.ids, dtype=kind) for x in encoded])


def pieces(content: bytes) -> list[str]:
    """A text in pieces, cut at ends of lines."""
    found, lines, length = [], [], 0
    for line in content.decode(errors="replace").splitlines(keepends=True):
        lines.append(line)
        length += len(line)
        if length >= PIECE:
            found.append("".join(lines))
            lines, length = [], 0
    return [*found, "".join(lines)]
