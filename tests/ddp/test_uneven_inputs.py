"""Uneven inputs: training matches one process on the same batches, up to rounding."""

import copy

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import phalanx
from phalanx.ddp import DDP, SyncBatchNorm

from .whole import ROWS, TINY, assert_close, batch, on_every_backend, seeded

any_data = settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.differing_executors]
)
EPOCHS = 2


@st.composite
def plans(draw):
    """Draw the batches per rank and epoch, and the divisor of the mean."""
    lengths = st.lists(st.integers(0, 4), min_size=4, max_size=4)
    epochs = [draw(lengths) for _ in range(EPOCHS)]
    return epochs, draw(st.sampled_from(["all", "active", "weighted"]))


class Normed(nn.Module):
    """A model with a batch norm layer."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(5, 4), norm, nn.Linear(4, 3)

    def forward(self, rows):
        return self.second(self.norm(self.first(rows)).tanh())


def make(norm=nn.BatchNorm1d):
    return seeded(lambda: Normed(norm(4)).double())


def rows_of(step, rank, size):
    return batch(step, size).double().split(ROWS)[rank]


def momentum(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def train(ddp, group, plan, optimizer):
    """Train this rank; return how many ranks had data in each step."""
    epochs, counting = plan
    counts = []
    for number, lengths in enumerate(epochs):
        loader = [rows_of(10 * number + step, group.rank(), group.size())
                  for step in range(lengths[group.rank()])]  # fmt: skip
        loop = phalanx.uneven(
            loader, ddp, optimizers=[optimizer], divide_by_initial_world_size=counting == "all"
        )
        for rows in loop:
            ddp.weight = 1.0 + group.rank() if counting == "weighted" else None
            optimizer.zero_grad()
            ddp(rows).square().mean().backward()
            optimizer.step()
            having = torch.ones(1)
            group.allreduce(having).wait()  # a metric of the user's own
            counts.append(int(having))
        assert loop.report.steps == tuple(lengths[: group.size()])
    return counts


class Whole:
    """One process with the data of all ranks and each rank's buffers."""

    def __init__(self, size):
        self.module, self.size = make(), size
        self.buffers = [copy.deepcopy(dict(self.module.named_buffers())) for _ in range(size)]
        self.optimizer = momentum(self.module)

    def load(self, rank):
        for name, buffer in self.module.named_buffers():
            buffer.copy_(self.buffers[rank][name])

    def keep(self, rank):
        self.buffers[rank] = copy.deepcopy(dict(self.module.named_buffers()))

    def step(self, number, having, counting):
        weights = {rank: 1.0 + rank if counting == "weighted" else 1.0 for rank in having}
        total = self.size if counting == "all" else sum(weights.values())
        self.optimizer.zero_grad()
        self.buffers = [self.buffers[max(having)]] * self.size
        for rank in having:
            self.load(rank)
            loss = self.module(rows_of(number, rank, self.size)).square().mean()
            (loss * weights[rank] / total).backward()
            self.keep(rank)
        self.optimizer.step()

    def train(self, plan):
        epochs, counting = plan
        for number, lengths in enumerate(epochs):
            for step in range(max(lengths)):
                having = [rank for rank, length in enumerate(lengths) if step < length]
                self.step(10 * number + step, having, counting)
            last = max(r for r, length in enumerate(lengths) if length == max(lengths))
            self.buffers = [self.buffers[last]] * self.size
        self.load(0)


@any_data
@given(plan=plans())
@on_every_backend
def test_training_matches_one_process(group, plan):
    epochs, counting = plan
    plan = [lengths[: group.size()] for lengths in epochs], counting
    ddp = DDP(make(), process_group=group, bucket_cap_mb=TINY)
    counts = train(ddp, group, plan, momentum(ddp))
    assert counts == [sum(n > step for n in lengths) for lengths in plan[0]
                      for step in range(lengths[group.rank()])]  # fmt: skip
    whole = Whole(group.size())
    whole.train(plan)
    assert_same_state(ddp, whole.module)


def assert_same_state(ddp, whole):
    for name, theirs in whole.state_dict().items():
        assert_close(ddp.module.state_dict()[name].double(), theirs.double(), name)
    ddp.assert_in_sync()


class WholeBatch(Whole):
    """One process that normalizes over the rows of all ranks with data."""

    def step(self, number, having, counting):
        rows = [rows_of(number, rank, self.size) for rank in having]
        self.optimizer.zero_grad()
        losses = [part.square().mean() for part in self.module(torch.cat(rows)).split(ROWS)]
        (sum(losses) / (self.size if counting == "all" else len(losses))).backward()
        self.optimizer.step()

    def load(self, rank):
        """Do nothing; there is one set of buffers."""


@any_data
@given(plan=plans().filter(lambda plan: plan[1] != "weighted"))
@on_every_backend
def test_sync_batch_norm_uses_the_ranks_with_data(group, plan):
    """Ranks without data do not contribute to the statistics."""
    epochs, counting = plan
    plan = [lengths[: group.size()] for lengths in epochs], counting
    ddp = DDP(make(SyncBatchNorm), process_group=group, bucket_cap_mb=TINY)
    train(ddp, group, plan, momentum(ddp))
    whole = WholeBatch(group.size())
    whole.train(plan)
    assert_same_state(ddp, whole.module)
