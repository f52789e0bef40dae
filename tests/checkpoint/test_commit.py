"""Atomicity and durability of the commit."""

import errno
import os
import shutil
import threading

import pytest
import torch

from phalanx.checkpoint.components import (
    CheckpointWriter,
    CheckpointWriterConfig,
    RankInfo,
    WriterHook,
)
from phalanx.errors import CheckpointNotFound, SaveFailed

from .internals import MANIFEST, _faultpoints, data_file_name, files_to_remove, storage_at, verify
from .states import ThreadExchange, load, mixed, plain, same, save, saved, together

POINTS = [
    "begin",
    "locked",
    "tensor",
    "flush",
    "written",
    "publish",
    "moved",
    "replace",
    "replaced",
    "published",
    "committed",
]
"""Fault points of a save that replaces a checkpoint, in order."""
FOR_ALL = ("begin", "tensor", "flush", "written")
"""Fault points that other ranks than rank 0 reach, too."""
VISIBLE = {"replaced", "published", "committed", "discard"}
"""Fault points at which the new checkpoint is visible; at the last, ranks have left the save."""


class Failing:
    """Make one rank fail at a fault point."""

    def __init__(self, point, rank):
        self.point, self.rank, self.threads = f"checkpoint:{point}", rank, {}
        self.struck = False

    def __call__(self, point):
        thread = threading.current_thread()
        if point == self.point and self.threads.get(thread, None) == self.rank and not self.struck:
            self.struck = True
            raise OSError(errno.EIO, "the disk is on fire", self.point)

    def __enter__(self):
        _faultpoints.arm(self)
        return self

    def __exit__(self, *_):
        _faultpoints.disarm(self)


@pytest.mark.parametrize(
    ("rank", "point"), [*((0, point) for point in POINTS), *((1, point) for point in FOR_ALL)]
)
def test_failure_at_any_point_is_raised_on_all_ranks_and_is_atomic(tmp_path, point, rank):
    path = tmp_path / "c"
    saved(path, [mixed(0, 1), mixed(1, 1)])
    with Failing(point, rank) as failing:

        class Barrier(ThreadExchange):
            def at(self, seat):
                failing.threads[threading.current_thread()] = seat
                return super().at(seat)

        errors = save_on_two_threads(path, 2, Barrier)
    assert failing.struck
    for error in errors:
        assert isinstance(error, SaveFailed), error
        assert f"on rank {rank} while" in str(error)
        assert "the disk is on fire" in str(error)
    step = 2 if point in VISIBLE else 1
    for each in range(2):
        assert same(plain(mixed(each, step)), load(path, each, 2)[0])
    assert os.listdir(tmp_path) == ["c"]
    saved(path, [mixed(0, 3), mixed(1, 3)])
    assert same(plain(mixed(1, 3)), load(path, 1, 2)[0])
    assert len(os.listdir(path)) == 3


def save_on_two_threads(path, step, meet):
    """Save with two ranks that join the barrier from their own threads."""
    barrier = meet(2)

    def write(rank):
        writer = CheckpointWriter(CheckpointWriterConfig(), RankInfo(rank, 2), barrier.at(rank))
        writer.write(path, mixed(rank, step))

    return together(2, write)


def test_ranks_leave_before_old_files_are_removed(tmp_path):
    """Removal takes about 200 ms per gigabyte."""
    path = tmp_path / "c"
    saved(path, [mixed(0, 1), mixed(1, 1)])
    old = {name for name in os.listdir(path) if name != MANIFEST}
    may_go, removers = threading.Event(), set()

    def hold(point):
        if point == "checkpoint:discard":
            assert may_go.wait(30)
            removers.add(threading.current_thread())

    barrier = ThreadExchange(2)
    writers = [
        CheckpointWriter(CheckpointWriterConfig(), RankInfo(rank, 2), barrier.at(rank))
        for rank in range(2)
    ]
    _faultpoints.arm(hold)
    try:
        assert together(2, lambda rank: writers[rank].write(path, mixed(rank, 2))) == [None, None]
        assert old < set(os.listdir(path))
        assert same(plain(mixed(1, 2)), load(path, 1, 2)[0])
        assert os.listdir(tmp_path) == ["c"], "another job could save here"
        may_go.set()
        for writer in writers:
            writer.close()
    finally:
        _faultpoints.disarm(hold)
    assert len(removers) == 2, "each rank removes what it has written"
    assert len(os.listdir(path)) == 3
    assert not old & set(os.listdir(path))


def test_each_old_file_is_removed_by_exactly_one_rank():
    names = [data_file_name("0" * 16, rank) for rank in range(5)]
    shares = [files_to_remove([*names, "notes.txt"], 2, rank) for rank in range(2)]
    assert shares == [names[::2], names[1::2]]


def test_old_files_that_cannot_be_removed_do_not_fail_a_save(tmp_path):
    path = tmp_path / "c"
    saved(path, [mixed(0, 1)])
    with Failing("discard", None) as failing:
        saved(path, [mixed(0, 2)])
    assert failing.struck
    assert len(os.listdir(path)) == 3, "it is still there"
    assert same(plain(mixed(0, 2)), load(path)[0])
    saved(path, [mixed(0, 3)])
    assert len(os.listdir(path)) == 2


def test_manifest_is_durable_before_unreferenced_files_are_removed(tmp_path, monkeypatch):
    """As when a job is killed right after its commit and power fails during the next save."""
    path, log = tmp_path / "c", []
    saved(path, [{"a": torch.ones(3)}])
    (path / data_file_name("0" * 16, 0)).touch()
    fsync = os.fsync

    def note(fd):
        log.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def reached(point):
        log.append(point)

    monkeypatch.setattr(os, "fsync", note)
    _faultpoints.arm(reached)
    try:
        saved(path, [{"a": torch.ones(3)}])
    finally:
        _faultpoints.disarm(reached)
    assert log[log.index("checkpoint:discard") - 1] == str(path)


def test_interrupt_during_cleanup_releases_the_path(tmp_path, monkeypatch):
    class Interrupting(WriterHook):
        def pre_commit(self, path, **kwargs):  # noqa: ARG002 - it fails whatever comes
            monkeypatch.setattr(shutil, "rmtree", interrupt)
            raise ValueError

        def post_commit(self, path, **kwargs):
            pass

    def interrupt(*_, **__):
        monkeypatch.undo()
        raise KeyboardInterrupt

    (error,) = save(tmp_path / "c", [{"a": torch.ones(3)}], hook=lambda _: Interrupting())
    assert isinstance(error, KeyboardInterrupt)
    saved(tmp_path / "c", [{"a": torch.ones(3)}])
    assert os.listdir(tmp_path) == ["c"]


def test_nothing_is_visible_before_the_commit(tmp_path):
    seen = []

    def look(point):
        if point == "checkpoint:publish":
            with pytest.raises(CheckpointNotFound):
                load(tmp_path / "c")
        if point == "checkpoint:published":
            seen.append(load(tmp_path / "c")[0])

    _faultpoints.arm(look)
    try:
        saved(tmp_path / "c", [{"a": torch.ones(3)}])
    finally:
        _faultpoints.disarm(look)
    assert same(seen, [{"a": torch.ones(3)}])


def test_files_are_flushed_before_they_are_referenced(tmp_path, monkeypatch):
    """The order of fsync and rename decides what survives a power failure."""
    log = []

    def note(name, function):
        def wrapper(first, *rest, **kwargs):
            where = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else first
            log.append(
                (name, os.path.basename(str(rest[0] if rest and name == "rename" else where)))
            )
            return function(first, *rest, **kwargs)

        monkeypatch.setattr(os, name, wrapper)

    saved(tmp_path / "c", [{"a": torch.ones(3)}])
    note("fsync", os.fsync)
    note("rename", os.rename)
    saved(tmp_path / "new", [{"a": torch.ones(3)}])
    folder = log[1][1]
    assert [name for name, _ in log] == ["fsync"] * 4 + ["rename"] + ["fsync"] * 2
    assert log[0][1].endswith(".safetensors")
    assert log[2:] == [
        ("fsync", MANIFEST),
        ("fsync", folder),
        ("rename", "new"),
        ("fsync", ".new.saving"),
        ("fsync", tmp_path.name),
    ]
    log.clear()
    saved(tmp_path / "c", [{"a": torch.ones(3)}])
    assert log[4:] == [
        ("rename", "c"),  # fails, since the target exists
        ("rename", log[0][1]),
        ("fsync", "c"),
        ("rename", MANIFEST),
        ("fsync", "c"),
        ("fsync", ".c.saving"),
        ("fsync", tmp_path.name),
    ]


def test_directories_created_by_another_rank_are_flushed(tmp_path, monkeypatch):
    """The first rank to send a message creates the directory and its parents."""
    path, flushed, fsync = tmp_path / "one" / "two" / "c", [], os.fsync

    def note(fd):
        flushed.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    storage_at(str(path)).message_store().put("note.1", "hello")
    saved(path, [{"a": 1}])
    assert {str(tmp_path), str(tmp_path / "one")} <= set(flushed)
    flushed.clear()
    saved(path.with_name("d"), [{"a": 1}])
    assert str(tmp_path) not in flushed, "once is enough"


def test_concurrent_readers_see_the_old_or_the_new_checkpoint(tmp_path):
    path = tmp_path / "c"
    saved(path, [mixed(0, 0), mixed(1, 0)])
    ended = threading.Event()
    failures, counts = [], [0, 0]

    def read(rank):
        last = 0
        state = {"model": mixed(0)["model"], "step": None}
        try:
            while not ended.is_set():
                loaded, _ = load(path, rank, 2, state if counts[rank] % 2 else None)
                step = loaded["step"]
                assert step >= last
                whole = plain(mixed(rank, step))
                assert same({key: whole[key] for key in loaded}, loaded)
                last, counts[rank] = step, counts[rank] + 1
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    readers = [threading.Thread(target=read, args=(rank,)) for rank in range(2)]
    for reader in readers:
        reader.start()
    step = 0
    while step < 10 or (min(counts) < 6 and step < 200):
        step += 1
        saved(path, [mixed(0, step), mixed(1, step)])
    ended.set()
    for reader in readers:
        reader.join(30)
    assert failures == []
    assert min(counts) > 0


def test_checkpoint_replaced_during_verify_is_not_reported_as_damaged(tmp_path):
    path, counted = tmp_path / "c", []
    saved(path, [mixed(0, 1), mixed(1, 1)])

    def replace(count):
        if not counted:
            saved(path, [mixed(0, 2), mixed(1, 2)])
        counted.append(count)

    assert verify(str(path), replace) == []
    assert sum(counted) > sum(file.stat().st_size for file in path.glob("rank*"))


def test_verify_detects_a_change_of_any_byte(tmp_path):
    path = tmp_path / "c"
    weight = torch.randn(50)
    saved(path, [{**mixed(rank), "a": weight, "tied": weight} for rank in range(2)])
    assert verify(str(path)) == []
    for file in path.glob("rank*"):
        data = bytearray(file.read_bytes())
        for place in range(0, len(data), 301):
            data[place] ^= 4
            file.write_bytes(data)
            (problem,) = verify(str(path))
            assert problem.startswith(f"{file}: "), place
            data[place] ^= 4
        file.write_bytes(data)
    assert verify(str(path)) == []
