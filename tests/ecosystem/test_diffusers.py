"""A U-Net of diffusers learns over expansions."""

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed")

import diffusion


@pytest.mark.slow
def test_the_example(capsys):
    assert diffusion.main(["--steps", "3"]) == 0
    moved = {
        line[:20].strip(): float(line.split()[-1].rstrip("%"))
        for line in capsys.readouterr().out.splitlines()[2:]
    }
    assert moved.keys() == {"float32", "bf16", "plus", "compact, released"}
    assert moved.pop("bf16") < 20
    assert min(moved.values()) > 80
