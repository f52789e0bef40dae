"""Thread ranks: the same bodies, in this process."""

import sys
import threading
import time

import pytest
import torch

from phalanx.errors import InvalidArgument
from phalanx.testing import RankFailures


def failing(threads, body, size=2, **options):
    with pytest.raises(RankFailures) as caught:
        threads.run(body, size, **options)
    return str(caught.value)


def allreduce(ctx, value):
    group = ctx.group()
    tensor = torch.tensor([value + ctx.rank])
    group.allreduce(tensor).wait()
    return group.backend, tensor.item(), threading.current_thread().name


def test_ranks_are_threads(threads):
    results = threads.run(allreduce, 3, args=(1.0,))
    assert results == [("local", 6.0, f"rank {rank}") for rank in range(3)]


def test_a_body_may_be_any_function(threads):
    seen = []
    threads.run(lambda ctx: seen.append(ctx.rank))
    assert sorted(seen) == [0, 1, 2, 3]


def exchange(ctx):
    fresh = not ctx.store.check([str(ctx.rank)])
    ctx.store.set(str(ctx.rank), f"from {ctx.rank}")
    return fresh, [ctx.store.get(str(rank)) for rank in range(ctx.size)]


def test_ranks_share_a_store_that_is_new_each_time(threads):
    for _ in range(2):
        assert threads.run(exchange, 2) == [(True, [b"from 0", b"from 1"])] * 2


def test_random_numbers_of_the_caller_are_left_alone(threads):
    before = torch.random.get_rng_state()
    threads.run(lambda ctx: torch.rand(ctx.size), 2)
    assert torch.equal(torch.random.get_rng_state(), before)


def compare(ctx):
    assert ctx.size == 3


def test_failures_are_folded_and_explained(threads):
    text = failing(threads, compare)
    assert text.startswith(f"2 of 2 ranks failed in {__name__}.compare\n\nranks 0, 1 failed\n")
    assert "assert 2 == 3" in text
    assert "phalanx/testing" not in text


def leave(ctx):
    sys.exit(3)


def test_sys_exit_is_a_failure_of_the_body(threads):
    assert "SystemExit: 3" in failing(threads, leave, 1)


release = threading.Event()


def hang(ctx):
    if ctx.rank == 1:
        release.wait(60)


def fail_and_hang(ctx):
    if ctx.rank == 0:
        raise ValueError("the cause")
    hang(ctx)


@pytest.mark.parametrize(
    ("body", "options"), [(hang, {"timeout": 0.3}), (fail_and_hang, {"linger": 0.3})]
)
def test_a_hung_thread_is_dumped_and_left_behind(threads, body, options):
    release.clear()
    start = time.monotonic()
    text = failing(threads, body, **options)
    assert time.monotonic() - start < 5
    assert "rank 1 did not finish in 0.3 s" in text
    assert "in hang" in text
    assert threads.run(exchange, 2)
    release.set()


def test_the_size_is_bounded(threads):
    with pytest.raises(InvalidArgument, match="must be 1 to 4, got 5"):
        threads.run(compare, 5)
