"""The examples of docs/trainers.md run as they stand there."""

import re
from pathlib import Path

import lightning.fabric  # noqa: F401 (it sets a variable of the environment)
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
EXAMPLES = dict(
    re.findall(
        r"^## ([^\n]+)\n\n```python\n(import .+?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")
@pytest.mark.filterwarnings("ignore:.*'pin_memory' argument is set as true")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("framework", ["transformers", "Accelerate", "Lightning", "Fabric"])
def test_examples(framework, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        exec(compile(EXAMPLES[framework], framework, "exec"), {"__name__": "example"})
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    assert torch.get_default_dtype() == torch.float32
