"""The sums of a rank's micro-batches are complete and intact when the group fails."""

import os
import signal
from contextlib import suppress

import pytest
import torch
from torch import nn

from phalanx.errors import GroupError, PeerLost
from phalanx.testing import ThreadRanks

from .internals import (
    BucketOptions,
    Communicator,
    DelayedReduction,
    GradientFold,
    Reducer,
    SummationPlan,
    fold_nodes,
    midpoint,
)
from .whole import seeded

LEAVES = 8  # of three ranks: the first has one subtree, the others have two
FAILING_RANK = 1
LAYERS = 4
threads = ThreadRanks(4)


def make_net():
    return seeded(lambda: nn.Sequential(*(nn.Linear(9, 9) for _ in range(LAYERS))))


def loss_of(net, leaf, strike=None, place=None):
    """Return the loss of a micro-batch, whose backward calls `strike` in front of a layer."""
    hidden = torch.randn(3, 9, generator=torch.Generator().manual_seed(leaf))
    for layer, each in enumerate(net):
        hidden = each(hidden).sin()
        if layer == place:
            hidden.register_hook(lambda _: strike())
    return hidden.square().sum()


class Alone:
    """A single process that computes any node of the tree."""

    def __init__(self):
        self.net = make_net()

    def node(self, lo, hi):
        if hi - lo > 1:
            middle = midpoint(lo, hi)
            pairs = zip(self.node(lo, middle), self.node(middle, hi), strict=True)
            return [left + right for left, right in pairs]
        self.net.zero_grad()
        loss_of(self.net, lo).backward()
        return [parameter.grad for parameter in self.net.parameters()]


class Steps:
    """Steps of micro-batches on one rank. Every parameter has a bucket of its own."""

    def __init__(self, group, leaves=LEAVES):
        comm = Communicator(group, torch.device("cpu"))
        plan = SummationPlan(comm.rank, comm.size, leaves)
        options = BucketOptions((1,), frozenset(), DelayedReduction(), None, plan.slots)
        self.net = make_net()
        self.reducer = Reducer(list(self.net.named_parameters()), comm, options, reduce="sum")
        self.fold = GradientFold(comm, plan)
        self.fold.divisor = 3.0
        self.block = plan.block
        self.leaves = leaves

    def run(self, *, strike=None, place=None):
        """Make a step; `strike` is called in the last micro-batch of this rank."""
        self.net.zero_grad()
        self.reducer.begin_fold(self.fold)
        for leaf in range(self.block.lo, self.block.hi):
            loss = loss_of(self.net, leaf)
            if leaf == self.block.hi - 1 and strike is not None:
                if place is None:
                    strike()
                loss = loss_of(self.net, leaf, strike, place)
            self.reducer.run_micro_batch(self.fold, loss)
            if leaf == self.block.hi - 1:
                self.reducer.reduce_fold()
            yield leaf

    def finish(self, **options):
        for _ in self.run(**options):
            pass

    def check_nodes(self, folded):
        """Compare the nodes over the first leaves of this rank with a single process."""
        alone, found = Alone(), self.fold.nodes()
        leaves = [(leaf, leaf + 1) for leaf in range(self.block.lo, self.block.lo + folded)]
        wanted, _ = fold_nodes(leaves, self.leaves)
        assert [(node.lo, node.hi) for node in found] == wanted
        for node in found:
            expected = alone.node(node.lo, node.hi)
            seen = 0
            for bucket, sums in zip(self.reducer.buckets, node.sums, strict=True):
                assert sums.flat.numel() == bucket.buffer.numel(), "no header"
                for i, view in zip(bucket.members, sums.views, strict=True):
                    assert torch.equal(view.view(torch.int32), expected[i].view(torch.int32))
                    seen += 1
            assert seen == len(expected)


def test_nodes_follow_the_micro_batches():
    """Between micro-batches too, when the stack is deeper than the slots of a bucket."""

    def body(ctx):
        steps = Steps(ctx.group("local"), leaves=7)
        assert steps.fold.nodes() == []
        for _ in range(3):
            for leaf in steps.run():
                steps.check_nodes(leaf + 1)

    threads.run(body, 1)


def keep_sums(ctx, backend):
    steps = Steps(ctx.group(backend))
    whole = [each / 3 for each in Alone().node(0, LEAVES)]
    for _ in range(3):
        steps.finish()
        for parameter, expected in zip(steps.net.parameters(), whole, strict=True):
            assert torch.equal(parameter.grad.view(torch.int32), expected.view(torch.int32))
        for parameter in steps.net.parameters():
            parameter.grad.zero_()
        steps.check_nodes(len(steps.block))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_reduction_leaves_the_sums_of_a_rank_as_they_are(ranks, backend):
    ranks.run(keep_sums, 3, args=(backend,))


def lose_a_rank(ctx, step, place):
    """Rank 1 is killed in a backward pass, or before it; the others learn it at the same place."""
    group = ctx.group("shm")
    steps = Steps(group)
    for _ in range(step):
        steps.finish()
    launched, start_sum = [], steps.fold.start_sum
    steps.fold.start_sum = lambda bucket: (launched.append(bucket.index), start_sum(bucket))[1]

    def strike():
        if ctx.rank == FAILING_RANK:
            os.kill(os.getpid(), signal.SIGKILL)
        with suppress(PeerLost):
            group.barrier().wait()

    survives_until_the_end = place is None and ctx.rank != FAILING_RANK
    with pytest.raises(PeerLost) as caught:
        steps.finish(strike=None if survives_until_the_end else strike, place=place)
    assert caught.value.lost == (FAILING_RANK,)
    assert any("This is bucket" in note for note in caught.value.__notes__)
    steps.check_nodes(len(steps.block))
    return len(launched), len(steps.reducer.buckets)


@pytest.mark.parametrize("place", range(LAYERS))
def test_a_death_between_launches_leaves_complete_sums(ranks, place):
    first, _, last = ranks.run(lose_a_rank, 3, args=(2, place), expect_dead=[FAILING_RANK])
    assert first == last
    # Those of the layers behind have been launched, and one more has raised.
    tried, buckets = first
    assert 2 * (LAYERS - 1 - place) <= tried <= 2 * (LAYERS - 1 - place) + 1 < buckets + 1


@pytest.mark.parametrize("step", [0, 2])
def test_a_death_before_the_last_backward_pass_leaves_complete_sums(ranks, step):
    """In the step that records the order of gradients, and in one that launches early."""
    first, _, _ = ranks.run(lose_a_rank, 3, args=(step, None), expect_dead=[FAILING_RANK])
    assert first == (2 * LAYERS, 2 * LAYERS)


@pytest.mark.parametrize("place", [0, 2])
def test_an_aborted_group_leaves_complete_sums_without_shared_memory(place):
    def body(ctx):
        group = ctx.group("local")
        steps = Steps(group)
        for _ in range(2):
            steps.finish()

        def strike():
            if ctx.rank == FAILING_RANK:
                group.abort("on purpose")
            with suppress(GroupError):
                group.barrier().wait()

        why = "this rank aborted" if ctx.rank == FAILING_RANK else "on purpose"
        with pytest.raises(GroupError, match=why):
            steps.finish(strike=strike, place=place)
        steps.check_nodes(len(steps.block))

    threads.run(body, 3)


def test_there_are_no_nodes_after_a_backward_pass_that_raised():
    """Some of its gradients may be in the sums. The other ranks raise and have theirs."""

    def body(ctx):
        steps = Steps(ctx.group("local"))
        for _ in range(2):
            steps.finish()

        def strike():
            raise ArithmeticError("on purpose")

        if ctx.rank == FAILING_RANK:
            with pytest.raises(ArithmeticError):
                steps.finish(strike=strike, place=1)
            assert steps.fold.nodes() == []
        else:
            with pytest.raises(GroupError, match="ArithmeticError: on purpose"):
                steps.finish()
            steps.check_nodes(len(steps.block))

    threads.run(body, 3)
