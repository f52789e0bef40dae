"""Benchmark results: verdicts, the table, and JSON round trips."""

import json
import re

import pytest
from benchmarks.entry import Aim, Case
from benchmarks.machine import Machine, busy_seconds
from benchmarks.results import CaseResult, EntryResult, Results
from benchmarks.stats import Compare
from benchmarks.table import render, seconds, size, volume

from phalanx.errors import InvalidArgument


def results(
    *,
    own,
    peer,
    aims=(),
    compare=Compare.SPEED,
    load=0.1,
    others=0.0,
    threads=1,
    more=None,
    absent=(),
    sent=(),
):
    case = CaseResult(
        case=Case(2, {"bytes": 16384}),
        samples={"ours": own, "torch": peer, **(more or {})},
        calls={"ours": 10, "torch": 5},
        threads=threads,
        others=others,
        absent=dict(absent),
        sent=dict(sent),
    )
    entry = EntryResult("allreduce", "An allreduce", "torch", compare, aims, [case])
    machine = Machine("2026-01-01", "A processor", 2, load, "Linux 6", "3.11", "2.13")
    return Results(machine, [entry])


def verdict(**given):
    (entry,) = results(**given).entries
    (found,) = entry.verdicts(entry.cases[0])
    return found


def test_a_met_aim():
    found = verdict(own=[1.0] * 6, peer=[12.0] * 6, aims=[Aim("ours", at_least=10)])
    assert (found.met, found.sure, found.slack) == (True, True, 2.0)


def test_a_missed_aim():
    aims = [Aim("ours", at_most=0.5)]
    found = verdict(own=[4.0] * 6, peer=[3.0] * 6, aims=aims, compare=Compare.ADDED)
    assert (found.met, found.sure, found.slack) == (False, True, -0.5)


@pytest.mark.parametrize("own", [[1.0] * 5, [1.0, 1.0, 1.0, 1.0, 1.0, 4.0]])
def test_few_or_scattered_samples_are_not_conclusive(own):
    found = verdict(own=own, peer=[2.0] * len(own), aims=[Aim("ours", at_least=1.5)])
    assert found.met
    assert not found.sure


def test_an_aim_can_be_limited_to_some_cases():
    elsewhere = [Aim("ours", at_least=10, where={"ranks": 3}), Aim("ours", at_most=9)]
    assert verdict(own=[1.0], peer=[2.0], aims=elsewhere).aim is elsewhere[1]


def test_an_aim_can_have_its_own_peer():
    aims = [Aim("ours", at_most=0.6, against="limit", compare=Compare.COST)]
    found = verdict(own=[1.0] * 6, peer=[9.0] * 6, more={"limit": [2.0] * 6}, aims=aims)
    assert (found.peer, found.compare, found.found.median) == ("limit", Compare.COST, 0.5)
    assert found.met


def test_an_aim_against_an_absent_competitor_is_not_judged():
    aims = (Aim("ours", at_least=1, against="mpi"), Aim("mpi", at_least=1), Aim("ours", at_least=2))
    without = results(own=[1.0], peer=[2.0], aims=aims, absent={"mpi": "no mpiexec"})
    (entry,) = without.entries
    assert [found.aim for found in entry.verdicts(entry.cases[0])] == [aims[2]]
    assert entry.unjudged(entry.cases[0]) == [*aims[:2]]
    text = render(without)
    assert re.search("ours ≥ 1.00 x the speed of mpi +no mpi here\n", text)
    assert "- mpi did not take part: no mpiexec" in text
    assert Results.from_json(without.to_json()) == without


def test_an_aim_without_a_peer_bounds_the_time():
    case = CaseResult(Case(1, {}), {"ours": [3.0, 4.0, 5.0]}, {"ours": 1}, 1, None)
    entry = EntryResult("alone", "Alone", None, Compare.SPEED, [Aim("ours", at_most=4.5)], [case])
    (found,) = entry.verdicts(case)
    assert (found.found.median, found.met) == (4.0, True)
    text = render(Results(Machine.here(), [entry]))
    assert "x the speed" not in text
    assert "ours ≤ 4.50 s  4.00 s (3.50 to 4.50 s)  met, not sure" in text


def test_results_round_trip_through_json():
    aims = (
        Aim("ours", at_least=10, where={"bytes": 16384}, compare=Compare.COST, against="torch"),
    )
    before = results(own=[1.0, 2.0], peer=[10.0, 18.0], aims=aims)
    text = before.to_json()
    assert Results.from_json(text) == before
    derived = json.loads(text)["entries"][0]["cases"][0]["derived"]
    assert derived["seconds"]["torch"]["median"] == 14.0
    assert derived["against_peer"]["ours"]["median"] == 9.5
    assert derived["aims"][0]["met"] is False


def test_older_files_can_be_read():
    before = results(own=[1.0], peer=[2.0], aims=(Aim("ours", at_least=1),))
    told = json.loads(before.to_json())
    del told["entries"][0]["cases"][0]["absent"], told["entries"][0]["cases"][0]["sent"]
    del told["entries"][0]["aims"][0]["against"], told["entries"][0]["aims"][0]["compare"]
    assert Results.from_json(json.dumps(told)) == before


def test_json_of_another_format_is_rejected():
    with pytest.raises(InvalidArgument, match="format 1"):
        Results.from_json("{}")


def test_the_table_shows_times_ratios_and_verdicts():
    aims = (Aim("ours", at_least=10), Aim("ours", at_most=9.5))
    text = render(results(own=[1e-6] * 6, peer=[12e-6] * 6, aims=aims))
    assert "load average before: 0.10\n" in text
    assert "2      16 KiB  ours        1.00 µs (1.00 to 1.00 µs)  12.0 (12.0 to 12.0)" in text
    assert "2      16 KiB  ours ≥ 10.0 x the speed of torch  12.0 (12.0 to 12.0)  met\n" in text
    assert "               ours ≤ 9.50 x the speed of torch  12.0 (12.0 to 12.0)  missed\n" in text
    assert "rounds: 6, threads per rank: 1\n" in text
    assert "busy" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_counted_bytes_have_a_column():
    counted = results(own=[1.0], peer=[2.0], sent={"ours": 1536})
    assert Results.from_json(counted.to_json()) == counted
    header, _, ours, theirs = render(counted, markdown=True).splitlines()[5:9]
    assert header.endswith("x the speed of torch (95%) | sent |")
    assert ours.endswith("| 1.50 KiB |")
    assert theirs.endswith("|  |")
    assert "sent: bytes per call" in render(counted)
    assert "sent" not in render(results(own=[1.0], peer=[2.0]))


def test_markdown_output_is_a_table():
    text = render(results(own=[1.0], peer=[2.0], compare=Compare.ADDED), markdown=True)
    assert "| ranks | bytes | competitor | per call (middle half) | added to torch (95%) |" in text
    assert "| 2 | 16 KiB | ours | 1.00 s (1.00 to 1.00 s) | -1.00 s (-1.00 to -1.00 s) |" in text


def test_a_busy_machine_is_reported():
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
def test_times_have_three_significant_digits(value, text):
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (4, "4 B"), (1536, "1536 B"), (16384, "16 KiB"), (25 << 20, "25 MiB")],
)
def test_sizes_use_the_largest_exact_unit(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (720, "720 B"), (1052672, "1.00 MiB"), (100712448, "96.0 MiB")],
)
def test_byte_volumes_have_three_significant_digits(count, text):
    assert volume(count) == text


def test_the_machine_is_described():
    machine = Machine.here()
    assert machine.cores >= 1
    assert machine.cpu
    assert machine.torch.startswith("2.")


def test_busy_time_is_monotonic():
    before = busy_seconds()
    assert before is None or busy_seconds() >= before
