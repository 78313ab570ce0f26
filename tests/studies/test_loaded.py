"""`studies/loaded.py`, in a few steps."""

import json

import pytest

loaded = pytest.importorskip("loaded", reason="transformers is not installed")


def test_each_way_of_loading_is_tuned_once(tmp_path, monkeypatch):
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    monkeypatch.setattr(loaded, "SHAPE", shape)
    monkeypatch.setattr(loaded, "BATCH", 2)
    monkeypatch.setattr(loaded, "HELD_OUT", 4)
    monkeypatch.setattr(loaded, "RATES", (1e-5,))
    ways = {name: x for name, x in loaded.WAYS.items() if x.library == "torch.optim"}
    monkeypatch.setattr(loaded, "WAYS", ways)
    options = ["--steps", "4", "--pretraining", "4", "--seeds", "0", "--out", str(tmp_path)]
    assert loaded.main(options) == 0
    rows = {x["way"]: x for x in json.loads((tmp_path / "loaded.json").read_text())["rows"]}
    assert {name: x["dtype"] for name, x in rows.items()} == {
        "float32": "torch.float32",
        "as loaded": "torch.bfloat16",
        "float32, autocast": "torch.float32",
        "mcftensor, plus": "torch.bfloat16",
    }
    assert rows["as loaded"]["norms moved"] == 0
    assert rows["mcftensor, plus"]["norms moved"] == 1
    assert "updates are lost" in rows["as loaded"]["verdict"]

    def once(*_):
        raise AssertionError("what has been measured is measured again")

    monkeypatch.setattr(loaded, "tune", once)
    assert loaded.main(options) == 0
