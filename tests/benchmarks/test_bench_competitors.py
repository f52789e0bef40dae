"""External competitors: MPI ranks, processes that keep cores busy, plain copies."""

import os
import resource
import time

import pytest
from benchmarks.busy import busy_cores
from benchmarks.entry import Absent, SelfTimed, find
from benchmarks.limits import alone, in_place, lone_group, memcpy
from benchmarks.mpi import MpiRanks, Unavailable, mpi
from benchmarks.runner import run

from benchmarks import mpi as mpi_module
from phalanx.testing import ThreadRanks


def children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return set(file.read().split())


@pytest.fixture
def before():
    """The child processes before the test, possibly pools of other tests; none may be added."""
    there = children()
    yield there
    assert children() == there


@pytest.fixture
def broken_mpiexec(monkeypatch, tmp_path):
    program = tmp_path / "mpiexec"
    program.write_text("#!/bin/sh\necho a line\necho no such world >&2\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setattr(mpi_module, "_mpiexec", lambda: str(program))


def take_part(ctx):
    with mpi(ctx, "allreduce", 4) as competitor:
        return competitor


@pytest.mark.usefixtures("broken_mpiexec", "before")
def test_every_rank_reports_why_mpi_is_absent():
    assert ThreadRanks(2).run(take_part) == [Absent("it did not start: no such world")] * 2


def test_a_missing_mpi4py_is_named(monkeypatch):
    monkeypatch.setattr(mpi_module, "find_spec", lambda _: None)
    with pytest.raises(Unavailable, match="mpi4py is not installed"):
        MpiRanks(2)


@pytest.mark.usefixtures("before")
@pytest.mark.parametrize("operation", ["allreduce", "broadcast", "allgather", "reduce_scatter"])
def test_mpi_ranks_run_and_time_each_operation(operation):
    pytest.importorskip("mpi4py")
    ranks = MpiRanks(2)
    try:
        began = time.perf_counter()
        told = ranks.time(operation, 1024, calls=10)
        assert 0 < told < time.perf_counter() - began
    finally:
        ranks.close()


def test_busy_cores_runs_one_process_per_core(before):
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with busy_cores():
        spinning = children() - before
        assert len(spinning) == len(os.sched_getaffinity(0))
        cores = [os.sched_getaffinity(int(pid)) for pid in spinning]
        assert set.union(*cores) == os.sched_getaffinity(0)
        assert all(len(core) == 1 for core in cores)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime > spent


def limits(ctx):
    made = []
    turn = alone(ctx, lambda: made.append(1))
    assert isinstance(turn, SelfTimed)
    lone = lone_group(ctx, "local")
    memcpy(4096)()
    in_place(4096)()
    return len(made), turn.run(5) > 0, len(made), lone.size()


def test_upper_bound_competitors_run_on_one_rank():
    assert ThreadRanks(2).run(limits) == [(0, True, 5, 1), (0, False, 0, 1)]


@pytest.mark.slow
def test_the_allreduce_entry_end_to_end():
    (entry,) = run([find("allreduce")], quick=True, repeats=2, tell=lambda _: None).entries
    (case,) = entry.cases
    measured = {"shared", "ordinary", "gloo", "memcpy", "memcpy by all", "in place by all", "call"}
    assert measured <= case.samples.keys()
    assert case.samples.keys() | case.absent.keys() == {*measured, "mpi"}
    judged = {(found.aim.competitor, found.peer) for found in entry.verdicts(case)}
    assert {("shared", "gloo"), ("shared", "call")} <= judged
