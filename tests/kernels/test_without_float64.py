"""What runs on a device without float64, as Apple's MPS is, by PyTorch's own operations.

The table of the page is what is found here.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.pretended import Misplaced, pretended

PAGE = Path(__file__).parents[2] / "docs/reference/devices.md"
FORMATS = {
    f.name: f for f in (mcf.bf16x2, mcf.bf16x3, mcf.fp16x2, mcf.fp32x2, mcf.bf16i16, mcf.bf16i8)
} | {"bf16br": mcf.Format.from_name("bf16br")}


def entered(format):
    return mcf.as_expansion(torch.rand(8, 32).to("mps") + 1, format)


def trained(format, **flags):
    model = nn.Linear(32, 8, device="mps")
    model = mcf.as_expansion(model, format)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, **flags)
    for _ in range(2):
        model(torch.rand(4, 32).to("mps", format.dtype)).sum().backward()
        optimizer.step()


def adamw(format, **flags):
    p = nn.Parameter(entered(format))
    optimizer = torch.optim.AdamW([p], **flags)
    for _ in range(2):
        p.grad = torch.ones_like(p.detach().lent)
        optimizer.step()


FEATURES = {
    "`as_expansion` of a float32 tensor": entered,
    "copies between devices": lambda f: entered(f).cpu().to("mps"),
    "`as_plain(x, torch.float32)`": lambda f: mcf.as_plain(entered(f), torch.float32),
    "`x + y`, `x - y`": lambda f: entered(f) + entered(f) - entered(f),
    "`x * y`": lambda f: entered(f) * entered(f),
    "`x / y`": lambda f: entered(f) / entered(f),
    "`x.sqrt()`": lambda f: entered(f).sqrt(),
    "`x.mul_(0.999)`": lambda f: entered(f).mul_(0.999),
    "`x[0] = 1.2`": lambda f: entered(f).__setitem__(0, 1.2),
    "`x.exp()`": lambda f: entered(f).exp(),
    "conversion of a model, and its gradients": lambda f: trained(f, lr=0.0),
    "SGD with momentum": lambda f: trained(f, lr=0.1),
    "SGD with momentum, fused": lambda f: trained(f, lr=0.1, fused=True),
    "AdamW": adamw,
    "AdamW, foreach": lambda f: adamw(f, foreach=True),
    "AdamW, fused": lambda f: adamw(f, fused=True),
}


def runs(feature, format) -> bool:
    try:
        with pretended("mps", has_float64=False):
            FEATURES[feature](format)
    except Misplaced:
        return False
    return True


def table() -> str:
    lines = ["| | " + " | ".join(f"`{name}`" for name in FORMATS) + " |"]
    lines.append("|---|" + "---|" * len(FORMATS))
    for feature in FEATURES:
        cells = ["yes" if runs(feature, format) else "no" for format in FORMATS.values()]
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_table_of_the_page():
    assert table() in PAGE.read_text()


def test_scaled_formats_need_float64():
    with pretended("mps", has_float64=False), pytest.raises(Misplaced):
        mcf.as_expansion(torch.rand(8, 32).to("mps"), mcf.scaling.scaled(torch.float16))
