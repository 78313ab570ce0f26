"""Compiled code reads the facts of tensors as Python does."""

import threading

import pytest
import torch

from mcftensor.kernels import cpu, facts


@pytest.fixture(scope="module")
def launch():
    if facts._EXCHANGE is None:
        pytest.skip("this torch has no exchange API of DLPack")
    if (found := facts.COMPILED.get(cpu.BUILD_AFTER)) is None:
        pytest.skip("no compiler")
    return found


def of_dtype(dtype, count=5):
    return [torch.zeros(2, 16 * i, dtype=torch.uint8).view(dtype) for i in range(1, count)]


x = torch.zeros(3, 4, 5)
DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]
COLUMNS = {
    "alike": [torch.zeros(25, 40) for _ in range(300)],
    "parameters": [torch.nn.Parameter(torch.zeros(i)) for i in range(9)],
    "views": [x, x[1:], x[:, :1], x[0, 0, 0], x[1:2, :1, 3:], x[:, 0], x.mT, x[:, :, ::2]],
    "without elements": [x[:0], x[:0, ::2], torch.zeros(0), torch.zeros(3, 0).T],
    "lengths of one": [x[:1, :1].mT, x.expand(1, 3, 4, 5).permute(1, 0, 2, 3), x[0, :1, :1]],
    "expanded": [x, torch.zeros(1).expand(5)],
    "of two dtypes": [x, x.bfloat16(), x],
    "of one width": [torch.zeros(3).bfloat16(), torch.zeros(3).half()],
    **{str(dtype): of_dtype(dtype) for dtype in DTYPES},
}


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("name", COLUMNS)
def test_facts_are_those_that_python_is_told(name, kind, launch):
    column = kind(COLUMNS[name])
    assert facts._read(launch, column) == facts._asked(column)


def test_dtypes_are_told_apart(launch):
    firsts = [of_dtype(dtype)[1] for dtype in DTYPES]
    for a in firsts:
        for b in firsts:
            assert (facts._read(launch, [a, b])[0] is None) == (a.dtype != b.dtype)


@pytest.mark.parametrize("what", ["data", "set_", "resize_", "storage", "swap"])
def test_facts_are_read_anew(what, launch):
    """Nothing is kept from one call to the next: memory may move between them."""
    column = [torch.zeros(4, 4) for _ in range(3)]
    before = facts._read(launch, column)
    moving = column[1]
    if what == "data":
        moving.data = torch.zeros(9, 9).T[1:]
    elif what == "set_":
        moving.set_(torch.zeros(7))
    elif what == "resize_":
        moving.resize_(100, 100)
    elif what == "storage":
        moving.untyped_storage().resize_(1 << 20)
    else:
        torch.utils.swap_tensors(moving, torch.zeros(2, 2, dtype=torch.float64))
    found = facts._read(launch, column)
    assert found == facts._asked(column)
    assert found != before


@pytest.mark.parametrize(
    "other", [torch.zeros(3, device="meta"), torch.zeros(3).to_sparse()], ids=["meta", "sparse"]
)
def test_tensors_that_dlpack_does_not_know(other, launch):
    """No error is left behind, and Python's answers hold."""
    assert facts._read(launch, [x, other]) is None
    assert facts._read(launch, [x, x]) == facts._asked([x, x])


def test_threads_read_at_a_time(launch):
    columns = [[torch.zeros(i, k) for i in range(200)] for k in range(4)]
    expected = list(map(facts._asked, columns))
    wrong = []

    def read(i):
        found = [facts._read(launch, columns[i]) for _ in range(200)]
        wrong.extend(x for x in found if x != expected[i])

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
