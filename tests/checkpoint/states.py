"""States to save, ranks as threads, and bitwise comparison of states."""

import math
import os
import threading
from collections import OrderedDict

import torch

from phalanx.checkpoint import CheckpointManager, PerRank
from phalanx.checkpoint.components import (
    CheckpointReader,
    CheckpointWriter,
    CheckpointWriterConfig,
    RankInfo,
)


class ThreadBarrier:
    """A barrier for threads that can only wait, as a user might write one."""

    def __init__(self, size, *, timeout=10.0):
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout)

    def at(self, rank):  # noqa: ARG002 - the same object for all ranks
        return self

    def execute_barrier(self):
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise TimeoutError("somebody did not come to the barrier") from None


class ThreadExchange(ThreadBarrier):
    """A thread barrier with a text exchange."""

    def __init__(self, size, *, timeout=10.0):
        super().__init__(size, timeout=timeout)
        self._texts = [""] * size

    def at(self, rank):
        return _RankExchange(self, rank)

    def exchange(self, rank, text):
        self._texts[rank] = text
        self.execute_barrier()
        texts = list(self._texts)
        self.execute_barrier()
        return texts


class _RankExchange:
    def __init__(self, whole, rank):
        self._whole, self._rank = whole, rank

    def execute_barrier(self):
        self._whole.execute_barrier()

    def exchange(self, text):
        return self._whole.exchange(self._rank, text)


def together(size, call):
    """Call on `size` threads and return the results or errors by rank."""
    outcomes = [None] * size

    def run(rank):
        try:
            outcomes[rank] = call(rank)
        except BaseException as error:  # noqa: BLE001 - returned to the test
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes


def save(path, states, *, meet=ThreadExchange, hook=None, timeout=10, **kwargs):
    """Save one state per rank and return the errors by rank."""
    size = len(states)
    barrier = meet(size) if meet is not None and size > 1 else None

    def write(rank):
        writer = CheckpointWriter(
            CheckpointWriterConfig(write_barrier_timeout_secs=timeout),
            RankInfo(rank, size),
            None if barrier is None else barrier.at(rank),
            hook(rank) if hook is not None else None,
        )
        writer.write(str(path), states[rank], **kwargs)
        writer.close()

    return together(size, write)


def saved(path, states, **kwargs):
    """Save and raise the first error."""
    for error in save(path, states, **kwargs):
        if error is not None:
            raise error


def load(path, rank=0, size=1, state=None, **kwargs):
    """Load as one rank."""
    return CheckpointReader(RankInfo(rank, size)).read(str(path), state, **kwargs)


def same(one, two):
    """Whether two states are equal, including types and bits."""
    if isinstance(one, OrderedDict):
        one = dict(one)
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and same_tensor(one, two)
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, float):
        return (one == two and math.copysign(1, one) == math.copysign(1, two)) or (
            math.isnan(one) and math.isnan(two)
        )
    return bool(one == two)


def same_tensor(one, two):
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    one, two = (
        each.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        for each in (one, two)
    )
    return torch.equal(one, two)


def trained():
    """Return a small model and its optimizer after one step."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def mixed(rank, step=0):
    """Return a state with replicated and per-rank parts."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {
            "weight": torch.randn(64, 33, generator=generator),
            "bias": torch.randn(7, generator=generator),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(float(step))}}, "betas": (0.9, 0.99)},
        "step": step,
        "own": torch.full((5,), rank + 100 * step),
        "position": PerRank({"epoch": 1, "sample": rank}),
    }


def plain(state):
    """Return the state without markers, as load() returns it."""
    return {key: each.value if isinstance(each, PerRank) else each for key, each in state.items()}


def state_of(step):
    """Return a small state that contains its step."""
    return {"weight": torch.full((50,), float(step)), "step": step}


def damage(path):
    """Flip a bit of a checkpoint's data without changing its length."""
    (file,) = [each for each in os.listdir(path) if each.startswith("rank0")]
    with open(os.path.join(path, file), "r+b") as data:
        data.seek(-1, os.SEEK_END)
        last = data.read(1)[0]
        data.seek(-1, os.SEEK_END)
        data.write(bytes([last ^ 1]))


def filled(path, steps, **options):
    """Return a manager whose directory has a checkpoint of each step."""
    folder = CheckpointManager(path, **options)
    for step in steps:
        folder.save(step, state_of(step))
    return folder


def names(path):
    """Return the entries of a directory except its lock."""
    return sorted(name for name in os.listdir(path) if name != ".saving")
