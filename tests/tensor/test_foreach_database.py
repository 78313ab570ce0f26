"""PyTorch's databases of functions of lists, over expansions and stored numbers."""

import contextlib
import itertools
import random

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import mcftensor as mcf
from support.helpers import bits
from support.rotation import rotated
from support.scales import is_scaled

invocations = pytest.importorskip("torch.testing._internal.common_methods_invocations")

INFOS = {
    info.name: info
    for kind in ("unary", "binary", "pointwise", "reduce", "other")
    for info in getattr(invocations, f"foreach_{kind}_op_db")
}
FORMATS = [mcf.bf16x2, mcf.fp32x2, mcf.bf16i16, mcf.e4m3i8, mcf.scaling.scaled(torch.float16)]
KINDS = {
    "all": lambda column, i: True,
    "first column": lambda column, i: column == 0,
    "other columns": lambda column, i: column > 0,
    "every other row": lambda column, i: i % 2 == 0,
}
"""Which tensors are expansions; all others are plain tensors of float32."""

SCALED = FORMATS[-1]
KNOWN = {
    "_foreach_clone": (
        "the results are plain",
        {(format, "all") for format in (mcf.bf16i16, mcf.e4m3i8)},
    ),
    "_foreach_norm": (
        "`dtype` reaches aten.norm without its name",
        {(format, "all") for format in FORMATS if format is not mcf.bf16i16},
    ),
    **dict.fromkeys(
        ("_foreach_minimum", "_foreach_maximum"),
        ("plain targets are rounded to float16", {(SCALED, "other columns")}),
    ),
}
"""Functions that fail, why, and over which formats and kinds."""

UNITS = 64
"""Errors are at most so many times u^n, relative to the largest of a tensor."""


def samples(info):
    """Yield lists of tensors with their arguments in rows, and keywords."""
    random.seed(0)
    torch.manual_seed(0)
    given = info.sample_inputs_func(
        info, "cpu", torch.float32, requires_grad=False, num_input_tensors=[4]
    )
    empty = info.sample_zero_size_inputs("cpu", torch.float32)
    for sample in itertools.chain(given, empty):
        yield [sample.input, *sample.args], sample.kwargs


def lists(columns, format, kind):
    """Return columns of operands, with some of their tensors in a format."""

    def enter(x, k, i):
        if not isinstance(x, torch.Tensor):
            return x
        is_stored = KINDS[kind](k, i) and (x.dim() == 2 or format is not mcf.e4m3i8)
        return mcf.as_expansion(x, format) if is_stored else x.clone()

    return [
        [enter(x, k, i) for i, x in enumerate(column)]
        if isinstance(column, list)
        else enter(column, k, 0)
        for k, column in enumerate(columns)
    ]


def attempt(call):
    try:
        with mcf.when_rounded("ignore"):
            return call()
    except Exception as error:  # noqa: BLE001
        return error


def one_by_one(function, columns, kwargs):
    """Return the results of a function of tensors, row by row."""
    found = []
    for i in range(len(columns[0])):
        own = dict(kwargs)
        if "scalars" in own:
            own["value"] = own.pop("scalars")[i]
        operands = [column[i] if isinstance(column, list) else column for column in columns]
        found.append(function(*operands, **own))
    return found


def all_bits(columns):
    return [bits(x) for x in tree_leaves(columns) if isinstance(x, torch.Tensor)]


@pytest.mark.thinned(of=8)
@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("name", rotated(INFOS))
def test_lists(name, format, kind):
    is_known = name in KNOWN and (format, kind) in KNOWN[name][1]
    errors = (AssertionError, RuntimeError)
    with pytest.raises(errors) if is_known else contextlib.nullcontext():
        check_samples(name, format, kind)


def check_samples(name, format, kind):
    info = INFOS[name]
    functions = [(info.inplace_variant, info.ref_inplace, True)]
    if info.supports_out:
        functions.append((info.method_variant, info.ref, False))
    for columns, kwargs in samples(info):
        if kind != "all" and not any(isinstance(x, list) for x in columns[1:]):
            continue
        for function, single, in_place in functions:
            if function is not None and single is not None:
                check(function, single, lists(columns, format, kind), kwargs, in_place)


def check(function, single, columns, kwargs, in_place):
    """Compare a function of lists with one of each row, in bits, and with float64."""
    wide, own = (
        tree_map_only(torch.Tensor, convert, columns)
        for convert in (lambda x: mcf.as_plain(x, torch.float64), torch.clone)
    )
    exact = attempt(lambda: one_by_one(single, wide, kwargs))
    if isinstance(exact, Exception):  # nor has PyTorch this function
        return
    before = all_bits(columns)
    expected = attempt(lambda: one_by_one(single, own, kwargs))
    found = attempt(lambda: function(*columns, **kwargs))
    if isinstance(found, NotImplementedError) and isinstance(expected, NotImplementedError):
        assert function.__name__.strip("_").removeprefix("foreach_") in str(found)
        return
    for results in (found, expected):
        if isinstance(results, Exception):
            raise results
    found = columns[0] if in_place else found
    written = len(columns[0]) if in_place else 0
    assert all_bits(columns)[written:] == before[written:]
    for x, y, z in zip(found, expected, exact, strict=True):
        assert bits(x) == bits(y) or (is_scaled(x) and same_numbers(x, y))
        assert_near(x, z)


def same_numbers(x, y):
    """Whether numbers are equal, at whatever scale."""
    return torch.equal(*(mcf.as_plain(z, torch.float64).nan_to_num(7) for z in (x, y)))


def assert_near(x, exact):
    """Errors are at most `UNITS` times the precision, relative to the largest number."""
    precision = x.format.precision if isinstance(x, mcf.MCFTensor) else 24
    x, exact = mcf.as_plain(x, torch.float64), exact.double()
    finite = torch.isfinite(exact)
    torch.testing.assert_close(x[~finite], exact[~finite], rtol=0, atol=0, equal_nan=True)
    if finite.any():
        error, size = (x - exact)[finite].abs().max(), exact[finite].abs().max()
        assert error <= UNITS * 2.0**-precision * size
