"""Small changes that make the library wrong, and the tests that should notice."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A text of a file of the package, given by the end of its path, and what to put in its place.

    The text must be in the file once. `tests` are what pytest is given.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _of(file: str, *tests: str, **changes: tuple[str, str]) -> list[Mutation]:
    """Mutations of one file that the same tests should notice, by name."""
    stem = file.removesuffix(".py")
    return [
        Mutation(f"{stem}: {name.replace('_', ' ')}", file, old, new, tests)
        for name, (old, new) in changes.items()
    ]


MUTATIONS = [
    # ------------------------------------------------------------------------------ arithmetic
    *_of(
        "eft.py",
        "tests/numerics/test_eft.py",
        error_of_a_sum=("return s, (a - aa) + (b - bb)", "return s, (a - aa) - (b - bb)"),
        fast_sum_of_unordered=("return s, b - (s - a)", "return s, a - (s - b)"),
        halves_too_long=("c = x * (2.0**low_bits + 1)", "c = x * (2.0 ** (low_bits - 2) + 1)"),
        large_halves=("* 2.0 ** -(low_bits + 1)", "* 2.0"),
        partial_product=("- al * bh)", "+ al * bh)"),
        large_products=("product.abs() > 2.0**900", "product.abs() > torch.inf"),
        fma_rounds_twice=(
            "return add_odd(a.to(wider) * b.to(wider), c.to(wider)).to(dtype)",
            "return (a.to(wider) * b.to(wider) + c.to(wider)).to(dtype)",
        ),
        root_of_a_midpoint=("up = remainder > root", "up = remainder > 0.9 * root"),
    ),
    *_of(
        "rounding.py",
        "tests/numerics/test_rounding.py",
        "tests/numerics/test_stochastic.py",
        odd_neighbour_inward=("bits | 1, (bits - 1) | 1)", "bits | 1, bits | 1)"),
        sixteen_bits_by_float32=(
            "x = _make_odd(nearest, torch.where(torch.isfinite(x), ",
            "x = _make_odd(nearest, 0 * torch.where(torch.isfinite(x), ",
        ),
        ties_away_from_zero=(
            "half = (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)",
            "half = 1 << (dropped - 1)",
        ),
        sign_of_a_split_zero=(
            "return torch.copysign(x, rounded[0].to(x.dtype))  # the",
            "return x  # the",
        ),
        collapse_to_nearest=(
            "total = torch.where(total == 0, leading, add_odd(leading, total))",
            "total = torch.where(total == 0, leading, leading + total)",
        ),
        move_without_remainder=("noise.uniform() < remainder", "noise.uniform() <= remainder"),
        move_from_zero=(
            "torch.where(x == 0, torch.copysign(least, remainder.to(x.dtype)), neighbour)",
            "torch.where(x == 0, least, neighbour)",
        ),
    ),
    *_of(
        "noise.py",
        "tests/numerics/test_stochastic.py",
        half_of_the_range=("_shifted(self.pattern, 11)", "_shifted(self.pattern, 12)"),
        streams_alike=("_signed(stream * 0x51B54A32D192ED03)", "_signed(0)"),
        one_key_for_all=(
            "torch.randint(2**63 - 1, (), device=device)",
            "torch.zeros((), dtype=torch.int64, device=device)",
        ),
        one_number_for_all=("(index + 1) * _signed", "(index * 0 + 1) * _signed"),
    ),
    *_of(
        "networks.py",
        "tests/numerics/test_networks.py",
        sum_without_its_tail=("settle(fast_two_sum(vh, tl + vl)", "settle(fast_two_sum(vh, vl)"),
        product_of_tails=("t = eft.fma(xl, yh, eft.fma(xh, yl, xl * yl))", "t = xl * yh + xh * yl"),
        fma_without_tails=("((ql + rl) + xl * yl)", "(ql + rl)"),
        root_without_its_tail=("low = xl + eft.fma(-sh, sh, xh)", "low = eft.fma(-sh, sh, xh)"),
        ties_the_other_way=("(torch.sign(b) == torch.sign(c))", "(torch.sign(b) != torch.sign(c))"),
        sign_of_zero=("finite & ~((leading == 0) & (plain == 0))", "finite"),
        special_values_in_tails=(
            "return leading, *(torch.where(finite, tail, 0) for tail in tails)",
            "return leading, *tails",
        ),
        one_chain_less=(
            "for place in range(min(terms + 1, last)):",
            "for place in range(terms - 1):",
        ),
        products_of_the_last_order=(
            "for i in range(1, terms)]",
            "for i in range(1, max(2, terms - 1))]",
        ),
        quotient_without_spare_digit=(
            "    digits.append(remainder[0] / y[0])\n    return",
            "    return",
        ),
        root_without_spare_digit=(
            "    root.append(remainder[0] / twice)\n    return",
            "    return",
        ),
    ),
    *_of(
        "wide.py",
        "tests/numerics/test_expansion.py",
        "tests/training/test_optimizers.py",
        sums_of_sums=(
            "return Wide([add_signed(leading, _total(tails)) if tails else leading])",
            "return Wide([self.value + other.value])",
        ),
        sign_of_zero=("torch.copysign(_total(self.levels), leading) if", "_total(self.levels) if"),
        float64_as_one_float32=("x.dtype not in (*NARROW, torch.float32):", "False:"),
        change_without_tails=(
            "return Wide([leading + (_total(tails) + moved if tails else moved)])",
            "return Wide([leading + moved])",
        ),
    ),
    *_of(
        "terms.py",
        "tests/numerics/test_stochastic.py",
        last_term_to_nearest=(
            "networks.shorten(self.floats, noise)",
            "networks.shorten(self.floats, None)",
        ),
    ),
    *_of(
        "numbers.py",
        "tests/numerics/test_conversion.py",
        special_values_lost=(
            "networks.settle(networks.distill(entered, terms + 1), entered[0])",
            "networks.distill(entered, terms + 1)",
        ),
        leading_terms_rounded_alone=(
            "peeled.append(collapse_terms(entered, base))",
            "peeled.append(entered[0].to(base))",
        ),
    ),
    *_of(
        "formulas.py",
        "tests/tensor/test_arithmetic.py",
        "tests/numerics/test_expansion.py",
        lerp_from_the_far_end=("return near.where(weight.is_below(0.5), far)", "return far"),
        difference_is_a_sum=('"fnma": lambda x, y, z: (-x).fma', '"fnma": lambda x, y, z: x.fma'),
        quotient_before_product=("x + value * a / b", "x + value * (a / b)"),
    ),
    *_of(
        "format.py",
        "tests/numerics/test_stochastic.py",
        "tests/numerics/test_formats.py",
        "tests/tensor/test_convert.py",
        noise_in_float32=('self.terms == 2 and self.rounding == "nearest"', "self.terms == 2"),
        norms_of_two_terms=("for length in shape) <= 1", "for length in shape) < 1"),
    ),
    *_of(
        "exact.py",
        "tests/numerics/test_exact.py",
        subnormals=("max(exponent, format.min_exponent)", "max(exponent, -10_000)"),
        sign_of_zero=("torch.where(leading == 0, terms[0], leading)", "leading + 0"),
        fractions_by_floats=("sum(map(Fraction, numbers), Fraction(0))", "Fraction(sum(numbers))"),
        overflow=(
            "Fraction(2) ** (format.max_exponent + 1)",
            "Fraction(2) ** (format.max_exponent + 2)",
        ),
    ),
    *_of(
        "finfo.py",
        "tests/numerics/test_finfo.py",
        eps=("eps = 4 * (format.u / 2)", "eps = 2 * (format.u / 2)"),
        largest=("math.fsum(base.max * (format.u / 2) ** i", "math.fsum(base.max * format.u ** i"),
        smallest=("base.smallest_normal * 2 * format.u", "base.smallest_normal * format.u"),
    ),
    # -------------------------------------------------------------------------------- dispatch
    *_of(
        "plans.py",
        "tests/tensor/test_arithmetic.py",
        "tests/tensor/test_tensor.py",
        difference_is_a_sum=('("fnma", (y, alpha, x))', '("fma", (y, alpha, x))'),
        reversed_the_wrong_way=("_sub(y, x, alpha)", "_sub(x, y, alpha)"),
        one_parameter_makes_parameters=('"parameter" if all(x.role', '"parameter" if any(x.role'),
        unlike_bases=("        require_one_base(name, [target, *(x.format for x in own)])\n", ""),
    ),
    *_of(
        "alone.py",
        "tests/tensor/test_alone.py",
        memory_is_shared=("    if row.overlaps(written, places):\n        return False\n", ""),
        the_same_place_is_enough=("if address == place and own == width:", "if address == place:"),
    ),
    *_of(
        "expressions.py",
        "tests/tensor/test_lists.py",
        "tests/numerics/test_stochastic.py",
        scalars_of_the_first_call=(
            "return column[:1] if len(column) > 1 and len(set(map(id, column))) == 1 else column",
            "return column[:1]",
        ),
        no_noise=("key = scalars[-1] if format.takes_key else None", "key = None"),
    ),
    *_of(
        "printer.py",
        "tests/kernels/test_kernel_types.py",
        every_nan_is_short=("self._zeros[place] >= _SHORT", "self._zeros[place] >= 0"),
    ),
    *_of(
        "tails.py",
        "tests/numerics/test_tails.py",
        ties_go_up=("((1 << (lost - 1)) - 1)", "(1 << (lost - 1))"),
        leading_cut_off=("(bits + 0x8000 if self.bits else bits) >> 16", "bits >> 16"),
        rounded_twice=("number.to_odd()", "number.to(torch.float32)"),
        nans_kept=("quiet(x).view", "x.view"),
    ),
    *_of(
        "noise.py",
        "tests/numerics/test_tails.py",
        writes_do_not_matter=("(key * _STEPS[stream])", "(0 * key + _STEPS[stream])"),
        salts_do_not_matter=(" + salt_of(key).to(torch.int32)", ""),
    ),
    *_of(
        "counting.py",
        "tests/tensor/test_balanced.py",
        one_salt_for_all=("hashlib.blake2b(name.encode()", "hashlib.blake2b(name[:0].encode()"),
        writes_with_their_salt=("return count & ((1 << _SALT) - 1)", "return count"),
        states_of_one_salt=("unwritten(count) + _salted(name)", "unwritten(count)"),
        pieces_begin_at_the_first=("count + (places << _SALT) if places", "count if places"),
    ),
    *_of(
        "pieces.py",
        "tests/tensor/test_balanced.py",
        every_row_of_one_element=("int(row) * stride", "int(row)"),
    ),
    *_of(
        "stepping.py",
        "tests/tensor/test_balanced.py",
        states_of_one_number=("self.made[x] = number + 1", "pass"),
    ),
    *_of(
        "convert.py",
        "tests/tensor/test_balanced.py",
        loaded_states_without_salts=("if count is None or _count(x)", "if True or _count(x)"),
        names_do_not_matter=("moved(start(local(x).device, name)", "moved(start(local(x).device)"),
    ),
    *_of(
        "sharded.py",
        "tests/distributed/test_fsdp.py",
        "tests/distributed/test_resharding.py",
        "tests/distributed/test_tensor_parallel.py",
        every_shard_the_first=("place += start * math.prod", "place += 0 * math.prod"),
        shards_of_the_first_size=("rows = -(-shape[dim] // mesh", "rows = (shape[dim] // mesh"),
    ),
    *_of(
        "patches/distributed.py",
        "tests/distributed/test_fsdp.py",
        idle_steps_counted=("        count.copy_(was)", "        pass"),
        two_dtypes_refused=("if schema.op.overloadpacket in _LERPS:", "if False:"),
        lists_refused=("(type(x)(map(like, first, x)) if", "(x if"),
    ),
    *_of(
        "scaled_tails.py",
        "tests/numerics/test_scaled_tails.py",
        "tests/tensor/test_lending.py",
        scale_saturates=("((1 << 23) - 1 - (3 << 21))", "0"),
        code_cut_off=(
            "(pattern + (1 << (self.bits - 1))) >> self.bits\n        is_fin",
            "pattern >> self.bits\n        is_fin",
        ),
        scaled_tie_up=("half = ((pattern >> lost) & 1) + ((1", "half = 1 + ((1"),
        subnormal_numbers_kept=("torch.where(magnitude < (1 << 23), 0, magnitude)", "magnitude"),
        scales_below=("torch.full_like(scales, _LEAST)", "torch.ones_like(scales)"),
        rounded_to_infinity=("_INFINITY - (1 << lost)", "_INFINITY - 1"),
        tails_of_nans=("pattern - (own << self.bits), 0)", "pattern - (own << self.bits), 1)"),
        states_in_codes=(
            'divide an update by epsilon."""\n        return named("bf16i16")',
            'divide an update by epsilon."""\n        return self',
        ),
        scaled_rounded_twice=("number.to_odd()", "number.to(torch.float32)"),
        below_zero_kept=(
            "is_below, is_nan = (own == 0) & (tails < 0)",
            "is_below, is_nan = (own == 0) & (tails > 999)",
        ),
    ),
    *_of(
        "lending.py",
        "tests/tensor/test_lending.py",
        lent_once=("        if not is_bare([codes]):", "        if True:"),
        lent_numbers_of_codes=(
            "self._view(self._source.dequantize())",
            "self._view(self._source.lent.float())",
        ),
        views_of_the_whole=("lambda x: view(first(x))", "lambda x: view(x)"),
        first_of_many=("args, **kwargs)[i]", "args, **kwargs)[0]"),
        copies_cannot_be_written=("if format is LENT or numbers.dim() < 2:", "if False:"),
    ),
    *_of(
        "lending.py",
        "tests/distributed/test_fsdp.py",
        padding_left_out=("    if missing > 0 and", "    if False and"),
        wide_types_get_codes=("if dtype in (None, x._format.dtype) else", "if True else"),
    ),
    *_of(
        "rows.py",
        "tests/tensor/test_lending.py",
        parameters_lend_nothing=("elif own or lends(x):", "elif own:"),
        new_ones_are_values=('if not is_like and x._role == "parameter":', "if False:"),
    ),
    *_of(
        "stored.py",
        "tests/tensor/test_lending.py",
        parameters_note=('or x._role == "parameter"', "or False"),
    ),
    *_of(
        "stored.py",
        "tests/tensor/test_stored.py",
        "tests/training/test_exact_float32.py",
        parameters_become_plain=("    if format is None or any(", "    if True or any("),
        stored_again_without_counting=("    _finish(targets)\n", ""),
        blocks_not_counted=("    _finish(written)\n", ""),
        blocks_begin_anew=(
            "for read in readers:\n            read(start, stop)",
            "for read in readers:\n            read(0, stop - start)",
        ),
    ),
    *_of(
        "auditing.py",
        "tests/tensor/test_stored.py",
        memory_of_decoded_numbers=(
            "_leading(x).data_ptr() == _leading(y)",
            "_floats(x)[0].data_ptr() == _floats(y)[0]",
        ),
    ),
    *_of(
        "operands.py",
        "tests/tensor/test_balanced.py",
        results_begin_anew=("else key + 1", "else 0 * key"),
        writes_are_not_counted=("x.add_(1)", "x.add_(0)"),
    ),
    *_of(
        "recoding.py",
        "tests/kernels/test_same_bits.py",
        parts_round_alike=("first.fill_(start)", "first.fill_(0)"),
    ),
    *_of(
        "traces.py",
        "tests/kernels/test_kernels.py",
        "tests/tensor/test_tape.py",
        operands_stay_as_they_were=("if key[0] != target}", "}"),
    ),
    *_of(
        "tape.py",
        "tests/tensor/test_tape.py",
        "tests/tensor/test_tape_writes.py",
        everything_is_stored=(
            "for i, x in held if x[0]() is not None or any(map(_is_alive, x))",
            "for i, x in held",
        ),
        nothing_goes_together=(
            "groups.setdefault((x.trace, x.results(), x.layout[0][0]), [])",
            "groups.setdefault((x.trace, x.results(), id(x)), [])",
        ),
    ),
    *_of(
        "decoded.py",
        "tests/tensor/test_tape_of_numbers.py",
        "tests/tensor/test_fuzz_steps.py",
        key_of_the_first_write=("count + before if before else count", "count"),
        notes_are_forgotten=("[x * y for x, y in own]", "[x for x, y in own]"),
        reads_what_is_not_rounded=("if i in self._unrounded and not (", "if False and not ("),
        writes_are_not_counted=("if counts and number:", "if False:"),
        parts_begin_at_zero=("keys, start=rows.start)", "keys, start=0)"),
        one_number_for_all=(
            "column.count(first) == len(column)",
            "column.count(first) > 0",
        ),
        done_twice_after_a_cut=("self._at = i + 1, None", "self._at = i + 1, computed"),
    ),
    *_of(
        "recording.py",
        "tests/tensor/test_tape.py",
        "tests/tensor/test_tape_writes.py",
        gradients_are_read_late=("[[*map(_copied, x)] for x in", "[x for x in"),
        rows_read_each_other=(" or (count > 1 and new and not _are_apart(added))", ""),
        writes_are_not_counted=(
            "            _increment_version(columns[0])",
            "            pass",
        ),
    ),
    *_of(
        "fused.py",
        "tests/tensor/test_lists.py",
        "tests/training/test_optimizers.py",
        given_twice_steps_once=("if len(set(map(id, params))) < len(params):", "if False:"),
        skipped_first_steps=("            buffer.zero_()", "            pass"),
        gradients_stay_scaled=(
            "            unscale_(flat, format.name, scale)",
            "            pass",
        ),
        decay_is_l2=('("adam", "decay")', '("adam", "l2")'),
    ),
    *_of(
        "functions.py",
        "tests/tensor/test_models.py",
        graphs_lost=("        or torch.is_grad_enabled()\n", ""),
    ),
    # --------------------------------------------------------------------------------- kernels
    *_of(
        "columns.py",
        "tests/tensor/test_lists.py",
        "tests/kernels/test_kernels.py",
        scalars_of_the_first_row=(
            "[x if len(x) == 1 else [x[i] for i in rows] for x in self.scalars]",
            "[x[:1] for x in self.scalars]",
        ),
        last_tensors_decide=("are_contiguous &= all", "are_contiguous = all"),
    ),
    *_of(
        "cpp.py",
        "tests/kernels/test_kernels.py",
        ties_away_from_zero=("(bits + 0x7fff + ((bits >> 16) & 1))", "(bits + 0x8000)"),
        index_in_a_block=('"index": "counted<L>() + i"', '"index": "counted<L>()"'),
        subnormals_of_half=(
            "U subnormal = as<U>(to<F>(bits & 0x7fff) * 0x1p-24f);",
            "U subnormal = as<U>(to<F>(bits & 0x7fff) * 0x1p-25f);",
        ),
    ),
    *_of(
        "cpu.py",
        "tests/kernels/test_kernels.py",
        contracted=("-ffp-contract=off", "-ffp-contract=fast"),
    ),
    # ------------------------------------------------------------------------------- structure
    *_of(
        "comparison.py",
        "tests/tensor/test_select.py",
        at_most_is_below=("less(x, y) | equal(x, y)", "less(x, y)"),
        magnitude_of_minus_zero=("choose(torch.signbit(x[0])", "choose(x[0] < 0"),
        equal_in_the_leading_term=(
            "bool(equal(*terms).all())",
            "bool(equal(*(x[:1] for x in terms)).all())",
        ),
    ),
    *_of(
        "comparison.py",
        "tests/tensor/test_operators.py::test_order_is_exact_on_all_terms",
        "tests/tensor/test_operators.py::test_order_of_what_is_not_a_number",
        leading_terms_last=("for term in reversed(terms):", "for term in terms:"),
        ranks_of_leading_terms=(
            "for term in terms:\n        is_new",
            "for term in terms[:1]:\n        is_new",
        ),
        unstable=("rank.double().masked_fill(torch.isnan(terms[0]), torch.nan)", "rank.double()"),
    ),
    *_of(
        "comparison.py",
        "tests/tensor/test_neighbours.py",
        gaps_that_are_halved=("for _ in range(len(x) - 1):", "for _ in range(0):"),
        from_infinity=("choose(torch.isfinite(x[0]), near, plain)", "near"),
    ),
    *_of(
        "structure.py",
        "tests/tensor/test_structure.py",
        "tests/tensor/test_tensor.py",
        "tests/tensor/test_modules.py",
        "tests/tensor/test_hazards.py",
        filled_in_the_leading_term=(
            "fill(target, [x.expand(target.shape) for x in numbers])",
            "fill(target, [i * x.expand(target.shape) for i, x in zip((1, 0, 0), numbers)])",
        ),
        role_of_the_empty=('x.role if holds else "value"', '"value"'),
        role_of_the_new=(
            "return x._like([func(t, *args, **kwargs) for t in x._read()], own=True)",
            "return MCFTensor([func(t, *args, **kwargs) for t in x._read()], x.format)",
        ),
        item_of_the_leading_term=(
            "return func(x._collapsed())",
            "return func(x.components[0])",
        ),
        gradients_that_are_expansions=(
            'return x.acts_as == "parameter" and (in_forward',
            "return False and (in_forward",
        ),
        masked_in_place=("if func.overloadpacket is aten.masked_fill:", "if False:"),
    ),
    *_of(
        "structure.py",
        "tests/tensor/test_operators.py::test_placement_keeps_all_terms",
        "tests/tensor/test_operators.py::test_numbers_are_placed_with_all_their_bits",
        "tests/tensor/test_operators.py::test_operator[index_put-bf16x2]",
        accumulates_term_by_term=(' or named.get("accumulate")', ""),
    ),
    *_of(
        "long.py",
        "tests/tensor/test_long.py",
        mean_of_one_more=(
            "return total / (x.numel() / max(total.numel(), 1))",
            "return total / (x.numel() / max(total.numel(), 1) + 1)",
        ),
        odd_rows_drop_one=("row = torch.cat([pairs, row[..., 2 * half :]], -1)", "row = pairs"),
        scan_of_one_pass=("distance *= 2", "distance *= 4"),
        blocks_of_products=(
            "_sum(torch.stack(parts), 0) if len(parts) > 1",
            "parts[-1] if len(parts) > 1",
        ),
        variance_of_a_population=(
            "- (1 if correction is None else correction)",
            "- (0 if correction is None else correction)",
        ),
        repeated_positions=(
            "for i in range(int(occurrence.max()) + 1 if len(positions) else 0):",
            "for i in range(1 if len(positions) else 0):",
        ),
        close_to_infinity=("(torch.isfinite(y) & (", "((y == y) & ("),
    ),
    *_of(
        "collectives.py",
        "tests/distributed/test_collectives.py",
        mean_of_ranks=('total / len(parts) if op == "avg" else total', "total"),
        gather_of_the_leading_term=(
            "for i, part in enumerate(parts):",
            "for i, part in enumerate(parts[:1]):",
        ),
        ranks_draw_numbers=("return MCFTensor.of(x.components, x.format.nearest)", "return x"),
        formats_that_differ=("if len(kinds) > 1:", "if len(kinds) > 2:"),
    ),
    # ---------------------------------------------------------------------- tensors, conversion
    *_of(
        "tensor.py",
        "tests/tensor/test_tensor.py",
        "tests/tensor/test_hazards.py",
        "tests/tensor/test_structure.py",
        "tests/files/test_checkpoint_fuzz.py",
        strides_unlike=(
            "x.shape == leading.shape and x.stride() != leading.stride()",
            "False",
        ),
        devices_unlike=("if x.device != leading.device:", "if False:"),
        role_of_a_parameter=(
            '            self._role = "parameter"\n            for',
            "            for",
        ),
        numbers_rounded_by_where=(
            "number_in(x, format, role) if isinstance(x, (int, float)) else x",
            "number_in(x, format, role) if False else x",
        ),
        numbers_rounded_by_assignment=(
            "if isinstance(value, (int, float)) and not isinstance(value, bool):",
            "if isinstance(value, float) and value != value:",
        ),
        array_of_leading_terms=(
            "return self._collapsed().cpu().numpy()",
            "return self.components[0].detach().double().cpu().numpy()",
        ),
        damaged_pickles=(
            'if components[0].shape != shape or role not in ("value", "parameter"):',
            "if components[0].shape != shape:",
        ),
    ),
    *_of(
        "convert.py",
        "tests/tensor/test_convert.py",
        "tests/tensor/test_modules.py",
        "tests/training/test_accumulation.py",
        module_in_use=("            if not _is_free(x):", "            if False:"),
        sums_of_gradients_end=(
            "if isinstance(x, MCFTensor) and isinstance(hook, GradientHook):",
            "if False:",
        ),
        gradient_of_another_dtype=("        x.grad = grad.to(x.dtype)", "        x.grad = grad"),
        assigned_as_they_are=(
            "            if format_of(new) != format:\n                new = value_in(",
            "            if False:\n                new = value_in(",
        ),
        overrides_first_to_match=(
            "            wanted = overrides[matching[0]]\n",
            "            wanted = overrides[matching[-1]]\n",
        ),
    ),
    *_of(
        "convert.py",
        "tests/tensor/test_statistics.py",
        buffers_plain=(
            "wanted = None if x.is_complex() else choose.of_buffer(x)",
            "wanted = None",
        ),
        averages_as_parameters=(
            'role = "value" if is_average(name) else "parameter"',
            'role = "parameter"',
        ),
        loaded_buffers_as_values=("new = _in_role(new.detach(), part.role)", "pass"),
    ),
    *_of(
        "convert.py",
        "tests/training/test_plain_parameters.py",
        what_is_new_by_default=("        if self.present:", "        if False:"),
        overrides_are_forgotten=("            meant.append(name)", "            pass"),
    ),
    *_of(
        "statistics.py",
        "tests/tensor/test_statistics.py",
        statistics_by_leading_terms=(
            "if isinstance(x, MCFTensor) and not _is_value(x) and name not in _STATISTICS:",
            "if isinstance(x, MCFTensor):",
        ),
        batches_count_twice=("operands[share] = 1.0", "operands[share] = 2.0"),
        averages_in_eval_mode=('given.get("training", func not in _READING)', "True"),
        sums_of_processes_unknown=(
            "    aten.batch_norm_update_stats.default,  # programs that average by themselves\n",
            "",
        ),
    ),
    *_of(
        "defaults.py",
        "tests/tensor/test_defaults.py",
        large_weights_in_two_terms=("if is_large else by_shape", "if False else by_shape"),
        rates_do_not_matter=("_LARGE if lr is None else lr * _UPDATES", "_LARGE"),
        luck_decides=("_LARGE = 0.75", "_LARGE = 0.45"),
    ),
    *_of(
        "plain_parameters.py",
        "tests/training/test_plain_parameters.py",
        first_step_only=(
            "new = [p for p in plain if id(p) not in told]",
            "new = [] if told else plain",
        ),
        said_at_every_step=("    told.update(map(id, new))", "    pass"),
        meant_ones_too=(" and id(p) not in meant]", "]"),
    ),
    *_of(
        "casting.py",
        "tests/tensor/test_first_meeting.py",
        gradients_end=(
            "if is_wrapped(x) or (torch.is_grad_enabled() and x.requires_grad):",
            "if False:",
        ),
        results_in_fewer_bits=("format.precision <= PRECISION or", "True or"),
        copies_left_out=("return x.clone() if copy else x", "return x"),
    ),
    *_of(
        "printing.py",
        "tests/tensor/test_first_meeting.py",
        digits_of_float64=(
            "if format.precision > 53 and PRINT_OPTS",
            "if False and PRINT_OPTS",
        ),
    ),
    *_of(
        "decimals.py",
        "tests/tensor/test_first_meeting.py",
        leading_term_alone=("sum(map(Fraction, terms), Fraction(0))", "Fraction(terms[0])"),
    ),
    *_of(
        "compute.py",
        "tests/tensor/test_first_meeting.py",
        errors_of_torch=(
            "            raise explained(error, args, kwargs) from error",
            "            raise",
        ),
    ),
    # ------------------------------------------------------------------------------- training
    *_of(
        "accumulation.py",
        "tests/training/test_accumulation.py",
        removed_and_still_there=(
            "if self._active and p.grad is not None:",
            "if p.grad is not None:",
        ),
        format_of_another_base=(
            "if format is None or format.dtype != grad.dtype:",
            "if format is None:",
        ),
        graphs_cut=("if grad.requires_grad or grad.is_complex()", "if grad.is_complex()"),
        sparse_dropped=("    if grad.is_sparse:\n        sum_.add_(grad)\n", ""),
    ),
    *_of(
        "gradient_hooks.py",
        "tests/training/test_accumulation.py",
        moved_without_hooks=("            if isinstance(p, MCFTensor):", "            if False:"),
    ),
    *_of(
        "releasing.py",
        "tests/training/test_releasing.py",
        steps_twice=("if p in self._stepped or p in self._failed:", "if p in self._failed:"),
        fails_and_steps_again=(
            "if p in self._stepped or p in self._failed:",
            "if p in self._stepped:",
        ),
        graphs_cut=("or grad is None or grad.requires_grad:", "or grad is None:"),
        bucket_never_ends=(
            "                _at_end_of_backward(self._step_all)",
            "                pass",
        ),
        bucket_is_dropped_with_its_gradients=(
            "if p.grad is not None:  # else somebody has dropped it",
            "if True:",
        ),
        gradients_of_a_failed_step=(
            "        finally:\n            for p in stepping:\n                p.grad = None\n",
            "",
        ),
        norm_of_any_order=("for p in self._names if p in self._norms]", "for p in self._norms]"),
        clipped_for_ever=(
            "        self._measured = None\n        self._bytes = 0",
            "        self._bytes = 0",
        ),
        loaded_and_still_failed=(
            "            optimizer.register_load_state_dict_post_hook(self._end),\n",
            "",
        ),
        scaled=('if getattr(optimizer, "grad_scale", None) is not None:', "if False:"),
        two_handles=("other._optimizer is optimizer or not", "not"),
        in_a_cycle_with_parameters=(
            "self._handle = weakref.ref(handle)",
            "self._handle = lambda: handle",
        ),
        copies_refuse=(
            "return list, ()  # copies of a module have no handle",
            "return type(self), ()",
        ),
    ),
    *_of(
        "separate.py",
        "tests/training/test_releasing.py",
        hooks_of_its_base=("            setattr(optimizer, name, type(x)())", "            pass"),
        groups_note_each_step=(
            '[{**groups[g], "params": list(ps)} for g, ps in chosen.items()]',
            '[groups[g] | {"params": list(ps)} for g, ps in chosen.items()]\n'
            "        [groups[g].update(step=groups[g].get('step', 0) + 1) for g in chosen]",
        ),
        all_are_separable=("    if _are_equal(together, apart):", "    if True:"),
    ),
    *_of(
        "state_layouts.py",
        "tests/meters/test_memory.py",
        without_the_mode=("            plan.apply(trial)", "            pass"),
        order_of_lengths=(
            "enumerate(sorted({x for x in shape if x > 1}), 2)",
            "enumerate(sorted({x for x in shape if x > 1}, reverse=True), 2)",
        ),
        counts_of_writes=(" + 8 * self.counts_writes", ""),
        all_exact=("is_exact = None not in lengths and", "is_exact = True or"),
        one_group_for_all=("keys = {p: (g, ", "keys = {p: (0, "),
    ),
    *_of(
        "steps.py",
        "tests/training/test_optimizers.py",
        "tests/numerics/test_stochastic.py",
        decay_grows=('change = change - p * s["decay"]', 'change = change + p * s["decay"]'),
        decay_without_rate=('fixed["decay"] = s["lr"] * s["decay"]', 'fixed["decay"] = s["decay"]'),
        amsgrad_forgotten=("(v_max[0] if v_max else v).sqrt()", "v.sqrt()"),
        nesterov_forgotten=(
            'g = g + buffer * s["nesterov"] if "nesterov" in s else buffer',
            "g = buffer",
        ),
        dampening_forgotten=('g * s["1 - dampening"]', "g"),
        minimized=("        if maximize:", "        if False:"),
        infinities_taken=('torch.where(s["found_inf"] == 1, o, n)', "n"),
        gradients_scaled=('g = g / s["grad_scale"]', "g = g"),
        step_of_the_first=(
            "[known[count] for count in counts]",
            "[known[counts[0]] for count in counts]",
        ),
        states_draw_alike=(
            "noise_of(f.rounding, key, index, stream)",
            "noise_of(f.rounding, key, index)",
        ),
        first_moment_uncorrected=("rate = lr / (1 - integer_power(beta1, step))", "rate = lr"),
        rate_a_step_ahead=(
            "return (-lr / (1 + (step - 1) * lr_decay),)",
            "return (-lr / (1 + step * lr_decay),)",
        ),
        float32_beside_float64=("f.dtype.itemsize <= limit for f", "True for f"),
    ),
    *_of(
        "dynamo.py",
        "tests/compile/test_compile.py::TestFunctions",
        "tests/numerics/test_stochastic.py",
        taken_apart=(
            'if keyword not in given["kwargs"] or not _is_ours(given["self"]):',
            "if True:",
        ),
        addcdiv_taken_apart=("if decompose is None:", "if found:"),
    ),
    *_of(
        "registries.py",
        "tests/numerics/test_stochastic.py",
        draws_merged=("    operators.append(torch.ops.mcftensor.draw_key)", "    pass"),
    ),
    *_of(
        "collage.py",
        "tests/training/test_collage.py",
        "tests/training/test_optimizers.py",
        plus_is_light=(
            "    | dict.fromkeys(SECOND_MOMENTS, _OWN)\n",
            "    | dict.fromkeys(SECOND_MOMENTS)\n",
        ),
        plain_momentum=('    | {"momentum_buffer": _OWN},', "    | {},"),
        copies_without_mode=("    return collage(copied, mode)", "    return copied"),
        loaded_states_rounded=(
            "if format and rounds and x.shape == p.shape else x",
            "if False else x",
        ),
        momentum_from_the_gradient=(
            "                if isinstance(wanted, Format):",
            "                if False:",
        ),
        dampened_momentum=('group["momentum"] and not group["dampening"]', 'group["momentum"]'),
        modes_pile_up=("        previous.remove()", "        pass"),
        unknown_states=("            self._check_names(optimizer)", "            pass"),
    ),
    *_of(
        "optimizers.py",
        "tests/compile/test_untraced.py",
        "tests/compile/test_compile.py::TestOptimizerSteps",
        steps_are_traced=("return untraced(take, self", "return take(self"),
        all_steps_untraced=(
            "        return step(self, *args, **kwargs)\n\n    chosen",
            "        return untraced(step, self, *args, **kwargs)\n\n    chosen",
        ),
    ),
    # ---------------------------------------------------------------------------- checkpoints
    *_of(
        "loading.py",
        "tests/files/test_save_file.py",
        "tests/files/test_checkpoint_fuzz.py",
        shapes_that_differ=("    if new.shape != old.shape:", "    if False:"),
        ties_that_differ=(
            "if x is not y and not (type(x) is type(y) and torch.equal(x, y)):",
            "if False:",
        ),
    ),
    *_of(
        "files.py",
        "tests/files/test_save_file.py",
        "tests/files/test_checkpoint_fuzz.py",
        tensors_that_are_gone=("require(name, name in file)", "pass"),
        digests_unread=(
            "require(name, digests.get(name) == digest(name, x))",
            "require(name, name in digests)",
        ),
        shards_of_another=(
            "if verify and seals.get(file) != (shard.seal if seals else None):",
            "if False:",
        ),
    ),
    *_of(
        "transformer_engine.py",
        "tests/files/test_bridge_layouts.py",
        masters_of_another_step=("    if differ:", "    if False:"),
        remainders_without_a_sign=("<< 16) + tail", "<< 16) + (tail.to(torch.int32) & 0xFFFF)"),
    ),
    *_of(
        "conversion.py",
        "tests/files/test_bridge.py",
        bits_lost_in_silence=("if lost and not self.lossy:", "if False:"),
    ),
    *_of(
        "resuming.py",
        "tests/files/test_bridge.py",
        "tests/files/test_bridge_fuzz.py",
        optimizers_in_half=("        vars(optimizer).update(before)", "        pass"),
        states_of_other_shapes=("and x.shape != p.shape:", "and False:"),
    ),
    *_of(
        "weights.py",
        "tests/files/test_bridge_fuzz.py",
        archives_unchecked=("    if damaged is not None:", "    if False:"),
    ),
    *_of(
        "megatron.py",
        "tests/files/test_bridge_fuzz.py",
        masters_that_lost_their_names=("    if masters and without:", "    if False:"),
    ),
    *_of(
        "distcp.py",
        "tests/files/test_bridge_fuzz.py",
        paths_of_other_names=('if ".".join(map(str, paths[name])) != name:', "if False:"),
        parts_unchecked=("if verify and zipfile", "if False and zipfile"),
    ),
    *_of(
        "torchtitan.py",
        "tests/files/test_bridge_layouts.py",
        states_of_no_weight=("    if unknown:", "    if False:"),
        one_group=('if {**its_options, "params": group["params"]} == group:', "if True:"),
    ),
    *_of(
        "zero.py",
        "tests/files/test_bridge_layouts.py",
        elements_that_are_not_there=("if not used <= available <= used + padding:", "if False:"),
        parts_of_later_processes=("start, stop = start - length, stop - length", "pass"),
    ),
    *_of(
        "atomic.py",
        "tests/files/test_atomic.py",
        renamed_before_it_is_on_disk=("            synchronize(temporary)\n", ""),
        written_in_place=(
            "            temporary.replace(path)",
            "            path.write_bytes(temporary.read_bytes())",
        ),
        leftovers_of_the_living=(
            "if _lock(file) and not is_needed(path):",
            "if not is_needed(path):",
        ),
        leftovers_stay=("        remove_abandoned(leftover)", "        pass"),
    ),
    *_of(
        "shards.py",
        "tests/files/test_checkpoint_fuzz.py",
        "tests/files/test_save_file.py",
        "tests/files/test_atomic.py",
        outside_of_the_folder=('if f in ("", ".", "..") or set(f)', "if set(f)"),
        backslashes=('{"/", "\\\\", ":", "\\0"}', '{"/", ":", "\\0"}'),
        shards_too_large=("filled + size > most", "filled > most"),
        units=("2 ** (10 * i) for i", "10 ** (3 * i) for i"),
        stale_shards_stay=("            file.unlink(missing_ok=True)", "            pass"),
    ),
    *_of(
        "state_dicts.py",
        "tests/files/test_terms.py",
        "tests/files/test_store_as_terms.py",
        "tests/files/test_save_file.py",
        terms_that_are_copies=(
            "stored_components(part)[i].detach()",
            "stored_components(part)[i].detach().clone()",
        ),
        terms_missing=(
            "if name not in groups or set(present) != set(expected):",
            "if name not in groups:",
        ),
        names_taken=("            if beside in state_dict:", "            if False:"),
        transposed_is_tied=(", t.shape, t.stride())", ")"),
    ),
    *_of(
        "digests.py",
        "tests/files/test_save_file.py",
        "tests/files/test_checkpoint_fuzz.py",
        digest_without_shape=(
            'kind = f"{name} {x.dtype} {tuple(x.shape)}"',
            'kind = f"{name} {x.dtype}"',
        ),
        later_versions=('if content["version"] != _VERSION:', "if False:"),
        metadata_unsealed=("    if seal != _of(content):", "    if False:"),
    ),
    # --------------------------------------------------------------------------------- meters
    *_of(
        "readings.py",
        "tests/meters/test_edq.py",
        "tests/meters/test_edq_obstacles.py",
        along_itself=("= intended @ moved\n", "= moved @ moved\n"),
        lost_in_the_last_term=("stays[0].sum()", "stays[-1].sum()"),
        nan_has_moved=("((new == old) | (torch.isnan(new) & torch.isnan(old)))", "(new == old)"),
        parts_of_one_rank=(
            "            torch.distributed.all_reduce(rows, group=group)\n",
            "",
        ),
        steps_that_differ=(
            "sample.sums[DIFFERS] += sample.fingerprints[name] != real[name]",
            "pass",
        ),
        norm_is_its_square=("norm = math.sqrt(total[_UPDATE])", "norm = total[_UPDATE]"),
    ),
    *_of(
        "auditing.py",
        "tests/meters/test_auditing.py",
        threshold=("elif unchanged >= threshold:", "elif unchanged > threshold:"),
        zeros_in_the_leading_term=("[tail == 0 for tail in tails], same)", "[], same)"),
        nearly_all_is_all=("min(max(round(100 * share, 2), 0.01), 99.99)", "round(100 * share, 2)"),
        nan_has_moved=("same | (np.isnan(leading) & np.isnan(y[0]))", "same"),
    ),
    # -------------------------------------------------------------------- what comes from elsewhere
    *_of(
        "directory.py",
        "tests/kernels/test_compiler.py",
        strangers_are_trusted=("return status.st_uid in (0, os.geteuid())", "return True"),
        open_folders_are_trusted=(
            "return _is_own(status) and not is_shared and not status.st_mode & stat.S_IWOTH",
            "return _is_own(status) and not is_shared",
        ),
        links_are_followed=("status = path.lstat()", "status = path.stat()"),
        contents_unread=(
            'if is_safe and path.stem.endswith(f"_{_digest(path.read_bytes())}"):',
            "if is_safe:",
        ),
    ),
    *_of(
        "cpu.py",
        "tests/kernels/test_compiler.py",
        flushing_stays=("if _flushes_subnormals() != flushes:", "if False:"),
        untried=('if not is_right(_opened(scratch / "kernel.so")):', "if False:"),
    ),
    *_of(
        "operands.py",
        "tests/tensor/test_interrupts.py",
        terms_one_by_one=(
            "torch._foreach_copy_(own, new, non_blocking)",
            "[x.copy_(y) for x, y in zip(own, new)]",
        ),
        places_one_by_one=(
            "return list(map(partial.__call__, calls))",
            "return [call() for call in calls]",
        ),
    ),
    *_of(
        "structure.py",
        "tests/tensor/test_structure.py",
        places_that_are_not_there=(
            "    if in_place:\n        _require_places",
            "    if False:\n        _require_places",
        ),
        raises_in_its_middle=("by_copy = func is aten.masked_scatter_.default", "by_copy = False"),
    ),
    *_of(
        "structure.py",
        "tests/tensor/test_interrupts.py",
        shapes_one_by_one=("if not is_bare(x.components):", "if True:"),
    ),
    *_of(
        "tensor.py",
        "tests/tensor/test_interrupts.py",
        data_one_by_one=(
            "self.__dict__.update(new)  # all by one call",
            "[setattr(self, n, c) for n, c in new.items()]",
        ),
    ),
    *_of(
        "patches/distributed.py",
        "tests/files/test_terms.py",
        "tests/distributed/test_resharding.py",
        loaded_terms_unseen=("    if actions:\n", "    if False:\n"),
    ),
    *_of(
        "format.py",
        "tests/files/test_terms.py",
        "tests/tensor/test_nan_bits.py",
        misfits_unseen=("fits[where] &= stays | is_tie", "pass"),
        any_nan=("return [quiet(leading), *tails]", "return [leading, *tails]"),
    ),
    *_of(
        "state_dicts.py",
        "tests/files/test_terms.py",
        sums_unread=("_sum_of(parts[0], format) != told", "False"),
        tails_kept=(
            "return [x if i in kept else torch.zeros_like(x) for i, x in enumerate(parts)], 0",
            "return parts, 0",
        ),
        scales_dropped=("kept = {0, *format.shared}", "kept = {0}"),
        refused_and_left=("found, _ = format.normalized(parts)", "found = parts"),
        first_refusal_ends_it=(
            "for error in list(_refusals(terms)):",
            "for error in _refusals(terms):",
        ),
    ),
    *_of(
        "states.py",
        "tests/training/test_resuming_every_optimizer.py",
        numbers_are_rounded=("(x.shape != p.shape or id(p)", "(id(p)"),
    ),
    *_of(
        "stepping.py",
        "tests/training/test_inside_a_step.py",
        "tests/tensor/test_tape.py",
        the_tape_is_never_run=(
            "            self.tape.run()\n        finally",
            "            pass\n        finally",
        ),
        step_never_ends=("        _thread.step = outer\n        step.end()", "        step.end()"),
        inner_steps_begin_anew=("{} if outer is None else outer.gradients", "{}"),
        closures_inside=("        _thread.step = None\n", ""),
        kept_gradients_follow=("                read.leave_gradient()", "                pass"),
        sparse_changes_are_lost=("        plain.copy_(read)", "        pass"),
    ),
    *_of(
        "dtypes.py",
        "tests/training/test_inside_a_step.py",
        base_is_the_identity=(
            "return x._collapsed(x._format.dtype).to(*rest, **kwargs)",
            "return x",
        ),
        dtype_of_numbers_rounds=("rest = [x._format.dtype if y in given else y for y in rest]", ""),
    ),
    *_of(
        "tensor.py",
        "tests/training/test_inside_a_step.py",
        recorded_is_inside=("and not (torch.is_grad_enabled() and self.requires_grad)", ""),
        each_look_another_gradient=("            step.gradients[id(self)] = found, read\n", ""),
        views_without_tails=(
            "                made._grow([view(x) for x in tails])",
            "                pass",
        ),
    ),
    *_of(
        "sharded.py",
        "tests/distributed/test_fsdp.py::test_steps_give_the_bits_of_unsharded_ones",
        plain_shards=("            p.grad = lifted\n", ""),
        lifted_for_ever=("                p.grad = grad\n", "                pass\n"),
    ),
    *_of(
        "collage.py",
        "tests/training/test_collage.py",
        any_path_becomes_fused=("            options == [None, None]\n", "            True\n"),
        sparse_stays_fused=('            group["fused"] = False', "            pass"),
    ),
    *_of(
        "codes.py",
        "tests/numerics/test_blocks.py",
        "tests/numerics/test_scaled_tails.py",
        saturates=("above = (1 << 23) - 1 - (3 << 21)", "above = 0"),
        small_ones_are_lost=("codes = codes.maximum(torch.ones_like(codes))", "codes = codes"),
        ties_up=("bits + ((bits >> _LOST) & 1) + ((1", "bits + 1 + ((1"),
        mean_of_the_square=("bits if noise is None else _by_roots(bits)", "bits"),
        small_ties_of_the_sum=(" | (kept != y).to(torch.int32)", ""),
        small_sums_up=("small - (kept > y).to(torch.int32)", "small"),
    ),
    *_of(
        "kernels/shared.py",
        "tests/numerics/test_blocks.py",
        rows_of_whole_blocks_alone=("missing = -rows.shape[1] % BLOCK", "missing = 0"),
        blocks_in_turns=(".repeat_interleave(BLOCK, 1)", ".repeat(1, BLOCK)"),
    ),
    *_of(
        "factor.py",
        "tests/tensor/test_rows.py",
        never_multiplied=("        numbers.mul_(self.value)\n", ""),
        multiplied_for_ever=(
            "[] if key is None else [key])\n        self.value = 1.0\n",
            "[] if key is None else [key])\n",
        ),
    ),
    *_of(
        "rows.py",
        "tests/tensor/test_rows.py",
        any_dimension=("return dim in (0, -x.dim())", "return True"),
        parts_forget=("    if target.is_part:\n        factor.settle()\n", ""),
        views_of_other_rows=("len(shape) > 1 and first == x.shape[0]", "len(shape) > 1"),
    ),
    *_of(
        "stored.py",
        "tests/tensor/test_rows.py",
        multiplied_after_it_is_written=(
            "            x._factor.value = 1.0\n",
            "            pass\n",
        ),
        parts_multiply_the_whole=("        or x.is_part\n", ""),
    ),
    *_of(
        "states.py",
        "tests/distributed/test_resharding.py",
        blocks_are_cast=(
            " or id(p) in _thread.resumed or in_blocks)",
            " or id(p) in _thread.resumed)",
        ),
    ),
    *_of(
        "narrow_states.py",
        "tests/training/test_narrow_states.py",
        said_again=("if _seen.get(optimizer) == latest:", "if False:"),
        said_of_all=("if x.shape != p.shape or (", "if True or ("),
    ),
    *_of(
        "kept.py",
        "tests/files/test_convert_after_loading.py",
        rounded_in_silence=("and one.differs_from(x):", "and False:"),
        said_of_what_fits=("and one.differs_from(x):", "and True:"),
    ),
    # --------------------------------------------------------------------------------- scaling
    *_of(
        "exponents.py",
        "tests/scaling/test_rules.py",
        half_too_much=("(n.bit_length() - 1) // 2", "n.bit_length() // 2"),
        infinities_times_zero=("2.0**-149 if k < -126", "0.0 if k < -126"),
        infinities_times_zero_on_devices=("<< 23).clamp(min=1)", "<< 23)"),
        exponents_are_shared=("s.to(torch.int32, copy=True)", "s"),
    ),
    *_of(
        "exponents.py",
        "tests/scaling/test_scaled_formats.py",
        infinities_are_measured=(
            "            magnitude = torch.where(x.isfinite(), x, 0).abs().amax()\n",
            "            pass\n",
        ),
    ),
    *_of(
        "scaled_format.py",
        "tests/scaling/test_scaled_formats.py",
        tails_as_small_as_they_are=(
            "rest = (x - leading.to(x.dtype)) * 2.0 ** PRECISIONS[self.dtype]",
            "rest = x - leading.to(x.dtype)",
        ),
    ),
    *_of(
        "integer_tails.py",
        "tests/scaling/test_scaled_formats.py",
        ties_go_up=("((magnitude >> _LOST) & 1) + (1 << (_LOST - 1)) - 1", "(1 << (_LOST - 1))"),
        float64_is_rounded_twice=("collapse_odd((x,))", "x.to(torch.float32)"),
        leading_bits_are_cut_off=("(pattern + (1 << (BITS - 1))) >> BITS", "pattern >> BITS"),
    ),
    *_of(
        "scaled_format.py",
        "tests/scaling/test_scaled_optimizers.py",
        states_get_integer_tails=(
            "return self.lead if self.tail == torch.int8 else self.nearest",
            "return self.nearest",
        ),
    ),
    *_of(
        "scaled_format.py",
        "tests/scaling/test_fp8.py",
        infinite_eight_bits=("x.clamp(-most, most).to(self.dtype)", "x.to(self.dtype)"),
    ),
    *_of(
        "scaled_numbers.py",
        "tests/scaling/test_rules.py",
        "tests/scaling/test_scaled_formats.py",
        "tests/scaling/test_scaled_optimizers.py",
        parts_forget_the_rest=(" * power_of_two(before - raised)", ""),
        weights_drift=("least = largest(least, rms - 1)", "pass"),
        squares_are_placed_low=('if x.placing == "high"', 'if x.placing == "higher"'),
        exponents_jump=(
            "further = smallest(largest(-shift, least), most)",
            "further = most",
        ),
    ),
    *_of(
        "norms.py",
        "tests/scaling/test_rules.py",
        "tests/scaling/test_scaled_gradients.py",
        eps_of_the_data=("eps * power_of_two(-exponent) * power_of_two(-exponent)", "eps"),
        gradients_go_by_rule=('Unrounded(dx, s, "by size")', "Unrounded(dx, s)"),
        gains_get_whole_sums=("half = half_log2(size // max(1, part.numel()))", "half = 0"),
        statistics_of_data_are_saved=(
            "    return times_any_power(mean, exponent), times_any_power(inverse, -exponent)\n",
            "    return times_any_power(mean, 0), times_any_power(inverse, 0)\n",
        ),
    ),
    *_of(
        "losses.py",
        "tests/scaling/test_rules.py",
        "tests/scaling/test_scaled_gradients.py",
        attention_forgets_the_values=(
            "    s = g.exponent + values.exponent\n",
            "    s = g.exponent\n",
        ),
        chances_are_large=("Unrounded(times_power(plain, whole), -whole,", "Unrounded(plain, 0,"),
    ),
    *_of(
        "scaled_steps.py",
        "tests/scaling/test_scaled_optimizers.py",
        squares_of_fused_steps_are_low=(
            "written=(0, 2, 3, 4), squares=(3, 4)",
            "written=(0, 2, 3, 4)",
        ),
        first_moments_are_not_written=("written=(0, 2, 3, 4)", "written=(0, 3, 4)"),
        squares_underflow=("times_any_power(own.mantissa, own.exponent)", "own.plain().double()"),
    ),
    *_of(
        "fp8.py",
        "tests/scaling/test_fp8.py",
        gradients_as_e4m3=("gradient.shape[-1]), E5M2)", "gradient.shape[-1]), E4M3)"),
        half_is_forgotten=("a.exponent + b.exponent + half", "a.exponent + b.exponent"),
    ),
]
