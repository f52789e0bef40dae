"""The commit: all or nothing, whatever goes wrong, and one job at a time."""

import errno
import os
import shutil
import subprocess
import threading
import time

import pytest
import torch

from phalanx import _faultpoints
from phalanx.checkpoint import CheckpointWriter, CheckpointWriterConfig, RankInfo, WriterHook
from phalanx.checkpoint._board import FileBoard
from phalanx.checkpoint._files import LocalStorage
from phalanx.checkpoint._locks import Lock
from phalanx.checkpoint._manifest import MANIFEST
from phalanx.checkpoint._notes import ByNotes
from phalanx.checkpoint._upkeep import remove_leftovers, verify
from phalanx.errors import (
    CheckpointNotFound,
    DamagedCheckpoint,
    FolderInUse,
    SaveFailed,
    SaveTimeout,
)

from .states import (
    ThreadBarrier,
    ThreadExchange,
    load,
    mixed,
    plain,
    same,
    save,
    saved,
    together,
)

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
"""All points of a save over another one, in their order."""
FOR_ALL = ("begin", "tensor", "flush", "written")
"""Those that other ranks than the first reach too."""
VISIBLE = {"replaced", "published", "committed"}


class Failing:
    """Make one thread fail at a point."""

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
def test_a_failure_anywhere_is_raised_everywhere_and_leaves_the_old_or_the_new(
    tmp_path, point, rank
):
    path = tmp_path / "c"
    saved(path, [mixed(0, 1), mixed(1, 1)])
    with Failing(point, rank) as failing:

        class Barrier(ThreadExchange):
            def at(self, seat):
                failing.threads[threading.current_thread()] = seat
                return super().at(seat)

        errors = together_saving(path, 2, Barrier)
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


def together_saving(path, step, meet):
    """Save with two ranks whose seats at the barrier are taken in their own threads."""
    barrier = meet(2)

    def write(rank):
        writer = CheckpointWriter(CheckpointWriterConfig(), RankInfo(rank, 2), barrier.at(rank))
        writer.write(path, mixed(rank, step))

    return together(2, write)


def test_before_the_commit_nothing_is_visible(tmp_path):
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


def test_everything_is_flushed_before_it_is_named(tmp_path, monkeypatch):
    """The order in which a disk learns of things is what survives a power cut."""
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
        ("rename", "c"),  # refused, for there is something
        ("rename", log[0][1]),
        ("fsync", "c"),
        ("rename", MANIFEST),
        ("fsync", "c"),
        ("fsync", ".c.saving"),
        ("fsync", tmp_path.name),
    ]


def test_readers_during_commits_have_the_old_or_the_new(tmp_path):
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


def test_two_jobs_at_one_folder(tmp_path):
    path = tmp_path / "c"
    storage = LocalStorage(str(path))
    held = storage.begin("process 7 on elsewhere (a job of 2 ranks)")
    for meet in (ThreadExchange, ThreadBarrier):
        for error in save(path, [{"a": 1}] * 2, meet=meet):
            assert isinstance(error, FolderInUse)
            assert "is being saved to by process 7 on elsewhere (a job of 2 ranks)" in str(error)
    with storage.create(held, f"rank0-{held}.safetensors") as sink:
        sink.write(memoryview(b"still here"))
    storage.end(held)
    saved(path, [{"a": 1}] * 2)
    assert os.listdir(tmp_path) == ["c"]


def test_a_lock_is_taken_by_one_of_many(tmp_path):
    holding, most = [], []

    def take(rank):
        for _ in range(50):
            try:
                lock = Lock.take(tmp_path / "l", f"thread {rank}", purpose="here")
            except FolderInUse:
                continue
            holding.append(rank)
            most.append(len(holding))
            holding.remove(rank)
            lock.release()

    assert together(4, take) == [None] * 4
    assert set(most) == {1}
    assert os.listdir(tmp_path) == []


def test_leftovers_of_the_dead_are_removed_and_nothing_else(tmp_path):
    path = tmp_path / "c"
    saved(path, [{"a": torch.ones(3)}])
    (path / "notes.txt").write_text("mine")
    (path / f"rank3-{'0' * 16}.safetensors").write_text("moved in, never committed")
    workspace = tmp_path / ".c.saving"
    (workspace / ("1" * 16)).mkdir(parents=True)
    (workspace / ("1" * 16) / "rank0.safetensors").touch()
    (workspace / "lock").write_text("process 1 on a machine that is gone")
    (workspace / "note.1234.1.0").touch()
    (tmp_path / ".other.saving").mkdir()
    saved(path, [{"a": torch.ones(4)}])
    assert sorted(os.listdir(tmp_path)) == [".other.saving", "c"]
    assert len(os.listdir(path)) == 3
    assert (path / "notes.txt").read_text() == "mine"


def test_leftovers_are_removed_without_a_save_too(tmp_path):
    for name in ("dead", "alive"):
        (tmp_path / f".{name}.saving" / ("1" * 16)).mkdir(parents=True)
    saved(tmp_path / "dead", [{"a": torch.ones(2)}])
    (tmp_path / ".dead.saving" / ("1" * 16)).mkdir(parents=True)
    storage = LocalStorage(str(tmp_path / "alive"))
    held = storage.begin("a job that is alive")
    assert remove_leftovers(tmp_path) == ["dead"]
    assert sorted(os.listdir(tmp_path)) == [".alive.saving", "dead"]
    assert (tmp_path / ".alive.saving" / held).is_dir()
    storage.end(held)
    assert same(load(tmp_path / "dead")[0], {"a": torch.ones(2)})


def test_every_byte_can_be_verified(tmp_path):
    path = tmp_path / "c"
    weight = torch.randn(50)
    saved(path, [{**mixed(rank), "a": weight, "tied": weight} for rank in range(2)])
    assert verify(path).ranks == 2
    for file in path.glob("rank*"):
        data = bytearray(file.read_bytes())
        for place in range(0, len(data), 301):
            data[place] ^= 4
            file.write_bytes(data)
            with pytest.raises(DamagedCheckpoint, match=f"{file.name} cannot be used"):
                verify(path)
            data[place] ^= 4
        file.write_bytes(data)
    verify(path)


def test_a_damaged_checkpoint_is_replaced_but_first_left_alone(tmp_path):
    path = tmp_path / "c"
    saved(path, [{"a": torch.ones(3)}])
    (path / MANIFEST).write_text("{")
    (old,) = path.glob("rank*")
    save(path, [{"a": 1j}])
    assert old.exists(), "somebody may want to rescue it"
    saved(path, [{"a": torch.ones(4)}])
    assert not old.exists()
    assert same(load(path)[0], {"a": torch.ones(4)})


@pytest.mark.parametrize("meet", [ThreadExchange, ThreadBarrier, None])
def test_a_rank_that_never_comes_is_named(tmp_path, meet):
    barrier = meet(3, timeout=0.5) if meet is not None else None

    def write(rank):
        config = CheckpointWriterConfig(write_barrier_timeout_secs=0.5)
        seat = None if barrier is None else barrier.at(rank)
        CheckpointWriter(config, RankInfo(rank, 3), seat).write(tmp_path / "c", {"a": 1})

    begun = time.monotonic()
    errors = together(2, write)
    assert time.monotonic() - begun < 10
    for error in errors:
        assert isinstance(error, SaveFailed)
        assert isinstance(errors[0], SaveTimeout)
    if meet is None:
        assert "rank 2 did not come within 0.5 s" in str(errors[0])
        assert "rank 2 did not come within 0.5 s" in str(errors[1])
    with pytest.raises(CheckpointNotFound):
        load(tmp_path / "c")
    saved(tmp_path / "c", [{"a": 1}] * 3, meet=None)
    assert os.listdir(tmp_path) == ["c"]


def test_a_rank_that_leaves_in_the_middle_is_named(tmp_path):
    """Here rank 1 takes part in the first meeting, and is then heard of no more."""

    def write(rank):
        board = LocalStorage(str(tmp_path / "c")).board()
        company = ByNotes(RankInfo(rank, 2), board, timeout=0.5, barrier=None)
        assert company.together("starting", lambda: rank) == [0, 1]
        if rank == 0:
            company.together("working", lambda: None)

    errors = together(2, write)
    assert errors[1] is None
    assert isinstance(errors[0], SaveTimeout)
    assert "while working: rank 1 (it was at 1 of 2 meetings) did not come" in str(errors[0])


def test_two_processes_that_say_they_are_one_rank(tmp_path):
    hellos = threading.Barrier(2)

    def write(thread):
        board = LocalStorage(str(tmp_path / "c")).board()
        company = ByNotes(RankInfo(min(thread, 1), 2), board, timeout=5, barrier=None)
        if thread == 0:
            while len(board.names()) < 2:  # let both of them speak first
                time.sleep(0.001)
        else:
            hellos.wait()
        company.exchange("")

    errors = together(3, write)
    for error in errors:
        assert "two processes say that they are rank 1" in str(error)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte, where we may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)],
        capture_output=True,
        check=False,
    )
    if not mounted or mounted.returncode:
        pytest.skip("we may not mount a file system here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("meet", [ThreadExchange, None])
def test_a_full_disk(small_disk, meet):
    saved(small_disk / "c", [{"w": torch.ones(10_000)}] * 2)
    errors = save(
        small_disk / "c", [{"w": torch.full((200_000,), rank)} for rank in range(2)], meet=meet
    )
    for error in errors:
        assert isinstance(error, SaveFailed)
        assert "[Errno 28] No space left on device: '" in str(error)
    assert same(load(small_disk / "c")[0], {"w": torch.ones(10_000)})
    assert os.listdir(small_disk) == ["c"]
    saved(small_disk / "c", [{"w": torch.ones(20_000)}] * 2)


def test_a_folder_that_may_not_be_written(tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir()
    saved(folder / "c", [{"a": 1}])
    if os.geteuid() == 0:
        if subprocess.run(["chattr", "+i", str(folder)], capture_output=True).returncode:  # noqa: PLW1510
            pytest.skip("root may write anywhere here")
        undo = ["chattr", "-i", str(folder)]
    else:
        folder.chmod(0o500)
        undo = ["chmod", "700", str(folder)]
    try:
        for meet in (ThreadExchange, None):
            for path in (folder / "c", folder / "d"):
                errors = save(path, [{"a": 2}] * 2, meet=meet, timeout=0.3)
                assert all(isinstance(error, SaveFailed) for error in errors)
                assert "Permission denied" in str(errors[0]) or "not permitted" in str(errors[0])
        assert load(folder / "c")[0] == {"a": 1}
    finally:
        subprocess.run(undo, check=True)


def test_the_cause_is_told_even_if_nothing_can_be_written_any_more(tmp_path, monkeypatch):
    """As on a disk that breaks: notes to the others, and the farewell, fail as well."""

    def broken(board, name, text):
        raise OSError(errno.EIO, "broken", name)

    class Breaking(WriterHook):
        def pre_commit(self, path, **kwargs):  # noqa: ARG002 - it breaks whatever comes
            monkeypatch.setattr(FileBoard, "put", broken)
            raise ValueError("this came first")

        def post_commit(self, path, **kwargs):
            pass

    errors = save(tmp_path / "c", [{"a": 1}] * 2, meet=None, hook=lambda _: Breaking(), timeout=1)
    for error in errors:
        assert isinstance(error, SaveFailed)
        assert "this came first" in str(error)


def test_the_target_is_a_file(tmp_path):
    (tmp_path / "c").write_text("mine")
    (error,) = save(tmp_path / "c", [{"a": 1}])
    assert isinstance(error, SaveFailed)
    assert "Not a directory" in str(error)
    assert (tmp_path / "c").read_text() == "mine"
    assert os.listdir(tmp_path) == ["c"]


def test_ranks_that_do_not_share_a_file_system(tmp_path):
    barrier = ThreadExchange(2)

    def write(rank):
        writer = CheckpointWriter(CheckpointWriterConfig(), RankInfo(rank, 2), barrier.at(rank))
        writer.write(tmp_path / f"machine {rank}" / "c", {"w": torch.full((3,), rank)})

    for error in together(2, write):
        assert "on rank 1 while writing" in str(error)
        assert "do ranks share the file system?" in str(error)
