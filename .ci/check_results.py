"""Check what `studies/pretrain.py --steps 20 --out DIR` wrote to DIR."""

import json
import math
import sys
from pathlib import Path

from matplotlib.image import imread

BYTES_PER_PARAMETER = {
    "master": 16,
    "bf16": 8,
    "light": 10,
    "plus": 12,
    "full": 14,
    "exact": 14,
    "tail8": 13,
    "round": 12,
    "compact": 7.0625,
    "released": 5.0625,
    "half16": 14,
    "half8": 13,
}

folder = Path(sys.argv[1])
strategies = json.loads((folder / "results.json").read_text())["strategies"]
assert list(strategies) == list(BYTES_PER_PARAMETER), list(strategies)
for name, result in strategies.items():
    nats = result["final"]["nats"]
    memory = result["bytes_per_parameter"]
    print(f"{name:7} {nats:.4f} nats, {memory:.2f} bytes per parameter")
    assert len(result["training"]) == 20, "one training loss a step"
    assert nats < math.log(256), "training must beat a uniform guess"
    edq = result["edq"]
    print(f"{'':7} EDQ ratio {result['final']['edq_ratio']:.4f} from {len(edq)} samples")
    assert [reading["step"] for reading in edq] == list(range(1, 20, 2)), "every other step"
    assert all(0 <= reading["lost"] <= 1 for reading in edq), "shares"
    # Norms, which are three-term expansions, add less than 0.1.
    assert 0 <= memory - BYTES_PER_PARAMETER[name] < 0.1, "memory is not what the mode promises"

ratios = {name: result["final"]["edq_ratio"] for name, result in strategies.items()}
lost = {name: result["final"]["lost"] for name, result in strategies.items()}
for name in strategies.keys() - {"bf16", "round"}:
    assert abs(ratios[name] - 1) < 1e-3, f"{name} must lose next to nothing"
    assert lost[name] < 0.1, f"{name} must move nearly all elements"
assert abs(ratios["round"] - 1) < 0.02, "balanced rounding must be right in the mean"
assert ratios["bf16"] < 0.8, "plain bf16 must lose a good part"
assert lost["bf16"] > 0.5, "plain bf16 must leave most elements where they are"

picture = imread(folder / "loss.png")
assert min(picture.shape[:2]) > 400, picture.shape
assert picture[..., :3].std() > 0.01, "the picture is blank"
print("results.json and loss.png are sane")
