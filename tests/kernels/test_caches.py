"""Caches that do not grow without end."""

import ast
import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import mcftensor as mcf
from mcftensor.dispatch import plans
from mcftensor.dispatch.plans import Kind
from mcftensor.formats import FORMATS, Format
from mcftensor.kernels import Columns, running
from mcftensor.kernels.caches import Bounded
from mcftensor.passes import expressions, steps
from mcftensor.passes.expressions import Expression


def test_what_was_used_longest_ago_goes():
    cache = Bounded(2)
    assert [cache.put(key, key.upper()) for key in "ab"] == ["A", "B"]
    assert cache.get("a") == "A"
    cache.put("c", "C")
    assert [cache.get(key) for key in "abc"] == ["A", None, "C"]
    assert len(cache) == cache.total == 2


def test_costs():
    cache = Bounded(10, cost=len)
    for key in range(5):
        cache.put(key, "x" * 3)
    assert (len(cache), cache.total) == (3, 9)
    cache.put(4, "x")
    assert (len(cache), cache.total) == (3, 7)
    assert cache.put(5, "x" * 11) == "x" * 11  # which is not kept, nor drives others out
    assert [cache.get(key) is not None for key in range(6)] == [False] * 2 + [True] * 3 + [False]
    cache.put(4, "x" * 11)
    assert cache.get(4) is None
    cache.clear()
    assert (len(cache), cache.total) == (0, 0)


def test_several_threads():
    cache = Bounded(50, cost=abs)

    def work(seed):
        for i in range(3000):
            key = (seed * i) % 97
            value = cache.get(key)
            assert value in (None, key % 7)
            cache.put(key, key % 7)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(1, 9)))
    assert cache.total == sum(cache._entries.values()) <= 50


def test_kernels_are_kept_up_to_a_number(monkeypatch):
    monkeypatch.setattr(running, "KERNELS", Bounded(3))
    x = torch.arange(5.0, dtype=torch.float64)
    for scale in range(8):

        def body(vectors, scalars, index, scale=scale):
            return [vectors[0] * scale]

        output = torch.empty_like(x)
        running.run(body, Columns([[x]], [], [[output]]))
        assert torch.equal(output, x * scale)
        assert len(running.KERNELS) <= 3
    assert len(running.KERNELS) == 3


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
    plans.plan.cache_clear()
    expansions = [Kind(Format.from_name(f.name), "value", True) for f in FORMATS]
    every = itertools.product(("add", "mul", "div", "sub"), expansions, range(200))
    for name, kind, i in every:
        waits = Expression("add", kind.format, (i, 0))
        plans.plan(name, (kind, kind._replace(waits=waits)), (), None)
    info = plans.plan.cache_info()
    assert info.currsize == info.maxsize < info.misses


def test_the_bound_of_functions_is_reached():
    expressions._body.cache_clear()
    for i in range(1500):
        nested = Expression("add", mcf.bf16x2, (0, Expression("mul", mcf.bf16x2, (i, i))))
        expressions._body(nested, (mcf.bf16x2,), (False, False))
    info = expressions._body.cache_info()
    assert info.currsize == info.maxsize < info.misses
    steps._body.cache_clear()
    for i in range(1500):
        steps._body("sgd", False, (mcf.bf16x2, mcf.bf16x2), (f"number {i}",))
    info = steps._body.cache_info()
    assert info.currsize == info.maxsize < info.misses
