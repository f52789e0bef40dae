"""Timeouts and retention do not depend on the wall clock, which here jumps by years.

The C library's clock is replaced rather than Python's `time`, so torch's stores see it, too.
"""

import os
import shutil
import subprocess
import sys

import pytest

from ports import free_port

CLOCK = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long jump(void) {
  static int looks;
  return (__atomic_add_fetch(&looks, 1, __ATOMIC_RELAXED) % 3 - 1) * 100000000L;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int result = syscall(SYS_clock_gettime, clock, now);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += jump();
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec precise;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *now) {
  struct timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  if (now) *now = precise.tv_sec;
  return precise.tv_sec;
}
"""

PROGRAM = """
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from phalanx.checkpoint import CheckpointManager
from phalanx.checkpoint.barriers import GroupBarrier, TCPStoreBarrier
from phalanx.checkpoint.components import (
    CheckpointReader,
    CheckpointWriter,
    CheckpointWriterConfig,
    RankInfo,
)
from phalanx.errors import BarrierTimeout, SaveTimeout
from phalanx.testing import ThreadRanks

PATH, PORT = sys.argv[1], int(sys.argv[2])
LONG, SHORT, SLACK = 20, 0.2, 10  # seconds
looks = [time.time() for _ in range(9)]
assert max(looks) - min(looks) > 1e8, "the clock does not jump"
pool = ThreadPoolExecutor(2)


def both(call):
    return list(pool.map(call, range(2)))


def in_time(error, call, *args):
    began = time.monotonic()
    with pytest.raises(error):
        call(*args)
    assert SHORT <= time.monotonic() - began < SLACK


def meet(rank, barrier):
    for use in range(20):
        assert barrier.exchange(f"{rank} {use}") == [f"0 {use}", f"1 {use}"]
        barrier.execute_barrier()


def wait_alone(barriers):
    in_time(BarrierTimeout, barriers[0].execute_barrier)
    with pytest.raises(BarrierTimeout):
        barriers[1].execute_barrier()


def make(rank, timeout):
    return TCPStoreBarrier(rank, 2, f"{timeout}", LONG, True, PORT, "127.0.0.1", timeout)


patient, hasty = both(lambda rank: make(rank, LONG)), both(lambda rank: make(rank, SHORT))
both(lambda rank: meet(rank, patient[rank]))
wait_alone(hasty)
ThreadRanks(2).run(lambda ctx: meet(ctx.rank, GroupBarrier(ctx.group("local"))), 2)


def state(rank, step):
    return {"w": torch.full((1000,), float(step)), "rank": rank}


def save(rank, step, barrier=None, timeout=LONG):
    writer = CheckpointWriter(CheckpointWriterConfig(timeout), RankInfo(rank, 2), barrier)
    writer.write(f"{PATH}/c", state(rank, step))


def check(step):
    for rank in range(2):
        read, missing = CheckpointReader(RankInfo(rank, 2)).read(f"{PATH}/c")
        assert torch.equal(read["w"], state(rank, step)["w"]) and read["rank"] == rank
        assert not missing


both(lambda rank: save(rank, 1, patient[rank]))
check(1)
both(lambda rank: save(rank, 2))  # they meet in the folder
check(2)
in_time(SaveTimeout, save, 0, 3, None, SHORT)
check(2)
both(lambda rank: save(rank, 4))
check(4)

with CheckpointManager(f"{PATH}/run", keep_last=2, keep_every=4) as folder:
    for step in range(1, 10):
        folder.save(step, state(0, step))
    assert folder.steps() == [4, 8, 9]
    assert folder.latest() == 9
    assert folder.load()["w"][0] == 9
"""


@pytest.fixture
def jumping_clock(tmp_path):
    """Compile a library that makes the wall clock of a process jump."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux and a C compiler")
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(CLOCK)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.mark.slow
def test_wall_clock_jumps_have_no_effect(tmp_path, jumping_clock):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path, str(free_port())],
        env={**os.environ, "LD_PRELOAD": str(jumping_clock)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
