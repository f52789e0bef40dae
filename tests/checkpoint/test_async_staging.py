"""Copies of states, without a process that writes them."""

import gc
import mmap
import os
import resource
import threading
import time
from concurrent.futures import Future

import pytest
import torch

from phalanx.checkpoint import Replicated
from phalanx.checkpoint.components import CheckpointStagerConfig, DefaultStager, RankInfo
from phalanx.errors import InvalidState, SaveFailed

from .internals import StagingBuffer
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
    before = mine["w"].clone()
    mine["w"].zero_()
    assert torch.equal(copy["w"], before)
    made.close()
    assert torch.equal(copy["w"], before)  # the memory stays as long as somebody has it


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
    first = made.stage({"w": torch.ones(10)})["w"][2:]
    larger = made.stage({"w": torch.full((10**6,), 2.0)})
    assert larger["w"].sum() == 2e6
    assert first.tolist() == [1] * 8
    made.close()


def test_memory_comes_back_whoever_is_taking_some():
    """As it does where the garbage that is collected has a copy in it."""
    made = stager()
    copy = made.stage(state())
    with made._pool._lock:
        del copy
        gc.collect()
    assert len(made._pool._free) == 1
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
        copy = made.stage({"model": Replicated(whole)})
        assert copy.size <= 8_100_000
        parts.append(copy["model"].value["w"].data.data.clone())
        made.close()
    assert torch.equal(torch.cat(parts), whole["w"])


def test_a_change_that_is_under_way_when_the_copy_ends_is_noticed():
    """Torch counts a change when it is over; until then it is no more than other bytes."""
    made, weight = DefaultStager(), torch.zeros(3_000_000)
    columns = torch.arange(420_000.0).view(600, 700).t()
    event = threading.Event()
    made._thread.submit(event.wait)
    copied = made.stage({"w": weight, "columns": columns})
    weight.numpy()[1_000_000:1_020_000] = 1  # by one of three threads, say
    event.set()
    with pytest.raises(SaveFailed, match="w was changed while it was copied"):
        copied.result(10)
    wanted = columns.clone()
    copied = made.stage({"columns": columns})
    columns.numpy()[:] = 0  # at once, whatever its size: nobody would notice
    assert torch.equal(copied.result(10)["columns"], wanted)
    made.close()


def test_a_tensor_of_an_inference_has_no_versions():
    with torch.inference_mode():
        mine = {"w": torch.ones(3)}
    assert dict(stager().stage(mine))["w"].tolist() == [1, 1, 1]


def test_memory_that_may_still_be_written_to_is_not_used_again(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    made, mine, before = stager(), {"w": torch.ones(12_000_000)}, StagingBuffer.put

    def interrupted(*arguments):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        before(*arguments)

    monkeypatch.setattr(StagingBuffer, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.stage(mine)
    assert made._pool._free == []
    monkeypatch.undo()
    assert same(mine, dict(made.stage(mine)))


def test_memory_that_cannot_be_had_is_an_error_of_the_save():
    made, mine = stager(), state()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # of memory, too
    try:
        with pytest.raises(
            SaveFailed, match="cannot allocate .* bytes to stage the state: .*File too large"
        ):
            made.stage(mine)
        with pytest.raises(
            SaveFailed, match="cannot allocate .* bytes to stage the state: .*File too large"
        ):
            made.prepare(mine)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert same(mine, dict(made.stage(mine)))


@pytest.mark.parametrize("size", [1000, 10**6, 10**7])
def test_a_tensor_without_its_memory_is_an_error_of_the_save(size):
    made = DefaultStager()
    made.prepare(size * 8).result(10)
    event = threading.Event()
    made._thread.submit(event.wait)
    weight = torch.ones(size)
    if size == 1000:  # which is copied at once
        weight.untyped_storage().resize_(4)
        with pytest.raises(SaveFailed, match="w has no values .* resized to 4 bytes"):
            made.stage({"w": weight})
    else:
        copied = made.stage({"w": weight})
        weight.untyped_storage().resize_(4)
        event.set()
        with pytest.raises(SaveFailed, match="w has no values .* resized to 4 bytes"):
            copied.result(10)
    event.set()
    made.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_has_neither_threads_nor_memory_of_ours():
    made, mine = stager(), {"w": torch.ones(1 << 20)}
    copy = made.stage(mine)
    wait_for_pages(copy.buffer)
    pid = os.fork()
    if pid == 0:  # everything is caught, and told by the code
        os._exit(fork_is_right(made, copy))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert copy["w"].all()
    made.close()


def fork_is_right(made, copy):
    try:
        made.stage({"w": torch.zeros(1 << 20)})
    except InvalidState:
        others = [mmap.mmap(-1, 1 << 20) for _ in range(1000)]  # wherever there is a gap
        made.close()
        del made, copy
        gc.collect()
        return 0 if all(other[0] == 0 for other in others) else 2
    return 1


def wait_for_pages(buffer):
    deadline = time.monotonic() + 10
    while any(thread.name == "phalanx-staging-memory" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert not buffer.lacks_pages


def many():
    generator = torch.Generator().manual_seed(3)
    sizes = [1, 7, 40_000, 3_000_000, 5, 70_000, 0, 2_500_000]
    tensors = {f"w{i}": torch.randn(n, generator=generator) for i, n in enumerate(sizes)}
    tensors["columns"] = torch.randn(500, 300, generator=generator).t()
    tensors["conj"] = torch.randn(3, dtype=torch.complex64, generator=generator).conj()
    return tensors


def test_tensors_of_all_sizes_are_copied_to_memory_with_and_without_pages():
    made, mine = DefaultStager(), many()
    for _ in range(2):  # the second copy finds its pages
        copy = made.stage(mine).result(10)
        assert same({**mine}, dict(copy))
        wait_for_pages(copy.buffer)
        del copy
    made.close()
