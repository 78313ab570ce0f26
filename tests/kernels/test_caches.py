"""Caches that do not grow without end."""

from concurrent.futures import ThreadPoolExecutor

from mcftensor.kernels.caches import Bounded


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
