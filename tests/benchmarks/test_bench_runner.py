"""The benchmark runner, on an entry with known times and on a quick real one."""

import json
import time

import pytest
import tiny_entry
from benchmarks.__main__ import main
from benchmarks.entry import Aim, Case, find, load, names
from benchmarks.measure import Plan, RankSamples, measure
from benchmarks.runner import Part, join, run
from click.testing import CliRunner

from phalanx.errors import InvalidArgument
from phalanx.testing import RankContext, ThreadRanks


def nothing(_):
    pass


@pytest.mark.slow
def test_the_runner_reports_the_known_times():
    told = []
    (entry,) = run([load("tiny_entry")], tell=told.append).entries
    assert len(told) == 2 * 4  # every case, by both sets of processes
    assert told[0] == "tiny_entry 1/2 ranks=1 size=3"
    assert [result.case for result in entry.cases] == [
        Case(ranks, {"size": size}) for ranks in (1, 2) for size in (3, 4)
    ]
    for result in entry.cases:
        slowest = result.case.ranks * result.case.params["size"]
        times = result.times()
        assert times["once"].count == times["twice"].count == 8  # 7, divided by two and rounded up
        assert times["once"].median == pytest.approx(slowest)
        assert times["twice"].median == pytest.approx(slowest * 2)
        assert result.against("twice", entry.compare)["once"].median == pytest.approx(0.5)
        assert result.threads == 1
    met = [[verdict.met for verdict in entry.verdicts(result)] for result in entry.cases]
    assert met == [[False], [False], [True, False], [True, False]]


def test_a_quick_run_uses_fewer_cases_and_repeats():
    (entry,) = run([load("tiny_entry")], quick=True, repeats=2, tell=nothing).entries
    assert [result.case.labels for result in entry.cases] == [
        {"ranks": 1, "size": 3},
        {"ranks": 2, "size": 3},
    ]
    assert entry.cases[0].times()["once"].count == 2


def in_a_thread(ctx: RankContext, plan: Plan):
    return measure(ctx, "tiny_entry", Case(ctx.size, {"size": 3}), plan)


def test_competitors_alternate_and_the_setup_is_finished():
    tiny_entry.happened.clear()
    (found,) = ThreadRanks(1).run(in_a_thread, args=(Plan(9, 0.0),))
    *turns, end = tiny_entry.happened[-19:]
    rounds = {tuple(turns[i : i + 2]) for i in range(0, 18, 2)}
    assert rounds == {("once", "twice"), ("twice", "once")}
    assert end == "the end"
    assert found.calls == {"once": 1, "twice": 1}
    assert found.seconds == {"once": [3] * 9, "twice": [6] * 9}


def test_a_competitor_absent_from_one_part_is_dropped():
    with_it = RankSamples({"a": [1.0], "b": [2.0]}, {"a": 1, "b": 1}, 1, 0.0, {})
    without = RankSamples({"a": [3.0]}, {"a": 1}, 1, 0.0, {"b": "it did not start"})
    found = join(Case(1, {}), [Part([with_it], None), Part([without], None)])
    assert found.samples == {"a": [1.0, 3.0]}
    assert found.absent == {"b": "it did not start"}


def test_bytes_are_those_of_the_rank_that_sends_most():
    ranks = [RankSamples({"a": [1.0]}, {"a": 1}, 1, 0.0, {}, {"a": sent}) for sent in (5, 7)]
    assert join(Case(2, {}), [Part(ranks, None)]).sent == {"a": 7}


def test_entries_are_found_by_name():
    assert {"allreduce", "group_overhead", "recorder"} <= set(names())
    assert find("recorder").name == "recorder"


@pytest.mark.parametrize(
    ("name", "hint"), [("recoder", "did you mean 'recorder'"), ("x", "there are allreduce")]
)
def test_an_unknown_name_is_rejected_with_a_hint(name, hint):
    with pytest.raises(InvalidArgument, match=f"there is no benchmark '{name}': {hint}"):
        find(name)
    done = CliRunner().invoke(main, [name, "--quick"])
    assert done.exit_code == 2
    assert hint in done.output


def test_an_aim_has_one_bound():
    with pytest.raises(AssertionError, match="one bound"):
        Aim("ours")


def test_list_option_prints_every_entry():
    done = CliRunner().invoke(main, ["--list"])
    assert done.exit_code == 0
    assert [line.partition(":")[0] for line in done.output.splitlines()] == names()


@pytest.mark.slow
def test_real_entries_end_to_end(tmp_path):
    kept = tmp_path / "results" / "out.json"
    began = time.monotonic()
    done = CliRunner().invoke(
        main, ["group_overhead", "recorder", "--quick", "--repeats", "2", "--json", str(kept)]
    )
    assert done.exit_code == 0, done.output
    told = json.loads(kept.read_text())
    overhead, recorder = told["entries"]
    assert [case["case"]["ranks"] for case in overhead["cases"]] == [1, 2]
    for case in overhead["cases"]:
        assert set(case["samples"]) == {"torch", "ours", "engine"}
        assert all(len(samples) == 2 for samples in case["samples"].values())
        assert all(
            0 < s < time.monotonic() - began for all_ in case["samples"].values() for s in all_
        )
    assert set(recorder["cases"][0]["derived"]["against_peer"]) == {"recorder"}

    shown = CliRunner().invoke(main, ["--show", str(kept)])
    assert shown.output == done.output
    assert max(map(len, shown.output.splitlines())) <= 110, "figures are long where others are busy"
    as_markdown = CliRunner().invoke(main, ["--show", str(kept), "--markdown"])
    assert "| ranks | cores | clock | competitor |" in as_markdown.output
