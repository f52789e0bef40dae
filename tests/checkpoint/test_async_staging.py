"""Copies of states, without a process that writes them."""

import gc
import os
from concurrent.futures import Future

import pytest
import torch

from phalanx.checkpoint import Alike, CheckpointStagerConfig, DefaultStager, RankInfo
from phalanx.errors import InvalidState, SaveFailed

from .states import same


def stager(*, rank_info=None, **flags):
    config = CheckpointStagerConfig(**{"use_async_staging": False, **flags})
    return DefaultStager(config, rank_info=rank_info)


def state():
    return {"w": torch.randn(1000, 300), "b": [torch.randn(7).half(), 3, None], "e": torch.ones(0)}


def test_out_of_the_box_a_copy_is_a_future():
    made = DefaultStager()
    copied = made.stage(state())
    assert isinstance(copied, Future)
    assert copied.result(10)["w"].shape == (1000, 300)
    made.close()
    with pytest.raises(InvalidState, match="closed"):
        made.stage(state())


@pytest.mark.parametrize("use_shared_memory", [True, False])
def test_a_copy_is_a_state_of_its_own(use_shared_memory):
    made, mine = stager(use_shared_memory=use_shared_memory), state()
    copy = made.stage(mine)
    assert same(mine, dict(copy))
    mine["w"].zero_()
    assert copy["w"].all()
    made.close()
    assert copy["w"].all()  # the memory stays as long as somebody has it


def test_memory_is_used_again_once_nobody_has_the_copy():
    made = stager()
    copy = made.stage(state())
    address = copy["w"].data_ptr()
    other = made.stage(state())
    assert other["w"].data_ptr() != address
    del copy
    gc.collect()
    assert made.stage(state())["w"].data_ptr() == address
    made.close()


def test_room_that_was_prepared_is_taken():
    made, mine = stager(), state()
    made.prepare(mine).result(10)
    copy = made.stage(mine)
    assert not copy.buffer.lacks_pages
    assert same(mine, dict(copy))
    made.prepare(50_000_000).result(10)  # bigger than before
    del copy
    assert same(mine, dict(made.stage(mine)))
    made.close()


def test_memory_that_grows_keeps_what_others_have_of_it():
    made = stager()
    first = made.stage({"w": torch.ones(10)})["w"]
    larger = made.stage({"w": torch.full((10**6,), 2.0)})
    assert first.data_ptr() != larger["w"].data_ptr()
    assert larger["w"].sum() == 2e6
    made.close()


def test_several_threads_copy_a_large_state(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    made = stager()
    mine = {"w": torch.arange(12_345_678), "b": torch.ones(3)}
    for _ in range(2):  # into memory that is not there, and that is
        copy = made.stage(mine)
        assert torch.equal(copy["w"], mine["w"])
        del copy
    made.close()


def test_a_rank_copies_its_part_only():
    whole = {"w": torch.arange(3_000_000)}
    parts = []
    for rank in range(3):
        made = stager(rank_info=RankInfo(rank, 3))
        copy = made.stage({"model": Alike(whole)})
        assert copy.size <= 8_100_000
        parts.append(copy["model"].value["w"].data.clone())
        made.close()
    assert torch.equal(torch.cat(parts), whole["w"])


def test_a_tensor_of_an_inference_has_no_versions():
    with torch.inference_mode():
        mine = {"w": torch.ones(3)}
    assert dict(stager().stage(mine))["w"].tolist() == [1, 1, 1]


def test_memory_that_cannot_be_had_is_an_error_of_the_save(monkeypatch):
    def full(fd, data, offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SaveFailed, match="no memory for a copy of .* bytes: .*No space left"):
        stager().stage(state())
