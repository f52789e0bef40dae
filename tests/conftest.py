"""Fixtures and collection order shared by all tests."""

import gc
import os
import signal
from pathlib import Path

import pytest
import torch

from phalanx.testing import RankPool
from phalanx.testing.pytest_plugin import threads, uneven_batches

__all__ = ["ranks", "threads", "uneven_batches"]

HERE = Path(__file__).parent

# For every connection to a TCPStore, torch looks up the name of the loopback address. Tests
# do not need it, and must not wait for a slow name server.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

torch.set_num_threads(1)  # as in rank processes: where ranks are threads, they share the machine

PRELOADED = ("phalanx.ddp", "torch._dynamo")
"""What the first optimizer or checkpoint of a process imports: 1,200 modules. In the template they
are imported once and not by every rank, and the ranks' garbage collector does not walk through
their objects after every test."""


@pytest.fixture(scope="session")
def ranks():
    """Four processes as ranks."""
    with RankPool(4, preload=PRELOADED) as pool:
        pool.start()  # while tests with threads run
        yield pool


@pytest.fixture
def foreground():
    """Handle signals as in the foreground of a terminal, for this test and what it starts.

    A suite that runs in the background of a shell (``nohup make test &``) is started with SIGINT
    and SIGHUP ignored. Python then has no handler that raises KeyboardInterrupt, and every child
    ignores them too. SIGHUP still ends nothing here, but a child that is started has its default.
    """
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: lambda *_: None,
    }
    before = {number: signal.getsignal(number) for number in handlers}
    ignored = [number for number, handler in before.items() if handler is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, handlers[number])
    yield
    for number in ignored:
        signal.signal(number, before[number])


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect without garbage collection: imports make many objects, and hardly any garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def young_heap():
    """Let the garbage collector scan only objects made by tests, not everything imported.

    Some tests collect garbage on four ranks, and what optimizers import is most of the objects.
    """
    gc.collect()
    gc.freeze()


LONGEST = (
    "ddp/test_compile.py",
    "examples/test_digits.py",
    "test_docs.py",
    "examples/test_resume.py",
    "checkpoint/test_async_deaths.py",
    "checkpoint/test_async_failures.py",
    "groups/test_update_membership.py",
    "groups/test_failure_detection.py",
    "ddp/test_fuzz.py",
    "test_drop_in.py",
    "ddp/test_comm_hook.py",
    "launch/test_orphans.py",
    "groups/test_rendezvous.py",
    "checkpoint/test_async.py",
    "groups/test_split_group.py",
    "groups/test_rejoin.py",
    "groups/test_shm_deaths.py",
    "checkpoint/test_barriers_deaths.py",
    "testing/test_failures.py",
    "testing/test_pool.py",
    "testing/test_threads.py",
    "test_imports.py",
    "launch/test_torch.py",
    "benchmarks/test_bench_runner.py",
)
"""The slowest files. If one came last, it would run alone."""


def pytest_collection_modifyitems(items):
    """Run the slowest files first."""
    turns = {HERE / name: turn for turn, name in enumerate(LONGEST)}
    assert all(path.exists() for path in turns)
    items.sort(key=lambda item: turns.get(item.path, len(LONGEST)))
