"""Join: ranks run out of data at different steps, on every backend."""

import warnings

import pytest
import torch

from cases import over_cases
from phalanx import errors
from phalanx.groups import process_group
from phalanx.join import Join, Joinable
from phalanx.testing import over_groups

from .counting import Counter, take
from .internals import _join, _JoinConfig

everywhere = over_cases("local-4", "shm-2", "gloo-4")
on_pairs = over_groups(sizes=(2,), reuse=True)
apart = over_groups(sizes=(2,))
"""For bodies that leave the group broken."""

LENGTHS = {
    "even": (3, 3, 3, 3),
    "rising": (1, 3, 4, 6),
    "falling": (5, 2, 2, 1),
    "one has none": (2, 0, 2, 2),
    "all but one have none": (0, 0, 0, 3),
    "nobody has any": (0, 0, 0, 0),
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@everywhere
def test_ranks_without_data_shadow_the_others(group, lengths):
    lengths = lengths[: group.size()]
    mine, most = lengths[group.rank()], max(lengths)
    counter = Counter(group)
    with Join([counter]):
        take([counter], mine)
    assert counter.counts == [sum(n > step for n in lengths) for step in range(mine)]
    assert counter.shadowed == most - mine
    assert counter.was_last is (mine == most)


@everywhere
def test_joinables_run_in_order(group):
    log, counters = [], [Counter(group, "a"), Counter(group, "b")]
    mine = 1 + group.rank()
    with Join(counters, log=log, scale=2):
        take(counters, mine)
    step = [("a", "main"), ("b", "main")]
    assert log == step * (group.size() - mine) + [("a", "post"), ("b", "post")]
    assert [counter.given for counter in counters] == [{"log": log, "scale": 2}] * 2
    assert counters[0].counts == counters[1].counts


@everywhere
def test_first_joinable_gets_the_number_of_ranks_with_data(group):
    first, second = Counter(group), Counter(group)
    with Join([first, second]):
        if group.rank() == 0:
            work = first.step()
            work.wait()
            assert work.get_future().wait()[0].item() == 1
            assert second.step() is None


class Steps(Counter):
    """A joinable that shadows a step by running it, as sharded optimizers do."""

    def join_hook(self, **kwargs):
        hook = super().join_hook(**kwargs)
        hook.main_hook = self.step
        return hook


@everywhere
def test_main_hook_may_be_the_joinables_own_step(group):
    steps = Steps(group)
    with Join([steps]):
        take([steps], group.rank())
    assert steps.counts == [group.size()] * (group.size() - 1)


@everywhere
def test_throw_on_early_termination_raises_on_all_ranks(group):
    counter = Counter(group)
    with (
        pytest.raises(errors.UnevenInputs, match="exhausted") as caught,
        Join([counter], throw_on_early_termination=True),
    ):
        take([counter], 2 if group.rank() else 1)
    assert isinstance(caught.value, RuntimeError)
    assert ("rank 0 " in str(caught.value)) is (group.rank() == 0)
    with Join([counter], throw_on_early_termination=True):  # even inputs do not raise
        take([counter], 2)
    assert counter.shadowed == 0


@everywhere
def test_disabled_join_does_nothing(group):
    counter = Counter(group)
    with Join([counter], enable=False):
        assert counter.step() is None
    assert counter.was_last is None
    counter.step()


@everywhere
def test_joins_can_be_nested_and_reentered(group):
    outer, inner = Counter(group), Counter(group)
    with Join([outer]):
        outer.step()
        block = Join([inner])
        for _ in range(2):
            with block:
                take([inner], group.rank())
        with Join([outer]):
            take([outer], 1 if group.rank() else 2)
        assert outer._join_config.is_first_joinable
        take([outer], group.rank())
    assert not outer._join_config.enable
    assert len(inner.counts) == 2 * group.rank()
    assert outer.was_last is (group.rank() == group.size() - 1)


@apart
def test_error_in_the_block_aborts_the_other_ranks(group):
    counter = Counter(group)
    expected = ZeroDivisionError if group.rank() else errors.GroupAborted
    with pytest.raises(expected) as caught, Join([counter]):
        counter.step()
        if group.rank():
            1 / 0  # noqa: B018
        take([counter], 2)
    if not group.rank():
        assert "rank 1" in str(caught.value)
    assert not counter._join_config.enable


@apart
def test_error_in_a_hook_aborts_the_other_ranks(group):
    counter = Counter(group)
    counter.add_up = lambda mine: 1 / mine  # a step, and a hook that fails
    expected = ZeroDivisionError if group.rank() else errors.GroupAborted
    with pytest.raises(expected), Join([counter]):
        take([counter], 0 if group.rank() else 2)


@on_pairs
def test_early_return_counts_as_running_out_of_data(group):
    counter = Counter(group)

    def loop():
        with Join([counter]):
            for _ in range(4):
                counter.step()
                if group.rank():
                    return

    loop()
    assert (len(counter.counts), counter.shadowed) == ((1, 3) if group.rank() else (4, 0))


@over_groups(backends=("gloo",), sizes=(2,), reuse=True)  # processes: warnings are caught there
def test_large_skew_warns_once(group):
    counter, usual = Counter(group), _join.SKEW_WARNING_STEPS
    _join.SKEW_WARNING_STEPS = 3
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with Join([counter]):
                take([counter], 0 if group.rank() else 6)
    finally:
        _join.SKEW_WARNING_STEPS = usual
    told = [str(each.message) for each in caught]
    assert len(told) == group.rank()
    assert all("rank 1 has over 3 fewer inputs" in each for each in told)


@over_groups(backends=("local",), sizes=(2,))
def test_bad_joinables_are_rejected(group, ctx):
    with pytest.raises(ValueError, match="at least one joinable"):
        Join([])
    with pytest.raises(TypeError, match="not a Joinable"):
        Join([torch.nn.Linear(1, 1)])
    other = ctx.group("local", name="other")
    with pytest.raises(ValueError, match=r"Counter \(number 1\) uses another"):
        Join([Counter(group), Counter(other)])
    with pytest.raises(ValueError, match="no group that contains this rank"):
        Join([Counter("world")])

    class Careless(Counter):
        def __init__(self, group):
            self.group = group

    with pytest.raises(AssertionError, match="Careless must call Joinable.__init__"):
        Join.notify_join_context(Careless(group))
    with pytest.raises(TypeError, match="abstract"):
        Joinable()


def test_disabled_join_config():
    config = _JoinConfig.construct_disabled_join_config()
    assert config == (False, False, False)
    assert config._fields == ("enable", "throw_on_early_termination", "is_first_joinable")


class Groupless(Counter):
    """A joinable without a group, as torch's may be."""

    join_process_group = None


@everywhere
def test_default_is_the_current_group(group):
    with process_group(group):
        join = Join([Groupless(group)])
    with join:
        pass
    assert join.report.steps == (0,) * group.size()
