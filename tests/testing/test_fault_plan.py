"""Plans of failures: drawn from a seed, read from a trace, written and read again."""

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
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, problem):
    path = tmp_path / "trace.csv"
    path.write_text(f"1.0\n{line}\n")
    with pytest.raises(InvalidArgument, match=f"trace.csv:2: .*{problem}"):
        FaultPlan.from_trace(path)


def test_arguments_of_a_random_plan_are_checked():
    with pytest.raises(InvalidArgument, match="must be positive"):
        FaultPlan.random(0, mean_time_between_failures=0, count=1)
    with pytest.raises(InvalidArgument, match="from outside"):
        FaultPlan.random(0, mean_time_between_failures=1, count=1, actions={delay(1): 1.0})
