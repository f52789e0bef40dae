"""Exclusive saves per path, and cleanup after dead jobs."""

import os

import pytest
import torch

from phalanx.errors import CheckpointDirectoryInUse, SaveFailed

from .internals import (
    MANIFEST,
    DirectoryLock,
    LocalCheckpointDirectory,
    LocalStorage,
    data_file_name,
)
from .states import ThreadBarrier, ThreadExchange, load, same, save, saved, together


def test_second_job_at_a_path_is_rejected(tmp_path):
    path = tmp_path / "c"
    storage = LocalStorage(str(path))
    held = storage.begin("process 7 on host elsewhere (2 ranks)")
    for meet in (ThreadExchange, ThreadBarrier):
        for error in save(path, [{"a": 1}] * 2, meet=meet):
            assert isinstance(error, CheckpointDirectoryInUse)
            assert "process 7 on host elsewhere (2 ranks) is saving to " in str(error)
    with storage.create(held, f"rank0-{held}.safetensors") as sink:
        sink.write(memoryview(b"still here"))
    storage.end(held)
    saved(path, [{"a": 1}] * 2)
    assert os.listdir(tmp_path) == ["c"]


def test_lock_is_exclusive(tmp_path):
    holding, most = [], []

    def take(rank):
        for _ in range(50):
            try:
                lock = DirectoryLock.take(tmp_path / "l", f"thread {rank}", target="here")
            except CheckpointDirectoryInUse:
                continue
            holding.append(rank)
            most.append(len(holding))
            holding.remove(rank)
            lock.release()

    assert together(4, take) == [None] * 4
    assert set(most) == {1}
    assert os.listdir(tmp_path) == []


def test_only_leftovers_of_dead_saves_are_removed(tmp_path):
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


def test_clean_removes_leftovers_without_a_save(tmp_path):
    for name in ("dead", "alive"):
        (tmp_path / f".{name}.saving" / ("1" * 16)).mkdir(parents=True)
    saved(tmp_path / "dead", [{"a": torch.ones(2)}])
    (tmp_path / ".dead.saving" / ("1" * 16)).mkdir(parents=True)
    storage = LocalStorage(str(tmp_path / "alive"))
    held = storage.begin("a job that is alive")
    LocalCheckpointDirectory(str(tmp_path)).clean()
    assert sorted(os.listdir(tmp_path)) == [".alive.saving", "dead"]
    assert (tmp_path / ".alive.saving" / held).is_dir()
    storage.end(held)
    assert same(load(tmp_path / "dead")[0], {"a": torch.ones(2)})


def test_damaged_checkpoint_is_kept_until_a_save_succeeds(tmp_path):
    path = tmp_path / "c"
    saved(path, [{"a": torch.ones(3)}])
    (path / MANIFEST).write_text("{")
    (old,) = path.glob("rank*")
    save(path, [{"a": 1j}])
    storage = LocalStorage(str(path))
    storage.end(storage.begin("a job that fails"))
    assert old.exists(), "somebody may want to rescue it"
    saved(path, [{"a": torch.ones(4)}])
    assert not old.exists()
    assert same(load(path)[0], {"a": torch.ones(4)})


def test_manifest_that_is_a_fifo_does_not_block(tmp_path):
    path = tmp_path / "c"
    path.mkdir()
    os.mkfifo(path / MANIFEST)
    saved(path, [{"a": 1}])
    assert load(path)[0] == {"a": 1}


def test_symlinked_lock_is_not_followed(tmp_path):
    """Otherwise a user with write access here could make us overwrite any of our files."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / ".c.saving").mkdir()
    (tmp_path / ".c.saving" / "lock").symlink_to(precious)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".d.saving").symlink_to(tmp_path / "elsewhere")
    for name in ("c", "d"):
        (error,) = save(tmp_path / name, [{"a": 1}])
        assert isinstance(error, SaveFailed)
        assert f"{tmp_path}/.{name}.saving" in str(error)
    assert precious.read_text() == "mine"
    assert os.listdir(tmp_path / "elsewhere") == []


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/", path)])
def test_foreign_entries_do_not_fail_a_save(tmp_path, make):
    path = tmp_path / "c"
    saved(path, [{"a": torch.ones(2)}])
    make(path / data_file_name("1" * 16, 0))
    (tmp_path / ".c.saving").mkdir()
    make(tmp_path / ".c.saving" / ("1" * 16))
    make(tmp_path / ".c.saving" / "note.x")
    saved(path, [{"a": torch.zeros(2)}])
    assert same(load(path)[0], {"a": torch.zeros(2)})
