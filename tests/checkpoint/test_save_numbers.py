"""Ranks whose save numbers differ."""

import pytest

from phalanx.checkpoint.components import CheckpointWriter, CheckpointWriterConfig, RankInfo
from phalanx.errors import SaveFailed

from .states import ThreadExchange, load, mixed, plain, same, together


@pytest.mark.parametrize("meet", [ThreadExchange, None])
def test_rank_that_is_behind_abandons_its_save_and_catches_up(tmp_path, meet):
    """As when the writer of rank 1 was killed in the second save and rank 0 is still in it."""
    path = str(tmp_path / "c")
    barrier = None if meet is None else meet(2)

    def save(rank):
        seat = None if barrier is None else barrier.at(rank)
        writer = CheckpointWriter(CheckpointWriterConfig(10), RankInfo(rank, 2), seat)
        for step in (2, 3) if rank == 0 else (3,):
            try:
                writer._writes = step - 1
                writer.write(path, mixed(rank, step))
            except SaveFailed as error:
                gave_up.append(f"rank {rank}, step {step}: {error}")

    gave_up = []
    assert together(2, save) == [None, None]
    (told,) = gave_up
    where = "rank 0, step 2: save number 2 was abandoned while preparing"
    assert told == f"{where}: rank 1 is at save number 3"
    for rank in range(2):
        assert same(plain(mixed(rank, 3)), load(path, rank, 2)[0])


def test_save_numbers_are_counted_by_the_writer(tmp_path):
    barrier = ThreadExchange(2)

    def save(rank):
        writer = CheckpointWriter(CheckpointWriterConfig(10), RankInfo(rank, 2), barrier.at(rank))
        writer._writes = rank  # rank 1 has had a save more
        if rank == 0:
            with pytest.raises(SaveFailed, match="save number 1 was abandoned"):
                writer.write(str(tmp_path / "c"), {"step": 1})
        writer.write(str(tmp_path / "c"), {"step": 2})

    assert together(2, save) == [None, None]
    assert load(tmp_path / "c")[0] == {"step": 2}


def test_world_size_mismatch_is_reported(tmp_path):
    barrier = ThreadExchange(2)

    def save(sizes):
        def write(rank):
            info = RankInfo(rank, sizes[rank])
            writer = CheckpointWriter(CheckpointWriterConfig(10), info, barrier.at(rank))
            writer.write(str(tmp_path / "c"), {"step": 1})

        return together(2, write)

    for error in save([2, 3]):
        assert isinstance(error, SaveFailed)
        assert "ranks disagree on the world size: rank 0: 2, rank 1: 3" in str(error)
    for error in save([3, 3]):
        assert isinstance(error, SaveFailed)
        assert "the barrier has 2 ranks, expected 3" in str(error)


def test_rank_outside_the_world_size_is_rejected():
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="rank must be in"):
            RankInfo(rank, size)
