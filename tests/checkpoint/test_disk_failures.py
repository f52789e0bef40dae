"""Full, broken and unshared disks, and occupied target paths."""

import errno
import fcntl
import os
import re
import resource
import shutil
import subprocess

import pytest
import torch

from phalanx.checkpoint.components import (
    CheckpointWriter,
    CheckpointWriterConfig,
    RankInfo,
    WriterHook,
)
from phalanx.errors import SaveFailed

from .internals import FileMessageStore
from .states import ThreadExchange, load, same, save, saved, together


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of one megabyte, or skip."""
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
def test_full_disk_fails_the_save_and_keeps_the_checkpoint(small_disk, meet):
    saved(small_disk / "c", [{"w": torch.ones(10_000)}] * 2)
    errors = save(
        small_disk / "c", [{"w": torch.full((200_000,), rank)} for rank in range(2)], meet=meet
    )
    for error in errors:
        assert isinstance(error, SaveFailed)
        assert "[Errno 28] No space left on device: '" in str(error)
    assert same(load(small_disk / "c")[0], {"w": torch.ones(10_000)})
    saved(small_disk / "c", [{"w": torch.ones(20_000)}] * 2)
    # The first rank to fail may have no space for a message; the next save cleans up.
    assert os.listdir(small_disk) == ["c"]


def test_read_only_directory(tmp_path):
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


def test_cause_is_raised_even_if_messages_cannot_be_written(tmp_path, monkeypatch):
    """As on a broken disk, where messages to other ranks fail as well."""

    def broken(board, name, text):
        raise OSError(errno.EIO, "broken", name)

    class Breaking(WriterHook):
        def pre_commit(self, path, **kwargs):  # noqa: ARG002 - it breaks whatever comes
            monkeypatch.setattr(FileMessageStore, "put", broken)
            raise ValueError("this came first")

        def post_commit(self, path, **kwargs):
            pass

    errors = save(tmp_path / "c", [{"a": 1}] * 2, meet=None, hook=lambda _: Breaking(), timeout=1)
    for error in errors:
        assert isinstance(error, SaveFailed)
        assert "this came first" in str(error)


def test_target_that_is_a_file_is_rejected(tmp_path):
    (tmp_path / "c").write_text("mine")
    (error,) = save(tmp_path / "c", [{"a": 1}])
    assert isinstance(error, SaveFailed)
    assert "Not a directory" in str(error)
    assert (tmp_path / "c").read_text() == "mine"
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize(
    ("number", "owner", "problem"),
    [
        (errno.EIO, "", "OSError: .*Input/output error: .*saving"),
        (errno.EIO, "process 7", "OSError: .*Input/output error: .*saving"),
        (errno.ENOLCK, "process 7", "may be in use by process 7: its file system has no locks"),
    ],
)
def test_failed_lock_names_the_cause(tmp_path, monkeypatch, number, owner, problem):
    (tmp_path / ".c.saving").mkdir()
    (tmp_path / ".c.saving" / "lock").write_text(owner)

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    (error,) = save(tmp_path / "c", [{"a": 1}])
    assert isinstance(error, SaveFailed)
    assert re.search(problem, str(error)), error


def test_unshared_file_system_is_reported(tmp_path):
    barrier = ThreadExchange(2)

    def write(rank):
        writer = CheckpointWriter(CheckpointWriterConfig(), RankInfo(rank, 2), barrier.at(rank))
        writer.write(tmp_path / f"machine {rank}" / "c", {"w": torch.full((3,), rank)})

    for error in together(2, write):
        assert "on rank 1 while writing" in str(error)
        assert "all ranks must share the file system" in str(error)


def load_with_few_files(ctx, path, names):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 12 + max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        state = {name: torch.zeros(3) for name in names}
        load(path, state=state)
        return same(state, load(path)[0]), sum(float(each.sum()) for each in state.values())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_load_with_more_files_than_the_open_file_limit(ranks, tmp_path):
    state = {f"w{i:02}": torch.full((3,), float(i)) for i in range(90)}
    saved(tmp_path / "c", [state] * 90)
    assert len(os.listdir(tmp_path / "c")) == 91
    loaded = ranks.run(load_with_few_files, 1, args=(str(tmp_path / "c"), list(state)))
    assert loaded == [(True, 3 * sum(range(90)))]
