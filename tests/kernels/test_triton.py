"""Triton kernels: the bits of eager PyTorch in its interpreter, and what is in their machine code.

Nothing here needs a GPU.
"""

import functools
import gc
import linecache
import re
import subprocess
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import mcftensor as mcf
from mcftensor.kernels import Columns, cuda, digit_sums, execute, first_use
from mcftensor.kernels import triton as programs
from mcftensor.sums.accumulators import accumulate
from mcftensor.sums.digits import WIDEST, Grid, grid_of
from support.kernel_cases import (
    CASES,
    MIXTURES,
    NAMES,
    OPERATIONS,
    STEPS,
    STORED,
    STORED_MIXTURES,
    STORED_STEPS,
    all_stored,
    assert_same_bits,
    decoded,
    encoded,
    expression,
    mixtures,
    operand,
    patterns,
    run,
    run_one,
    run_sets,
    run_trace,
    same,
    step,
    traced,
    way,
)

triton = pytest.importorskip("triton")

pytestmark = [
    # The interpreter computes with numpy, which warns of what arithmetic with special values does.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning"),
]


@pytest.mark.parametrize(("capability", "rounds"), [((7, 5), False), ((8, 0), True)])
def test_which_gpus_round_to_bfloat16_by_one_instruction(capability, rounds, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert cuda._rounds.__wrapped__(torch.device("cuda")) == rounds


@pytest.mark.thinned(of=20)
@pytest.mark.parametrize(("name", "operation"), CASES)
def test_every_operation(name, operation):
    format = mcf.Format.from_name(name)
    operands = [operand(format.nearest, 1501) for _ in range(OPERATIONS[operation])]
    same("triton", run, expression(operation, format), *operands)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("name", ["bf16x2", "bf16x3", "fp16x2", "fp32x2"])
def test_traces(name):
    same("triton", run_trace, *traced(mcf.Format.from_name(name), 1501))


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["bf16x2", "fp16x2", "fp32x2"])
def test_plain_operands_with_all_payloads(name, dtype):
    format = mcf.Format.from_name(name)
    x, plain = operand(format, 4099), patterns(dtype, 4099)
    same("triton", run, expression("add", format), x, (plain,))


@pytest.mark.thinned(of=5)
@pytest.mark.parametrize("name", ["triton", "rounding"])
@pytest.mark.parametrize("kind", STEPS)
def test_fused_steps(kind, name):
    same(name, step, kind, mixtures(kind))


@pytest.mark.parametrize("name", ["triton", "rounding"])
@pytest.mark.parametrize(("kind", "formats"), STORED_STEPS)
def test_fused_steps_over_what_is_stored(kind, formats, name):
    same(name, step, kind, formats)


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize("name", STORED)
def test_what_is_stored_is_decoded(name):
    same("triton", decoded, name, *all_stored(name))


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", STORED)
def test_numbers_are_encoded(name, dtype):
    same("triton", encoded, name, *(patterns(dtype, length) for length in (5003, 7, 1)))


@pytest.mark.thinned(of=12)
@pytest.mark.parametrize(
    ("name", "operation"),
    [(name, operation) for name in ("bf16x2", "bf16x3", "fp16x2") for operation in OPERATIONS],
)
def test_operations_where_the_device_rounds(name, operation):
    format = mcf.Format.from_name(name)
    operands = [operand(format, 1501) for _ in range(OPERATIONS[operation])]
    same("rounding", run, expression(operation, format), *operands)


@pytest.mark.parametrize("name", ["bf16x2", "fp16x2"])
def test_conversions_where_the_device_rounds(name):
    same("rounding", encoded, name, *(patterns(torch.float32, length) for length in (5003, 7, 1)))


def test_one_huge_and_many_tiny_tensors():
    format = mcf.bf16x2
    shapes = [(3,), (50_001,), *[(i % 5 + 1,) for i in range(40)], (1024,), (1025,)]
    pairs = [(operand(format, *shape), operand(format, *shape)) for shape in shapes]
    same("triton", run_sets, expression("mul", format), *pairs)


@pytest.mark.parametrize("name", ["bf16x2", "fp32x2", "bf16x2sr"])
def test_unaligned_transposed_and_with_gaps(name):
    format = mcf.Format.from_name(name)
    whole = [operand(format.nearest, 60, 40) for _ in range(2)]
    for arrange in (
        lambda t: t.flatten()[1:],
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[:1].expand(60, 40),
    ):
        operands = [tuple(arrange(t) for t in x) for x in whole]
        same("triton", run, expression("add", format), *operands)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_scalars_in_the_table_and_on_the_device(dtype):
    format = mcf.bf16x2
    x = operand(format, 1501)
    for value in (0.3, -0.0, float("inf"), float("nan"), 1e-30):
        scalar = torch.tensor(value, dtype=dtype)
        same("triton", run, expression("mul", format), x, (scalar,))


def scaled(x, scalar):
    """A kernel's product of a vector and a scalar, which may be a number."""
    output = torch.empty_like(x)

    def body(vectors, scalars, index):
        return [(vectors[0].to(torch.float64) * scalars[0]).to(torch.float32)]

    execute.run(body, Columns([[x]], [[scalar]], [[output]]))
    return [output]


@pytest.mark.with_float64("its kernel computes in float64")
def test_a_number_is_a_scalar():
    x = torch.randn(1501)
    for number in (0.1, -0.0, 2.0**-1060, float("nan")):
        got = same("triton", scaled, x, number)
        there = same("triton", scaled, x, torch.tensor(number, dtype=torch.float64))
        assert_same_bits(got, there)


@pytest.mark.with_float64("its kernel computes in float64")
def test_a_changed_scalar_on_the_device_is_read_anew():
    x, scalar = torch.randn(1501), torch.tensor(2.0, dtype=torch.float64)
    with way("triton"):
        (first,) = scaled(x, scalar)
        (second,) = scaled(x, scalar.mul_(2))
    assert torch.equal(first * 2, second)


# ------------------------------------------------------------------------------------- launches


def test_registers_that_do_not_suffice():
    """A kernel that spills them is right, and has more threads from the next launch on."""
    used = []

    def launch(*tables, num_warps, **options):
        used.append(num_warps)
        return SimpleNamespace(n_spills=0 if num_warps >= 16 else 12)

    kernel = cuda._Kernel({(7,): launch}, 4, 16)
    for _ in range(4):
        kernel.launch(7, ALIGNED=True)
    assert used == [4, 8, 16, 16]


@pytest.mark.parametrize("lanes", [32, 64])
def test_long_programs_have_more_threads(lanes):
    operation = SimpleNamespace(dtype=torch.float32)
    threads = [
        lanes * programs.warps(SimpleNamespace(instructions=[operation] * count), lanes)
        for count in (10, 1000, 2000)
    ]
    assert threads == [128, 256, 512]


@pytest.mark.parametrize(("lanes", "warps"), [(32, 4), (64, 2)])
def test_a_thread_has_eight_elements(lanes, warps, monkeypatch):
    """Whatever the size of warps, which is 64 threads on AMD's GPUs for data centers."""
    properties = SimpleNamespace(warp_size=lanes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    lanes_of = cuda._lanes.__wrapped__
    assert lanes_of(torch.device("cpu")) == 32
    format = mcf.bf16x2
    operands = [operand(format, 64) for _ in range(2)]
    program = program_of(lambda: run(expression("add", format), *operands))
    kernel = cuda._kernel(program, (), True, lanes_of(torch.device("cuda")))
    assert kernel.warps == warps
    assert kernel.warps * lanes * 8 == programs.THREAD_BLOCK
    assert kernel.most * lanes * 2 == programs.THREAD_BLOCK


@pytest.fixture
def launch(monkeypatch):
    """A function that multiplies a vector, always the same one, by a number, in a kernel."""
    x, output = torch.randn(1501), torch.empty(1501)

    def body(vectors, scalars, index):
        return [(vectors[0].to(torch.float64) * scalars[0]).to(torch.float32)]

    def call(scalar):
        execute.run(body, Columns([[x]], [[scalar]], [[output]]))
        assert torch.equal(output, (x.double() * scalar).float())

    monkeypatch.setattr(cuda, "_TABLES", cuda._Tables(1 << 20))
    with way("triton"):
        yield call


@pytest.fixture
def made(monkeypatch):
    """The tables that are copied to the device."""
    tables = []
    on_device = cuda._on_device

    def spy(table, device):
        tables.append(weakref.ref(table))
        return on_device(table, device)

    monkeypatch.setattr(cuda, "_on_device", spy)
    return tables


@pytest.mark.with_float64("its kernel computes in float64")
def test_tables_are_kept_but_for_numbers(launch, made):
    """Which may be others at each step, as with a schedule of learning rates."""
    for number in range(1, 30):
        launch(number / 7)
    assert len(made) == 2 + 29  # rows and their owners, and the numbers of each launch
    assert sum(table() is not None for table in made) == len(cuda._TABLES.kept) == 2


@pytest.mark.with_float64("its kernel computes in float64")
def test_tables_of_a_graph_are_its_own(launch, made, monkeypatch):
    """They are filled when it is replayed, and what PyTorch allocates meanwhile stays as long."""
    launch(2.0)
    made.clear()
    monkeypatch.setattr(cuda, "is_capturing", lambda device: True)
    for number in (1.0, 2.0):
        launch(number)
    assert len(made) == 6
    assert not any(table() is not None for table in made)
    assert len(cuda._TABLES.kept) == 2


def test_tables_take_so_many_bytes(launch, monkeypatch):
    monkeypatch.setattr(cuda._TABLES, "most", 100)
    x = [torch.randn(5) for _ in range(20)]
    for t in x:
        with torch.no_grad():
            run_one(twice, [t], [], [t])
        assert 0 < cuda._TABLES.total <= 100


def twice(vectors, scalars, index):
    return [vectors[0] + vectors[0]]


def sources():
    return sum(name.startswith("<mcftensor") for name in linecache.cache)


def test_so_many_kernels_are_kept(launch, monkeypatch):
    """With their sources, which nothing else holds."""
    make, kernels, before = cuda._Kernel, weakref.WeakSet(), sources()

    def spy(*args):
        kernel = make(*args)
        kernels.add(kernel)
        return kernel

    monkeypatch.setattr(cuda, "_Kernel", spy)
    kernel_of = functools.lru_cache(maxsize=2)(cuda._kernel.__wrapped__)
    monkeypatch.setattr(cuda, "_kernel", kernel_of)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32):
        x = torch.ones(5, dtype=dtype)
        run_one(twice, [x], [], [x])
        assert (x == 2).all()
    gc.collect()
    assert len(kernels) == 2
    assert sources() == before + 2


# --------------------------------------------------------------------------------- machine code


def compiled(program, warps):
    """PTX and more for a GPU of compute capability 9.0, as a launch with aligned pointers makes
    it."""
    kernel = cuda._kernel(program, (False,) * len(program.signature.scalars), True, 32)
    divisible = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(
        fn=kernel.function,
        signature={"rows": "*i64", "owners": "*i32", "numbers": "*i64"}
        | dict.fromkeys(("STEP", "BLOCK", "ALIGNED"), "constexpr"),
        constexprs={"STEP": 0, "BLOCK": programs.THREAD_BLOCK, "ALIGNED": True},
        attrs={(i,): divisible for i in range(3)},
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    options = {"enable_fp_fusion": False, "num_warps": warps}
    return triton.compile(source, target=target, options=options).asm


def spilled(cubin, tmp_path):
    """Bytes of registers that a kernel has no room for, by what NVIDIA's tools say."""
    path = tmp_path / "kernel.cubin"
    path.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    said = subprocess.run([tool, "-res-usage", path], check=True, capture_output=True, text=True)
    return [int(x) for x in re.findall(r"(?:STACK|LOCAL):(\d+)", said.stdout)]


def check(program, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    warps = programs.warps(program, 32)
    asm = compiled(program, warps)
    while spilled(asm["cubin"], tmp_path) != [0, 0] and warps < programs.MOST_THREADS // 32:
        warps *= 2  # as launches do
        asm = compiled(program, warps)
    assert spilled(asm["cubin"], tmp_path) == [0, 0]
    ptx = asm["ptx"]
    names = {x.name for x in program.instructions}
    assert ".ftz" not in ptx
    assert ".approx" not in ptx
    assert ".local" not in ptx
    if "fma" not in names:
        assert "fma.rn" not in ptx
    written = {x.dtype for x in program.instructions if x.name not in ("vector", "shared")}
    assert bool(re.search(r"cvt\.rn\.bf16(x2)?\.f32", ptx)) == (torch.bfloat16 in written)
    for name, instructions in (("div", ("div", "reciprocal")), ("sqrt", ("sqrt",))):
        found = re.findall(rf"\b{name}\.\w+(?:\.\w+)*\.f(?:32|64)", ptx)
        assert all(x.startswith(f"{name}.rn.") for x in found)
        assert bool(found) == bool(names & set(instructions))
    # 16 bytes a thread, or 8 where fewer elements fit into its registers
    wide = r"v4\.b32|v2\.b64" if warps == 4 else r"v4\.b32|v2\.b64|v2\.b32"
    for kind in ("ld", "st"):
        assert re.search(rf"{kind}\.global\.({wide})", ptx)
    return asm


def program_of(function):
    """The one program that a function runs."""
    with way("triton") as ran:
        function()
    (program,) = set(ran)
    return program


QUICK = [
    (name, operation)
    for name in ("bf16x2", "fp32x2")
    for operation in ("add", "mul", "div", "sqrt", "fma")
]
SLOW = [
    pytest.param(name, operation, marks=pytest.mark.slow)
    for name in NAMES
    for operation in OPERATIONS
    if (name, operation) not in QUICK
]


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize(("name", "operation"), [*QUICK, *SLOW])
def test_machine_code_of_operations(name, operation, tmp_path, monkeypatch):
    format = mcf.Format.from_name(name)
    operands = [operand(format.nearest, 64) for _ in range(OPERATIONS[operation])]
    program = program_of(lambda: run(expression(operation, format), *operands))
    check(program, tmp_path, monkeypatch)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize(
    ("kind", "mixture"),
    [
        ("adamw", ("bf16x2", "bf16x2")),
        ("adam", ("bf16x2", torch.bfloat16)),
        ("sgd", ("bf16x2", "bf16x2")),
        ("momentum", ("bf16x2", "bf16x2")),
        ("adagrad", ("bf16x2", "bf16x2")),
        *(
            pytest.param("adamw", x, marks=pytest.mark.slow)
            for x in (*MIXTURES[2:], *STORED_MIXTURES)
        ),
    ],
    ids=str,
)
def test_machine_code_of_fused_steps(kind, mixture, tmp_path, monkeypatch):
    with way("triton") as ran:
        step(kind, [mixture], [(64,)])
    check(ran[0], tmp_path, monkeypatch)


# ------------------------------------------------------------------------------------- exact sums


def _terms(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of more than a block: numbers of a few sizes, and some of all bits."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 1030, generator=generator, dtype=torch.float64).to(dtype)
    x[:, ::200] = first_use.hard_numbers(dtype, seed, 12).view(2, 6)
    x[1, 3], x[1, 1029] = -0.0, torch.inf
    return x


def _accumulators(dtype: torch.dtype, factors: int, grid: Grid) -> torch.Tensor:
    x, *y = (_terms(dtype, i) for i in range(factors))
    return accumulate(x, y[0] if y else None, grid)


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize("factors", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_exact_sums(dtype, factors, monkeypatch):
    monkeypatch.setattr(digit_sums.COMPILED, "get", lambda _: None)
    monkeypatch.setattr(digit_sums, "is_right_in_triton", lambda _: lambda *args: True)
    for grid in (WIDEST, grid_of(dtype, factors)):
        right = _accumulators(dtype, factors, grid)
        with way("triton") as used:
            assert torch.equal(_accumulators(dtype, factors, grid), right)
        assert len(used) == 1


@pytest.mark.parametrize("is_right", [True, False])
def test_exact_sums_are_compared_before_their_first_use(is_right, monkeypatch):
    """Without its last digit a sum is wrong, and PyTorch's operators add instead."""
    monkeypatch.setattr(digit_sums.COMPILED, "get", lambda _: None)
    monkeypatch.setattr(first_use, "_SAID", set())
    right = _accumulators(torch.float32, 1, WIDEST)
    accumulation = programs._accumulation
    if not is_right:
        monkeypatch.setattr(programs, "_accumulation", lambda x: accumulation(x[:-1]))
    said = pytest.warns(UserWarning, match="other bits than PyTorch")
    with way("triton", is_tried=True), nullcontext() if is_right else said:
        assert torch.equal(_accumulators(torch.float32, 1, WIDEST), right)
