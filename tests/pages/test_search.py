"""The search of the site leads to the right page, by its own worker over its own index."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

SEARCH = Path(__file__).parents[1] / "support/search.js"
FIRST = {
    "does not learn": "guides/fine-tuning.html",
    "fine-tuning in bf16 does not learn": "guides/fine-tuning.html",
    'dtype="auto"': "guides/fine-tuning.html",
    "torch_dtype": "guides/fine-tuning.html",
    "loss does not go down": "guides/fine-tuning.html",
    "norm weights stay at 1": "guides/fine-tuning.html",
    "loss is nan": "guides/questions.html#my-loss-is-nan",
    "layernorm": "guides/choosing.html#norms-in-float32",
    "LayerNorm": "guides/choosing.html#norms-in-float32",
    "rmsnorm": "guides/choosing.html#norms-in-float32",
    "gradscaler": "guides/moving.html#from-gradscaler",
    "dataparallel": "distributed.html",
    "DistributedDataParallel": "distributed.html",
    "FSDP": "distributed.html",
    "OOM": "guides/bytes.html#will-it-fit",
    "out of memory": "guides/bytes.html#will-it-fit",
    "peft": "trainers.html#peft",
    "lora": "trainers.html#peft",
    "ema": "guides/recipes.html#an-average-of-weights-that-moves",
    "offload": "guides/host.html",
    "windows": "reference/devices.html#windows-and-macos",
    "macos": "reference/devices.html#windows-and-macos",
    "diffusion": "guides/image-models.html",
    "diffusers": "guides/image-models.html",
    "sdxl": "guides/image-models.html",
    "onetrainer": "guides/image-models.html",
    "kohya": "guides/image-models.html",
    "Muon": "optimizers.html",
    "trl": "guides/rl.html",
    "grpo": "guides/rl.html",
    "verl": "guides/rl.html",
    "torchtitan": "trainers.html#torchtitan",
    "lightning": "trainers.html#lightning",
    "stochastic rounding": "guides/tails.html",
    "safetensors": "checkpoints.html#weights-in-safetensors",
    "install": "start.html#install",
    "does it help": "help.html",
}


@pytest.fixture(scope="module")
def found(site) -> dict[str, list[str]]:
    """By query, the best section of each page."""
    command = [shutil.which("node"), str(SEARCH), str(site), *FIRST, *map(str, range(1, 100))]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert not done.stderr, done.stderr[:400]
    return json.loads(done.stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not found")
@pytest.mark.parametrize("query", FIRST)
def test_the_first_page_that_a_search_finds(found, query):
    assert FIRST[query] in (found[query][0], found[query][0].partition("#")[0])


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not found")
def test_a_search_for_a_number_finds_pages(found):
    assert all(found[str(x)] for x in (1, 2, 3, 4, 8, 16, 32, 64))
