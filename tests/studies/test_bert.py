"""`studies/bert.py`, on a model and a text small enough for seconds."""

import dataclasses
import json
import math

import pytest
import torch
from tokenizers import Tokenizer

import bert
from masked.masking import masked
from masked.training import BertRun, MaskedTraining, Phase, Size, logits, model
from pretraining import corpus, report, text

# optimi, which sums as Kahan, belongs to the packages of the benchmarks.
HERE = [name for name in bert.STRATEGIES if name != "kahan"]
MARKS = len(corpus.SPECIAL)


@pytest.fixture(autouse=True)
def _few_windows(monkeypatch):
    monkeypatch.setattr(bert, "phases", lambda steps: phases(steps, 2))


def phases(*steps):
    return tuple(Phase(n, 10 + 4 * i, 2, 1.0 - 0.3 * i, 0.5, 2) for i, n in enumerate(steps))


@pytest.fixture
def run(poem, tmp_path):
    """Run the command on the poem in a folder; return the records by name."""

    def run(folder, *arguments):
        where = tmp_path / folder
        options = ["--data", poem, "--checkpoints", where, "--out", where / "out"]
        options += ["--size", 1, 16, 2, 16, "--vocabulary", 280, "--steps", 2, "--seeds", 0]
        assert bert.main([*map(str, options), "--beta2", "0.98", *arguments]) == 0
        return {path.stem: json.loads(path.read_text()) for path in where.glob("out/*.json")}

    return run


def without_times(record):
    run, result = record["run"], record["result"]
    return run, {name: x for name, x in result.items() if name != "seconds_per_step"}


# Text


def test_tokens_are_the_text_and_marks_are_none_of_them(tmp_path):
    content = b"hello hello \xc3\xa4\xff\n" * 50
    tokenizer = corpus.trained(content, 270)
    tokens = corpus.encode(tokenizer, content)
    assert tokens.min() >= MARKS
    assert len(tokens) < len(content) / 2, "pairs are merged"
    assert tokenizer.decode(tokens.tolist()) == content.decode(errors="replace")


def test_the_corpus_is_made_once(poem, tmp_path, monkeypatch):
    first = corpus.load(tmp_path, poem, 270, 16)
    monkeypatch.setattr(corpus, "trained", None)
    again = corpus.load(tmp_path, None, 270, 16)
    assert torch.equal(first.training, again.training)
    assert torch.equal(first.validation, again.validation)
    assert first.vocabulary == again.vocabulary == 270


def test_only_the_training_part_teaches_the_tokenizer(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("ab" * 900 + "zq" * 100)
    corpus.load(tmp_path, file, 262, 16)
    saved = torch.load(tmp_path / "corpus-262.pt", weights_only=True)
    vocabulary = Tokenizer.from_str(saved["tokenizer"]).get_vocab()
    assert "ab" in vocabulary
    assert "zq" not in vocabulary


def test_long_strings_are_prose(tmp_path):
    file = tmp_path / "source.py"
    file.write_text(f'"""short"""\nadd_docstr(f, "{"long " * 50}")\nx = 1\n')
    assert corpus.docstrings(file) == b"long " * 50 + b"\n"
    file.write_text("def f[: nothing")
    assert corpus.docstrings(file) == b""
    assert text.split_files(tmp_path, [file, file], corpus.docstrings) == (b"", b"")


# Masking


def test_what_is_hidden_can_be_put_back():
    tokens = torch.randint(MARKS, 50, (3, 40))
    inputs, positions, targets = masked(tokens, 50, torch.Generator().manual_seed(0))
    assert positions.shape == targets.shape == (3, 6)  # 15 % of 40
    assert all(len(set(row.tolist())) == 6 for row in positions)
    assert torch.equal(inputs[:, 0], torch.full((3,), corpus.CLS))
    assert torch.equal(inputs[:, -1], torch.full((3,), corpus.SEP))
    assert torch.equal(inputs.scatter(1, positions, targets)[:, 1:-1], tokens)


def test_of_ten_hidden_tokens_eight_are_masked_one_is_random_and_one_stays():
    tokens = torch.full((400, 100), 7)
    inputs, positions, _ = masked(tokens, 1000, torch.Generator().manual_seed(0))
    shown = inputs.gather(1, positions).flatten()
    share = {name: (shown == token).float().mean().item() for name, token in
             {"mask": corpus.MASK, "stays": 7}.items()}  # fmt: skip
    assert share["mask"] == pytest.approx(0.8, abs=0.02)
    assert share["stays"] == pytest.approx(0.1, abs=0.02)
    rest = shown[(shown != corpus.MASK) & (shown != 7)]
    assert rest.min() >= MARKS
    assert rest.max() > 900
    spread = torch.bincount(positions.flatten())[1:101].float() / 400
    assert spread.min() > 0.08
    assert spread.max() < 0.22


# Training


def training(poem, strategy="master", **changes):
    content = torch.tensor(list(poem.read_bytes()), dtype=torch.int16)
    settings = {"steps": 6, "lr": 1e-3, "beta2": 0.98, "batch_size": 2, "device": "cpu", "seed": 0}
    run = BertRun(strategy, **settings, phases=phases(4, 2), size=Size(1, 16, 2, 16),
                  vocabulary=256, **changes)  # fmt: skip
    return MaskedTraining(run, content, content)


def test_rates_rise_and_fall_in_each_phase(poem):
    job = training(poem)
    assert [job.factor(step) for step in range(7)] == pytest.approx(
        [0.5, 1, 2 / 3, 1 / 3, 0.7, 0.35, 0.35]
    )
    assert next(job.batches()).inputs.shape == (2, 10)
    job.step = 4
    assert next(job.batches()).inputs.shape == (2, 14)


def test_only_hidden_tokens_are_judged():
    network = model(Size(1, 16, 2, 16), 300).eval()
    batch = masked(torch.randint(MARKS, 300, (2, 14)), 300, torch.Generator().manual_seed(0))
    whole = network(batch.inputs).logits
    for i, (row, positions) in enumerate(zip(whole, batch.positions, strict=True)):
        own = logits(network, batch).unflatten(0, (2, -1))[i]
        torch.testing.assert_close(own, row[positions], rtol=1e-5, atol=1e-6)


def test_float16_skips_a_step_with_infinite_gradients(poem):
    job = training(poem, "fp16")
    before = [p.detach().clone() for p in job.model.parameters()]
    scale = job.scaler.get_scale()
    next(job.model.parameters()).register_hook(lambda grad: grad * math.inf)
    job.take(next(job.batches()))
    assert job.scaler.get_scale() == scale / 2
    assert all(torch.equal(p, q) for p, q in zip(before, job.model.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:Parameter `foreach` is deprecated:DeprecationWarning")
def test_kahan_has_the_settings_of_torch(poem):
    pytest.importorskip("optimi", reason="it is not installed")
    groups = training(poem, "kahan").optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]
    for group in groups:
        assert (group["beta1"], group["beta2"], group["eps"]) == (0.9, 0.98, 1e-8)
        assert group["kahan_sum"]
        assert len(group["params"]) == len(group["param_names"])


def test_runs_in_pieces_end_with_the_same_bits(run):
    """Every start takes one step at least."""
    some = ["--strategies", "compact", "--save-every", "3"]
    whole = run("whole", *some)
    starts = 0
    while not (done := run("pieces", *some, "--minutes", "1e-9")) and starts < 20:
        starts += 1
    assert starts == 3, "of four steps, the last of which finishes the run"
    assert done.keys() == whole.keys() == {"compact-0.98-0"}
    assert all(without_times(done[name]) == without_times(whole[name]) for name in whole)


@pytest.mark.slow
def test_each_strategy_in_pieces_ends_with_the_same_bits(run):
    whole = run("whole", "--strategies", *HERE)
    for _ in range(4 * len(HERE)):
        done = run("pieces", "--strategies", *HERE, "--minutes", "1e-9")
    assert len(done) == len(HERE)
    assert all(without_times(done[name]) == without_times(whole[name]) for name in whole)


def test_a_record_says_what_ran(run):
    record = run("one", "--strategies", "exact")["exact-0.98-0"]
    result = record["result"]
    assert record["run"]["phases"] == [dataclasses.asdict(phase) for phase in phases(2, 2)]
    assert record["tokens"] == 2 * 2 * 10 + 2 * 2 * 14
    assert [step for step, _ in result["validation"]] == [0, 1, 2, 3, 4]
    assert result["accuracy"][-1][0] == 4
    assert result["bytes_per_parameter"] == 14
    assert result["witness"]["displacement_matrices"] < 1e-4
    assert result["witness"]["second_moment"] == pytest.approx(1, abs=1e-5)
    assert report.finite(result) == result
