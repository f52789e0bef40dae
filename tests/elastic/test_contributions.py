"""What ranks publish of a loop: records that all read, and sums that outlive their rank."""

import os
import signal
import warnings

import pytest
import torch
from torch import nn

from phalanx.ddp._buckets import BucketOptions, DelayedReduction
from phalanx.ddp._communicator import Communicator
from phalanx.ddp._gradient_fold import GradientFold
from phalanx.ddp._reducer import Reducer
from phalanx.ddp._summation_tree import SummationPlan
from phalanx.elastic._buffers import BufferAverage
from phalanx.elastic._contributions import Contributions, LoopFlags, LoopRecord
from phalanx.testing import ThreadRanks

MICRO_BATCHES = 7  # of three ranks: 2, 2 and 3
LOST = 1


class Net(nn.Module):
    """Batch norm has buffers of both rules; one layer is not used by all micro-batches."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(5, 6), nn.BatchNorm1d(6)
        self.last, self.spare = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, leaf):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(leaf))
        hidden = self.norm(self.first(inputs))
        return (self.last(hidden) + (self.spare(hidden) if leaf == 2 else 0)).square().mean()


class Loop:
    """Loops over the micro-batches of one rank."""

    def __init__(self, group):
        torch.manual_seed(1)
        self.net = Net()
        comm = Communicator(group, torch.device("cpu"))
        self.plan = SummationPlan(comm.rank, comm.size, MICRO_BATCHES)
        options = BucketOptions((60,), frozenset(), DelayedReduction(), None, self.plan.slots)
        named = list(self.net.named_parameters())
        self.reducer = Reducer(named, comm, options, reduce="sum")
        self.fold = GradientFold(comm, self.plan)
        self.buffers = BufferAverage(self.net, {})
        self.buffers.attach(comm, self.plan)
        self.contributions = Contributions(comm, MICRO_BATCHES)

    def run(self, section, *, publishes=True):
        """Run a block; return this rank's record, as it is before the gradients are reduced."""
        block = self.plan.block
        self.contributions.clear()
        self.net.zero_grad()
        self.reducer.begin_fold(self.fold)
        self.buffers.begin()
        losses = []
        for leaf, merges in zip(range(block.lo, block.hi), block.merges, strict=True):
            self.buffers.restore()
            loss = self.net(leaf)
            losses.append(loss.item() + section)
            self.reducer.run_micro_batch(self.fold, loss)
            self.buffers.collect(leaf, merges)
        means, firsts = self.buffers.changed_kinds()
        flags = LoopFlags(float(means), float(firsts), 10.0 * section + block.lo)
        record = LoopRecord(losses, [-1.0] * len(block), 5.0, 0.25, flags)
        self.contributions.write_record(record)
        self.staged = self.buffers.stage(means_changed=means, firsts_changed=firsts)
        self.buffers.restore()  # every loop starts from the same buffers
        if publishes:
            nodes, used = block.nodes, self.fold.used
            self.contributions.publish(section, self.reducer, nodes, used, self.staged)
        return record

    def reduce(self, mine):
        self.reducer.reduce_fold()
        return self.contributions.exchange(mine, self.plan)


def records_of_all_ranks(ctx, backend):
    """A rank that is a loop ahead does not change what the others read."""
    loop = Loop(ctx.group(backend))
    for section in range(1, 5):
        found = loop.reduce(loop.run(section))
        flags = [10.0 * section + block.lo for block in loop.plan.blocks]
        assert [each.flags.known_requests for each in found] == flags
        assert [len(each.losses) for each in found] == [len(block) for block in loop.plan.blocks]
        assert all(section < loss for each in found for loss in each.losses)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_every_rank_reads_the_records_of_all(ranks, backend):
    ranks.run(records_of_all_ranks, 3, args=(backend,))


def record_while_another_is_ahead(ctx):
    """Rank 0 reads what rank 1 said before, although that has run its next loop meanwhile."""
    loop = Loop(ctx.group("shm"))
    for section in (1, 2):  # ranks agree on the buckets
        loop.reduce(loop.run(section))
    mine = loop.run(3)
    loop.reducer.reduce_fold()
    if ctx.rank == 1:
        following = loop.run(4)
        ctx.store.set("ahead", "")
    else:
        ctx.store.wait(["ahead"])
        found = loop.contributions.exchange(mine, loop.plan)
        assert [int(each.flags.known_requests) // 10 for each in found] == [3, 3]
        following = loop.run(4)
    found = loop.reduce(following)
    assert [int(each.flags.known_requests) // 10 for each in found] == [4, 4]


def test_a_rank_may_be_a_loop_ahead(ranks):
    ranks.run(record_while_another_is_ahead, 2)


def lose_a_rank(ctx, how):
    """Rank 1 dies in its third loop; return what the others find of it, as bytes."""
    loop = Loop(ctx.group("shm"))
    for section in (1, 2):
        loop.reduce(loop.run(section))
    if ctx.rank == LOST:
        loop.run(3, publishes=how != "not published")
        if how == "taken back":
            loop.contributions.clear()
        os.kill(os.getpid(), signal.SIGKILL)
    loop.run(3)
    with pytest.raises(Exception, match="rank 1"):
        loop.reducer.reduce_fold()
    parameters = dict(loop.net.named_parameters())
    others = loop.contributions.of_dead_ranks(2, parameters)
    assert others == [], "published in another section"
    found = loop.contributions.of_dead_ranks(3, parameters)
    if how != "published":
        assert found == []
        return None
    (lost,) = found
    assert lost.rank == LOST
    sums = loop.buffers.adopt(lost.buffers, list(lost.gradients))
    return {
        "results": lost.results,
        "used": lost.used,
        "requests": lost.record.flags.known_requests,
        "gradients": {
            node: {name: _bytes(each) for name, each in gradients.items()}
            for node, gradients in lost.gradients.items()
        },
        "buffers": [[_bytes(each) for each in node] for node in sums],
    }


def _bytes(tensor):
    return tensor.detach().contiguous().numpy().tobytes()


@pytest.mark.parametrize("how", ["published", "not published", "taken back"])
def test_published_sums_outlive_their_rank(ranks, how):
    first, _, last = ranks.run(lose_a_rank, 3, args=(how,), expect_dead=[LOST])
    assert first == last
    if how != "published":
        return

    def expected(ctx):
        """Run the lost rank's micro-batches here."""
        loop = Loop(ctx.group("local"))
        loop.plan = SummationPlan(LOST, 3, MICRO_BATCHES)
        loop.fold = GradientFold(loop.contributions._comm, loop.plan, block=loop.plan.block)
        record = loop.run(3)
        nodes = loop.fold.nodes()
        gradients = {
            (node.lo, node.hi): {
                loop.reducer.names[i]: _bytes(view)
                for bucket, sums in zip(loop.reducer.buckets, node.sums, strict=True)
                for i, view in zip(bucket.members, sums.views, strict=True)
            }
            for node in nodes
        }
        pairs = zip(record.losses, record.weights, strict=True)
        return {
            "results": dict(zip([2, 3], pairs, strict=True)),
            "used": {loop.reducer.names[i] for i in loop.fold.used},
            "requests": record.flags.known_requests,
            "gradients": gradients,
            "buffers": [[_bytes(each) for each in node] for node in loop.buffers.nodes()],
        }

    (alone,) = ThreadRanks(1).run(expected)
    assert first == alone
    assert any("spare" in name for name in first["used"])


# -- buffers -------------------------------------------------------------------------------


class Counter(nn.Module):
    """Changes its buffers in some micro-batches."""

    def __init__(self, changing):
        super().__init__()
        self.changing = changing
        self.register_buffer("mean", torch.randn(3, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("small", torch.ones(5, dtype=torch.float16))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, leaf):
        if leaf in self.changing:
            self.mean[1] += 1 / (leaf + 1)
            self.count += leaf + 1
            self.mask ^= True


@pytest.mark.parametrize("changing", [(), (0,), (1,), range(5)], ids=str)
def test_what_a_rank_staged_is_what_it_had(changing):
    """Also if it changed nothing, which is not copied."""

    def body(ctx):
        comm = Communicator(ctx.group("local"), torch.device("cpu"))
        plan = SummationPlan(0, 1, 5)
        module = Counter(changing)
        lost, survivor = BufferAverage(module, {}), BufferAverage(Counter(changing), {})
        for each in (lost, survivor):
            each.attach(comm, plan)
            each.begin()
        for leaf, merges in enumerate(plan.block.merges):
            lost.restore()
            module(leaf)
            lost.collect(leaf, merges)
        means, firsts = lost.changed_kinds()
        assert means == bool(changing)
        assert firsts == (0 in changing)
        staged = lost.stage(means_changed=means, firsts_changed=firsts)
        sums = survivor.adopt(staged, plan.block.nodes)
        found = [[_bytes(each) for each in node] for node in sums]
        assert found == [[_bytes(each) for each in node] for node in lost.nodes()]
        assert survivor.has_first_values
        assert survivor.changed_kinds() == (means, firsts)
        for mine, theirs in zip(survivor._first_values, lost._first_values, strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ThreadRanks(1).run(body)
