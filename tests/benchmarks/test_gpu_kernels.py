"""Kernels compiled for GPUs that are not there, and what is seen in their machine code."""

import json
from pathlib import Path

import pytest
import torch

import gpu_kernels
from machine_code import gpus, inspection
from machine_code.catalogue import catalogue
from mcftensor.kernels.program import Signature, record

RESULTS = Path(__file__).parents[2] / "benchmarks/results/gpu-kernels.json"


@pytest.fixture(scope="module")
def known():
    return catalogue()


@pytest.fixture(scope="module")
def committed():
    return json.loads(RESULTS.read_text())["targets"]


def test_what_is_committed_is_of_the_kernels_that_there_are(known, committed):
    assert set(committed) == set(inspection.TARGETS)
    for kernels in committed.values():
        assert kernels
        for name, found in kernels.items():
            assert found["instructions"] == len(known[name].instructions), name
    for name in ("AdamW, bf16x2, plus", "AdamW, bf16i8, compact", "AdamW, bf16i16", "mul, bf16x2"):
        assert all(any(x.startswith(name) for x in kernels) for kernels in committed.values())


def test_what_is_committed_has_no_faults(committed):
    assert [line for t, x in committed.items() for line in gpu_kernels.faults_of(t, x)] == FAULTS


FAULTS: list[str] = []
"""Of kernels for targets that have some; they are launched all the same."""


@pytest.mark.slow
@pytest.mark.parametrize("target", inspection.TARGETS)
def test_kernels_are_compiled_to_what_is_committed(target, committed):
    pytest.importorskip("triton")
    for name in ("AdamW, bf16x2, plus", "AdamW, bf16i16", "mul, bf16x2"):
        assert gpu_kernels.figures_of(target, name) == committed[target][name]


def body(vectors, scalars, index):
    return [vectors[0] * vectors[1] + vectors[2]]


@pytest.fixture
def product(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return record(body, Signature((torch.float32,) * 3, (), (torch.float32,)))


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_contracted_product_is_found(target, product, tmp_path, monkeypatch):
    assert inspection.inspect(product, target, tmp_path).faults == []
    import triton  # noqa: PLC0415

    compile_ = triton.compile

    def fast(*args, options, **rest):
        return compile_(*args, options=options | {"enable_fp_fusion": True}, **rest)

    monkeypatch.setattr(triton, "compile", fast)
    (fault,) = inspection.inspect(product, target, tmp_path).faults
    assert "fused products, 0 asked for" in fault


def test_flushing_and_narrow_accesses_are_found(product):
    code = gpus.Code({}, 32, 0, 4, "LDG.E.128 R1\nSTG.E R2", "add.ftz.f32")
    assert inspection._flushes(code, "sm_90", product)
    assert inspection._store(code, "sm_90") == 4
    wide = gpus.Code({}, 32, 0, 4, "LDG.E.64 R1\nSTG.E.128 R2", "add.rn.f32")
    assert not inspection._flushes(wide, "sm_90", product)
    assert inspection._store(wide, "sm_90") == 16
    amd = gpus.Code(
        {},
        32,
        0,
        4,
        "",
        "global_load_dwordx4 v\nglobal_store_dwordx2 v\n.amdhsa_float_denorm_mode_32 0\n",
    )
    assert inspection._flushes(amd, "gfx942", product)
    assert inspection._store(amd, "gfx942") == 8


@pytest.mark.parametrize(
    ("target", "registers", "warps", "share"),
    [
        ("sm_90", 32, 4, 1.0), ("sm_90", 80, 4, 6 * 4 / 64), ("sm_90", 255, 16, 0.0),
        ("sm_89", 40, 4, 1.0), ("gfx942", 64, 4, 1.0), ("gfx942", 128, 4, 0.5),
    ],
)  # fmt: skip
def test_occupancy(target, registers, warps, share):
    assert inspection.occupancy(inspection.TARGETS[target], registers, warps) == share
