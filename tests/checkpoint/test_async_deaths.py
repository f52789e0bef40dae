"""Asynchronous saves when a rank or writer is killed, and at interpreter exit.

With PHALANX_SOAK set (``make soak``), writers and ranks are killed a hundred times each.
"""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from phalanx.checkpoint import (
    CheckpointerConfig,
    PerRank,
    Replicated,
    make_async_checkpointer,
)
from phalanx.checkpoint.barriers import BarrierConfig
from phalanx.checkpoint.components import CheckpointProcessConfig, CheckpointWriterConfig, RankInfo
from phalanx.errors import CheckpointError
from phalanx.testing import Died
from ports import free_port

from .states import load, same, saved

SOAK = "PHALANX_SOAK" in os.environ
ROUNDS, KILLS = (10, 10) if SOAK else (1, 1)
"""Number of restarts of two ranks, and of saves with a kill after each."""
LONGEST = 0.1
"""Longest time until the kill in seconds; about the duration of a save."""
DEATHS = 100 if SOAK else 2
"""Number of times ranks are killed."""
GRACE = 5.0 if SOAK else 0.5
"""Seconds for the other ranks to detect the death before they are killed, too."""


def make(rank, size, port=None):
    """Return a checkpointer, with a barrier if a port is given."""
    place = {"global_rank": rank, "global_world_size": size}
    address = {"master_address": "localhost", "tcpstore_port": port, "barrier_prefix": "c"}
    patience = {"timeout_barrier_init_secs": 40, "timeout_secs": 40}
    arguments = {**place, **address, **patience, "use_checkpoint_barrier_tcpstore_libuv": True}
    barrier = BarrierConfig() if port is None else BarrierConfig("tcp_store", arguments)
    config = CheckpointerConfig(
        writer_config=CheckpointWriterConfig(15),
        barrier_config=barrier,
        process_config=CheckpointProcessConfig(subprocess_init_timeout_secs=60),
    )
    return make_async_checkpointer(config, RankInfo(rank, size))


def state(step):
    return {"model": Replicated({"weight": torch.full((300, 1000), step)}), "step": step}


def die_in_the_middle_of_a_save(ctx, path, note):
    checkpointer = make(0, 1)
    checkpointer.save(path, state(1))[1].result(60)
    process = checkpointer._checkpoint_process.process
    os.kill(process.pid, signal.SIGSTOP)  # so the save is certainly unfinished
    checkpointer.save(path, state(2))[0].result(10)
    with open(note, "w") as file:
        file.write(str(process.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_rank_leaves_no_writer_process(ranks, tmp_path):
    """Nor memory: it is anonymous and freed with the last process that maps it."""
    path, note = str(tmp_path / "c"), tmp_path / "pid"
    (outcome,) = ranks.run(
        die_in_the_middle_of_a_save, 1, args=(path, str(note)), timeout=90, expect_dead=[0]
    )
    assert isinstance(outcome, Died)
    deadline = time.monotonic() + 10
    while is_there(int(note.read_text())):
        assert time.monotonic() < deadline, "the writer process has outlived its rank"
        time.sleep(0.01)
    assert load(path)[0]["step"] == 1


def is_there(pid):
    """Whether a process still has a thread and therefore open files."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return len(threads) > 1 or stat.rpartition(")")[2].split()[0] not in "ZX"


SCRIPT = """
import atexit, sys, torch
from phalanx.checkpoint import make_async_checkpointer

torch.set_num_threads(2)
checkpointer = make_async_checkpointer()
atexit.register(lambda: checkpointer.save(sys.argv[2], {"w": torch.ones(1000)}))
large = {"w": torch.ones(20_000_000)}
checkpointer._checkpoint_process.write(large, sys.argv[3])  # copied by the thread that writes
checkpointer.save(sys.argv[1], large)
"""


@pytest.mark.slow
def test_interpreter_exit_loses_no_save_silently(tmp_path):
    (tmp_path / "file").touch()
    paths = [str(tmp_path / "c"), str(tmp_path / "file" / "c"), str(tmp_path / "d")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *paths],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert load(paths[0])[0]["w"].sum() == 20_000_000
    assert load(paths[2])[0]["w"].sum() == 20_000_000
    assert f"rank 0, save to {paths[1]}: the save failed" in done.stderr


UNGUARDED = """
import sys, torch
from phalanx.checkpoint import make_async_checkpointer
from phalanx.checkpoint.components import CheckpointWriter, CheckpointWriterConfig

def make_writer(rank_info):
    return CheckpointWriter(CheckpointWriterConfig(), rank_info)

checkpointer = make_async_checkpointer(checkpoint_writer_init_fn=make_writer)
print(checkpointer.save(sys.argv[1], {"step": 1})[1].exception(60))
"""


@pytest.mark.slow
def test_script_without_main_guard_is_reported(tmp_path):
    (tmp_path / "script.py").write_text(UNGUARDED)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", tmp_path / "c"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "could not start: this script is being imported by its own" in done.stdout
    assert 'if __name__ == "__main__":' in done.stdout
    assert os.listdir(tmp_path) == ["script.py"]


def save_steps(ctx, folder, first, kills, seed, port):
    """Save step after step; kill writers during every other save."""
    checkpointer = make(ctx.rank, ctx.size, port)
    outcomes = {}
    draw = random.Random(seed)
    for step in range(first, first + 2 * kills):
        victims, instant = draw.choice([{0}, {1}, {0, 1}]), draw.uniform(0, LONGEST)
        _, writing = checkpointer.save(f"{folder}/c", state(step))
        if (step - first) % 2 and ctx.rank in victims:
            process = checkpointer._checkpoint_process.process
            time.sleep(instant)
            process.kill()
            process.wait()
        error = writing.exception(60)
        assert error is None or isinstance(error, CheckpointError)
        outcomes[step] = None if error is None else str(error)
    checkpointer.close()
    return outcomes


def kill_at_random(ranks, folder, *, rounds, kills, seed):
    """Kill writers at random times during saves by two ranks; check the newest checkpoint.

    Every other round uses a barrier whose store is in the writer process of rank 0.
    """
    for turn in range(rounds):
        first = 2 * turn * kills
        port = free_port() if turn % 2 == 0 else None
        arguments = (folder, first, kills, seed + turn, port)
        told = ranks.run(save_steps, 2, args=arguments, timeout=240)
        where = f"seed {seed + turn}, port {port}: {told}"
        assert [outcomes[first] for outcomes in told] == [None, None], where
        if port is None:  # a store that dies with a writer also fails the next save
            for step in range(first, first + 2 * kills, 2):  # saves without a kill
                assert [outcomes[step] for outcomes in told] == [None, None], where
        # A rank may die after the commit and before it reports it.
        done = [step for outcomes in told for step, error in outcomes.items() if error is None]
        newest = load(f"{folder}/c")[0]
        assert max(done) <= newest["step"] < first + 2 * kills, where
        weight = torch.full((300, 1000), newest["step"])
        assert same({"model": {"weight": weight}, "step": newest["step"]}, newest)


@pytest.mark.slow
@pytest.mark.timeout(3600 if SOAK else 300)
def test_writers_killed_at_random_times(ranks, tmp_path):
    kill_at_random(ranks, str(tmp_path), rounds=ROUNDS, kills=KILLS, seed=random.randrange(10**6))


def own_state(rank, step, weight):
    return {"model": Replicated({"weight": weight}), "own": PerRank([rank, step]), "step": step}


def train_until_killed(ctx, folder, first, seed, victims, port):
    """Save step after step, two at a time; the victims die at a random time.

    Some kill their writer first, for the others the kernel does. A rank that sees a failed save is
    killed, too, as is one that does not see it in time. Tensors change as soon as staging ends.
    """
    checkpointer = make(ctx.rank, ctx.size, port)
    draw, notes = random.Random(seed + ctx.rank), Path(folder, str(ctx.rank))
    weight, before = torch.zeros(300, 1000), None
    for step in itertools.count(first):
        weight.fill_(step)
        began = time.monotonic()
        try:
            staging, writing = checkpointer.save(f"{folder}/c", own_state(ctx.rank, step, weight))
        except CheckpointError:  # of the save before, which was not looked at yet
            die(draw.choice([0, LONGEST]), None)
        staging.result(30)
        if step < first + 2:
            writing.result(60)  # a new job can save at once
            duration, writer = time.monotonic() - began, checkpointer._checkpoint_process.process
        elif step == first + 2:
            instant = draw.uniform(0, 3 * duration) + (0 if ctx.rank in victims else GRACE)
            takes_writer = draw.random() < 0.5
            threading.Thread(target=die, args=(instant, writer if takes_writer else None)).start()
        if before is not None and before.exception(60) is not None:
            die(draw.choice([0, LONGEST]), None)
        with notes.open("a") as file:
            file.write(f"{writer.pid} {step - 1}\n")
        before = writing


def die(seconds, writer):
    time.sleep(seconds)
    if writer is not None:
        writer.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def notes_of(folder):
    """Return the pids of the ranks' writers and the last step reported as saved."""
    texts = [Path(folder, str(rank)).read_text() for rank in range(2)]
    notes = [text[: text.rindex("\n")].split()[-2:] for text in texts]  # complete lines only
    return [int(pid) for pid, _ in notes], max(int(step) for _, step in notes)


@pytest.mark.slow
@pytest.mark.timeout(3600 if SOAK else 300)
def test_ranks_killed_at_random_times(ranks, tmp_path):
    folder, newest = str(tmp_path), 0
    for death in range(DEATHS):
        seed = random.randrange(10**6)
        victims = random.Random(seed).choice([(0,), (1,), (0, 1)])
        port = free_port() if death % 2 else None
        where = f"seed {seed}, port {port}, victims {victims}"
        arguments = (folder, newest + 1, seed, victims, port)
        ranks.run(train_until_killed, 2, args=arguments, expect_dead=(0, 1), timeout=120)
        (writers, told), limit = notes_of(folder), time.monotonic() + 10
        assert told > newest, where
        while any(map(is_there, writers)):
            assert time.monotonic() < limit, f"a writer has outlived its rank: {where}"
            time.sleep(0.01)
        newest = load(f"{folder}/c")[0]["step"]
        assert told <= newest <= told + 2, where  # up to two commits may be unreported
        check_whole(f"{folder}/c", newest)
        newest += 1  # another job can save there at once
        weight = torch.full((300, 1000), float(newest))
        saved(f"{folder}/c", [own_state(rank, newest, weight) for rank in range(2)], meet=None)
        check_whole(f"{folder}/c", newest)
        assert len(os.listdir(f"{folder}/c")) == 3, where
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "c"]


def check_whole(path, step):
    weight = torch.full((300, 1000), float(step))
    for rank in range(2):
        wanted = {"model": {"weight": weight}, "own": [rank, step], "step": step}
        assert same(wanted, load(path, rank, 2)[0])
