"""Writer processes for tests, reused for any world size."""

import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest

from phalanx.checkpoint.components import (
    AsyncCheckpointer,
    CheckpointProcess,
    CheckpointProcessConfig,
    CheckpointReader,
    CheckpointStagerConfig,
    CheckpointWriter,
    CheckpointWriterConfig,
    DefaultStager,
    RankInfo,
)
from phalanx.errors import InvalidArgument


class AnySize(CheckpointWriter):
    """A writer that takes the world size with every write."""

    def write(self, path, state_dict, *, size=1, timeout=30, **kwargs):
        if size < 0:
            raise NegativeSize(f"no world has {size} ranks")
        config = CheckpointWriterConfig(timeout)
        writer = CheckpointWriter(config, RankInfo(self._rank_info.global_rank, size))
        # Other ranks have not been through the same tests, and are at another save.
        writer._context = self._context._replace(number=1)
        return writer.write(path, state_dict, **kwargs)


class NegativeSize(InvalidArgument):
    """An error class of a user, which other processes do not know."""


def any_size(rank_info):
    return AnySize(CheckpointWriterConfig(), rank_info)


def nothing():
    """A no-op initializer for the process."""


def make_process(rank=0, size=1, writer=any_size, arguments=None, **config):
    config = {"subprocess_init_timeout_secs": 60, **config}
    return CheckpointProcess(
        RankInfo(rank, size),
        CheckpointProcessConfig(**config),
        nothing,
        (),
        writer,
        arguments or {},
    )


@contextmanager
def checkpointer(process, rank=0, size=1, *, in_background=True):
    """Yield a checkpointer on a shared writer process."""
    config = CheckpointStagerConfig(use_async_staging=in_background)
    stager = DefaultStager(config, rank_info=RankInfo(rank, size))
    made = AsyncCheckpointer(stager, process, CheckpointReader(RankInfo(rank, size)))
    try:
        yield made
    finally:
        stager.close()


class Writers:
    """Writer processes by rank. Each imports torch, so it is started when a test asks for it."""

    def __init__(self):
        self._started = {}

    def __getitem__(self, rank):
        if rank not in self._started:
            self._started[rank] = make_process(rank, 3)
        return self._started[rank]

    def close(self):
        for each in self._started.values():
            each.close()


@pytest.fixture(scope="module")
def writers():
    made = Writers()
    yield made
    made.close()


@contextmanager
def late(checkpointer):
    """Delay background staging within the block."""
    event = threading.Event()
    checkpointer._checkpoint_stager._thread.submit(event.wait)
    try:
        yield
    finally:
        event.set()


def wait_until(condition):
    """Poll a condition; fail after 10 seconds."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class stopped:  # noqa: N801 - reads like a function
    """Stop the process of a `CheckpointProcess` within the block."""

    def __init__(self, process):
        process.process_creation_future.result(60)
        self._process = process.process

    def __enter__(self):
        os.kill(self._process.pid, signal.SIGSTOP)

    def __exit__(self, *_):
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGCONT)
