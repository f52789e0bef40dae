"""``kill -9`` during a save: the newest committed checkpoint is intact.

At every fault point, and at random times: a few in the suite, 300 with
PHALANX_SOAK set (``make soak``).
"""

import itertools
import os
import random
import resource
import signal
import threading
import time

import pytest
import torch

from phalanx.checkpoint import make_sync_checkpointer
from phalanx.checkpoint.components import CheckpointWriter, CheckpointWriterConfig, RankInfo
from phalanx.errors import SaveFailed
from phalanx.testing import Fault, kill

from .states import load, mixed, plain, same, saved
from .test_commit import POINTS, VISIBLE

SOAK = "PHALANX_SOAK" in os.environ
INSTANTS = 300 if SOAK else 6


def save_once(ctx, path, step, timeout=30):
    """Save and return the error text, or None."""
    writer = CheckpointWriter(CheckpointWriterConfig(timeout), RankInfo(ctx.rank, ctx.size))
    try:
        writer.write(path, mixed(ctx.rank, step))
    except SaveFailed as error:
        return str(error)


@pytest.mark.parametrize("point", [*POINTS, "discard"])
def test_rank_0_killed_at_every_fault_point(ranks, tmp_path, point):
    path = str(tmp_path / "c")
    saved(path, [mixed(0, 1)])
    ranks.run(save_once, 1, args=(path, 2), faults=[Fault(f"checkpoint:{point}", kill(), rank=0)])
    whole(path, 1, 2 if point in VISIBLE else 1)
    assert_next_save_cleans_up(path, 1)


@pytest.mark.parametrize(
    ("rank", "point"),
    [(1, "tensor"), (1, "flush"), (1, "written"), (0, "publish"), (0, "published")],
)
def test_killed_rank_is_reported_without_a_timeout(ranks, tmp_path, rank, point):
    path = str(tmp_path / "c")
    saved(path, [mixed(0, 1), mixed(1, 1)])
    fault = Fault(f"checkpoint:{point}", kill(), rank=rank)
    results = ranks.run(save_once, 2, args=(path, 2), faults=[fault], timeout=25)
    assert f"rank {rank} died" in results[1 - rank]
    whole(path, 2, 2 if point in VISIBLE else 1)
    assert_next_save_cleans_up(path, 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_killed_before_the_first_exchange_is_missing(ranks, tmp_path, rank):
    path = str(tmp_path / "c")
    fault = Fault("checkpoint:begin", kill(), rank=rank)
    results = ranks.run(save_once, 2, args=(path, 2), kwargs={"timeout": 0.2}, faults=[fault])
    assert f"rank {rank} did not arrive within 0.2 s" in results[1 - rank]
    assert_next_save_cleans_up(path, 2)


def whole(path, size, step):
    for rank in range(size):
        assert same(plain(mixed(rank, step)), load(path, rank, size)[0])


def assert_next_save_cleans_up(path, size):
    saved(path, [mixed(rank, 7) for rank in range(size)], meet=None)
    whole(path, size, 7)
    assert os.listdir(os.path.dirname(path)) == ["c"]
    assert len(os.listdir(path)) == size + 1


def time_a_save(ctx, path):
    """Return the duration of a save."""
    assert save_once(ctx, path, 0) is None
    begun = time.monotonic()
    assert save_once(ctx, path, 0) is None
    return time.monotonic() - begun


def save_until_killed(ctx, path, first, seconds, victims):
    """Save step after step; a thread kills the victims after some time."""

    def end():
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    if ctx.rank in victims:
        threading.Thread(target=end, daemon=True).start()
    with open(f"{path}.{ctx.rank}", "ab", buffering=0) as progress:
        for step in itertools.count(first):
            if save_once(ctx, path, step, timeout=1) is not None:
                if ctx.rank in victims:
                    signal.pause()  # the other victim died first; wait for the kill
                return
            progress.write(b"%d\n" % step)


@pytest.mark.slow
def test_ranks_killed_at_random_times(ranks, tmp_path):
    path = str(tmp_path / "c")
    duration = max(ranks.run(time_a_save, 2, args=(path,)))
    rng = random.Random(None if SOAK else 4)
    newest, seen = 0, set()
    for _ in range(INSTANTS):
        victims = rng.choice([(0,), (1,), (0, 1)])
        arguments = (path, newest + 1, rng.uniform(0, 3 * duration), victims)
        ranks.run(save_until_killed, 2, args=arguments, expect_dead=victims)
        step = load(path)[0]["step"]
        # Every reported save is committed; one more commit may be unreported.
        told = max([newest, *(last_told(path, rank) for rank in range(2))])
        assert step in (told, told + 1)
        whole(path, 2, step)
        seen.add(step - newest)
        newest = step
    assert_next_save_cleans_up_here(tmp_path, path)
    assert len(seen) > 1 or not SOAK, "they were all killed at the same place"


def last_told(path, rank):
    try:
        with open(f"{path}.{rank}") as file:
            return int(([0, *file.read().split()])[-1])
    except FileNotFoundError:
        return 0


def assert_next_save_cleans_up_here(folder, path):
    saved(path, [mixed(rank, 7) for rank in range(2)], meet=None)
    assert sorted(set(os.listdir(folder)) - {"c.0", "c.1"}) == ["c"]
    assert len(os.listdir(path)) == 3


def save_with_little_room(ctx, path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        make_sync_checkpointer().save(path, {"w": torch.ones(1_000_000)})
    except SaveFailed as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_file_size_limit_fails_the_save_and_keeps_the_checkpoint(ranks, tmp_path):
    path = str(tmp_path / "c")
    saved(path, [{"w": torch.zeros(3)}])
    (said,) = ranks.run(save_with_little_room, 1, args=(path,))
    assert "on rank 0 while writing: OSError: [Errno 27] File too large: '" in said
    assert ".safetensors'" in said
    assert same(load(path)[0], {"w": torch.zeros(3)})
    assert os.listdir(tmp_path) == ["c"]
