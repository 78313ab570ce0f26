"""Kernels compiled for GPUs that are not there, and what is seen in their machine code."""

import json
from pathlib import Path

import pytest
import torch

import gpu_kernels
from machine_code import gpus, inspection
from machine_code.catalogue import catalogue, group_of
from mcftensor.kernels import triton
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
        assert {*map(group_of, kernels)} == {*map(group_of, known)}
    for name in ("AdamW, bf16x2, plus", "AdamW, bf16i8, compact", "AdamW, bf16i16", "mul, bf16x2"):
        assert all(any(x.startswith(name) for x in kernels) for kernels in committed.values())


def test_what_is_committed_has_no_faults(committed):
    assert [line for t, x in committed.items() for line in gpu_kernels.faults_of(t, x)] == FAULTS


FAULTS: list[str] = []
"""Of kernels for targets that have some; they are launched all the same."""


@pytest.mark.slow
@pytest.mark.parametrize("target", inspection.TARGETS)
def test_kernels_are_compiled_to_what_is_committed(target, committed, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # which the program sets
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
    compiler = pytest.importorskip("triton")
    compile_ = compiler.compile

    def fast(*args, options, **rest):
        return compile_(*args, options=options | {"enable_fp_fusion": True}, **rest)

    monkeypatch.setattr(compiler, "compile", fast)
    (fault,) = inspection.inspect(product, target, tmp_path).faults
    assert "fused products, 0 asked for" in fault


def test_flushing_is_found(product):
    code = gpus.Code({}, 32, 0, 4, "LDG.E.128 R1\nSTG.E R2", "add.ftz.f32")
    assert inspection._flushes(code, "sm_90", product)
    code = gpus.Code({}, 32, 0, 4, "LDG.E.64 R1\nSTG.E.128 R2", "add.rn.f32")
    assert not inspection._flushes(code, "sm_90", product)
    code = gpus.Code({}, 32, 0, 4, "", ".amdhsa_float_denorm_mode_32 0\n")
    assert inspection._flushes(code, "gfx942", product)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_narrow_accesses_are_found(target, product, tmp_path, monkeypatch):
    """Vectors that are not at multiples of 16 bytes are read and written number by number."""
    wide = inspection.inspect(product, target, tmp_path)
    assert (wide.loads, wide.stores, wide.narrow) == ([16], [16], 0)
    source = triton.source
    monkeypatch.setattr(
        triton,
        "source",
        lambda *args, **options: source(*args, **options).replace("if ALIGNED", "if False"),
    )
    narrow = inspection.inspect(product, target, tmp_path)
    assert (narrow.loads, narrow.stores, narrow.narrow) == ([], [], 8)  # three loads, one store
    assert narrow.faults == ["8 narrow loads and stores"]


def test_tables_are_no_elements():
    """They are read, and nothing is written to them."""
    text = """global_load_dwordx4 v[0:3], v7, s[24:25] offset:16
        global_load_dwordx2 v[4:5], v7, s[24:25] offset:104
        global_store_dwordx4 v0, v[2:5], s[0:1]
        """
    amd = gpus.Code({}, 32, 0, 4, "", text)
    nvidia = gpus.Code({}, 32, 0, 4, "", "ld.global.b64 { %rd4 }\nst.global.v2.b64 [ %rd5 ]\n")
    for code, target in ((amd, "gfx942"), (nvidia, "sm_90")):
        assert not inspection._accesses(code, target, "load")
        assert inspection._accesses(code, target, "store") == {16: 1}


def test_what_is_not_read_is_not_loaded(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    dtypes = (torch.float32,) * 2
    program = record(lambda v, s, i: [v[1] * 2], Signature(dtypes, (), dtypes[:1]))
    assert inspection.inspect(program, "sm_90", tmp_path).narrow == 0


def test_elements_at_a_scalar_address_count():
    """A thread's second 16 bytes follow those of all threads of its block."""
    text = """global_load_dwordx4 v[6:9], v5, s[6:7]
        global_load_dwordx4 v[0:3], v6, s[0:1] offset:2048
        global_load_ushort v26, v[0:1], off offset:14
        global_load_dwordx4 v[0:3], v5, s[4:5] offset:16
        """
    amd = gpus.Code({}, 32, 0, 4, "", text)
    assert inspection._accesses(amd, "gfx942", "load") == {16: 2, 2: 1}


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_widths_of_smaller_numbers(target, tmp_path, monkeypatch):
    """Eight elements a thread are 16 bytes of two-byte numbers, and 8 of one-byte ones."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    dtypes = torch.bfloat16, torch.int8

    def body(vectors, scalars, index):
        return [vectors[0] + vectors[1].to(torch.bfloat16)]

    found = inspection.inspect(record(body, Signature(dtypes, (), dtypes[:1])), target, tmp_path)
    assert (found.loads, found.stores, found.narrow) == ([8, 16], [16], 0)


@pytest.mark.parametrize(
    ("target", "registers", "warps", "share"),
    [
        ("sm_90", 32, 4, 1.0), ("sm_90", 80, 4, 6 * 4 / 64), ("sm_90", 255, 16, 0.0),
        ("sm_89", 40, 4, 1.0), ("gfx942", 64, 4, 1.0), ("gfx942", 128, 4, 0.5),
    ],
)  # fmt: skip
def test_occupancy(target, registers, warps, share):
    assert inspection.occupancy(inspection.TARGETS[target], registers, warps) == share
