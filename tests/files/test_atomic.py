"""A process killed while it saves leaves the last checkpoint whole."""

import contextlib
import errno
import functools
import os
import random
import signal
import stat
import time
from pathlib import Path

import pytest
import torch

import mcftensor as mcf
from mcftensor.checkpoint import atomic_files, saving
from support.forks import fork, needs_fork
from support.helpers import same_terms, sample

pytest.importorskip("safetensors")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Not to wait for the disk, which no test takes the power from."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@functools.cache
def state(seed):
    return {f"{i}.weight": sample(mcf.bf16x2, 30, seed=10 * seed + i) for i in range(3)}


def version(folder, count=20):
    """Which state a folder holds; it is an error if it is none of them."""
    loaded = mcf.load_file(folder)
    for seed in range(count):
        expected = state(seed)
        if loaded.keys() == expected.keys() and all(
            same_terms(x, loaded[name]) for name, x in expected.items()
        ):
            return seed
    raise AssertionError("a mixture")


def names_in(folder):
    return sorted(f.name for f in folder.iterdir())


ONE, MANY = None, 150  # sizes of shards: one file, or three
KINDS = [(MANY, MANY), (ONE, ONE), (ONE, MANY), (MANY, ONE)]


def instrument(patch, before):
    """Call a function before everything by which a save changes the disk."""

    def announced(function):
        def call(*args, **kwargs):
            before()
            return function(*args, **kwargs)

        return call

    def write_half(file):
        write = file.write

        def call(content):
            before()
            write(content[: len(content) // 2])
            file.flush()
            before()
            return write(content[len(content) // 2 :])

        return call

    class File:
        def __init__(self, file):
            self.file, self.write, self.seek = file, write_half(file), file.seek

    def write(file, *args):
        return write_file(File(file), *args)

    def open_path(path, mode="r", **kwargs):
        if set(mode) & set("wx+"):
            before()
        return open_file(path, mode, **kwargs)

    write_file, open_file = saving.write, Path.open
    patch.setattr(Path, "open", open_path)
    patch.setattr(saving, "write", write)
    for owner, name in [
        (os, "open"),
        (os, "fsync"),
        (Path, "replace"),
        (Path, "unlink"),
        (Path, "write_text"),
    ]:
        patch.setattr(owner, name, announced(getattr(owner, name)))


@pytest.mark.thinned(of=4)  # an error at every point is tried for every kind
@needs_fork
@pytest.mark.parametrize(("before", "after"), KINDS, ids=str)
def test_killed_at_every_point(before, after, tmp_path):
    seen = set()
    for point in range(1000):
        mcf.save_file(state(0), tmp_path, max_shard_size=before)

        def save_until(point=point):
            left = iter(range(point))

            def act():
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)

            with pytest.MonkeyPatch.context() as patch:
                instrument(patch, act)
                mcf.save_file(state(1), tmp_path, max_shard_size=after)

        _, status = os.waitpid(fork(save_until), 0)
        seen.add(version(tmp_path))
        assert version(tmp_path / "model.safetensors") in (0, 1)
        mcf.save_file(state(2), tmp_path, max_shard_size=after)
        assert version(tmp_path) == 2
        assert len(names_in(tmp_path)) == (4 if after else 1)
        if status == 0:
            break
        assert status == signal.SIGKILL
    assert point > (40 if after else 10)
    assert seen == {0, 1}


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize(("before", "after"), KINDS, ids=str)
def test_an_error_at_every_point(before, after, tmp_path, monkeypatch):
    """As of a disk that is full: nothing is left of the new checkpoint, or of the old one."""
    failed, unlink = 0, Path.unlink
    for point in range(1000):
        mcf.save_file(state(0), tmp_path, max_shard_size=before)
        files = names_in(tmp_path)
        calls = iter(range(point))

        def fail(calls=calls):
            if next(calls, None) is None and not fail.done:
                fail.done = True
                raise OSError(28, "No space left on device")

        fail.done = False
        with monkeypatch.context() as patch, contextlib.suppress(OSError):
            instrument(patch, fail)
            patch.setattr(Path, "unlink", unlink)
            mcf.save_file(state(1), tmp_path, max_shard_size=after)
        failed += fail.done
        assert not [name for name in names_in(tmp_path) if name.endswith(".tmp")]
        if version(tmp_path) == 0:
            # One file that is there beside an index is not looked at.
            assert files == [n for n in names_in(tmp_path) if n in files or after == MANY]
        if not fail.done:
            break
    assert version(tmp_path) == 1
    assert failed == point > (40 if after else 10)


@needs_fork
@pytest.mark.slow
def test_killed_at_random(tmp_path):
    """A process that saves one checkpoint after another. `test_killed_at_every_point` is the short
    form."""
    random_ = random.Random(1)
    mcf.save_file(state(0), tmp_path)
    seen = set()
    for start in range(1000):

        def save_forever(start=start):
            for i in range(start, 10**6):
                mcf.save_file(state(i % 5), tmp_path, max_shard_size=MANY if i % 3 else ONE)

        child = fork(save_forever)
        time.sleep(random_.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        seen.add(version(tmp_path))
    mcf.save_file(state(7), tmp_path)
    assert names_in(tmp_path) == ["model.safetensors"]
    assert len(seen) > 2


@needs_fork
def test_two_writers_at_once(tmp_path):
    """One of them is last, and its checkpoint is whole."""
    for _ in range(5):
        writers = [
            fork(
                lambda seed=seed: [
                    mcf.save_file(state(seed), tmp_path, max_shard_size=MANY) for _ in range(8)
                ]
            )
            for seed in (1, 2)
        ]
        assert [os.waitpid(writer, 0)[1] for writer in writers] == [0, 0]
        assert version(tmp_path) in (1, 2)
    mcf.save_file(state(3), tmp_path, max_shard_size=MANY)
    assert len(names_in(tmp_path)) == 4


@pytest.mark.parametrize("is_removed", [True, False])
def test_another_writer_takes_a_new_file_for_abandoned(is_removed, tmp_path, monkeypatch):
    """It looks between the moments when the file is made and when it is locked."""
    lock, write, held = atomic_files._lock, saving.write, contextlib.ExitStack()

    def lock_late(file):
        monkeypatch.setattr(atomic_files, "_lock", lock)
        if is_removed:
            atomic_files.remove_abandoned(Path(file.name))
        else:
            with contextlib.ExitStack() as other:
                lock(other.enter_context(Path(file.name).open("rb+")))
                held.push(other.pop_all())
        return lock(file)

    def write_late(file, *args):
        held.close()
        atomic_files.remove_abandoned(Path(file.name))
        return write(file, *args)

    monkeypatch.setattr(atomic_files, "_lock", lock_late)
    monkeypatch.setattr(saving, "write", write_late)
    mcf.save_file(state(1), tmp_path)
    assert version(tmp_path) == 1
    assert atomic_files._lock is lock


def test_where_every_file_is_said_to_be_locked(tmp_path, monkeypatch):
    def refuse(file, how):
        raise BlockingIOError(errno.EAGAIN, "")

    monkeypatch.setattr(atomic_files.fcntl, "flock", refuse)
    mcf.save_file(state(1), tmp_path)
    assert version(tmp_path) == 1
    assert names_in(tmp_path) == ["model.safetensors"]


class TestReplacing:
    def test_an_error_leaves_the_file(self, tmp_path):
        path = tmp_path / "x [1].pt"
        path.write_text("old")
        with contextlib.suppress(KeyError), mcf.checkpoint.replacing(path) as temporary:
            temporary.write_text("new")
            assert path.read_text() == "old"
            raise KeyError
        assert path.read_text() == "old"
        with mcf.checkpoint.replacing(path) as temporary:
            temporary.write_text("new")
        assert path.read_text() == "new"
        assert names_in(tmp_path) == ["x [1].pt"]

    def test_two_at_once_and_what_a_killed_one_left(self, tmp_path):
        path = tmp_path / "x [1].pt"
        leftover = tmp_path / ".x [1].pt.0123abcd.tmp"
        others = [tmp_path / name for name in (".x 1.pt.0123abcd.tmp", "x [1].pt.tmp", ".x [1].pt")]
        for file in (leftover, *others):
            file.write_text("half")
        with mcf.checkpoint.replacing(path) as first:
            assert not leftover.exists()
            first.write_text("first")
            with mcf.checkpoint.replacing(path) as second:
                assert first.exists()
                second.write_text("second")
            assert path.read_text() == "second"
        assert path.read_text() == "first"
        assert names_in(tmp_path) == sorted(f.name for f in (path, *others))

    def test_what_is_no_file_stays(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "folder").mkdir()
        for name in ("pipe", "folder"):
            with pytest.raises(FileExistsError), mcf.checkpoint.replacing(tmp_path / name):
                pass
        assert sorted(x.name for x in tmp_path.iterdir()) == ["folder", "pipe"]
        assert (tmp_path / "pipe").is_fifo()

    def test_other_users_can_read_it_as_they_can_other_files(self, tmp_path):
        (tmp_path / "plain").touch()
        mcf.save_file({"x": torch.ones(1)}, tmp_path)
        assert (tmp_path / "model.safetensors").stat().st_mode == (
            tmp_path / "plain"
        ).stat().st_mode

    def test_data_are_on_disk_before_the_name_is(self, tmp_path, monkeypatch):
        calls = []
        fsync, replace = os.fsync, Path.replace
        monkeypatch.setattr(os, "fsync", lambda f: calls.append("fsync") or fsync(f))
        monkeypatch.setattr(Path, "replace", lambda a, b: calls.append("replace") or replace(a, b))
        with mcf.checkpoint.replacing(tmp_path / "x") as temporary:
            temporary.write_text("new")
        assert calls == ["fsync", "replace", "fsync"]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere; make it first"):
        mcf.save_file(torch.nn.Linear(2, 2), tmp_path / "nowhere" / "model.safetensors")


@pytest.mark.skipif(os.name == "nt", reason="needs modes")
@pytest.mark.parametrize(("before", "after"), KINDS, ids=str)
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_mode_is_kept(mode, before, after, tmp_path):
    mcf.save_file(state(0), tmp_path, max_shard_size=before)
    for file in tmp_path.iterdir():
        file.chmod(mode)
    mcf.save_file(state(1), tmp_path, max_shard_size=after)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {mode}
    assert version(tmp_path) == 1


@pytest.mark.skipif(os.name == "nt", reason="needs modes")
def test_nobody_reads_it_meanwhile(tmp_path):
    path = tmp_path / "training.pt"
    path.touch(mode=0o600)
    with atomic_files.replacing(path) as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        temporary.write_text("secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.name == "nt", reason="needs modes")
def test_a_file_of_another_group(tmp_path, monkeypatch):
    """Where it cannot be given to that group, the own one gets what all others had: nothing."""

    def refuse(path, user, group):
        raise PermissionError

    path = tmp_path / "training.pt"
    path.touch()
    path.chmod(0o660)
    monkeypatch.setattr(os, "chown", refuse)
    with atomic_files.replacing(path) as temporary:
        temporary.write_text("new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.name == "nt", reason="needs links")
@pytest.mark.parametrize("there", [True, False])
def test_links_are_followed(there, tmp_path):
    target, link = tmp_path / "far" / "x.safetensors", tmp_path / "model.safetensors"
    target.parent.mkdir()
    if there:
        mcf.save_file(state(0), target)
        target.chmod(0o600)
    link.symlink_to(target)
    mcf.save_file(state(1), link)
    assert link.is_symlink()
    assert version(link) == version(target) == 1
    assert names_in(target.parent) == [target.name]
    if there:
        assert stat.S_IMODE(target.stat().st_mode) == 0o600


@pytest.mark.skipif(os.name == "nt", reason="needs modes and links")
def test_folders_of_conversions(tmp_path):
    """An empty folder that is there keeps its mode, and a link to it stays one."""
    source, folder, link = tmp_path / "run.safetensors", tmp_path / "to", tmp_path / "link"
    mcf.save_file(state(0), source)
    folder.mkdir(mode=0o700)
    link.symlink_to(folder)
    mcf.checkpoint.convert_checkpoint(source, link, mcf.bf16x2)
    assert link.is_symlink()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert names_in(folder) == ["model.safetensors"]
