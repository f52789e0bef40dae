"""Saving with any exchange: writer, hooks, defaults and the sync checkpointer."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.checkpoint import (
    CheckpointerConfig,
    PerRank,
    Replicated,
    make_sync_checkpointer,
)
from phalanx.checkpoint.components import (
    CheckpointWriter,
    CheckpointWriterConfig,
    RankInfo,
    SyncCheckpointer,
    WriterHook,
)
from phalanx.errors import (
    CheckpointDirectoryInUse,
    InvalidArgument,
    SaveFailed,
    SaveTimeout,
    UnsupportedState,
)

from .internals import LocalStorage, find_ranks
from .states import ThreadBarrier, ThreadExchange, load, mixed, plain, same, save, saved, together

EXCHANGES = [ThreadExchange, ThreadBarrier, None]


@pytest.mark.parametrize("meet", EXCHANGES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_save_with_every_exchange(tmp_path, size, meet):
    for step in (1, 2):
        saved(tmp_path / "run" / "c", [mixed(rank, step) for rank in range(size)], meet=meet)
        for rank in range(size):
            assert same(plain(mixed(rank, step)), load(tmp_path / "run" / "c", rank, size)[0])
    assert os.listdir(tmp_path / "run") == ["c"]
    assert len(os.listdir(tmp_path / "run" / "c")) == size + 1


def test_replicated_state_is_written_once_and_split_among_ranks(tmp_path):
    model = {f"layer {i}": torch.randn(300_000) for i in range(8)}
    for path, state in (("marked", {"m": Replicated(model)}), ("found", {"m": model})):
        saved(tmp_path / path, [state] * 4)
        sizes = [file.stat().st_size for file in (tmp_path / path).glob("rank*")]
        assert len(sizes) == 4
        assert max(sizes) < 8 * 1_200_000 / 4 + (1 << 20)
        assert sum(sizes) < 8 * 1_200_000 + 10_000


def test_state_without_tensors_has_no_data_file(tmp_path):
    saved(tmp_path / "c", [{"step": 1, "rank": rank} for rank in range(2)])
    assert os.listdir(tmp_path / "c") == ["manifest.json"]
    assert load(tmp_path / "c", 1, 2)[0] == {"step": 1, "rank": 1}


def test_keys_present_on_some_ranks_only(tmp_path):
    states = [{"a": {0: 1}}, {"a": {0: 1, 1: torch.ones(2)}, "b": PerRank([1])}]
    saved(tmp_path / "c", states)
    assert same(load(tmp_path / "c", 0, 2)[0], {"a": {0: 1}})
    assert same(load(tmp_path / "c", 1, 2)[0], {"a": {0: 1, 1: torch.ones(2)}, "b": [1]})


class Recorder(WriterHook):
    def __init__(self, rank, *, fail="", path=None):
        self.rank, self.fail, self.calls, self.path = rank, fail, [], path

    def pre_commit(self, path, **kwargs):
        self.calls.append(("pre", path, kwargs, os.path.exists(path)))
        if self.fail == f"pre {self.rank}":
            raise ValueError("the hook says no")

    def post_commit(self, path, **kwargs):
        self.calls.append(("post", path, kwargs, os.path.exists(path)))
        if self.fail == f"post {self.rank}":
            raise ValueError("too late")


def test_hooks_run_on_every_rank_before_and_after_the_commit(tmp_path):
    hooks = {}
    path = str(tmp_path / "c")
    given = {"tag": "x", "save_number": 7, "progress_meter": None}  # none of these is ours
    saved(path, [{}, {}], hook=lambda rank: hooks.setdefault(rank, Recorder(rank)), **given)
    for hook in hooks.values():
        assert hook.calls == [("pre", path, given, False), ("post", path, given, True)]


@pytest.mark.parametrize("meet", EXCHANGES)
def test_pre_commit_failure_aborts_the_save_on_all_ranks(tmp_path, meet):
    saved(tmp_path / "c", [{"v": 1}] * 2)
    errors = save(
        tmp_path / "c", [{"v": 2}] * 2, hook=lambda rank: Recorder(rank, fail="pre 1"), meet=meet
    )
    for error in errors:
        assert isinstance(error, SaveFailed)
        assert "failed on rank 1 while writing: ValueError: the hook says no" in str(error)
    assert isinstance(errors[1].__cause__, ValueError)
    assert load(tmp_path / "c")[0] == {"v": 1}
    assert os.listdir(tmp_path) == ["c"]


def test_post_commit_failure_is_raised_on_its_rank_only(tmp_path):
    errors = save(tmp_path / "c", [{}, {}], hook=lambda rank: Recorder(rank, fail="post 1"))
    assert errors[0] is None
    assert isinstance(errors[1], ValueError)
    load(tmp_path / "c")


@pytest.mark.parametrize("meet", EXCHANGES)
def test_unsupported_state_is_named_on_every_rank(tmp_path, meet):
    errors = save(tmp_path / "c", [{}, {"o": [{"foo": {1}}]}, {}, {"x": 1j}], meet=meet)
    for error in (errors[0], errors[2]):
        assert isinstance(error, SaveFailed)
        assert (
            "on rank 1 while preparing: UnsupportedState: o[0].foo has unsupported type set"
            in str(error)
        )
        assert str(error).endswith("(rank 3 failed too)")
    for error, name in ((errors[1], "o[0].foo"), (errors[3], "x")):
        assert type(error) is UnsupportedState
        assert str(error).startswith(f"{name} has unsupported type ")
    assert os.listdir(tmp_path) == []


def test_replicated_state_that_differs_is_named_on_every_rank(tmp_path):
    errors = save(
        tmp_path / "c", [{"m": Replicated({"w": torch.tensor(rank)})} for rank in range(2)]
    )
    for error in errors:
        assert isinstance(error, SaveFailed)
        assert "m.w is marked Replicated but differs between rank 0 and rank 1" in str(error)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("meet", EXCHANGES)
def test_failure_to_compare_state_is_raised_on_all_ranks(tmp_path, meet):
    """An expanded tensor that is too large to materialize."""
    states = [{"w": torch.ones(2)}, {"w": torch.ones(1).expand(1 << 45)}]
    for error in save(tmp_path / "c", states, meet=meet):
        assert isinstance(error, SaveFailed)
        assert "failed on rank 1 while comparing state: RuntimeError: " in str(error)
        assert "memory" in str(error)
    assert os.listdir(tmp_path) == []


def test_storage_error_on_one_rank_is_raised_on_all(tmp_path):
    barrier = ThreadExchange(2)

    def write(rank):
        writer = CheckpointWriter(CheckpointWriterConfig(), RankInfo(rank, 2), barrier.at(rank))
        writer.write(tmp_path / "c" if rank == 0 else "unheardof://c", {"a": 1})

    for error in together(2, write):
        assert isinstance(error, SaveFailed)
        assert "on rank 1 while preparing: ValueError: Protocol not known" in str(error)
    assert os.listdir(tmp_path) == []


def test_path_types_and_empty_path(tmp_path):
    checkpointer = make_sync_checkpointer()
    for path in (os.fsencode(tmp_path / "b"), tmp_path / "p", f"{tmp_path}/s/"):
        checkpointer.save(path, {"a": 1})
        assert checkpointer.load(path) == {"a": 1}
    assert sorted(os.listdir(tmp_path)) == ["b", "p", "s"]
    for call in (lambda: checkpointer.save("", {"a": 1}), lambda: checkpointer.load("")):
        with pytest.raises(InvalidArgument, match="path must not be empty"):
            call()


def test_default_sync_checkpointer(tmp_path):
    checkpointer = make_sync_checkpointer()
    assert isinstance(checkpointer, SyncCheckpointer)
    assert checkpointer.save(tmp_path / "c", {"w": torch.ones(2)}) is None
    assert same(checkpointer.load(tmp_path / "c"), {"w": torch.ones(2)})
    checkpointer.close()
    assert CheckpointerConfig().writer_config == CheckpointWriterConfig(600)


def test_rank_info_defaults_to_torchs_default_group(tmp_path):
    assert find_ranks() == RankInfo(0, 1)
    dist.init_process_group("fake", rank=2, world_size=3, store=FakeStore())
    try:
        assert find_ranks() == RankInfo(2, 3)
    finally:
        dist.destroy_process_group()


def test_rank_info_falls_back_to_launcher_variables(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert find_ranks() == RankInfo(1, 2)


def test_wall_clock_is_not_used(tmp_path, monkeypatch):
    def jump():
        raise AssertionError("a clock that may jump")

    monkeypatch.setattr(time, "time", jump)
    saved(tmp_path / "c", [{"a": 1}] * 2, meet=None)
    saved(tmp_path / "c", [{"a": 2}] * 2, meet=None)
    assert load(tmp_path / "c")[0] == {"a": 2}


def test_collective_state_dict_runs_on_all_ranks(tmp_path):
    """As for a sharded optimizer, whose state_dict() would hang if one rank skipped it."""
    barrier = ThreadBarrier(2)

    class Collective:
        def state_dict(self):
            barrier.execute_barrier()
            return {"a": 1}

    storage = LocalStorage(str(tmp_path / "c"))
    held = storage.begin("another job")
    for error in save(tmp_path / "c", [{"c": Collective()}] * 2):
        assert isinstance(error, CheckpointDirectoryInUse)
    storage.end(held)
    saved(tmp_path / "c", [{"c": Collective()}] * 2)


def test_keyboard_interrupt_is_kept_and_reported_to_other_ranks(tmp_path):
    class Interrupted(Recorder):
        def pre_commit(self, path, **kwargs):
            super().pre_commit(path, **kwargs)
            if self.rank == 0:
                raise KeyboardInterrupt

    errors = save(tmp_path / "c", [{}, {}], hook=Interrupted)
    assert isinstance(errors[0], KeyboardInterrupt)
    assert isinstance(errors[1], SaveFailed)
    assert "rank 0 while writing: KeyboardInterrupt" in str(errors[1])
    assert os.listdir(tmp_path) == []


class QuotaTimeout(SaveTimeout):
    """An error class of a user, which other ranks do not know."""


def test_a_subclass_of_an_error_class_counts_as_that_class_on_every_rank(tmp_path):
    class Quota(Recorder):
        def pre_commit(self, path, **kwargs):  # noqa: ARG002 - whatever comes
            raise QuotaTimeout("no answer")

    for error in save(tmp_path / "c", [{}, {}], hook=Quota):
        assert isinstance(error, SaveTimeout)
        assert "on rank 0 while writing: QuotaTimeout: no answer" in str(error)


class ClosesOnce(CheckpointWriter):
    closed = 0

    def close(self):
        super().close()
        self.closed += 1


def test_writer_can_be_reused(tmp_path):
    writer = ClosesOnce(CheckpointWriterConfig(), RankInfo(0, 1))
    for step in range(5):
        writer.write(tmp_path / "c", {"step": step, "w": torch.full((3,), step)})
        assert load(tmp_path / "c")[0]["step"] == step
    assert writer.closed == 0, "which a subclass may do only once"
    writer.close()
    assert len(os.listdir(tmp_path / "c")) == 2
