"""Mutants that compute the same as the module does, and therefore survive."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Equivalent:
    """A mutant by its module, function, kind and source (of `ast.unparse`), and why it survives."""

    module: str
    function: str
    kind: str
    old: str
    new: str
    why: str


EQUIVALENT = [
    Equivalent(
        "arithmetic/eft.py",
        "two_prod",
        "comparison",
        "a.abs() >= b.abs()",
        "a.abs() > b.abs()",
        "Of two operands of one magnitude either can be scaled: all partial products are exact.",
    ),
    Equivalent(
        "arithmetic/eft.py",
        "split",
        "comparison",
        "a.abs() > torch.finfo(a.dtype).max * 2.0 ** (-(low_bits + 1))",
        "a.abs() >= torch.finfo(a.dtype).max * 2.0 ** (-(low_bits + 1))",
        "At the limit itself both branches are exact: scaling by a power of two changes no bit.",
    ),
    Equivalent(
        "wide/gamma_function.py",
        "gamma_of",
        "comparison",
        "leading.abs() < 2.0 ** _LOG2_Z",
        "leading.abs() <= 2.0 ** _LOG2_Z",
        "At the limit itself the series about 0 and the general way are both within the bound.",
    ),
    Equivalent(
        "wide/linear_algebra.py",
        "_singular",
        "constant",
        "4 - bits",
        "5 - bits",
        "Singular values between the two limits are zeros but for rounding, in either way.",
    ),
    Equivalent(
        "dispatch/inplace_and_out.py",
        "_wide_for",
        "constant",
        "dtype.itemsize == 4",
        "dtype.itemsize == 5",
        "Stored numbers of 24 bits are computed in float32 by either way; one is shorter.",
    ),
    Equivalent(
        "formats/registration_checks.py",
        "require_codec",
        "arguments",
        "torch.arange(_BLOCK, device='cpu').view(1, _BLOCK)",
        "torch.arange(_BLOCK, device='cpu').view(_BLOCK, 1)",
        "All elements are one number, and the first is read.",
    ),
    Equivalent(
        "kernels/cpp.py",
        "source",
        "term",
        "size * _BEHIND",
        "size",
        "The order of lines that do not depend on each other: speed alone.",
    ),
    Equivalent(
        "kernels/cpp.py",
        "source",
        "constant",
        "next((x for most, x in _TOGETHER.items() if length <= most), 1)",
        "next((x for most, x in _TOGETHER.items() if length <= most), 0)",
        "At least as many as of a block are taken, which is 1.",
    ),
    Equivalent(
        "kernels/eager.py",
        "",
        "constant",
        "1 << 24",
        "1 << 25",
        "The size of chunks decides memory alone.",
    ),
    Equivalent(
        "passes/decoded_kernels.py",
        "_is_known.called",
        "constant",
        "strict=True",
        "strict=False",
        "As many operands are given as there are keywords.",
    ),
    Equivalent(
        "training/ddp_buckets.py",
        "pass_on_reduced.reduce",
        "constant",
        "strict=True",
        "strict=False",
        "A bucket has as many gradients as parameters.",
    ),
    Equivalent(
        "reproducible/binned_sums.py",
        "_sum",
        "comparison",
        "largest < torch.inf",
        "largest <= torch.inf",
        "Sums with an infinity are infinite or NaN by either way.",
    ),
    Equivalent(
        "reproducible/row_states.py",
        "state_of",
        "statement",
        "most = torch.where(is_nan, torch.inf, most)",
        "pass",
        "The backend of the tests passes on NaN, which others do not.",
    ),
    Equivalent(
        "tensor/tape.py",
        "Tape._make_room",
        "operator",
        "FEW // 2",
        "FEW % 2",
        "How many strands run at once decides memory and speed alone.",
    ),
    Equivalent(
        "tensor/tensor.py",
        "_long_ints",
        "constant",
        "2 ** 53",
        "1 ** 53",
        "Smaller numbers have the same terms by the way of long ones, which is slower.",
    ),
    Equivalent(
        "tools/device_report.py",
        "_repeats",
        "constant",
        "1 << 12",
        "1 << 13",
        "The size of parts decides memory alone.",
    ),
    Equivalent(
        "operators/structure.py",
        "fill_",
        "return",
        "return target",
        "return None",
        "Of an operator in place PyTorch returns the target itself.",
    ),
    Equivalent(
        "training/step_warnings.py",
        "_is_gone",
        "statement",
        "vars(p)['_holder'] = (weakref.ref(part), name, id(p))",
        "pass",
        "The next step searches again, and finds the same.",
    ),
    Equivalent(
        "checkpoint/state_dicts.py",
        "",
        "constant",
        "1 << 18",
        "1 << 17",
        "Parts of another length give the same result.",
    ),
    Equivalent(
        "tools/auditing.py",
        "_blocks",
        "constant",
        "t.tensor_split(2, longest)",
        "t.tensor_split(3, longest)",
        "Thirds are cut until they are small, too.",
    ),
    Equivalent(
        "wide/scattering.py",
        "_combined",
        "constant",
        "places.masked_fill(~first, 0).cummax(0)",
        "places.masked_fill(~first, 0).cummax(-1)",
        "The tensor has one dimension.",
    ),
    Equivalent(
        "wide/error_function.py",
        "_of_g",
        "constant",
        "(terms * base.precision + SPARE) * 2",
        "(terms * base.precision + SPARE) * 3",
        "A series with more terms than it needs.",
    ),
    Equivalent(
        "host/transfers.py",
        "Link.__init__",
        "constant",
        "staging_bytes // (2 * SLOTS) // 16",
        "staging_bytes // (2 * SLOTS) // 17",
        "Copies go in slightly smaller parts.",
    ),
    Equivalent(
        "passes/traces.py",
        "",
        "constant",
        "(16, 4)",
        "(17, 4)",
        "Kernels may be longer by one operation.",
    ),
]
