"""Caches that do not grow without end."""

import ast
import functools
import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import mcftensor as mcf
from mcftensor.dispatch import resolve
from mcftensor.dispatch.resolve import Kind
from mcftensor.formats import Format
from mcftensor.kernels import Columns, cuda, execute
from mcftensor.passes import expressions, optimizer_steps, traces
from mcftensor.passes.expressions import Expression
from mcftensor.passes.traces import Operation, Trace


def tables(most):
    """A cache, and a function that asks it for a table of so many bytes, half of what it takes."""
    cache = cuda._Tables(most)

    def table(key, bytes=1):
        return cache.get(key, lambda: torch.full((bytes,), ord(key), dtype=torch.uint8))

    return cache, table


def test_what_was_used_longest_ago_goes():
    cache, table = tables(4)
    first = table("a")
    table("b")
    assert table("a") is first
    assert table("c").tolist() == [ord("c")]
    assert list(cache.kept) == ["a", "c"]
    assert cache.total == 4


def test_costs():
    cache, table = tables(20)
    for key in "abcde":
        table(key, 3)
    assert (list(cache.kept), cache.total) == (["c", "d", "e"], 18)
    assert len(table("f", 11)) == 11  # which is not kept
    assert (len(cache.kept), cache.total) == (0, 0)


def test_several_threads():
    cache, table = tables(50)

    def work(seed):
        for i in range(3000):
            key = chr((seed * i) % 97)
            assert table(key).item() == ord(key)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(1, 9)))
    assert cache.total == 2 * len(cache.kept) <= 50


def test_kernels_are_kept_up_to_a_number(monkeypatch):
    kernel_of = functools.lru_cache(maxsize=3)(execute.kernel_of.__wrapped__)
    monkeypatch.setattr(execute, "kernel_of", kernel_of)
    x = torch.arange(5.0, dtype=torch.float64)
    for scale in range(8):

        def body(vectors, scalars, index, scale=scale):
            return [vectors[0] * scale]

        output = torch.empty_like(x)
        execute.run(body, Columns([[x]], [], [[output]]))
        assert torch.equal(output, x * scale)
    info = kernel_of.cache_info()
    assert (info.currsize, info.misses) == (3, 8)


def cached_functions():
    """Functions of the package with a cache, and what bounds it: nothing, or a number."""
    for path in sorted(Path(mcf.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                for decorator in map(ast.unparse, node.decorator_list):
                    if re.fullmatch(r"functools\.(cache|lru_cache.*)", decorator):
                        yield node, decorator


def test_every_cache_of_a_function_has_a_bound():
    found = list(cached_functions())
    assert len(found) > 5
    for function, decorator in found:
        takes_nothing = not ast.unparse(function.args)
        assert takes_nothing or re.search(r"maxsize=\d+", decorator), function.name


def test_the_bound_of_plans_is_reached():
    resolve.plan.cache_clear()
    formats = [Format(torch.bfloat16, terms) for terms in range(2, 7)]
    kinds = [Kind(*x) for x in itertools.product(formats, ("value", "parameter"), (True, False))]
    for own in itertools.islice(itertools.product(kinds, repeat=3), 5000):
        resolve.plan("addcmul", own, (), None)
    info = resolve.plan.cache_info()
    assert info.currsize == info.maxsize < info.misses


def test_the_bound_of_traces_is_reached():
    trace = Trace()
    for i in range(1000):
        trace.then(Operation("add", mcf.bf16x2, (0, i), 0))
    assert len(trace.made) <= traces._MOST


def test_the_bound_of_functions_is_reached():
    expressions._body.cache_clear()
    for i in range(1500):
        expressions._body(Expression(f"operation {i}", mcf.bf16x2), (mcf.bf16x2,), (False, False))
    info = expressions._body.cache_info()
    assert info.currsize == info.maxsize < info.misses
    optimizer_steps._body.cache_clear()
    for i in range(1500):
        optimizer_steps._body("_fused_sgd_", False, (mcf.bf16x2, mcf.bf16x2), (f"number {i}",))
    info = optimizer_steps._body.cache_info()
    assert info.currsize == info.maxsize < info.misses
