"""CheckpointManager: save, load, rewind and locking."""

import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from phalanx.checkpoint import CheckpointManager
from phalanx.checkpoint.components import CheckpointReader, RankInfo
from phalanx.errors import (
    CheckpointDirectoryInUse,
    CheckpointError,
    CheckpointNotFound,
    InvalidArgument,
    InvalidType,
    MissingKeys,
)
from phalanx.groups._peers import process_state

from .internals import (
    DirectoryLock,
    LocalCheckpointDirectory,
    LocalSnapshot,
    parse_step_name,
    step_name,
)
from .states import filled, names, saved, state_of


def test_empty_directory_has_no_steps(tmp_path):
    folder = CheckpointManager(tmp_path / "run")
    assert folder.latest() is None
    assert folder.steps() == []
    with pytest.raises(CheckpointNotFound, match="no checkpoint in .*run"):
        folder.load()
    assert not (tmp_path / "run").exists(), "who only looks leaves nothing"


def test_missing_step_error_lists_the_available_steps(tmp_path):
    folder = filled(tmp_path, [1, 2])
    with pytest.raises(CheckpointNotFound, match="no step 3; available steps: 1, 2"):
        folder.load(3)


def test_load_into_a_state_is_strict_by_default(tmp_path):
    folder = filled(tmp_path, [7])
    mine = {"weight": torch.zeros(50), "step": None}
    folder.load(state=mine)
    assert mine["step"] == 7
    assert mine["weight"].tolist() == [7.0] * 50
    with pytest.raises(CheckpointError, match="other"):
        folder.load(state={"other": None})
    assert folder.load(state={"other": None}, strict=False)


def test_newest_step_is_by_number_not_by_mtime(tmp_path):
    folder = filled(tmp_path, [8, 9, 10, 11], keep_last=4)
    for age, step in enumerate(folder.steps()):
        when = 1_900_000_000 - age * 1_000_000
        os.utime(os.path.join(folder.path(step), "manifest.json"), (when, when))
        os.utime(folder.path(step), (when, when))
    assert folder.load()["step"] == 11
    folder.close()
    assert filled(tmp_path, [12], keep_last=2).steps() == [11, 12]


def test_step_names_sort_and_parse(tmp_path):
    assert sorted(map(step_name, [100, 20, 3])) == [step_name(step) for step in (3, 20, 100)]
    assert parse_step_name("step-123456789012") == 123456789012
    strangers = (
        "step-1",
        "step-000000001",
        "step-0000000a",
        "a-step-00000001",
        "step-0000000\u0661",
    )
    for name in strangers:
        assert parse_step_name(name) is None, name


def test_saving_an_older_step_requires_rewind(tmp_path):
    folder = filled(tmp_path, [1, 2, 3, 4])
    with pytest.raises(
        InvalidArgument, match=r"cannot save step 3: .* already has step 4.*rewind\(3\)"
    ):
        folder.save(3, state_of(3))
    folder.rewind(2)
    assert folder.steps() == [2]
    folder.save(3, state_of(3))
    assert folder.latest() == 3


@pytest.mark.parametrize("what", ["a link", "notes.txt"])
def test_rewind_removes_nothing_if_a_foreign_file_is_found(tmp_path, what):
    folder = filled(tmp_path / "run", [1, 2, 3])
    if what == "a link":
        os.rename(folder.path(2), tmp_path / "elsewhere")
        os.symlink(tmp_path / "elsewhere", folder.path(2))
    else:
        open(os.path.join(folder.path(2), what), "w").close()
    before = sorted(os.listdir(folder.path(2)))
    with pytest.raises(CheckpointError, match=f"step-00000002 cannot be removed: .*{what}"):
        folder.rewind(1)
    assert folder.steps() == [1, 2, 3]
    assert sorted(os.listdir(folder.path(2))) == before


def test_saving_the_same_step_replaces_it(tmp_path):
    folder = filled(tmp_path, [1, 2])
    folder.save(2, {"step": "again"})
    assert folder.load() == {"step": "again"}


def test_leftovers_of_dead_jobs_are_removed(tmp_path):
    for name in (".step-00000007.saving/0123456789abcdef", ".step-00000003.removed-01234567"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "rank0-0123456789abcdef.safetensors").touch()
    (tmp_path / ".step-00000007.saving" / "lock").touch()
    (tmp_path / ".step-00000008.saving" / "0123456789abcdef").mkdir(parents=True)
    DirectoryLock.take(tmp_path / ".step-00000008.saving", "the living", target="a save")
    (tmp_path / ".mine").mkdir()
    filled(tmp_path, [1])
    assert names(tmp_path) == [".mine", ".step-00000008.saving", "step-00000001"]


def test_second_job_is_rejected_with_the_lock_holder(tmp_path):
    folder = filled(tmp_path, [1])
    other = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointDirectoryInUse, match=f"process {os.getpid()} on"):
        other.save(2, state_of(2))
    assert other.load()["step"] == 1, "but it may read"
    folder.close()
    other.save(2, state_of(2))
    del other
    gc.collect()  # an error's traceback has a cycle
    filled(tmp_path, [3])  # a collected manager releases its lock


def test_killed_job_releases_the_lock(tmp_path):
    code = (
        "import sys, time\n"
        "from phalanx.checkpoint._checkpoint_directory import LocalCheckpointDirectory\n"
        "LocalCheckpointDirectory(sys.argv[1]).lock('the other job'); print(flush=True)\n"
        "time.sleep(60)"
    )
    command = [sys.executable, "-c", code, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"\n"
        with pytest.raises(CheckpointDirectoryInUse, match="the other job"):
            filled(tmp_path, [1])
        process.send_signal(signal.SIGKILL)
    assert filled(tmp_path, [1]).steps() == [1]


def test_a_save_waits_for_the_end_of_a_killed_one(tmp_path):
    """The kernel shows a process as a zombie before it has closed its files."""
    code = """
        import ctypes, os, sys, threading
        from phalanx.checkpoint._checkpoint_directory import LocalCheckpointDirectory
        LocalCheckpointDirectory(sys.argv[1]).lock("the other job")

        def end():
            print(flush=True)
            sys.stdin.readline()
            os._exit(0)

        threading.Thread(target=end).start()
        SYS_exit = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
        ctypes.CDLL(None).syscall(SYS_exit, 0)  # this thread only
    """
    command = [sys.executable, "-c", textwrap.dedent(code), tmp_path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == b"\n"
        while process_state(process.pid) != "dead":
            time.sleep(0.001)
        threading.Timer(0.3, process.stdin.close).start()
        assert filled(tmp_path, [1]).steps() == [1]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_neither_holds_nor_releases_the_lock(tmp_path):
    """Such as a data loader worker, which may outlive its killed parent."""
    folder = filled(tmp_path, [1])
    ours, its = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            ours.close()
            folder.close()
            its.send(b"closed")
            its.recv(1)  # until the parent's end is closed
        finally:
            os._exit(0)
    its.close()
    assert ours.recv(6) == b"closed"
    with pytest.raises(CheckpointDirectoryInUse):
        filled(tmp_path, [2])
    os.close(folder._directory._lock._fd)  # as the kernel does when a process dies
    folder._directory._lock = None
    filled(tmp_path, [2]).close()
    ours.close()
    os.waitpid(child, 0)


def test_new_directory_and_its_parents_are_flushed(tmp_path, monkeypatch):
    flushed = []
    flush = os.fsync

    def note(fd):
        flushed.append(os.readlink(f"/proc/self/fd/{fd}"))
        flush(fd)

    monkeypatch.setattr(os, "fsync", note)
    filled(tmp_path / "new" / "run", [1])
    assert {str(tmp_path), str(tmp_path / "new")} <= {*flushed}


def test_path_does_not_depend_on_later_chdir(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    with CheckpointManager("r\u00fcn 1") as folder, CheckpointManager("~/there/run") as other:
        folder.save(1, state_of(1))
        monkeypatch.chdir("../there")
        folder.save(2, state_of(2))
        other.save(1, state_of(1))
    assert names(tmp_path / "here" / "r\u00fcn 1") == ["step-00000001", "step-00000002"]
    assert os.listdir() == ["run"]


def test_leftovers_that_cannot_be_removed_do_not_fail_a_save(tmp_path, monkeypatch, caplog):
    def refuse(self):
        raise PermissionError("somebody else's")

    monkeypatch.setattr(LocalCheckpointDirectory, "clean", refuse)
    assert filled(tmp_path, [1]).steps() == [1]
    assert "somebody else's" in caplog.text


def test_bad_arguments_are_rejected(tmp_path):
    with pytest.raises(InvalidType, match="keep_last must be an integer, got float"):
        CheckpointManager(tmp_path, keep_last=2.5)
    with pytest.raises(InvalidType, match="keep_every must be an integer, got str"):
        CheckpointManager(tmp_path, keep_every="1000")
    for path, problem in (("", "path must not be empty"), (b"run", "path must be a str")):
        with pytest.raises(InvalidArgument, match=problem):
            CheckpointManager(path)
    with pytest.raises(InvalidArgument, match="keep_last must be at least 1"):
        CheckpointManager(tmp_path, keep_last=0)
    with pytest.raises(InvalidArgument, match="keep_every"):
        CheckpointManager(tmp_path, keep_every=-1)
    with pytest.raises(InvalidArgument, match="-1"):
        CheckpointManager(tmp_path).save(-1, {})
    with pytest.raises(InvalidType, match="got float"):
        CheckpointManager(tmp_path).save(1.5, {})
    with pytest.raises(InvalidType, match=r"got dict: .* load\(state=state\)"):
        CheckpointManager(tmp_path).load({"weight": torch.zeros(3)})
    with filled(tmp_path, [1]) as folder, pytest.raises(InvalidArgument, match="itself"):
        CheckpointManager(folder.path(1)).latest()


def test_file_url_is_a_local_path(tmp_path):
    with filled(f"file://{tmp_path}", [1]) as folder, CheckpointManager(tmp_path) as other:
        assert other.latest() == 1
        with pytest.raises(CheckpointDirectoryInUse):
            other.save(2, state_of(2))
        assert folder.path(1) == f"{tmp_path}/step-00000001"


def test_step_replaced_during_a_check_is_not_damaged(tmp_path, monkeypatch):
    folder = filled(tmp_path, [1])
    manifest = LocalSnapshot.manifest

    def read(snapshot):
        monkeypatch.undo()
        data = manifest(snapshot)
        folder.save(1, state_of(7))
        return data

    monkeypatch.setattr(LocalSnapshot, "manifest", read)
    assert not LocalCheckpointDirectory(str(tmp_path)).is_damaged(1)


def test_manager_on_fsspec_storage():
    url = "memory://test_folder/run"
    with filled(url, [1, 2, 3, 4], keep_last=2, keep_every=None) as folder:
        assert folder.steps() == [3, 4]
        assert folder.load()["step"] == 4
        folder.rewind(3)
        assert folder.latest() == 3


def test_object_is_not_loaded_from_a_partial_state(tmp_path):
    """For example RNG state, which is partly replicated and partly per rank."""
    numbers = [{"rng": {"kind": "mt", "words": torch.full((3,), rank)}} for rank in range(2)]
    saved(tmp_path / "step-00000001", numbers)
    given = []

    class Loader:
        load_state_dict = given.append

    reader = CheckpointReader(RankInfo(2, 3))
    path = str(tmp_path / "step-00000001")
    with pytest.raises(
        MissingKeys, match=r"rng\.words was saved per rank, by ranks 0, 1 only.*rank="
    ):
        reader.read(path, {"rng": Loader()})
    assert not given
    reader.read(path, {"rng": Loader()}, rank=0)
    assert given[0]["words"].tolist() == [0, 0, 0]
