"""The self-check passes here, and finds what is broken."""

import pytest
import torch

import mcftensor as mcf
from mcftensor.__main__ import main
from mcftensor.arithmetic import eft
from mcftensor.kernels.without_float64 import has_float64
from mcftensor.passes import expansion
from mcftensor.tools import device_report, known_results


def count() -> int:
    """Checks of a way of execution: those of float64 are left out without it."""
    return 48 if has_float64() else 38


def test_passes(device):
    checks = mcf.selfcheck(device, compiled=False)
    assert checks == count()
    assert checks.digest == known_results.leaf_digest(torch.device(device))
    assert checks.threads == torch.get_num_threads()


def test_the_digest_is_the_one_that_the_command_prints(monkeypatch, capsys):
    digest = mcf.selfcheck(compiled=False).digest
    monkeypatch.setattr(device_report, "known_work", lambda **_: {})
    monkeypatch.setattr(device_report, "_CHECKS", {})
    assert main(["selfcheck", "--eager"]) == 0
    assert f": {digest}, by " in capsys.readouterr().out


def test_a_device_that_lacks_an_operation_has_no_digest(monkeypatch):
    def lacks(*args, **options):
        raise NotImplementedError("no gelu here")

    monkeypatch.setattr(torch.nn.functional, "gelu", lacks)
    checks = mcf.selfcheck(compiled=False)
    assert checks == count()
    assert checks.digest is None


@pytest.mark.slow
def test_passes_compiled(device):
    assert mcf.selfcheck(device) == 2 * count()


def naive_sum(a, b):
    return a + b, torch.zeros_like(a)


def naive_product(a, b):
    return a * b, torch.zeros_like(a)


def leading_terms(x, y, format=None):
    return x[0] * y[0], *(torch.zeros_like(t) for t in x[1:])


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize(
    ("module", "name", "broken", "named"),
    [
        (eft, "two_sum", naive_sum, "two_sum in bfloat16"),
        (eft, "two_prod", naive_product, "two_prod in float32"),
        (eft, "sqrt", lambda a: torch.sqrt(a) * (1 + 2**-6), "sqrt in bfloat16"),
        (expansion, "mul", leading_terms, "mul in bf16x2"),
    ],
)
def test_finds_what_is_broken(module, name, broken, named, monkeypatch, capsys):
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(mcf.errors.SelfCheckError, match=named) as caught:
        mcf.selfcheck(compiled=False)
    assert named in caught.value.failures
    monkeypatch.setattr(device_report, "known_work", lambda **_: {})
    assert main(["selfcheck", "--eager"]) == 1
    (line, *_) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("FAIL")]
    assert named in line


def test_finds_what_a_compiler_changes(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: broken_by(function))

    def broken_by(function):
        return lambda inputs: [
            (result[0], *map(torch.zeros_like, result[1:])) for result in function(inputs)
        ]

    with pytest.raises(mcf.errors.SelfCheckError, match="two_sum in bfloat16, compiled"):
        mcf.selfcheck()


def test_command(capsys):
    assert main(["selfcheck", "--eager", "--device", "nowhere"]) == 2
    found = capsys.readouterr()
    assert len(found.err.splitlines()) == 1
    assert not found.out
