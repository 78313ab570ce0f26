"""Compiled C++ gives the bits of eager PyTorch."""

import itertools

import pytest
import torch

import mcftensor as mcf
from mcftensor.kernels import cpp, cpu, execute
from mcftensor.kernels.program import Signature, record
from mcftensor.passes import expansion
from support.kernel_cases import (
    CASES,
    EMPTY,
    OPERATIONS,
    STEPS,
    STORED,
    STORED_STEPS,
    all_stored,
    assert_same_bits,
    decoded,
    encoded,
    expression,
    guarded,
    mixtures,
    needs_mprotect,
    operand,
    patterns,
    run,
    run_sets,
    run_trace,
    same,
    step,
    traced,
    way,
)


@pytest.fixture(autouse=True)
def compiler_at_hand() -> None:
    if cpu.find() is None:
        pytest.skip("no C++ compiler")


@pytest.fixture
def threads():
    yield torch.set_num_threads
    torch.set_num_threads(1)


@pytest.mark.thinned(of=20)
@pytest.mark.parametrize(("name", "operation"), CASES)
def test_every_operation(name, operation):
    format = mcf.Format.from_name(name)
    count = OPERATIONS[operation]
    for length in (1, 7, 16, 5003):
        operands = [operand(format.nearest, length) for _ in range(count)]
        same("cpp", run, expression(operation, format), *operands)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("name", ["bf16x2", "fp16x2", "fp32x2", "fp64x2", "bf16x2sr"])
def test_scalars(name):
    format = mcf.Format.from_name(name)
    number = torch.tensor(0.3, dtype=torch.float64)
    wide, x = operand(format.nearest, 1003), operand(format.nearest, 1003)
    for special in (number, -number * 0, number / 0, number * 0 / 0, number * 1e-300):
        same("cpp", run, expression("fma", format), wide, (special,), x)
    short = expansion.expand(number, format.nearest)
    same("cpp", run, expression("lerp", format), wide, x, short)
    same("cpp", run, expression("addcdiv", format), short, wide, x, (number,))


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["bf16x2", "fp16x2", "fp32x2"])
def test_plain_operands_with_all_payloads(name, dtype):
    format = mcf.Format.from_name(name)
    plain = patterns(dtype, 4099)
    same("cpp", run, expression("add", format), operand_of(format), (plain,))
    same("cpp", run, expression("mul", format), operand_of(format), (plain,))


def operand_of(format):
    torch.manual_seed(3)
    return operand(format.nearest, 4099)


@pytest.mark.parametrize("name", ["bf16x2", "bf16x3", "fp16x2", "fp32x2"])
def test_traces(name):
    same("cpp", run_trace, *traced(mcf.Format.from_name(name), 5003))


@pytest.mark.parametrize("name", [f.name for f in mcf.formats.FORMATS])
def test_traces_round_as_single_operations_do(name):
    trace, operands, numbers = traced(mcf.Format.from_name(name), 20_011)
    variables = [*operands, *numbers, None]
    for operation in trace.operations:
        single = EMPTY
        for variable in trace.variables[:6]:
            single = single.with_variable(variable)
        is_new = variables[6] is None
        single = single.with_variable(trace.variables[6 if is_new else 0])
        given = [x for x in (*variables[:3], variables[6]) if x is not None]
        variables[operation.target] = run_trace(single.then(operation), given, numbers)
    got = run_trace(trace, operands, numbers)
    assert_same_bits(got, [x for i in trace.written for x in variables[i]])


def sets(format, shapes):
    """Pairs of operands of these shapes."""
    return [(operand(format.nearest, *x), operand(format.nearest, *x)) for x in shapes]


@pytest.mark.parametrize("name", ["bf16x2", "fp32x2", "fp64x2", "fp16x2", "bf16x2sr"])
def test_several_tensors(name):
    format = mcf.Format.from_name(name)
    shapes = [(5,), (300, 7), (5003,), (1,), (64,), (0,), (17,)]
    same("cpp", run_sets, expression("mul", format), *sets(format, shapes))


@pytest.mark.parametrize("operation", ["add", "fma"])
def test_several_sets_some_of_which_broadcast(operation):
    format, count = mcf.bf16x2, OPERATIONS[operation] - 1
    last = [operand(format), operand(format, 40), (torch.randn(()),) * 2, operand(format, 40)]
    alike = [(*tuple(operand(format, 40) for _ in range(count)), x) for x in last]
    same("cpp", run_sets, expression(operation, format), *alike)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", ["bf16x2", "fp32x2", "bf16x2sr"])
def test_threads_divide_the_work_alike(name, count, threads):
    format = mcf.Format.from_name(name)
    work = sets(format, [(100_003,), (5,), (70_001,), (17,), (1,)])
    alone = same("cpp", run_sets, expression("mul", format), *work)
    threads(count)
    together = same("cpp", run_sets, expression("mul", format), *work)
    assert_same_bits(together, alone)


WRITE_THREAD = """
extern "C" int omp_get_thread_num();
static void run(
    const int64_t *word, const double *number, int64_t count, int64_t begin, int64_t end) {
  uint16_t *out = (uint16_t *)word[2 * count];
  for (int64_t i = begin; i < end; ++i) out[i] += 1 + omp_get_thread_num();
}

"""


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_each_element_has_one_thread(count, threads, monkeypatch, tmp_path):
    """In large tensors those of PyTorch's own threads, but for a few where one ends."""
    monkeypatch.setenv("MCFTENSOR_CACHE_DIR", str(tmp_path))
    bf16 = torch.bfloat16
    program = record(lambda vectors, scalars, index: vectors, Signature((bf16,), (), (bf16,)))
    text = cpp.source(program, 16)
    start, stop = text.index("\nstatic void run("), text.index("// Where the share of a thread")
    text = text[:start] + WRITE_THREAD + text[stop:]
    launch = cpu.load(text, build=True, is_right=lambda launch: True)
    threads(count)
    lengths = [50_005, 300_001, 30_000, 64, 163_840]
    vectors = [torch.zeros(length, dtype=torch.uint16) for length in lengths]
    addresses = [x.data_ptr() for x in vectors]
    execute.launch(launch, lengths, [addresses, addresses], [], [])
    is_large = [length >= count * cpp.GRAIN for length in lengths]
    large = list(itertools.compress(vectors, is_large))
    small = [x for x, alone in zip(vectors, is_large, strict=True) if not alone]
    for x in [*large, torch.cat(small)] if small else large:
        index = torch.arange(len(x))
        chunk = -(-len(x) // count)
        off = x.int() - 1 != index // chunk
        near_an_end = (index % chunk < 64) | (index % chunk >= chunk - 64)
        assert not (off & ~near_an_end).any()
        assert x.int().diff().ge(0).all()


@pytest.mark.parametrize("name", ["bf16x2", "fp32x2", "bf16x2sr"])
class TestLayouts:
    def arranged(self, name, arrange):
        format = mcf.Format.from_name(name)
        return format, [
            tuple(arrange[i](t) for t in operand(format.nearest, 30, 50)) for i in range(2)
        ]

    def check(self, name, first, second):
        format, operands = self.arranged(name, (first, second))
        same("cpp", run, expression("add", format), *operands)
        target = mcf.MCFTensor(operands[0], format)

        def in_place():
            result = mcf.MCFTensor([t.clone() for t in target.components], format)
            result.mul_(mcf.MCFTensor(operands[1], format))
            return [result]

        same("cpp", in_place)

    def test_transposed(self, name):
        self.check(name, torch.Tensor.t, torch.Tensor.t)

    def test_unlike(self, name):
        self.check(name, lambda t: t.t(), lambda t: t.t().contiguous())
        self.check(name, lambda t: t[:30, :30].t(), lambda t: t[:30, :30])

    def test_with_gaps(self, name):
        self.check(name, lambda t: t[:, ::2], lambda t: t[:, ::2])
        self.check(name, lambda t: t[:, 1:], lambda t: t[:, :-1])

    def test_repeated(self, name):
        self.check(name, lambda t: t, lambda t: t[:1].expand(30, 50))

    def test_unaligned(self, name):
        format = mcf.Format.from_name(name)
        operands = [tuple(t[1:] for t in operand(format.nearest, 1003)) for _ in range(2)]
        same("cpp", run, expression("div", format), *operands)


@pytest.mark.thinned(of=4)
@needs_mprotect
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("name", ["bf16x2", "fp32x2", "fp64x2", "bf16x2sr"])
def test_memory_beyond_the_ends_is_not_touched(name, at_end):
    """The process is ended where it is."""
    format = mcf.Format.from_name(name)
    for length in (1, 7, 8, 15, 16, 17, 63, 64, 65, 129, 1025):
        operands = [operand(format.nearest, length) for _ in range(2)]
        operands = [tuple(guarded(t, at_end) for t in x) for x in operands]
        x = mcf.MCFTensor(operands[0], format)
        with way("cpp"):
            x.mul_(mcf.MCFTensor(operands[1], format))
        for term, before in zip(x.components, operands[0], strict=True):
            assert term.data_ptr() == before.data_ptr()


@pytest.mark.thinned(of=5)
@pytest.mark.parametrize("kind", STEPS)
def test_fused_steps(kind):
    same("cpp", step, kind, mixtures(kind))


@pytest.mark.parametrize(("kind", "formats"), STORED_STEPS)
def test_fused_steps_over_what_is_stored(kind, formats):
    same("cpp", step, kind, formats)


@pytest.mark.parametrize("name", STORED)
def test_what_is_stored_is_decoded(name):
    same("cpp", decoded, name, *all_stored(name))


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", STORED)
def test_numbers_are_encoded(name, dtype):
    same("cpp", encoded, name, *(patterns(dtype, length) for length in (5003, 7, 1)))


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
def test_fused_steps_skip_what_overflowed(kind):
    formats = [("bf16x2", "bf16x2"), ("fp32x2", torch.float32), ("bf16x2sr", "bf16x2sr")]
    same("cpp", step, kind, formats, [(257,)] * 3, 1.0)
