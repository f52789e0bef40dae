"""Results: verdicts, the table, and the way to JSON and back."""

import json

import pytest
from benchmarks.entry import Aim, Case
from benchmarks.machine import Machine, busy_seconds
from benchmarks.results import CaseResult, EntryResult, Results
from benchmarks.stats import Compare
from benchmarks.table import render, seconds

from phalanx.errors import InvalidArgument


def results(*, own, peer, aims=(), compare=Compare.SPEED, load=0.1, others=0.0, threads=1):
    case = CaseResult(
        case=Case(2, {"size": "16 KiB"}),
        samples={"ours": own, "torch": peer},
        calls={"ours": 10, "torch": 5},
        threads=threads,
        others=others,
    )
    entry = EntryResult("allreduce", "An allreduce", "torch", compare, aims, [case])
    machine = Machine("2026-01-01", "A processor", 2, load, "Linux 6", "3.11", "2.13")
    return Results(machine, [entry])


def verdict(**given):
    (entry,) = results(**given).entries
    (found,) = entry.verdicts(entry.cases[0])
    return found


def test_an_aim_is_met():
    found = verdict(own=[1.0] * 6, peer=[12.0] * 6, aims=[Aim("ours", at_least=10)])
    assert (found.met, found.sure, found.slack) == (True, True, 2.0)


def test_an_aim_is_missed():
    aims = [Aim("ours", at_most=0.5)]
    found = verdict(own=[4.0] * 6, peer=[3.0] * 6, aims=aims, compare=Compare.ADDED)
    assert (found.met, found.sure, found.slack) == (False, True, -0.5)


@pytest.mark.parametrize("own", [[1.0] * 5, [1.0, 1.0, 1.0, 1.0, 1.0, 4.0]])
def test_few_or_scattered_samples_prove_nothing(own):
    found = verdict(own=own, peer=[2.0] * len(own), aims=[Aim("ours", at_least=1.5)])
    assert found.met
    assert not found.sure


def test_an_aim_may_be_for_some_cases_only():
    elsewhere = [Aim("ours", at_least=10, where={"ranks": 3}), Aim("ours", at_most=9)]
    assert verdict(own=[1.0], peer=[2.0], aims=elsewhere).aim is elsewhere[1]


def test_an_aim_without_a_peer_is_about_the_time():
    case = CaseResult(Case(1, {}), {"ours": [3.0, 4.0, 5.0]}, {"ours": 1}, 1, None)
    entry = EntryResult("alone", "Alone", None, Compare.SPEED, [Aim("ours", at_most=4.5)], [case])
    (found,) = entry.verdicts(case)
    assert (found.found.median, found.met) == (4.0, True)
    assert "x the speed" not in render(Results(Machine.here(), [entry]))


def test_json_there_and_back():
    aims = (Aim("ours", at_least=10, where={"size": "16 KiB"}),)
    before = results(own=[1.0, 2.0], peer=[10.0, 18.0], aims=aims)
    text = before.to_json()
    assert Results.from_json(text) == before
    derived = json.loads(text)["entries"][0]["cases"][0]["derived"]
    assert derived["seconds"]["torch"]["median"] == 14.0
    assert derived["against_peer"]["ours"]["median"] == 9.5
    assert derived["aims"][0]["met"] is False


def test_other_json_is_refused():
    with pytest.raises(InvalidArgument, match="format 1"):
        Results.from_json("{}")


def test_the_table_tells_it_all():
    aims = (Aim("ours", at_least=10), Aim("ours", at_most=9.5))
    text = render(results(own=[1e-6] * 6, peer=[12e-6] * 6, aims=aims))
    assert "load average before: 0.10\n" in text
    assert "2      16 KiB  ours        1.00 µs (1.00 to 1.00 µs)  12.0 (12.0 to 12.0)" in text
    assert "aim at ranks 2, size 16 KiB: ours ≥ 10.0: met\n" in text
    assert "aim at ranks 2, size 16 KiB: ours ≤ 9.50: missed by 2.50\n" in text
    assert "rounds: 6, threads per rank: 1\n" in text
    assert "busy" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_markdown_is_a_table():
    text = render(results(own=[1.0], peer=[2.0], compare=Compare.ADDED), markdown=True)
    assert "| ranks | size | competitor | per call (middle half) | added to torch (95%) |" in text
    assert "| 2 | 16 KiB | ours | 1.00 s (1.00 to 1.00 s) | -1.00 s (-1.00 to -1.00 s) |" in text


def test_a_busy_machine_is_told():
    text = render(results(own=[1.0], peer=[1.0], load=3.0, others=0.7, threads=2))
    assert "load average before: 3.00 (busy)" in text
    assert "cores that others used: 0.7 to 0.7: a busy machine" in text
    assert "threads per rank: 2" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00 ns"),
        (1.5e-9, "1.50 ns"),
        (12.34e-6, "12.3 µs"),
        (-0.5, "-500 ms"),
        (75, "75.0 s"),
    ],
)
def test_times_have_three_digits(value, text):
    assert seconds(value) == text


def test_the_machine_is_described():
    machine = Machine.here()
    assert machine.cores >= 1
    assert machine.cpu
    assert machine.torch.startswith("2.")


def test_busy_time_only_grows():
    before = busy_seconds()
    assert before is None or busy_seconds() >= before
