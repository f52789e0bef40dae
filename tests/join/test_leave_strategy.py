"""The leave strategy: ranks leave the group when out of data, and failures meanwhile."""

import os
import re
import signal

import pytest
import torch

import phalanx
from cases import over_cases
from phalanx import errors
from phalanx.join import Join
from phalanx.testing import over_groups

from .counting import Counter, take

everywhere = over_cases("local-4", "shm-2", "gloo-4")
on_pairs = over_groups(sizes=(2,), reuse=True)
apart = over_cases("local-3", "shm-4", "gloo-3", reuse=False)
"""For bodies that leave the group broken."""


class Leaver(Counter):
    """A joinable that works with any number of members."""

    is_in_step = False

    @property
    def supports_leaving(self):
        return True

    def step(self):
        self.is_in_step = True
        work = super().step()
        self.is_in_step = False
        return work


def lengths_of(group):
    return [3, 1, 0, 2][: group.size()]


def count(lengths, mine):
    return [sum(n > step for n in lengths) for step in range(mine)]


@everywhere
def test_collectives_continue_among_ranks_with_data(group):
    leaver, lengths = Leaver(group), lengths_of(group)
    mine = lengths[group.rank()]
    for _ in range(2):
        with Join([leaver]) as join:
            assert join.leaves
            for _ in range(mine):
                leaver.step()
                leaver.counts.append(leaver.add_up(1.0))  # a collective issued by the user
        assert leaver.add_up(1.0) == group.size()  # all ranks are members again
        assert join.report.steps == tuple(lengths)
        assert leaver.was_last is (group.rank() == 0)
    assert leaver.counts == [n for n in count(lengths, mine) for _ in range(2)] * 2
    assert not leaver.shadowed


@everywhere
def test_uneven_loop_needs_no_join_block(group):
    leaver, lengths = Leaver(group), lengths_of(group)
    loop = phalanx.uneven(range(lengths[group.rank()]), leaver)
    assert len(loop) == lengths[group.rank()]
    for epoch in range(2):
        counts = [leaver.add_up(1.0) for _ in loop]  # before the joinable is used, or without
        assert counts == count(lengths, len(counts)), epoch
        assert loop.report.steps == tuple(lengths)
    assert leaver.add_up(1.0) == group.size()


@everywhere
def test_no_rank_has_data(group):
    leaver = Leaver(group)
    for _ in phalanx.uneven([], leaver):
        raise AssertionError("there is none")
    assert leaver.was_last is True
    assert leaver.add_up(1.0) == group.size()


@on_pairs
def test_one_rank_has_a_thousand_times_the_data(group):
    leaver = Leaver(group)
    loop = phalanx.uneven(range(1000 if group.rank() else 1), leaver)
    for _ in loop:
        leaver.step()
    assert loop.report.steps == (1, 1000)
    assert loop.report.idle_step_fraction == pytest.approx(999 / 2000)
    assert 0 < loop.report.idle_time_fraction < 1
    waited, last = loop.report.idle_seconds
    assert (waited, last) == (pytest.approx(loop.report.seconds[1] - loop.report.seconds[0]), 0)


@everywhere
def test_report_text(group):
    leaver = Leaver(group)
    loop = phalanx.uneven(range(group.rank() + 1), leaver)
    for _ in loop:
        leaver.step()
    first, *_, last, idle = str(loop.report).splitlines()
    assert re.fullmatch(r"rank 0: 1 steps, out of data after \d+\.\d\d s", first)
    rank = group.size() - 1
    assert re.fullmatch(rf"rank {rank}: {rank + 1} steps, to the end after \d+\.\d\d s", last)
    assert re.fullmatch(r"idle: \d+\.\d% of steps, \d+\.\d% of time", idle)


@everywhere
def test_report_of_the_shadow_strategy(group):
    counter, lengths = Counter(group), lengths_of(group)
    with Join([counter]) as join:
        take([counter], lengths[group.rank()])
    assert not join.leaves
    assert join.report.steps == tuple(lengths)


def break_off(leaver, steps):
    for number, _ in enumerate(phalanx.uneven(range(4), leaver), 1):
        leaver.step()
        if number == steps:
            break


def come_back(leaver, steps):
    for number, _ in enumerate(phalanx.uneven(range(4), leaver), 1):
        leaver.step()
        if number == steps:
            return


def in_a_block(leaver, steps):
    with Join([leaver]):
        for number in range(1, 5):
            leaver.step()
            if number == steps:
                return


@pytest.mark.parametrize("way", [break_off, come_back, in_a_block])
@everywhere
def test_loop_may_be_left_early(group, way):
    leaver = Leaver(group)
    way(leaver, 1 if group.rank() else 4)
    assert leaver.counts == [group.size(), 1, 1, 1][: len(leaver.counts)]
    assert len(leaver.counts) == (1 if group.rank() else 4)
    assert leaver.add_up(1.0) == group.size()


@everywhere
def test_nested_joins_around_one_loop(group):
    one, other = Leaver(group), Leaver(group)
    with Join([one]) as outer, Join([other]) as inner, Join([one]):
        for _ in range(group.rank()):
            one.step()
            other.step()
    assert inner.report.steps == tuple(range(group.size()))
    assert one.add_up(1.0) == group.size()
    assert outer.report is not None


@apart
def test_join_inside_the_loop_of_another_is_rejected(group):
    outer, inner = Leaver(group), Leaver(group)
    with pytest.raises(errors.RankMismatch, match="different joins"), Join([outer]):
        for _ in range(1 + group.rank()):
            outer.step()
            with Join([inner]):
                inner.step()


# -- faults --------------------------------------------------------------------------------


class Broken(Exception):
    pass


def loader_that_raises(steps):
    yield from range(steps)
    raise Broken("the disk is gone")


@apart
def test_rank_that_raises_is_named_on_all_others(group):
    """Rank 0 has left, rank 1 has data, and rank 2 raises."""
    leaver = Leaver(group)
    expected = Broken if group.rank() == 2 else errors.GroupAborted
    with pytest.raises(expected) as caught, Join([leaver]):
        take([leaver], group.rank())
        if group.rank() == 2:
            raise Broken("no more")
        take([leaver], 3 * group.rank())
    if group.rank() < 2:
        assert re.search(r"rank 2 .*its join block raised Broken: no more", str(caught.value))


@apart
def test_rank_whose_loader_raises_is_named_on_all_others(group):
    leaver = Leaver(group)
    loader = loader_that_raises(2) if group.rank() == 2 else range(5 * group.rank())
    expected = Broken if group.rank() == 2 else errors.GroupAborted
    with pytest.raises(expected, match="the disk is gone"):
        for _ in phalanx.uneven(loader, leaver):
            leaver.step()


@apart
def test_break_in_the_middle_of_a_step_aborts_the_group(group):
    leaver = Leaver(group)
    told = "rank 2.*, because it left the loop in the middle of a step"
    if group.rank() == 2:
        loop = phalanx.uneven(range(3), leaver)
        for _ in loop:
            leaver.is_in_step = True
            break
        with pytest.raises(errors.GroupAborted, match=told):
            _ = loop.report
        with pytest.raises(errors.GroupAborted):
            leaver.add_up(1.0)
        return
    with pytest.raises(errors.GroupAborted, match=told):
        for _ in phalanx.uneven(range(3 * group.rank()), leaver):
            leaver.step()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_dead_rank_is_named_on_all_others(ranks, backend):
    ranks.run(lose_one, 3, args=(backend,), expect_dead=[2], timeout=30)


def lose_one(ctx, backend):
    """Rank 0 has left and rank 1 is in a step when rank 2 dies."""
    group = ctx.group(backend)
    leaver = Leaver(group)
    with pytest.raises(errors.PeerLost) as caught:
        for step in phalanx.uneven(range(4 * group.rank()), leaver):
            leaver.step()
            if group.rank() == 2 and step == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    assert caught.value.lost == (2,)


@apart
def test_departed_rank_gets_errors_of_the_remaining_ranks(group):
    """Ranks 1 and 2 raise RankMismatch; rank 0 has left and is not involved."""
    leaver = Leaver(group)
    expected = errors.RankMismatch if group.rank() else errors.GroupAborted
    with pytest.raises(expected) as caught, Join([leaver]):
        for _ in range(group.rank() and 2):
            leaver.step()
            tree = torch.ones(1)
            phalanx.gather_uneven({"a": tree} if group.rank() == 1 else tree, group)
    if not group.rank():
        assert "its join block raised RankMismatch" in str(caught.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@apart
def test_interrupt_on_one_rank_aborts_the_others(group, error):
    leaver = Leaver(group)
    expected = errors.GroupAborted if group.rank() else error
    with pytest.raises(expected), Join([leaver]):
        for _ in range(3):
            leaver.step()
            if group.rank() == 0:
                raise error


@everywhere
def test_disabled_loop_does_nothing(group):
    leaver = Leaver(group)
    loop = phalanx.uneven(range(1 + group.rank()), leaver, enable=False)
    assert sum(1 for _ in loop) == 1 + group.rank()
    assert loop.report is None


@over_groups(backends=("local",), sizes=(2,))
def test_bad_arguments_are_rejected(group):
    leaver = Leaver(group)
    with pytest.raises(ValueError, match="needs a joinable"):
        phalanx.uneven([1])
    with pytest.raises(TypeError, match="loader first"):
        phalanx.uneven(leaver, leaver)
    with pytest.raises(TypeError, match="generator has no length"):
        len(phalanx.uneven((n for n in "ab"), leaver))
    with pytest.raises(TypeError, match="optimizers must be torch optimizers, got str"):
        Join([leaver], optimizers=["adam"])
    with pytest.raises(TypeError, match="not a Joinable"):
        list(phalanx.uneven([1], torch.nn.Linear(1, 1)))
