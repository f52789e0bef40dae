"""CheckpointManager with several ranks and with asynchronous checkpointers."""

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

from phalanx.checkpoint import (
    CheckpointerConfig,
    CheckpointManager,
    PerRank,
    make_async_checkpointer,
    make_sync_checkpointer,
)
from phalanx.checkpoint.barriers import BarrierConfig
from phalanx.checkpoint.components import Checkpointer, RankInfo
from phalanx.errors import (
    CheckpointDirectoryInUse,
    CheckpointError,
    CheckpointNotFound,
    DamagedCheckpoint,
    InvalidArgument,
    SaveFailed,
    StateMismatch,
)
from phalanx.groups import process_group

from .internals import LocalCheckpointDirectory
from .states import damage, state_of
from .writers import stopped


def use_a_folder(ctx, path, *, default_group):
    if default_group:
        dist.init_process_group("gloo", store=ctx.store, rank=ctx.rank, world_size=ctx.size)
    group = None if default_group else ctx.group()
    try:
        with CheckpointManager(path, keep_last=1, group=group) as folder:
            assert folder.latest() is None
            for step in (1, 2):
                folder.save(step, {"shared": torch.full((9,), step), "own": PerRank(ctx.rank)})
            loaded = folder.load()
            assert (loaded["shared"].tolist(), loaded["own"]) == ([2] * 9, ctx.rank)
            kind = InvalidArgument if ctx.rank == 0 else SaveFailed
            errors = [_error(lambda: folder.save(1, {}), kind), _error(lambda: folder.load(1))]
            wanted = torch.zeros(9 + (ctx.rank == 1), dtype=torch.int64)
            return [*errors, _error(lambda: folder.load(state={"shared": wanted}))]
    finally:
        if default_group:
            dist.destroy_process_group()


def _error(call, kind=CheckpointError):
    with pytest.raises(kind) as caught:
        call()
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("default_group", [False, True])
def test_all_ranks_agree_and_fail_together(request, tmp_path, default_group):
    team = request.getfixturevalue("ranks" if default_group else "threads")
    kwargs = {"default_group": default_group}
    one, two = team.run(use_a_folder, 2, args=(str(tmp_path),), kwargs=kwargs, timeout=40)
    assert [kind for kind, _ in one] == [InvalidArgument, CheckpointNotFound, StateMismatch]
    assert [kind for kind, _ in two] == [SaveFailed, CheckpointNotFound, StateMismatch]
    assert one[0][1] in two[0][1]
    assert one[1] == two[1]
    assert one[2][1].startswith("rank 1 failed while loading step 2: StateMismatch: shared is")


def save_in_two_ways(ctx, path, barrier):
    """Save with different ranks in torch's default group and in the current group."""
    world = dist.PrefixStore("world", ctx.store)
    dist.init_process_group("gloo", store=world, rank=ctx.rank, world_size=ctx.size)
    group = ctx.group("gloo", rank=1 - ctx.rank)
    try:
        with process_group(group), CheckpointManager(path) as folder:
            config = CheckpointerConfig(barrier_config=BarrierConfig(barrier))
            with closing(make_sync_checkpointer(config)) as checkpointer:
                checkpointer.save(folder.path(1), {"own": PerRank(ctx.rank)})
            return folder.load()["own"]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("barrier", "loaded"), [(None, [0, 1]), ("group", [0, 1]), ("dist_barrier", [1, 0])]
)
def test_manager_and_checkpointer_use_the_same_group(ranks, tmp_path, barrier, loaded):
    """Both prefer the current group to torch's default one, unless the barrier names another."""
    assert ranks.run(save_in_two_ways, 2, args=(str(tmp_path), barrier)) == loaded


def refused(ctx, path):
    return _error(lambda: CheckpointManager(path, group=ctx.group()).save(1, {}))


def test_lock_conflict_is_raised_on_all_ranks(threads, tmp_path):
    directory = LocalCheckpointDirectory(str(tmp_path))
    directory.lock("the other job")
    for kind, message in threads.run(refused, 3, args=(str(tmp_path),)):
        assert kind is CheckpointDirectoryInUse
        assert "the other job is saving to " in message
    directory.unlock()


def disagree(ctx, path):
    """Make different calls on different ranks."""
    with CheckpointManager(path, group=ctx.group()) as folder:
        folder.save(7, {})
        different = _error(lambda: folder.save(8 + ctx.rank, {}))
        calls = folder.latest if ctx.rank == 0 else lambda: folder.save(9, {})
        mixed = _error(calls)
        steps = _error(lambda: folder.load(7 + ctx.rank), InvalidArgument)
        return different, mixed, steps, folder.latest()


def test_different_calls_on_ranks_are_reported(threads, tmp_path):
    for different, mixed, steps, latest in threads.run(disagree, 2, args=(tmp_path,)):
        words = "ranks save different steps: rank 0: 8, rank 1: 9"
        assert different == (SaveFailed, words)
        assert "rank 0" in mixed[1]
        assert "asking for the latest step, rank 1" in mixed[1]
        assert "preparing" in mixed[1]
        assert steps == (InvalidArgument, "ranks load different steps: rank 0: 7, rank 1: 8")
        assert latest == 7, "and they can go on"


def look_into_a_loop(ctx, path):
    folder = CheckpointManager(path, group=ctx.group())
    return [_error(call, (OSError, CheckpointError)) for call in (folder.latest, folder.load)]


def test_read_error_on_one_rank_is_raised_on_all(threads, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    first, second = threads.run(look_into_a_loop, 2, args=(tmp_path / "loop",))
    assert [kind for kind, _ in first] == [OSError, OSError]
    assert [kind for kind, _ in second] == [CheckpointError, CheckpointError]
    assert second[0][1].startswith("rank 0 failed while asking for the latest step: OSError: ")


def load_what_is_damaged(ctx, path):
    folder = CheckpointManager(path, group=ctx.group())
    with pytest.raises(DamagedCheckpoint) as caught:
        folder.load()
    notes = caught.value.__notes__
    folder.load(1)
    folder.rewind(1)
    return notes, folder.latest()


def test_damaged_newest_step_is_an_error_with_a_hint(threads, tmp_path):
    with CheckpointManager(tmp_path) as folder:
        for step in (1, 2):
            folder.save(step, state_of(step))
    damage(folder.path(2))
    for notes, latest in threads.run(load_what_is_damaged, 2, args=(tmp_path,)):
        assert notes == [
            "to continue from the one before it: load(1, ...), then rewind(1), which removes step 2"
        ]
        assert latest == 1


def test_rank_without_a_group_logs_a_warning(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    CheckpointManager(tmp_path).latest()
    assert "rank 1 of 2 has no process group" in caplog.text


def test_checkpointer_with_other_rank_info_is_rejected(tmp_path):
    with closing(make_sync_checkpointer(rank_info=RankInfo(1, 2))) as checkpointer:
        folder = CheckpointManager(tmp_path, checkpointer=checkpointer)
        with pytest.raises(
            InvalidArgument, match=r"checkpointer is rank 1 of 2, the manager is rank 0 of 1"
        ):
            folder.save(1, state_of(1))


class InBackground(Checkpointer):
    """A user-defined checkpointer that writes in a thread once `may_write` is set."""

    def __init__(self):
        self._inner = make_sync_checkpointer()
        self._threads = ThreadPoolExecutor(1)
        self.may_write = threading.Event()

    def save(self, path, state_dict, **kwargs):
        staged = Future()
        staged.set_result(None)

        def write():
            self.may_write.wait()
            if state_dict["step"] == 3:
                raise OSError("the disk is full")
            self._inner.save(path, state_dict, **kwargs)

        return staged, self._threads.submit(write)

    def load(self, path, state_dict=None, **kwargs):
        return self._inner.load(path, state_dict, **kwargs)

    def close(self):
        self._threads.shutdown()


@pytest.fixture
def in_background():
    with closing(InBackground()) as checkpointer:
        yield checkpointer
        checkpointer.may_write.set()


def test_async_retention_runs_after_the_new_step_is_written(tmp_path, in_background):
    folder = CheckpointManager(tmp_path, keep_last=1, checkpointer=in_background)
    in_background.may_write.set()
    folder.save(1, state_of(1))[1].result()
    in_background.may_write.clear()
    _, written = folder.save(2, state_of(2))
    assert folder.latest() == 1
    with pytest.raises(InvalidArgument, match="already has step 2"):
        folder.save(1, state_of(1))
    in_background.may_write.set()
    written.result()
    _, written = folder.save(3, state_of(3))
    assert isinstance(written.exception(), OSError)
    folder.close()
    assert folder.steps() == [2], "one that failed removes nothing"
    assert folder.load()["step"] == 2


def test_close_waits_for_retention(tmp_path, in_background, monkeypatch):
    folder = CheckpointManager(tmp_path, keep_last=1, checkpointer=in_background)
    in_background.may_write.set()
    folder.save(1, state_of(1))[1].result()
    _, written = folder.save(2, state_of(2))
    is_waiting = threading.Event()
    remove = LocalCheckpointDirectory.remove

    def remove_late(self, step):
        is_waiting.wait()
        return remove(self, step)

    monkeypatch.setattr(LocalCheckpointDirectory, "remove", remove_late)
    written.result()
    closing_thread = threading.Thread(target=folder.close)
    closing_thread.start()
    closing_thread.join(0.1)
    assert closing_thread.is_alive()
    assert folder.steps() == [1, 2]
    assert os.path.exists(tmp_path / ".saving"), "and no one else may save meanwhile"
    is_waiting.set()
    closing_thread.join()
    assert folder.steps() == [2]
    assert not os.path.exists(tmp_path / ".saving")


def test_rewind_waits_for_pending_saves(tmp_path, in_background):
    folder = CheckpointManager(tmp_path, checkpointer=in_background)
    in_background.may_write.set()
    folder.save(1, state_of(1))[1].result()
    in_background.may_write.clear()
    folder.save(2, state_of(2))
    threading.Timer(0.05, in_background.may_write.set).start()
    folder.rewind(1)
    assert folder.steps() == [1]
    folder.close()
    assert folder.steps() == [1]


def test_close_raises_the_error_of_a_failed_save(tmp_path, in_background):
    """Otherwise a preempted run would exit as if its last step were saved."""
    with pytest.raises(OSError, match="the disk is full"):  # noqa: SIM117 - the order matters
        with CheckpointManager(tmp_path, checkpointer=in_background) as folder:
            folder.save(3, state_of(3))
            in_background.may_write.set()
            raise SystemExit(75)
    assert not os.path.exists(tmp_path / ".saving")


def test_unobserved_write_failure_is_raised_once_by_the_next_save(tmp_path):
    checkpointer = make_async_checkpointer()
    with CheckpointManager(tmp_path, checkpointer=checkpointer) as folder:
        (tmp_path / "step-00000001").touch()  # a file instead of a directory
        _, written = folder.save(1, state_of(1))
        wait([written])  # without observing the exception
        with stopped(checkpointer._checkpoint_process):
            with pytest.raises(SaveFailed, match="Not a directory"):
                folder.save(2, state_of(2))
            assert len(folder._writes) == 1, "it is waited for all the same"
        wait([folder.save(3, state_of(3))[1]])
        folder.save(4, state_of(4))
        assert len(folder._writes) <= 2, "those that have succeeded are forgotten"
        checkpointer.close()
    assert folder.steps() == [2, 3, 4]
