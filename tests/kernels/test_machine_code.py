"""The inner loops of fused steps compute with whole vectors, most of them in registers."""

import functools

import pytest

from machine_code import cpus
from machine_code.catalogue import catalogue, fused_steps

SETS = {**cpus.SETS, "NEON": cpus.NEON}

# The most loads and stores of vectors on the stack, as a share of the instructions of a loop. AVX2
# has 16 registers, the others 32; eight vectors are computed together.
SPILLED = {"AVX-512": 0.25, "AVX2": 0.4, "NEON": 0.25}

COMMON = ("AdamW, bf16x2, plus", "AdamW, bf16i16", "AdamW, bf16i8, compact", "SGD, bf16x2, light")
STEPS = dict(fused_steps())


@functools.cache
def programs_of(step):
    return catalogue([(step, STEPS[step])])


@pytest.mark.parametrize(
    "step", [pytest.param(x, marks=() if x in COMMON else pytest.mark.slow) for x in STEPS]
)
@pytest.mark.parametrize("name", SETS)
def test_loops_of_fused_steps(name, step, tmp_path):
    try:
        cpus.compiler(SETS[name])
    except FileNotFoundError as error:
        pytest.skip(str(error))
    for program in programs_of(step).values():
        loop = cpus.loop_of(program, SETS[name], tmp_path)
        scalar = {line.split()[0] for line in loop.scalar}
        if "bf16x2br" in step:  # AVX2 has no instruction from 64-bit integers to float64
            scalar.discard("vcvtsi2sdq")
        assert scalar == set()
        assert loop.spills * loop.elements <= SPILLED[name] * len(loop.lines)
