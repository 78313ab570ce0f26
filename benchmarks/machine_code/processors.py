"""Processors as their makers describe them, and the time that a kernel would take on each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from machine_code.cpus import Loop, cycles
from machine_code.gpus import Code
from machine_code.kernels import Kernel


@dataclass(frozen=True)
class Processor:
    """A processor that people train on.

    Attributes:
        name: its maker's name for it.
        units: cores, multiprocessors or compute units.
        clock: GHz that all units keep up under load.
        bandwidth: the bandwidth of its memory, in GB/s.
        code: the set of instructions of x86, or the target of Triton.
        model: LLVM's name of a CPU.
        rates: instructions of one thread that a GPU's unit finishes in a clock, by kind. Other
            kinds take the rate of `"all"`, which also limits the sum of all kinds.
        registers: the registers of a GPU's unit, in 32 bits.
        threads: the most threads of a GPU's unit.
    """

    name: str
    units: int
    clock: float
    bandwidth: float
    code: str
    model: str = ""
    rates: Mapping[str, float] | None = None
    registers: int = 65536
    threads: int = 2048


# Throughput of arithmetic instructions, by compute capability: CUDA C++ programming guide, section
# "Arithmetic instructions". Four schedulers issue an instruction of 32 threads each.
_SM_80 = {
    "all": 128, "float": 64, "integer": 64, "multiply": 64, "special": 16, "convert": 16,
    "double": 32,
}  # fmt: skip
_SM_90 = _SM_80 | {"float": 128, "convert": 64, "double": 64}
_SM_89 = _SM_80 | {"float": 128, "convert": 64, "double": 2}
# Four units of 16 lanes, each with an instruction of 64 threads in four clocks; a quarter of that
# for roots and reciprocals: CDNA 3 instruction set architecture, and the white paper.
_CDNA_3 = {"all": 64, "special": 16}

PROCESSORS = (
    Processor("EPYC 9654 (Zen 4)", 96, 3.55, 460.8, "AVX-512", "znver4"),
    Processor("EPYC 7763 (Zen 3)", 64, 3.2, 204.8, "AVX2", "znver3"),
    Processor("Xeon Platinum 8380 (Ice Lake)", 40, 2.6, 204.8, "AVX-512", "icelake-server"),
    Processor("Xeon Platinum 8480+ (Sapphire Rapids)", 56, 2.6, 307.2, "AVX-512", "sapphirerapids"),
    Processor("A100 80 GB", 108, 1.41, 2039, "sm_80", rates=_SM_80),
    Processor("H200", 132, 1.83, 4800, "sm_90", rates=_SM_90),
    Processor("B200", 148, 1.85, 8000, "sm_100", rates=_SM_90),
    Processor("RTX 4090", 128, 2.52, 1008, "sm_89", rates=_SM_89, threads=1536),
    Processor("MI300X", 304, 2.1, 5300, "gfx942", rates=_CDNA_3, registers=4 * 512 * 64),
)


def processor_at_hand(bandwidth: float) -> Processor:
    """The GPU that PyTorch uses, with the bandwidth in GB/s that was measured on it."""
    found = torch.cuda.get_device_properties(0)
    units, clock = found.multi_processor_count, getattr(found, "clock_rate", 0) / 1e6 or 1.7
    if torch.version.hip:
        code = found.gcnArchName.partition(":")[0]
        cores = 4 * 512 * 64
        return Processor(found.name, units, clock, bandwidth, code, rates=_CDNA_3, registers=cores)
    rates = {80: _SM_80, 90: _SM_90, 100: _SM_90, 103: _SM_90}
    capability = 10 * found.major + found.minor
    return Processor(
        *(found.name, units, clock, bandwidth, f"sm_{capability}"),
        rates=rates.get(capability, _SM_89 if capability > 80 else _SM_80),
        threads=found.max_threads_per_multi_processor,
    )


@dataclass(frozen=True)
class Prediction:
    """What a kernel would take on a processor, in picoseconds an element.

    Attributes:
        computing: if memory were infinitely fast.
        memory: if computing were.
        registers: of a GPU's thread.
        occupancy: share of the threads that a GPU's unit could hold, by their registers.
        spills: bytes of a GPU's thread that registers have no room for, or loads and stores an
            element of a CPU.
        instructions: of vectors, an element: of one lane on a GPU.
    """

    computing: float
    memory: float
    instructions: float
    spills: float
    registers: int | None = None
    occupancy: float | None = None

    @property
    def bound(self) -> str:
        """By what."""
        return "computing" if self.computing > self.memory else "memory"


def predict(kernel: Kernel, processor: Processor, code: Loop | Code) -> Prediction:
    """The time of a kernel by the instructions that its code has and the bytes that it moves."""
    memory = 1000 * (kernel.read + kernel.written) / processor.bandwidth
    every_unit = processor.clock * processor.units / 1000
    if isinstance(code, Loop):
        computing = cycles(code, processor.model) / every_unit
        return Prediction(computing, memory, code.instructions, code.spills)
    rates = processor.rates or {}
    busiest = max(
        code.instructions / rates["all"],
        *(count / rates.get(kind, rates["all"]) for kind, count in code.counts.items()),
    )
    held = processor.registers // max(code.registers, 1)
    occupancy = min(1.0, held / processor.threads)
    return Prediction(
        busiest / every_unit, memory, code.instructions, code.spills, code.registers, occupancy
    )
