"""Programs in C++: one loop over all elements of all tensors of a call.

Every value is a vector of lanes, of a type that compilers map to the machine's vectors, so that
nothing depends on automatic vectorization. bfloat16 and float16 numbers are computed as float32
values that hold them exactly, and rounded on the bit pattern. A truth value is an integer of 32 or
64 bits, 0 or -1. Integers wrap around, and products and sums must not be contracted: see
`cpu.FLAGS`.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence

import torch

from mcftensor.kernels.block_scales import BLOCK_SIZE
from mcftensor.kernels.cpp_prelude import BITS, ORDERED, PRELUDE, SHARING
from mcftensor.kernels.printer import COMMON, Copy, Dialect, Printer, lines_of
from mcftensor.kernels.program import CODES, COMPUTED, Program, Signature
from mcftensor.kernels.usual_numbers import Usual, for_usual_numbers

# Elements per thread that make starting it worthwhile, as in PyTorch.
GRAIN = 1 << 15

# Numbers of vectors computed together, line by line, by the length of programs: one vector alone
# mostly waits for its results. More vectors would not fit into registers, and long programs would
# take too long to compile.
_TOGETHER = {128: 8, 300: 4}

# Lines by which each vector lags the one before in programs with quotients or roots. Otherwise all
# vectors would wait for the one unit that computes these.
_BEHIND = 4

_TYPES = {
    torch.float32: "F", torch.float64: "D", torch.int32: "I", torch.int64: "L", torch.bool: "I"
}  # fmt: skip


def _constant(number: float, dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        number = -number
    if COMPUTED[dtype] == torch.int32 and number:
        return f"as<I>(constant<{number % 2**32}u>())"
    spelled = repr(number) if dtype.is_floating_point else f"{number % 2**64}ull"
    return f"all<{_TYPES[COMPUTED[dtype]]}>({spelled})"


_DIALECT = Dialect(
    types=_TYPES,
    constant=_constant,
    assignment="const auto {name} = {value};",
    counts=str,
    loaded={torch.uint8: "int32", torch.uint16: "int32"},  # after zeros
    operations=COMMON
    | {
        "vector": "load<U>(in{0} + {i}, n)",
        ("vector", torch.int64): "load<UL>(in{0} + {i}, n)",
        ("vector", torch.float64): "load<UL>(in{0} + {i}, n)",
        "packed": "unpacked(in{0} + {i} / 2)",
        "table": "entry({" + "}, {".join(map(str, range(2 + CODES))) + "})",
        "shared": "all<U>(in{0}[{block} / SHARING])",
        "block_max": "block_max<1, I>({valid}, {0})",
        "unsigned_max": "block_max<1, U>({valid}, {0})",
        "scalar": "entered<{type}>(scalar{0})",
        "index": "counted<L>() + {i}",
        ("index", torch.int32): "counted<I>() + int32_t({i})",
        "to": "to<{type}>({0})",
        "where": "choose({0}, {1}, {2})",
        "abs": "magnitude({0})",
        "shift_logical": "shifted({0}, {1})",
        "shift_byte": "shifted_byte({0})",
        "twice_less": "fma({0}, all<F>(2), -{1})",
        "zero_of_zero": "zero_of_zero({0}, {1})",
        "sqrt": "root({0})",
        "fma": "fma({0}, {1}, {2})",
        ("to", torch.bool): "to<{type}>(-{0})",
        ("where", torch.bool): "({0} & like({0}, {1})) | (~{0} & like({0}, {2}))",
        ("and", torch.bool): "{0} & like({0}, {1})",
        ("or", torch.bool): "{0} | like({0}, {1})",
        ("xor", torch.bool): "{0} ^ like({0}, {1})",
        ("eq", torch.bool): "{0} == like({0}, {1})",
    },
)

_IN_PAIRS = dataclasses.replace(
    _DIALECT,
    operations={
        **_DIALECT.operations,
        "vector": "{half}_of_pair(in{0} + {pair})",
        **{("vector", dtype): "{half}_alone(in{0} + {pair})" for dtype in _DIALECT.loaded},
        "packed": "{half}_of_halves(in{0} + {pair} / 2)",
        "block_max": "block_max<2, I>({valid}, {0})",
        "unsigned_max": "block_max<2, U>({valid}, {0})",
        "index": "(counted<L>() * 2 + ({inside})) + {block}",
        ("index", torch.int32): "(counted<I>() * 2 + int32_t({inside})) + int32_t({block})",
    },
)

_LOOP = """
static void run(
    const int64_t *word, const double *number,
    int64_t count, int64_t begin, int64_t end{argument}) {{
{names}
{before}
  constexpr Whole n;
  int64_t i = begin;
  for (; {whole}i + {vectors} * LANES <= end; i += {vectors} * LANES) {{
{interleaved}
  }}
  if (i < end) careful(word, number, count, i, end{valid});
}}

{rows}// Where the share of a thread begins.
INLINE int64_t share(int64_t length, int64_t t, int64_t threads) {{
  return t == threads ? length : length * t / threads / 64 * 64;
}}

// A tensor that is enough for all threads is divided as PyTorch divides it, so that memory stays
// with the thread that touched it first; the others are divided together.
extern "C" void launch(
    const int64_t *words, const double *numbers, int64_t count, int64_t threads) {{
  int64_t small = 0;
  for (int64_t r = 0; r < count; ++r) small += words[r] < threads * GRAIN ? words[r] : 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
  for (int64_t t = 0; t < threads; ++t) {{
    int64_t from = share(small, t, threads), to = share(small, t + 1, threads);
    for (int64_t r = 0, start = 0; r < count; ++r) {{
      int64_t length = words[r], begin = 0, end = length;
      if (length >= threads * GRAIN) {{
        begin = share(length, t, threads);
        end = share(length, t + 1, threads);
      }} else {{
        if (from > start) begin = (from - start + 63) / 64 * 64;
        if (to - start < length) end = (to - start + 63) / 64 * 64;
        if (end > length) end = length;
        start += length;
      }}
      if (begin < end) {run}(words + r, numbers + r, count, begin, end);
    }}
  }}
}}
"""


_IN_MEMORY = """\
#if defined(__AVX2__) && defined(__ELF__) && !defined(__clang__)
#define IN_MEMORY(x) \\
  static const U here_##x __asm__("constant_" #x) __attribute__((used)) = { \\
      x, x, x, x, x, x, x, x}; \\
  extern const U there_##x __asm__("constant_" #x) __attribute__((visibility("hidden"))); \\
  template <> inline __attribute__((always_inline)) U constant<x>() { return there_##x; }
"""

# What the loop leaves: any elements, or whole blocks; and elements or blocks with unusual numbers.
_CAREFUL = """
static __attribute__((noinline)) void careful(
    const int64_t *word, const double *number,
    int64_t count, int64_t begin, int64_t end{argument}) {{
{names}
{before}
{each}
}}
"""
_ELEMENTS = """\
  auto compute = [&](int64_t i, auto n) __attribute__((always_inline)) {{
{body}
  }};
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) compute(i, Whole());
  if (i < end) compute(i, int(end - i));"""
_BLOCKS = """\
  constexpr Whole n;
  for (int64_t i = begin; i < end; i += SHARING) {{
{body}
  }}"""

# Rows that end in a part of a block. The length is then that of rows padded to whole blocks. The
# last block of a row is computed in memory of its own, from zeros beyond its elements.
_ROWS = """\
static void run_rows(
    const int64_t *word, const double *number, int64_t count, int64_t begin, int64_t end) {{
  static constexpr int64_t bits[] = {{{bits}}};
  static constexpr bool is_shared[] = {{{are_shared}}};
  const int64_t width = word[{words} * count], blocks = (width + SHARING - 1) / SHARING;
  if (width % SHARING == 0) return run(word, number, count, begin, end, SHARING);
  int64_t words[{all_words}];
  double numbers[{numbers}];
  for (int k = 0; k < {all_words}; ++k) words[k] = word[k * count];
  for (int k = 0; k < {numbers} - 1; ++k) numbers[k] = number[k * count];
  alignas(64) char held[{tensors}][8 * SHARING] = {{}};
  for (int64_t block = begin / SHARING; block < end / SHARING;) {{
    const int64_t inside = block % blocks, i = block / blocks * width + inside * SHARING;
    const int64_t left = end / SHARING - block, most = blocks - 1 - inside;
    const int64_t whole = left < most ? left : most, rest = width - inside * SHARING;
    for (int k = 0; k < {tensors}; ++k) {{
      const int64_t memory = word[(k + 1) * count];
      if (is_shared[k]) words[k + 1] = memory + (block - i / SHARING) * bits[k] / 8;
      else if (whole) words[k + 1] = memory;
      else {{
        words[k + 1] = int64_t(held[k]) - i * bits[k] / 8;
        if (k < {inputs})
          __builtin_memcpy(held[k], (char *)memory + i * bits[k] / 8, rest * bits[k] / 8);
      }}
    }}
    run(words, numbers, 1, i, i + (whole ? whole : 1) * SHARING, whole ? SHARING : rest);
    if (!whole)
      for (int k = {inputs}; k < {tensors}; ++k)
        if (!is_shared[k]) {{
          char *there = (char *)word[(k + 1) * count] + i * bits[k] / 8;
          __builtin_memcpy(there, held[k], rest * bits[k] / 8);
        }}
    block += whole ? whole : 1;
  }}
}}

"""


def source(program: Program, width: int) -> str:
    """Return the program as a translation unit with `launch(words, numbers, count, threads)`.

    `width` is the vector size of the processor in bytes; wider vectors would be split by lanes.
    `count` sets of tensors are described by columns of 64-bit words: numbers of elements, addresses
    of vectors, addresses of outputs, lengths of rows if blocks share components, integer scalars.
    `numbers` holds columns of the other scalars.
    """
    signature = program.signature
    names, word, scalars = [], 1, 0
    for kind, dtypes in (("in", signature.vectors), ("out", signature.outputs)):
        for i, dtype in enumerate(dtypes):
            pointer = f"uint{8 * dtype.itemsize}_t *"
            names.append(f"{pointer}{kind}{i} = ({pointer})word[{word} * count];")
            word += 1
    word += bool(signature.shared)
    for i, dtype in enumerate(signature.scalars):
        if dtype == torch.int64:
            names.append(f"const int64_t scalar{i} = word[{word} * count];")
            word += 1
        else:
            names.append(f"const double scalar{i} = number[{scalars} * count];")
            scalars += 1
    plain = Printer(program, _DIALECT, Copy(words={"i": "i"}))
    inside = itertools.compress(program.instructions, program.varies)
    lanes = width // max(4, *(x.dtype.itemsize for x in inside))
    of_block = BLOCK_SIZE // lanes if signature.shared else 1
    fast, usual = for_usual_numbers(program) or (program, None)
    length = len(fast.instructions)
    count = max(next((x for most, x in _TOGETHER.items() if length <= most), 1), of_block)
    in_pairs = count > 1 and _in_pairs(program)
    size, dialect = max(of_block, 1 + in_pairs), _IN_PAIRS if in_pairs else _DIALECT
    copies = [_copies(first, size) for first in range(0, count, size)]
    printed = lines_of(fast, dialect, list(itertools.chain(*copies)))
    groups = [
        _lines(
            [Printer(fast, dialect, x) for x in group],
            itertools.islice(printed, size),
            in_pairs,
            usual,
        )
        for group in copies
    ]
    if signature.shared:
        alone = _copies(0, size, "valid")
        body = _lines(
            [Printer(program, dialect, x) for x in alone],
            lines_of(program, dialect, alone),
            in_pairs,
        )
    else:
        body = _lines([plain], [plain.lines_by_place(varying=True)])
    each = (_BLOCKS if signature.shared else _ELEMENTS).format(body=_indented(_woven([body]), 4))
    before = Printer(fast, _DIALECT, plain.copy).lines(varying=False)
    parts = {
        "names": _indented(names, 2),
        "argument": ", int32_t valid" if signature.shared else "",
    }
    waits = any(x.name in ("div", "sqrt") for x in program.instructions)
    careful = _CAREFUL.format(before=_indented(plain.lines(varying=False), 2), each=each, **parts)
    loop = careful + _LOOP.format(
        before=_indented(before, 2),
        interleaved=_indented(_woven(groups, size * _BEHIND if waits else 0), 4),
        vectors=count,
        valid=", valid" if signature.shared else "",
        whole="valid == SHARING && " if signature.shared else "",
        rows=_rows(signature, word, scalars) if signature.shared else "",
        run="run_rows" if signature.shared else "run",
        **parts,
    )
    has_float16 = any(x.dtype == torch.float16 for x in program.instructions)
    prelude = ("" if has_float16 else ORDERED) + BITS + PRELUDE
    if signature.shared:
        prelude += SHARING
    in_memory = signature.shared and lanes == 8
    prelude = prelude.replace("CONSTANTS", _in_memory(prelude + loop) if in_memory else "")
    return f"#define LANES {lanes}\n#define GRAIN {GRAIN}\n{_shuffles(lanes)}{prelude}{loop}"


def _in_memory(text: str) -> str:
    """Return declarations of a program's constants in memory, where instructions find them.

    GCC makes constants of AVX2 in registers, of which it has too few, by two instructions each
    time. It does not if it cannot see their values.
    """
    values = sorted(set(re.findall(r"constant<(\d+u)>", text)))
    lines = "".join(f"IN_MEMORY({x})\n" for x in values)
    return f"{_IN_MEMORY}{lines}#endif\n"


def _rows(signature: Signature, words: int, numbers: int) -> str:
    """Return the function that computes rows, given the numbers of words and scalars of a set."""
    dtypes = (*signature.vectors, *signature.outputs)
    return _ROWS.format(
        bits=", ".join(
            str(4 if i in signature.packed else 8 * x.itemsize) for i, x in enumerate(dtypes)
        ),
        are_shared=", ".join(str(i in signature.shared).lower() for i in range(len(dtypes))),
        tensors=len(dtypes),
        inputs=len(signature.vectors),
        words=len(dtypes) + 1,
        all_words=words,
        numbers=numbers + 1,
    )


def _shuffles(lanes: int) -> str:
    """Return definitions of two shuffles: lanes interleaved with zeros, and every second lane."""
    before_zeros = ", ".join(f"{k}, {lanes}" for k in range(lanes))
    each_second = ", ".join(f"{2 * k}" for k in range(lanes))
    return f"#define BEFORE_ZEROS {before_zeros}\n#define EACH_SECOND {each_second}\n"


def _in_pairs(program: Program) -> bool:
    """Whether all inputs and outputs have 16 bits, or bytes beside them."""
    signature = program.signature
    sizes = {x.itemsize for x in (*signature.vectors, *signature.outputs)}
    return sizes <= {1, 2} and 2 in sizes


def _copies(first: int, size: int, valid: str = "Every()") -> list[Copy]:
    """Return the copies of a group of vectors, whose elements form a block or pairs.

    Of the elements of a block those from `valid` on do not count.
    """
    places = [f"(i + {k} * LANES)" for k in range(first, first + size)]
    suffixes = [f"_{k}" for k in range(first, first + size)]
    return [
        Copy(
            suffix,
            {
                "i": places[k],
                "block": places[0],
                "valid": valid,
                "pair": places[k & ~1],
                "half": ("first", "second")[k % 2],
                "inside": f"{k & ~1} * LANES + {k % 2}",
            },
            suffixes,
        )
        for k, suffix in enumerate(suffixes)
    ]


def _lines(
    printers: Sequence[Printer],
    values: Iterable[dict[int, list[str]]],
    in_pairs: bool = False,
    usual: Usual | None = None,
) -> list[Sequence[str]]:
    """Return the loop body of a group of vectors: in each row a line per vector, or one for all.

    To the lines of values it adds those that store the results, if the block is usual.
    """
    words, program = [x.copy.words for x in printers], printers[0].program
    every, branches = list(values), program.branches()
    apart = set(itertools.chain(*branches.values()))
    lines: list[Sequence[str]] = []
    early = program.before_scales()
    for i in sorted(every[0], key=lambda i: (not early[i], i)):
        if i in branches:
            lines.append(
                [_branch(program, i, branches[i], every, [x.copy.suffix for x in printers])]
            )
        elif i not in apart:
            copies = every[:1] if program.per_block[i] else every
            lines += zip(*(of_copy[i] for of_copy in copies), strict=True)
    stores = len(lines)
    for i, place in enumerate(program.results):
        patterns = [x.pattern(place) for x in printers]
        if program.signature.shares(i):
            lines.append([f"out{i}[{words[0]['block']} / SHARING] = {patterns[0]}[0];"])
            continue
        is_packed = len(program.signature.vectors) + i in program.signature.packed
        if in_pairs:
            at = f"{words[0]['pair']} / 2" if is_packed else words[0]["pair"]
            name = "pack_pairs" if is_packed else "store_pairs"
            lines.append([f"{name}(out{i} + {at}, {', '.join(patterns)});"])
        elif is_packed:
            both = zip(words, patterns, strict=True)
            lines.append([f"pack(out{i} + {at['i']} / 2, {pattern});" for at, pattern in both])
        else:
            both = zip(words, patterns, strict=True)
            lines.append([f"store(out{i} + {at['i']}, {pattern}, n);" for at, pattern in both])
    if usual is None:
        return lines
    text = [_unless_usual(usual, printers), "else {", *itertools.chain(*lines[stores:]), "}"]
    return [*lines[:stores], ["\n".join(text)]]


def _unless_usual(usual: Usual, printers: Sequence[Printer]) -> str:
    """Return the statement that computes unusual elements with care, before any is stored."""
    first = printers[0]
    tests = [f"(uint32_t({first.value(x)}[0]) > {limit})" for x, limit in usual.maxima.items()]
    program, places = printers[0].program, sorted(usual.finite)
    for type_ in (torch.float32, torch.float64):
        of_type = [p for p in places if COMPUTED[program.instructions[p].dtype] == type_]
        values = ", ".join(x.value(place) for place in of_type for x in printers)
        if values:
            tests.append(f"has_nan(zeros_of({values}))")
    if usual.rests:
        values = ", ".join(x.value(place) for place in usual.rests for x in printers)
        tests.append(f"has_tiny(least({values}))")
    block, valid = printers[0].copy.words["block"], ", SHARING" * bool(program.signature.shared)
    end = f"{block} + {len(printers)} * LANES"
    apart = f"careful(word, number, count, {block}, {end}{valid});"
    return f"if (__builtin_expect({' | '.join(tests)}, 0)) {apart}"


def _branch(
    program: Program,
    place: int,
    own: Sequence[int],
    lines: Sequence[dict[int, list[str]]],
    suffixes: Sequence[str],
) -> str:
    """Return a choice by a condition of a block, rarely true, and the lines that it needs."""
    x = program.instructions[place]
    condition, first, second = (operand.index for operand in x.operands)
    type_ = _TYPES[COMPUTED[x.dtype]]
    text = [f"{type_} v{place}{suffix} = v{second}{suffix};" for suffix in suffixes]
    text.append(f"if (__builtin_expect(v{condition}{suffixes[0]}[0] != 0, 0)) {{")
    text += itertools.chain(*(of_copy[i] for i in own for of_copy in lines))
    text += [f"v{place}{suffix} = v{first}{suffix};" for suffix in suffixes]
    return "\n".join([*text, "}"])


def _woven(groups: Sequence[Sequence[Sequence[str]]], behind: int = 0) -> list[str]:
    """Interleave the lines of groups of vectors, each `behind` lines after the previous group."""
    places = [
        (row + behind * number, row, number)
        for number, lines in enumerate(groups)
        for row in range(len(lines))
    ]
    return [line for _, row, number in sorted(places) for line in groups[number][row]]


def _indented(lines: Sequence[str], places: int) -> str:
    return "\n".join(" " * places + line for line in lines)
