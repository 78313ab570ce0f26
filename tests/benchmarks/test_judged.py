"""The reader of FPCore, the judging of formulas, and the tests of other libraries, in short."""

from fractions import Fraction

import pytest
import torch

import mcftensor as mcf
from fpcore.evaluation import Evaluation, Unsupported
from fpcore.judging import judged
from fpcore.machine import OPERATIONS, Machine
from fpcore.operations import checked
from fpcore.reading import expressions, formula
from fpcore.sampling import drawn, ranges
from fpcore.verdicts import PAIRS, verdict
from judged import written
from suites import accupy, flashoptim, qd

ROOTS = """
(FPCore (a b) ; a comment
  :name "a [root] (less)" :pre (and (< 1 a 1e3) (<= 1e-6 b 1/2))
  (let* ([c (* a a)] [d (+ c b)]) (- (sqrt d) a)))
"""
LOOP = """(FPCore (x) :name "sum" :pre (< 1 x 2)
  (while (< i 20) ([s 0 (+ s (/ x 3))] [i 0 (+ i 1)]) s))"""
BRANCH = '(FPCore (x) :name "log" :pre (< 0.5 x 2) (if (== x 1) 0 (/ (log x) (fabs (- x 1)))))'
VECTOR = "(FPCore dot ((v 2)) :pre (< -9 (ref v 0) 9) (* (ref v 0) (ref v 1)))"
FUNCTIONS = """(FPCore (x y) :name "functions" :pre (and (< 0.1 x 0.9) (< 0.1 y 0.9))
  (+ (exp (sin x)) (pow x y) (* (atan2 x y) (- (cbrt y) (tanh x))) (log1p x) (hypot x y)))"""


def read(text):
    (core,) = expressions(text)
    return formula(core, "own")


def value(text, x):
    (core,) = expressions(text)
    numbers = Machine(torch.float64, len(x))
    return Evaluation(numbers, {}).of(core, {"x": torch.tensor(x, dtype=torch.float64)}).tolist()


def test_reading():
    found = read(ROOTS)
    assert found.name == "a [root] (less)"
    assert found.arguments == [("a", None), ("b", None)]
    assert found.properties[":pre"][2] == ["<=", Fraction(1, 10**6), "b", Fraction(1, 2)]
    assert ranges(found.properties[":pre"], ["a", "b"]) == {"a": (1, 1000), "b": (1e-6, 0.5)}
    assert read(VECTOR).arguments == [("v", 2)]
    for text in ("(FPCore", ")", "(FPCore (x) :name x y z)"):
        with pytest.raises(ValueError, match=r"FPCore|unpack"):
            read(text)


def test_evaluation():
    assert value("(if (< x 0) (- x) (* x x))", [-3.0, 2.0]) == [3, 4]
    assert value("(let ([x 1] [y x]) (+ x y))", [5.0]) == [6]
    assert value("(let* ([x 1] [y x]) (+ x y))", [5.0]) == [2]
    assert value("(while (< i x) ([i 0 (+ i 1)] [s 0 (+ s i)]) s)", [3.0, 5.0]) == [3, 10]
    assert value("(while* (< i x) ([i 0 (+ i 1)] [s 0 (+ s i)]) s)", [3.0, 5.0]) == [6, 15]
    assert value("(+ (* x) (/ x) (- x))", [4.0]) == [0.25]
    assert value("(if (!= x 1 2) 1 0)", [1.0, 2.0, 3.0]) == [0, 0, 1]
    with pytest.raises(Unsupported, match="besselj"):
        value("(besselj x)", [1.0])


@pytest.mark.parametrize("text", [ROOTS, LOOP, BRANCH, VECTOR, FUNCTIONS])
def test_more_terms_are_no_worse(text):
    found = verdict(read(text), {}, 8)
    assert found["worse"] == {}
    right = {name: mean for name, (mean, _, count) in found["right"].items() if count}
    assert all(right[more] > right[less] + 15 for more, less in PAIRS)


def test_each_operation_by_itself():
    text = "(FPCore (x y) :pre (and (< 1 x 9) (< 1 y 9)) (/ (- (* x y 7) (sqrt x)) (+ (sin x) y)))"
    formula = read(text)
    inputs = drawn(formula, {}, torch.float32, 16)
    worst = {}
    checked(formula, {}, inputs, mcf.fp32x2, worst)
    assert set(worst) >= {"*", "/", "sqrt", "sin"}
    assert all(0 < error < 3 for error, _ in worst.values())


def test_what_cancels_loses_bits_and_what_does_not_keeps_them():
    kinds = ("float32", "fp32x2")
    lost = judged(read(ROOTS), {}, kinds, 16)
    assert min(right for _, right in lost["float32"]) < 12
    assert min(right for _, right in lost["fp32x2"]) < 48 - 8
    kept = judged(read(VECTOR), {}, kinds, 16)
    assert min(right for _, right in kept["fp32x2"]) >= 47
    assert all(right == 24 for _, right in kept["float32"])


def test_a_kind_that_is_worse_is_said(monkeypatch):
    def rough(x):
        if isinstance(x, mcf.MCFTensor) and x.format is mcf.fp32x2:
            return mcf.as_expansion(mcf.as_plain(x, torch.float64).sqrt().bfloat16(), mcf.fp32x2)
        return torch.sqrt(x)

    monkeypatch.setitem(OPERATIONS, "sqrt", rough)
    text = '(FPCore (x) :name "root" :pre (< 1 x 9) (sqrt x))'
    assert set(verdict(read(text), {}, 8)["worse"]) == {"fp32x2 than float32"}


def test_inputs_satisfy_the_precondition():
    (a, b) = drawn(read(ROOTS), {}, torch.float32, 20)
    assert len(a) == 20
    assert all(1 < x < 1000 for x in a)
    assert all(Fraction(1, 10**6) <= x <= Fraction(1, 2) for x in b)


def test_checks_of_series_at_few_eps():
    for format in (mcf.fp32x2, mcf.fp64x2):
        assert qd.machin(qd.Arithmetic(format)) < 8
        assert qd.sines(qd.Arithmetic(format)) < 4


def test_dot_products_have_their_condition():
    x, y = accupy.dot_product(100, 1e30)
    products = [Fraction(a) * Fraction(b) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    assert 1e28 < 2 * sum(map(abs, products)) / abs(sum(products)) < 1e33


def test_no_exception_among_normal_numbers():
    x = flashoptim.numbers(0, -1, 0, 1 << 16)
    assert x[0] == -1
    *six, last, exact = flashoptim.exceptions(x, 1 / 127, 1 / 32767, mcf.bf16i8.nearest)
    assert six == [0] * 6
    assert last == exact


def test_a_line_for_each_formula():
    text = written({"suites": {"own": {"found": [{"name": "a", "right": {"x": [1, 2, 3]}}]}}})
    assert '{"name": "a", "right": {"x": [1, 2, 3]}}' in text
