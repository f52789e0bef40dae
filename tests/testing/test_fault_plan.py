"""Plans of failures: drawn from a seed, read from a trace, written and read again."""

import math
import signal
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import InvalidArgument
from phalanx.testing.faults import (
    Action,
    FaultPlan,
    PlannedFailure,
    delay,
    exit_abruptly,
    hold_gil,
    kill,
    kill_supervisor,
    segfault,
    stop,
    store_unreachable,
)

EVERY = [
    kill(),
    kill(signal.SIGTERM),
    stop(),
    stop(resume_after=0.25),
    delay(2),
    segfault(),
    exit_abruptly(),
    hold_gil(0.5),
    store_unreachable(1.5),
    kill_supervisor(),
]
EXTERNAL = [kill(), kill(15), stop(), stop(resume_after=0.1), segfault(), store_unreachable(2)]


@pytest.mark.parametrize("action", EVERY, ids=str)
def test_the_text_of_an_action_is_read_back(action):
    assert Action.parse(str(action)) == action


def test_texts_of_actions():
    assert Action.parse("kill") == kill()
    assert Action.parse(" stop ") == stop()
    assert str(kill()) == "kill:9"
    for wrong in ("", "explode", "explode:1", "delay", "kill:x", "segfault:1"):
        with pytest.raises(InvalidArgument):
            Action.parse(wrong)
    with pytest.raises(InvalidArgument, match="no action 'explode'; the actions are kill, stop"):
        Action("explode")


@pytest.mark.parametrize(
    ("make", "arguments", "allowed"),
    [
        (kill, [0, 0.5, -9, 999, math.nan], "a signal, from 1 to 64"),
        (exit_abruptly, [1.5, -1, 256, math.inf], "an exit code from 0 to 255"),
        (lambda seconds: stop(resume_after=seconds), [-1, math.nan, math.inf], "or no argument"),
        (delay, [-3, math.nan, math.inf], "a finite number of seconds, at least 0"),
        (hold_gil, [-3, math.nan, math.inf], "a finite number of seconds, at least 0"),
        (store_unreachable, [-3, math.nan, math.inf], "a finite number of seconds, at least 0"),
    ],
    ids=["kill", "exit_abruptly", "stop", "delay", "hold_gil", "store_unreachable"],
)
def test_arguments_of_actions_are_checked(request, make, arguments, allowed):
    name = request.node.callspec.id
    for argument in arguments:
        problem = f"{name} needs .*{allowed}, got {argument}"
        with pytest.raises(InvalidArgument, match=problem):
            make(argument)
        with pytest.raises(InvalidArgument, match=f"{name} needs .*{allowed}"):
            Action.parse(f"{name}:{argument}")


def test_an_action_has_the_argument_that_it_needs():
    for name in ("kill", "exit_abruptly", "delay", "store_unreachable"):
        with pytest.raises(InvalidArgument, match=f"{name} needs .*got None"):
            Action(name)
    with pytest.raises(InvalidArgument, match="segfault needs no argument, got 3"):
        Action.parse("segfault:3")
    assert str(Action.parse("kill:15.0")) == "kill:15"


def test_only_some_actions_are_fatal():
    assert {each.name for each in EVERY if each.is_fatal} == {
        *("kill", "stop", "segfault", "exit_abruptly")
    }
    assert not stop(resume_after=1).is_fatal


def test_equal_seeds_give_equal_plans():
    def draw(seed):
        return FaultPlan.random(seed, mean_time_between_failures=2.0, count=5)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_gaps_victims_and_actions_have_the_given_distribution():
    weights = {kill(): 3.0, stop(resume_after=1.0): 1.0}
    plan = FaultPlan.random(0, mean_time_between_failures=2.0, count=4000, actions=weights)
    times = [each.at for each in plan.failures]
    assert times == sorted(times)
    assert times[-1] / 4000 == pytest.approx(2.0, rel=0.1)
    counts = Counter(each.action.name for each in plan.failures)
    assert counts["kill"] / 4000 == pytest.approx(0.75, rel=0.1)
    thirds = Counter(int(each.share * 3) for each in plan.failures)
    assert all(thirds[k] / 4000 == pytest.approx(1 / 3, rel=0.1) for k in range(3))


failures = st.builds(
    PlannedFailure,
    at=st.floats(0, 1e6),
    action=st.sampled_from(EXTERNAL),
    rank=st.none() | st.integers(0, 9),
    share=st.floats(0, 1, exclude_max=True),
)


@given(found=st.lists(failures, max_size=5))
def test_a_saved_plan_is_read_back(tmp_path_factory, found):
    # The share is not used if there is a rank.
    made = [
        PlannedFailure(at=each.at, action=each.action, rank=each.rank)
        if each.rank is not None
        else each
        for each in sorted(found, key=lambda each: each.at)
    ]
    path = tmp_path_factory.getbasetemp() / "plan.csv"
    FaultPlan(tuple(made)).save(path)
    assert FaultPlan.from_trace(path) == FaultPlan(tuple(made))


def test_a_share_that_is_an_integer_is_not_read_back_as_a_rank(tmp_path):
    plan = FaultPlan((PlannedFailure(at=1, action=kill(), share=0),))
    plan.save(tmp_path / "plan.csv")
    assert FaultPlan.from_trace(tmp_path / "plan.csv") == plan


@pytest.mark.parametrize("rank", [-1, 1.5])
def test_a_failure_needs_a_rank_that_can_be_read_back(rank):
    with pytest.raises(InvalidArgument, match=f"rank must be an integer >= 0 or None, got {rank}"):
        PlannedFailure(at=1.0, action=kill(), rank=rank)


def test_traces_that_people_write(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("time,rank\n\n# preemptions\n20\n3.5, 1 # of an evening\n4,,stop:0.5\n")
    plan = FaultPlan.from_trace(path)
    assert [(each.at, each.rank, str(each.action)) for each in plan.failures] == [
        (3.5, 1, "kill:9"),
        (4.0, None, "stop:0.5"),
        (20.0, None, "kill:9"),
    ]
    assert plan == FaultPlan.from_trace(path)
    assert plan != FaultPlan.from_trace(path, seed=1)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("soon", "could not convert"),
        ("2,one", "could not convert"),
        ("2,1,explode", "no action 'explode'"),
        ("2,1,hold_gil:1", "cannot be done to a worker from outside"),
        ("2,1,kill,3", "4 columns"),
        ("2,1.5", "share < 1"),
        ("-2", "at >= 0"),
        ("nan", "finite at"),
        ("inf,1", "finite at"),
    ],
)
@pytest.mark.parametrize("first", ["1.0", "seconds,rank,action", ""])
def test_a_wrong_line_is_named(tmp_path, first, line, problem):
    """Also before the first time: only the first line can be a header."""
    path = tmp_path / "trace.csv"
    path.write_text(f"{first}\n{line}\n3.0\n")
    with pytest.raises(InvalidArgument, match=f"trace.csv:2: .*{problem}"):
        FaultPlan.from_trace(path)


@pytest.mark.parametrize("time", ["4.2s", "1O.5", "-", "nan", "inf"])
def test_a_wrong_time_is_no_header(tmp_path, time):
    path = tmp_path / "trace.csv"
    path.write_text(f"{time}\n7.5\n")
    with pytest.raises(InvalidArgument, match=r"trace.csv:1: "):
        FaultPlan.from_trace(path)


@pytest.mark.parametrize("first", ["4.5", "seconds"])
def test_a_byte_order_mark_is_ignored(tmp_path, first):
    path = tmp_path / "trace.csv"
    path.write_text(f"{first}\n7.5\n", encoding="utf-8-sig")
    times = [each.at for each in FaultPlan.from_trace(path).failures]
    assert times == ([4.5, 7.5] if first == "4.5" else [7.5])


def test_arguments_of_a_random_plan_are_checked():
    for mean in (0, math.inf, math.nan):
        with pytest.raises(InvalidArgument, match="must be positive and finite"):
            FaultPlan.random(0, mean_time_between_failures=mean, count=1)
    for weights, found in [
        ({}, "no actions"),
        ({kill(): 0.0}, "kill:9: 0.0"),
        ({kill(): 2.0, stop(): -1.0}, "kill:9: 2.0, stop: -1.0"),
    ]:
        with pytest.raises(InvalidArgument, match=f"actions must have .* got {found}"):
            FaultPlan.random(0, mean_time_between_failures=1, count=1, actions=weights)
    with pytest.raises(InvalidArgument, match="from outside"):
        FaultPlan.random(0, mean_time_between_failures=1, count=1, actions={delay(1): 1.0})
