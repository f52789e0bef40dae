"""Staging of states, without a writer process."""

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


def test_default_stager_returns_a_future():
    made = DefaultStager()
    copied = made.stage(state())
    assert isinstance(copied, Future)
    assert copied.result(10)["w"].shape == (1000, 300)
    made.close()
    with pytest.raises(InvalidState, match="closed"):
        made.stage(state())


@pytest.mark.parametrize("use_shared_memory", [True, False])
def test_staged_copy_is_independent(use_shared_memory):
    made, mine = stager(use_shared_memory=use_shared_memory), state()
    copy = made.stage(mine)
    assert same(mine, dict(copy))
    before = mine["w"].clone()
    mine["w"].zero_()
    assert torch.equal(copy["w"], before)
    made.close()
    assert torch.equal(copy["w"], before)  # the copy keeps its memory alive


def test_buffer_is_reused_after_the_copy_is_released():
    made = stager()
    copy = made.stage(state())
    address = copy["w"].data_ptr()
    other = made.stage(state())
    assert other["w"].data_ptr() != address
    del copy
    gc.collect()
    assert made.stage(state())["w"].data_ptr() == address
    made.close()


def test_prepared_buffer_is_used():
    made, mine = stager(), state()
    made.prepare(mine).result(10)
    copy = made.stage(mine)
    assert not copy.buffer.lacks_pages
    assert same(mine, dict(copy))
    made.prepare(50_000_000).result(10)  # bigger than before
    del copy
    assert same(mine, dict(made.stage(mine)))
    made.close()


def test_growing_buffer_keeps_existing_views():
    made = stager()
    first = made.stage({"w": torch.ones(10)})["w"][2:]
    larger = made.stage({"w": torch.full((10**6,), 2.0)})
    assert larger["w"].sum() == 2e6
    assert first.tolist() == [1] * 8
    made.close()


def test_buffer_can_be_returned_while_the_pool_lock_is_held():
    """As when the garbage collector frees a copy at any point."""
    made = stager()
    copy = made.stage(state())
    with made._pool._lock:
        del copy
        gc.collect()
    assert len(made._pool._free) == 1
    made.close()


def test_large_state_is_copied_by_several_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    made = stager()
    mine = {"w": torch.arange(12_345_678), "b": torch.ones(3)}
    for _ in range(2):  # into unmapped, then into mapped pages
        copy = made.stage(mine)
        assert torch.equal(copy["w"], mine["w"])
        del copy
    made.close()


def test_rank_stages_only_its_shard():
    whole = {"w": torch.arange(3_000_000)}
    parts = []
    for rank in range(3):
        made = stager(rank_info=RankInfo(rank, 3))
        copy = made.stage({"model": Replicated(whole)})
        assert copy.size <= 8_100_000
        parts.append(copy["model"].value["w"].data.data.clone())
        made.close()
    assert torch.equal(torch.cat(parts), whole["w"])


def test_concurrent_write_without_a_version_bump_is_detected():
    """torch bumps the version after a write, so a write in progress shows only in the bytes."""
    made, weight = DefaultStager(), torch.zeros(3_000_000)
    columns = torch.arange(420_000.0).view(600, 700).t()
    event = threading.Event()
    made._thread.submit(event.wait)
    copied = made.stage({"w": weight, "columns": columns})
    weight.numpy()[1_000_000:1_020_000] = 1
    event.set()
    with pytest.raises(SaveFailed, match="w was changed while it was copied"):
        copied.result(10)
    wanted = columns.clone()
    copied = made.stage({"columns": columns})
    columns.numpy()[:] = 0  # non-contiguous tensors were already copied by stage()
    assert torch.equal(copied.result(10)["columns"], wanted)
    made.close()


def test_inference_tensor_is_staged():
    with torch.inference_mode():
        mine = {"w": torch.ones(3)}
    assert dict(stager().stage(mine))["w"].tolist() == [1, 1, 1]


def test_buffer_of_an_interrupted_copy_is_not_reused(monkeypatch):
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


def test_failed_allocation_fails_the_save():
    made, mine = stager(), state()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # also limits memfd
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
def test_tensor_with_freed_storage_fails_the_save(size):
    made = DefaultStager()
    made.prepare(size * 8).result(10)
    event = threading.Event()
    made._thread.submit(event.wait)
    weight = torch.ones(size)
    if size == 1000:  # small tensors are copied synchronously
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
def test_forked_child_does_not_use_threads_or_memory_of_the_parent():
    made, mine = stager(), {"w": torch.ones(1 << 20)}
    copy = made.stage(mine)
    wait_for_pages(copy.buffer)
    pid = os.fork()
    if pid == 0:  # the exit code is the result
        os._exit(fork_is_right(made, copy))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert copy["w"].all()
    made.close()


def fork_is_right(made, copy):
    try:
        made.stage({"w": torch.zeros(1 << 20)})
    except InvalidState:
        others = [mmap.mmap(-1, 1 << 20) for _ in range(1000)]  # fill address space gaps
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


def test_tensors_of_all_sizes_are_staged():
    made, mine = DefaultStager(), many()
    for _ in range(2):  # the second copy uses mapped pages
        copy = made.stage(mine).result(10)
        assert same({**mine}, dict(copy))
        wait_for_pages(copy.buffer)
        del copy
    made.close()
