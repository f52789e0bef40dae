"""Thread ranks: the same bodies, in this process."""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import phalanx
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


def test_thread_ranks_run_a_collective(threads):
    results = threads.run(allreduce, 3, args=(1.0,))
    assert results == [("local", 6.0, f"rank {rank}") for rank in range(3)]


def test_a_body_can_be_any_callable(threads):
    seen = []
    threads.run(lambda ctx: seen.append(ctx.rank))
    assert sorted(seen) == [0, 1, 2, 3]


def exchange(ctx):
    fresh = not ctx.store.check([str(ctx.rank)])
    ctx.store.set(str(ctx.rank), f"from {ctx.rank}")
    return fresh, [ctx.store.get(str(rank)) for rank in range(ctx.size)]


def test_each_run_has_a_new_shared_store(threads):
    for _ in range(2):
        assert threads.run(exchange, 2) == [(True, [b"from 0", b"from 1"])] * 2


def test_the_callers_random_state_is_unchanged(threads):
    before = torch.random.get_rng_state()
    threads.run(lambda ctx: torch.rand(ctx.size), 2)
    assert torch.equal(torch.random.get_rng_state(), before)


def compare(ctx):
    assert ctx.size == 3


def test_equal_failures_are_folded_and_assertions_rewritten(threads):
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
def test_a_hung_thread_is_dumped_and_abandoned(threads, body, options):
    release.clear()
    start = time.monotonic()
    text = failing(threads, body, **options)
    assert time.monotonic() - start < 5
    assert re.search(r"rank 1 did not finish in \d\.\d s", text)
    assert "in hang" in text
    assert threads.run(exchange, 2)
    release.set()


def test_a_size_out_of_range_is_rejected(threads):
    with pytest.raises(InvalidArgument, match="must be 1 to 4, got 5"):
        threads.run(compare, 5)


def hang_with_a_broken_group(ctx, release):
    ctx.closing(SimpleNamespace(abort=lambda: 1 / 0))
    release.wait(20)


def test_a_group_that_cannot_be_aborted_does_not_hide_a_hang(threads):
    release = threading.Event()
    text = failing(threads, hang_with_a_broken_group, args=(release,), timeout=0.2)
    release.set()
    assert "ranks 0, 1 did not finish" in text
    assert "ZeroDivisionError" not in text


THROUGH_A_LINK = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in type(each).__module__]
sys.path.insert(0, sys.argv[1])
import phalanx, threading
from phalanx.testing import RankFailures, ThreadRanks
assert phalanx.__file__.startswith(sys.argv[1])

def body(ctx):
    threading.Event().wait(20)

try:
    ThreadRanks(1).run(body, timeout=0.2)
except RankFailures as error:
    print(error)
"""


def test_a_stack_is_shown_if_the_package_is_imported_through_a_link(tmp_path):
    link, script = tmp_path / "link", tmp_path / "script.py"
    link.symlink_to(Path(phalanx.__file__).resolve().parents[1])
    script.write_text(THROUGH_A_LINK)
    command = [sys.executable, str(script), str(link)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "in body\n    threading.Event().wait(20)" in done.stdout
    assert "phalanx/testing" not in done.stdout
