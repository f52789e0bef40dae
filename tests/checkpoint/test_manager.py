"""A folder of checkpoints: what it is to save, to load and to go back, and for whom."""

import gc
import os
import signal
import socket
import subprocess
import sys

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

from .internals import (
    DirectoryLock,
    LocalCheckpointDirectory,
    LocalSnapshot,
    parse_step_name,
    step_name,
)
from .states import filled, names, saved, state_of


def test_nothing_there_is_no_step(tmp_path):
    folder = CheckpointManager(tmp_path / "run")
    assert folder.latest() is None
    assert folder.steps() == []
    with pytest.raises(CheckpointNotFound, match="no checkpoint in .*run"):
        folder.load()
    assert not (tmp_path / "run").exists(), "who only looks leaves nothing"


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    folder = filled(tmp_path, [1, 2])
    with pytest.raises(CheckpointNotFound, match="no step 3; available steps: 1, 2"):
        folder.load(3)


def test_it_loads_into_a_state_and_strictly(tmp_path):
    folder = filled(tmp_path, [7])
    mine = {"weight": torch.zeros(50), "step": None}
    folder.load(state=mine)
    assert mine["step"] == 7
    assert mine["weight"].tolist() == [7.0] * 50
    with pytest.raises(CheckpointError, match="other"):
        folder.load(state={"other": None})
    assert folder.load(state={"other": None}, strict=False)


def test_the_number_decides_and_never_the_clock(tmp_path):
    folder = filled(tmp_path, [8, 9, 10, 11], keep_last=4)
    for age, step in enumerate(folder.steps()):
        when = 1_900_000_000 - age * 1_000_000
        os.utime(os.path.join(folder.path(step), "manifest.json"), (when, when))
        os.utime(folder.path(step), (when, when))
    assert folder.load()["step"] == 11
    folder.close()
    assert filled(tmp_path, [12], keep_last=2).steps() == [11, 12]


def test_names_are_in_the_order_of_steps_and_no_others_count(tmp_path):
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


def test_a_step_before_the_newest_is_refused_until_the_folder_is_rewound(tmp_path):
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
def test_a_rewind_removes_nothing_if_something_is_somebody_elses(tmp_path, what):
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


def test_the_same_step_is_replaced(tmp_path):
    folder = filled(tmp_path, [1, 2])
    folder.save(2, {"step": "again"})
    assert folder.load() == {"step": "again"}


def test_what_dead_jobs_left_is_removed_and_what_living_ones_do_is_not(tmp_path):
    for name in (".step-00000007.saving/0123456789abcdef", ".step-00000003.removed-01234567"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "rank0-0123456789abcdef.safetensors").touch()
    (tmp_path / ".step-00000007.saving" / "lock").touch()
    (tmp_path / ".step-00000008.saving" / "0123456789abcdef").mkdir(parents=True)
    DirectoryLock.take(tmp_path / ".step-00000008.saving", "the living", target="a save")
    (tmp_path / ".mine").mkdir()
    filled(tmp_path, [1])
    assert names(tmp_path) == [".mine", ".step-00000008.saving", "step-00000001"]


def test_two_jobs_are_refused_with_who_it_is_that_holds_it(tmp_path):
    folder = filled(tmp_path, [1])
    other = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointDirectoryInUse, match=f"process {os.getpid()} on"):
        other.save(2, state_of(2))
    assert other.load()["step"] == 1, "but it may read"
    folder.close()
    other.save(2, state_of(2))
    del other
    gc.collect()  # an error's traceback has a cycle
    filled(tmp_path, [3])  # whoever is forgotten holds nothing


def test_a_job_that_was_killed_holds_nothing(tmp_path):
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


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_was_forked_off_holds_nothing_and_takes_nothing_away(tmp_path):
    """A data loader's, say, which may live on for a while when its parent was killed."""
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
    os.close(folder._directory._lock._fd)  # as the kernel does it when a process dies
    folder._directory._lock = None
    filled(tmp_path, [2]).close()
    ours.close()
    os.waitpid(child, 0)


def test_a_new_folder_is_durable_with_those_above_it(tmp_path, monkeypatch):
    flushed = []
    flush = os.fsync

    def note(fd):
        flushed.append(os.readlink(f"/proc/self/fd/{fd}"))
        flush(fd)

    monkeypatch.setattr(os, "fsync", note)
    filled(tmp_path / "new" / "run", [1])
    assert {str(tmp_path), str(tmp_path / "new")} <= {*flushed}


def test_a_path_means_the_same_wherever_the_process_goes(tmp_path, monkeypatch):
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


def test_leftovers_that_cannot_be_removed_are_in_nobodys_way(tmp_path, monkeypatch, caplog):
    def refuse(self):
        raise PermissionError("somebody else's")

    monkeypatch.setattr(LocalCheckpointDirectory, "clean", refuse)
    assert filled(tmp_path, [1]).steps() == [1]
    assert "somebody else's" in caplog.text


def test_mistakes_are_explained(tmp_path):
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


def test_a_url_of_the_file_system_is_a_path(tmp_path):
    with filled(f"file://{tmp_path}", [1]) as folder, CheckpointManager(tmp_path) as other:
        assert other.latest() == 1
        with pytest.raises(CheckpointDirectoryInUse):
            other.save(2, state_of(2))
        assert folder.path(1) == f"{tmp_path}/step-00000001"


def test_what_is_replaced_while_it_is_looked_at_is_not_damaged(tmp_path, monkeypatch):
    folder = filled(tmp_path, [1])
    manifest = LocalSnapshot.manifest

    def read(snapshot):
        monkeypatch.undo()
        data = manifest(snapshot)
        folder.save(1, state_of(7))
        return data

    monkeypatch.setattr(LocalSnapshot, "manifest", read)
    assert not LocalCheckpointDirectory(str(tmp_path)).is_damaged(1)


def test_it_lives_wherever_fsspec_reaches():
    url = "memory://test_folder/run"
    with filled(url, [1, 2, 3, 4], keep_last=2, keep_every=None) as folder:
        assert folder.steps() == [3, 4]
        assert folder.load()["step"] == 4
        folder.rewind(3)
        assert folder.latest() == 3


def test_an_object_is_not_given_half_of_its_state_where_there_are_more_ranks(tmp_path):
    """Its random numbers, say, of which ranks hold some alike and some not."""
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
