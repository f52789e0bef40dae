"""Coordination by messages in storage or by a barrier, and ranks that do not arrive."""

import os
import threading
import time

import pytest

from phalanx.checkpoint.components import CheckpointWriter, CheckpointWriterConfig, RankInfo
from phalanx.errors import CheckpointNotFound, SaveFailed, SaveTimeout

from .internals import MESSAGE_PREFIX, Coordinator, LocalStorage, StorageExchange
from .states import ThreadBarrier, ThreadExchange, load, saved, together


@pytest.mark.parametrize("meet", [ThreadExchange, ThreadBarrier, None])
def test_missing_rank_is_named(tmp_path, meet):
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
        assert "rank 2 did not arrive within 0.5 s" in str(errors[0])
        assert "rank 2 did not arrive within 0.5 s" in str(errors[1])
    with pytest.raises(CheckpointNotFound):
        load(tmp_path / "c")
    saved(tmp_path / "c", [{"a": 1}] * 3, meet=None)
    assert os.listdir(tmp_path) == ["c"]


def test_rank_that_stops_taking_part_is_named(tmp_path):
    """Rank 1 takes part in the first exchange, and in no other."""

    def write(rank):
        messages = LocalStorage(str(tmp_path / "c")).message_store()
        info = RankInfo(rank, 2)
        coordinator = Coordinator(info, StorageExchange(info, messages, timeout=0.5))
        assert coordinator.run_on_all_ranks("starting", lambda: rank) == [0, 1]
        if rank == 0:
            coordinator.run_on_all_ranks("working", lambda: None)

    errors = together(2, write)
    assert errors[1] is None
    assert isinstance(errors[0], SaveTimeout)
    assert "while working: rank 1 (at exchange 1 of 2) did not arrive" in str(errors[0])


def test_two_processes_with_the_same_rank_raise(tmp_path):
    hellos = threading.Barrier(2)

    def write(thread):
        messages = LocalStorage(str(tmp_path / "c")).message_store()
        exchange = StorageExchange(RankInfo(min(thread, 1), 2), messages, timeout=5)
        if thread == 0:
            # Rank 0 must see both hellos at once.
            while sum(name.startswith(MESSAGE_PREFIX) for name in messages.names()) < 2:
                time.sleep(0.001)
        else:
            hellos.wait()
        exchange.exchange("")

    errors = together(3, write)
    for error in errors:
        assert "two processes claim to be rank 1" in str(error)
