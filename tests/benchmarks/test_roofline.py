"""What is counted of machine code, and what AMD's compiler makes of kernels."""

import re

import pytest
import torch

from machine_code import cpus, gpus, processors
from machine_code.kernels import WORK, Kernel, kernels
from mcftensor.kernels import cpu

needs_compiler = pytest.mark.skipif(cpu.find() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def known():
    return {kernel.name: kernel for kernel in kernels()}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def test_bytes_of_kernels(known):
    plus, compact = known["AdamW plus"], known["AdamW compact"]
    assert (plus.read, plus.written) == (12, 10)
    assert (compact.read, compact.written) == (7 + 2 / 32, 5 + 2 / 32)
    assert plus.is_in_place
    assert not known["float32 to bf16x2"].is_in_place
    assert known["AdamW plus, for-loop"].prepare is not None


def test_work_of_several_programs_is_not_timed(monkeypatch):
    one, other = (WORK[name] for name in ("product of bf16x2", "bf16x2 to float32"))

    def two(rows):
        parts = [prepare(rows) for prepare in (one, other)]
        return lambda: [part() for part in parts]

    monkeypatch.setattr("machine_code.kernels.WORK", {"one": one, "two": two})
    assert [kernel.prepare for kernel in kernels()] == [one, None]


# ------------------------------------------------------------------------------------------ x86


@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        ("vaddps\t%zmm1, %zmm2, %zmm3", ["float"]),
        ("vaddps\t64(%rax), %zmm2, %zmm3", ["float", "load"]),
        ("vdivps\t%zmm1, %zmm2, %zmm3", ["divide"]),
        ("vsqrtps\t%ymm1, %ymm2", ["root"]),
        ("vpmovzxwd\t(%rax,%rcx,2), %zmm1", ["shuffle", "load"]),
        ("vmovdqu16\t%zmm1, (%rax,%rcx,2)", ["store"]),
        ("vmovups\t8(%rsp), %zmm1", ["load"]),
        ("vmovdqa64\t%zmm1, %zmm2", ["move"]),
        ("vmovaps\t%zmm1, %zmm2{%k1}{z}", ["move"]),
        ("vpandd\t%zmm1, %zmm2, %zmm3", ["integer"]),
        ("vpternlogd\t$216, %zmm1, %zmm2, %zmm3", ["integer"]),
        ("vpsrld\t$16, %zmm1, %zmm2", ["shift"]),
        ("vcmpps\t$1, %zmm1, %zmm2, %k1", ["compare"]),
        ("vfpclassps\t$153, %zmm1, %k1", ["compare"]),
        ("vcvtps2pd\t%ymm1, %zmm2", ["convert"]),
        ("kandw\t%k1, %k2, %k3", ["mask"]),
        ("addq\t$64, %rax", []),
    ],
)
def test_kinds_of_instructions(line, kinds):
    assert cpus._kinds(line) == kinds


def test_the_loop_that_is_counted():
    text = """
.L1:
	vaddps	%zmm1, %zmm2, %zmm3
.L2:
	vmulps	%zmm1, %zmm2, %zmm3
	.p2align 4
	vmulps	%zmm1, %zmm2, %zmm3
	jne	.L2
.L3:
	vsubps	%zmm1, %zmm2, %zmm3
	jle	.L3
	jmp	.L1
""".splitlines()
    names = [line.split("\t")[0] for line in cpus._largest_loop(text, cpus.X86)]
    assert names == ["vmulps", "vmulps", "jne"]


@needs_compiler
@pytest.mark.parametrize("name", cpus.SETS)
def test_a_loop_has_the_operations_of_its_program(name, known, tmp_path):
    """Divisions, roots and rounded sums, as many as in the program: neither fewer nor doubled."""
    program = known["AdamW plus"].program
    loop = cpus.loop_of(program, cpus.SETS[name], tmp_path)
    lanes = cpus.SETS[name].width // 4
    recorded = [x.name for x in program.instructions]
    for kind, operation in (("divide", "div"), ("root", "sqrt")):
        assert loop.counts[kind] * lanes == recorded.count(operation)
    assert loop.elements % lanes == 0
    assert loop.counts["float"] * lanes <= sum(x in ("add", "sub", "mul") for x in recorded)
    assert 0 < loop.instructions < 40
    # two blocks share a load and a store
    read, written = len(program.signature.vectors), len(program.signature.outputs)
    assert loop.counts["load"] * lanes * 2 >= read
    assert loop.counts["store"] * lanes * 2 >= written


# ------------------------------------------------------------------------------------------ GPUs


def test_blocks_with_detours_are_left_out():
    text = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/                   CALL.REL.NOINC `(slow) ;
.L_x_1:
        /*0030*/                   FADD R1, R2, R3 ;
        /*0040*/               @P1 EXIT ;
        /*0050*/                   EXIT ;
        /*0060*/                   FMUL R1, R2, R3 ;
"""
    blocks = gpus._blocks(text)
    assert blocks == [["MOV", "BRA"], ["CALL.REL.NOINC"], ["FADD", "EXIT", "EXIT"]]


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("name", ["SGD plus", "AdamW plus", "AdamW exact", "AdamW compact"])
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_code_for_gpus(name, target, known, tmp_path):
    """No flushed subnormals, no contracted products, no spills, and wide accesses."""
    pytest.importorskip("triton")
    program = known[name].program
    code = gpus.code_of(program, target, tmp_path)
    assert code.spills == 0
    assert 10 < code.instructions < 400
    names = {x.name for x in program.instructions}
    divides = bool(names & {"div", "sqrt"})  # which are sequences of fma
    if target == "sm_90":
        assert ".ftz" not in code.text
        assert ".approx" not in code.text
        assert "fma.rn" not in code.text
        rounds = re.search(r"cvt\.rn\.bf16(x2)?\.f32", code.text)
        assert bool(rounds) == ("plus" in name)  # the others store integers
        assert "LDG.E.128" in code.assembly or "LDG.E.64" in code.assembly
    else:
        assert ".amdhsa_float_denorm_mode_32 3" in code.text
        assert ".amdhsa_float_denorm_mode_16_64 3" in code.text
        fused = re.findall(r"v_(?:pk_)?(?:fma|fmac|mad|mac)_f32", code.assembly)
        assert bool(fused) == divides
        assert re.search(r"global_load_dwordx[24]", code.assembly)
    assert (code.counts.get("special", 0) > 0) == divides


# ------------------------------------------------------------------------------------ predictions


def test_predictions_are_of_instructions_and_bytes(known):
    counts = {"integer": 32.0, "float": 8.0, "special": 1.0}
    code = gpus.Code(counts, registers=64, spills=0, warps=4, assembly="", text="")
    rates = {"all": 128, "integer": 64, "float": 128, "special": 16}
    gpu = processors.Processor("GPU", 100, 2.0, 1000, "sm_90", rates=rates)
    found = processors.predict(known["AdamW plus"], gpu, code)
    assert found.computing == pytest.approx(1000 * (32 / 64) / 200)
    assert found.memory == pytest.approx(22)
    assert found.bound == "memory"
    assert found.occupancy == 0.5
    slow = processors.Processor("GPU", 100, 2.0, 1e5, "sm_90", rates=rates | {"special": 1})
    found = processors.predict(known["AdamW plus"], slow, code)
    assert found.computing == pytest.approx(1000 / 200)
    assert found.bound == "computing"


def test_every_kernel_is_named_once(known):
    assert len(known) >= 8
    assert all(isinstance(kernel, Kernel) for kernel in known.values())
    assert len({p.name for p in processors.PROCESSORS}) == len(processors.PROCESSORS) >= 7
    assert torch.bfloat16 in known["AdamW plus"].program.signature.vectors
