"""What the library shows: few names, each in one place; old places go on for one release."""

import importlib
import inspect
import subprocess
import sys

import pytest

import mcftensor as mcf
from mcftensor.training import shadow

FUNCTIONS = (
    "EDQ Format MCFTensor PrecisionSchedule accumulate_gradients apply_deltas as_expansion "
    "as_plain change_format collage deltas fast_products finfo fma load_file order_free_gradients "
    "prepare save_file selfcheck step_in_backward when_rounded without_float64"
)
FORMATS = (
    "bf16i16 bf16i8 bf16x2 bf16x3 e4m3i16 e4m3i8 fp16i16 fp16i8 fp16x2 fp32x2 fp32x3 fp64x2 "
    "mxfp8 ue5m3 q4 ue4"
)
MODULES = "checkpoint eft errors exact expansion formats functional host meters networks scaling"


def test_these_names_are_public():
    assert sorted(mcf.__all__) == sorted(f"{FUNCTIONS} {FORMATS} {MODULES}".split())
    assert dir(mcf) == sorted(mcf.__all__)
    assert all(inspect.ismodule(getattr(mcf, name)) for name in MODULES.split())


@pytest.mark.parametrize("name", sorted(mcf._MOVED))
def test_an_old_place_says_the_new_one(name):
    place = mcf._MOVED[name]
    with pytest.warns(
        DeprecationWarning, match=rf"mcf\.{name} is now mcf\.{place}\.{name}"
    ) as found:
        old = getattr(mcf, name)
    assert [x.filename for x in found] == [__file__]
    assert old is getattr(importlib.import_module(f"mcftensor.{place}"), name)
    assert name not in dir(mcf)


def test_an_import_of_an_old_place_warns_where_it_stands():
    program = "from mcftensor import as_terms, RoundedWarning"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr.count("<string>:1: DeprecationWarning: mcf.as_terms is now") == 1


def test_a_name_that_never_was():
    with pytest.raises(AttributeError, match="module 'mcftensor' has no attribute 'as_words'"):
        mcf.as_words  # noqa: B018
    assert not hasattr(mcf, "__wrapped__")


def test_all_errors_and_warnings_are_in_one_place():
    """Those that modules of the library define, wherever that is."""
    found = {
        x
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("mcftensor.")
        for name, x in vars(module).items()
        if inspect.isclass(x)
        and issubclass(x, Exception)
        and x.__module__ == module.__name__
        and name[0] != "_"
    }
    found.remove(shadow.CannotShadow)  # which the meter catches
    assert found == {getattr(mcf.errors, name) for name in mcf.errors.__all__}
