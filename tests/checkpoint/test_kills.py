"""``kill -9`` while a checkpoint is saved: the newest one that was committed is there, whole.

At every point of a save, and at random instants: a few in the suite, and 300 of them with
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

from phalanx.checkpoint import (
    CheckpointWriter,
    CheckpointWriterConfig,
    RankInfo,
    make_sync_checkpointer,
)
from phalanx.errors import SaveFailed
from phalanx.testing import Fault, kill

from .states import load, mixed, plain, same, saved
from .test_commit import FOR_ALL, POINTS, VISIBLE

SOAK = "PHALANX_SOAK" in os.environ
INSTANTS = 300 if SOAK else 6
LONGEST = 0.15
"""Seconds before somebody is killed; a save takes a tenth of it."""


def writer(rank, size, timeout=0.4):
    return CheckpointWriter(CheckpointWriterConfig(timeout), RankInfo(rank, size))


def save_once(ctx, path, step):
    """Save, and tell whether it was done."""
    try:
        writer(ctx.rank, ctx.size).write(path, mixed(ctx.rank, step))
    except SaveFailed:
        return False
    return True


@pytest.mark.parametrize("point", POINTS)
def test_rank_0_is_killed_at_every_point(ranks, tmp_path, point):
    path = str(tmp_path / "c")
    saved(path, [mixed(0, 1)])
    ranks.run(save_once, 1, args=(path, 2), faults=[Fault(f"checkpoint:{point}", kill(), rank=0)])
    whole(path, 1, 2 if point in VISIBLE else 1)
    assert_next_save_tidies_up(path, 1)


@pytest.mark.parametrize(("rank", "point"), [*((1, each) for each in FOR_ALL), (0, "publish")])
def test_one_of_two_is_killed(ranks, tmp_path, rank, point):
    path = str(tmp_path / "c")
    saved(path, [mixed(0, 1), mixed(1, 1)])
    fault = Fault(f"checkpoint:{point}", kill(), rank=rank)
    results = ranks.run(save_once, 2, args=(path, 2), faults=[fault])
    assert results[1 - rank] is False
    whole(path, 2, 1)
    assert_next_save_tidies_up(path, 2)


def whole(path, size, step):
    for rank in range(size):
        assert same(plain(mixed(rank, step)), load(path, rank, size)[0])


def assert_next_save_tidies_up(path, size):
    saved(path, [mixed(rank, 7) for rank in range(size)], meet=None)
    whole(path, size, 7)
    assert os.listdir(os.path.dirname(path)) == ["c"]
    assert len(os.listdir(path)) == size + 1


def save_until_killed(ctx, path, first, seconds, victims):
    """Save one step after the other; a thread kills the victims after some time."""
    if ctx.rank in victims:
        threading.Thread(target=lambda: (time.sleep(seconds), os.kill(os.getpid(), signal.SIGKILL)),
                         daemon=True).start()  # fmt: skip
    with open(f"{path}.{ctx.rank}", "ab", buffering=0) as progress:
        for step in itertools.count(first):
            try:
                writer(ctx.rank, ctx.size).write(path, mixed(ctx.rank, step))
            except SaveFailed:
                if ctx.rank in victims:
                    signal.pause()  # the other one was first; its time will come
                return
            progress.write(b"%d\n" % step)


def test_any_rank_is_killed_at_any_instant(ranks, tmp_path):
    path = str(tmp_path / "c")
    saved(path, [mixed(0, 0), mixed(1, 0)])
    rng = random.Random(None if SOAK else 4)
    newest, seen = 0, set()
    for _ in range(INSTANTS):
        victims = rng.choice([(0,), (1,), (0, 1)])
        seconds = rng.uniform(0, LONGEST)
        ranks.run(
            save_until_killed, 2, args=(path, newest + 1, seconds, victims), expect_dead=victims
        )
        step = load(path)[0]["step"]
        # What any rank was told is done is done; one more may be, of which nobody was told.
        told = max([newest, *(last_told(path, rank) for rank in range(2))])
        assert step in (told, told + 1)
        whole(path, 2, step)
        seen.add(step - newest)
        newest = step
    assert_next_save_tidies_up_here(tmp_path, path)
    assert len(seen) > 1, "they were all killed at the same place"


def last_told(path, rank):
    try:
        with open(f"{path}.{rank}") as file:
            return int(([0, *file.read().split()])[-1])
    except FileNotFoundError:
        return 0


def assert_next_save_tidies_up_here(folder, path):
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


def test_a_file_that_may_not_grow(ranks, tmp_path):
    path = str(tmp_path / "c")
    saved(path, [{"w": torch.zeros(3)}])
    (said,) = ranks.run(save_with_little_room, 1, args=(path,))
    assert "on rank 0 while writing: OSError: [Errno 27] File too large: '" in said
    assert ".safetensors'" in said
    assert same(load(path)[0], {"w": torch.zeros(3)})
    assert os.listdir(tmp_path) == ["c"]
