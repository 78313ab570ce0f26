"""Shared by all tests: devices, formats, one thread, and caches of compiled code."""

import contextlib
import gc
import os
import random
import sys
from collections.abc import Generator
from pathlib import Path

from support import caches

gc.disable()  # until tests run: imports and collection make millions of objects that live

# Before torch reads it. Kernels stay between runs: their keys have the source, the compiler and the
# processor. Graphs that torch compiles call the library's operators by name, so their keys have the
# source of the library.
os.environ["MCFTENSOR_CACHE_DIR"] = str(caches.folder() / "kernels")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches.of_torch())
os.environ["TORCH_COMPILE_CACHE_KEY_TAG"] = caches.source()

# What tests start as programs of their own finds what they find.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))

import numpy as np
import pytest
import torch
from _pytest.doctest import DoctestModule
from hypothesis import settings

import mcftensor as mcf
from mcftensor.tensor import implicit_rounding
from support.cases import (  # noqa: F401 (pytest finds them here)
    pytest_generate_tests,
    pytest_pycollect_makeitem,
    pytest_runtest_protocol,
)
from support.helpers import a_step, requires_cuda
from support.leftovers import remember, restore
from support.no_float64 import NEEDS_FLOAT64, no_float64
from support.ranks import RankPool


def pytest_addoption(parser) -> None:
    parser.addoption("--without-float64", action="store_true", help="the library makes no float64")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for examples in docstrings of the library alone: tests have none."""
    return [x for x in (yield) if not isinstance(x, DoctestModule)]


def pytest_collection_finish() -> None:
    """Millions of objects live until the end: collections in tests need not visit them."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # modules of compiled code look for leaks at exit


settings.register_profile("mcftensor", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("mcftensor")
torch.set_num_threads(1)
for backend in (torch.cuda, torch.xpu, torch.mtia):
    if not backend.is_available():
        backend.manual_seed_all = lambda seed: None  # it would keep the stack of each call


@pytest.fixture(autouse=True)
def without_float64(request, leaves_nothing_behind):
    """With `--without-float64`, no code of the library may make a float64 tensor, except where the
    case needs it by its parameters or its mark, or where nobody can watch."""
    parameters = request.node.name.partition("[")[2]
    asks = any(part in parameters for part in NEEDS_FLOAT64)
    asks = asks or request.node.get_closest_marker("with_float64")
    mode = contextlib.nullcontext()
    if request.config.getoption("--without-float64") and not asks:
        is_unwatched = request.node.get_closest_marker("unwatched")
        mode = mcf.without_float64() if is_unwatched else no_float64(of_all=False)
    with mode:
        yield


@pytest.fixture(params=["cpu", requires_cuda])
def device(request) -> str:
    return request.param


@pytest.fixture(params=mcf.formats.FORMATS, ids=lambda f: f.name)
def format(request) -> mcf.Format:
    return request.param


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    """Fail the test that changes what is kept for the thread or the process."""
    implicit_rounding._lines.clear()  # of code that was seen copying
    before = remember()
    yield
    changed = restore(before)
    if changed:
        pytest.fail("the test leaves behind: " + "; ".join(changed))


@pytest.fixture(autouse=True)
def seed(leaves_nothing_behind) -> None:
    """Start all generators anew, which therefore nobody has to bring back."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (what other libraries draw from)


@pytest.fixture
def one_by_one(monkeypatch) -> None:
    """Have EDQ measure the small parameters of tests one by one, as large ones are."""
    monkeypatch.setattr("mcftensor.meters.edq.meter._SMALL", 1)


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def within_a_step():
    """Operations may go on a tape, as they may within a step of an optimizer."""
    with torch.no_grad(), a_step():
        yield


@pytest.fixture
def at_once(monkeypatch):
    """A function that computes a function's results without a tape."""

    def call(function, *args):
        with monkeypatch.context() as patch:
            patch.setattr("mcftensor.dispatch.defer.open_tape", lambda: None)
            return function(*args)

    return call


@pytest.fixture
def poem(tmp_path) -> Path:
    """A text to train on, of a size for seconds."""
    path = tmp_path / "poem.txt"
    path.write_text("".join(f"{n} green bottles hanging on the wall\n" for n in range(200)))
    return path


@pytest.fixture(scope="session")
def ranks():
    """The processes of tests that run on several."""
    pool = RankPool()
    yield pool
    pool.stop()
