"""Filtering of the tracebacks that ranks write to stderr."""

import os
from pathlib import Path

import pytest

import phalanx
from phalanx.errors import RANK_STATE_TEXTS, RankReport

from .conftest import eventually
from .internals import ErrorReportFilter, OutputPump, OutputSource, _error_reports

INSIDE = f"{Path(phalanx.__file__).parent}/groups/_work.py"
TORCH = "/opt/lib/python3.11/site-packages/torch/_tensor.py"


def frame(path, line=1):
    return f'  File "{path}", line {line}, in step\n    call()\n    ^^^^^^\n'


def lost(rank, *, after=""):
    """Return Python's traceback of a PeerLost, with its chained internal exception."""
    return (
        f"Traceback (most recent call last):\n{frame(INSIDE)}RuntimeError: not yet\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        f"Traceback (most recent call last):\n{frame('train.py')}{frame(TORCH)}{frame(INSIDE)}"
        f"phalanx.errors.PeerLost: allreduce #9 (group 'dp', rank {rank}): rank 3 is dead\n"
        f"  rank {1 - rank}: gave up\n  rank 3: dead\n{after}"
    )


USAGE = "usage: train.py [-h]\n                [--lr LR]\ntrain.py: error: "
SHORT = [
    "Traceback (most recent call last):",
    *frame("train.py").splitlines(),
    "  (2 frames inside phalanx and torch; --full-tracebacks shows them)",
    "phalanx.errors.PeerLost: allreduce #9 (group 'dp', rank 0): rank 3 is dead",
    "  rank 1: gave up",
    "  rank 3: dead",
]


class Recorder:
    """A screen that records its output."""

    def __init__(self):
        self.shown = []

    def write_lines(self, _, texts):
        self.shown += [text.decode() for text in texts]

    def show_unfinished(self, source, text, *, is_progress):
        pass

    def flush(self):
        pass


class Stream:
    """A rank's stderr, passed through the filter."""

    def __init__(self, rank=0, seen=None, **options):
        self.reader = ErrorReportFilter({} if seen is None else seen, rank, **options)

    def write(self, text, *, now=0.0):
        return self._shown(self.reader.feed(text.encode().splitlines(), now))

    def close(self):
        return self._shown(self.reader.release())

    def read(self, text):
        """Return everything that is shown for a complete stream."""
        return [*self.write(text), *self.close()]

    @staticmethod
    def _shown(lines):
        return [line.decode() for line in lines]


def test_internal_frames_are_hidden_in_phalanx_errors():
    stream = Stream()
    assert stream.write("before\n" + lost(0)) == ["before"]
    assert stream.close() == SHORT
    assert stream.reader.final_output() == SHORT


def test_a_repeated_error_is_shown_once_and_later_output_is_kept():
    seen = {}
    first, second = Stream(0, seen), Stream(1, seen)
    first.write(lost(0))
    first.close()
    second.write(lost(1, after="saved step 12\n"))
    assert second.close() == ["(the same phalanx.errors.PeerLost as on rank 0)", "saved step 12"]
    assert second.reader.final_output()[-4].endswith("rank 1): rank 3 is dead")
    first.write(lost(0))
    assert first.close() == SHORT, "again, for it is the same rank's"


CALL = {"operation": "allreduce float32[10]", "sequence": 9, "site": "train.py:12"}


@pytest.mark.parametrize("state", RANK_STATE_TEXTS)
@pytest.mark.parametrize(
    "more",
    [{}, {"site": "a.py:3"}, {"here": "data.py:5 in load"}, CALL, {"here": "a.py:3", **CALL}],
)
def test_rank_report_lines_do_not_make_an_error_different(state, more):
    seen = {}
    report = RankReport(rank=2, state=state, **more)
    Stream(0, seen).read(lost(0))
    shown = Stream(1, seen).read(lost(1, after=f"  {report}\n"))
    assert shown == ["(the same phalanx.errors.PeerLost as on rank 0)"]


def test_other_errors_are_shown_unchanged_unless_repeated():
    text = (
        f"Traceback (most recent call last):\n{frame('a.py')}{frame(TORCH)}ValueError: no\nmore\n"
    )
    other = text.replace("a.py", "b.py")
    seen = {}
    for rank, written, shown in [
        (0, text, text.splitlines()),
        (1, other, other.splitlines()),
        (2, text, ["(the same ValueError as on rank 0)", "more"]),
    ]:
        stream = Stream(rank, seen)
        stream.write(written)
        assert stream.close() == shown


def test_a_usage_error_is_shown_once():
    seen = {}
    shown = []
    for rank in range(2):
        stream = Stream(rank, seen)
        shown += stream.write(f"{USAGE}unrecognized arguments: --foo\nbye\n")
        assert not stream.close()
    assert shown == [
        *f"{USAGE}unrecognized arguments: --foo".splitlines(),
        "bye",
        "(the same usage error as on rank 0)",
        "bye",
    ]


def traceback(message):
    return f"Traceback (most recent call last):\n{frame('a.py')}{message}\n"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (traceback("ValueError: matrix rank 0"), traceback("ValueError: matrix rank 1")),
        (traceback("step 1 of another thread"), traceback("step 1 of another thread")),
        (f"{USAGE}unrecognized arguments: x", f"{USAGE}unrecognized arguments: y"),
        ("usage: memory 50%\nstep 1\n", "usage: memory 50%\nstep 1\n"),
        ("usage: memory 50%\n", "usage: memory 50%\n"),
        ("usage: memory 50%\n" + traceback("KeyError"), "usage: memory 50%\n  of 3 GB\n"),
        (lost(0), lost(1).replace("#9", "#10")),
    ],
)
def test_different_errors_are_shown_in_full(first, second):
    seen = {}
    Stream(0, seen).read(first)
    stream, alone = Stream(1, seen), Stream(1)
    assert stream.read(second) == alone.read(second)
    if "phalanx" not in second:
        assert Stream(1, {}).read(second) == second.splitlines()


@pytest.mark.parametrize(
    "after",
    [
        "step 1\nsaved checkpoint-1",
        "  rank 1: 3 samples skipped",
        "y\ny\nx",
        "\nx",
        "  rank 0: gave up\n  rank 3: dead",
    ],
)
def test_lines_after_a_traceback_are_shown_on_every_rank(after):
    """The traceback may have been logged, so these lines are not part of its message."""
    seen = {}
    Stream(0, seen).read(f"{traceback('ValueError: no')}{after}\n")
    shown = Stream(1, seen).read(f"{traceback('ValueError: no')}{after}\n")
    assert shown == ["(the same ValueError as on rank 0)", *after.splitlines()]


@pytest.mark.parametrize("after", ["saved step 12", "  rank 1: 3 samples skipped", "  note"])
def test_lines_after_a_phalanx_error_are_shown_on_every_rank(after):
    seen = {}
    Stream(0, seen).read(lost(0, after=after))
    shown = Stream(1, seen).read(lost(1, after=after))
    assert shown == ["(the same phalanx.errors.PeerLost as on rank 0)", after]


def test_a_phalanx_error_that_names_every_rank_is_shown_once():
    text = traceback("phalanx.errors.RankMismatch: rank 0 called barrier; rank 1 called allreduce")
    seen = {}
    Stream(0, seen).read(text)
    assert len(Stream(1, seen).read(text)) == 1


def test_lines_without_torchs_rank_label_get_none():
    stream = Stream(labelled=False)
    labelled = [f"[rank0]: {line}" for line in traceback("ValueError: no").splitlines()]
    assert stream.read("\n".join([*labelled, "bye"])) == [*labelled, "bye"]


def test_a_long_usage_message_takes_linear_time(monkeypatch):
    searched = []
    find_end = _error_reports._end_of_usage

    def end_of_usage(lines, index):
        searched.append(len(lines) - index)
        return find_end(lines, index)

    monkeypatch.setattr(_error_reports, "_end_of_usage", end_of_usage)
    lines = ["usage: train.py", *(f"  --option{number}" for number in range(3000))]
    end = "train.py: error: unrecognized arguments"
    assert Stream().read("\n".join([*lines, end])) == [*lines, end]
    assert sum(searched) < 2 * len(lines)


def test_a_held_traceback_is_shown_before_later_stdout():
    screen = Recorder()
    pump = OutputPump(screen)
    out, err = os.pipe(), os.pipe()
    reader = ErrorReportFilter({}, 0, quiet_period=60.0, max_hold=60.0)
    pump.add(os.fdopen(out[0], "rb", buffering=0), OutputSource("", rank=0))
    pump.add(os.fdopen(err[0], "rb", buffering=0), OutputSource("", is_error=True, rank=0), reader)
    pump.start()
    try:
        os.write(err[1], traceback("ValueError: no").encode())
        eventually(lambda: reader.held)
        os.write(out[1], b"next\n")
        eventually(lambda: screen.shown[-1:] == ["next"])
    finally:
        os.close(out[1])
        os.close(err[1])
        pump.finish(timeout=10)
    assert screen.shown == [*traceback("ValueError: no").splitlines(), "next"]


def test_torchs_rank_label_is_removed_if_lines_are_prefixed():
    labelled = "".join(
        f"[rank0]: {line}" if line.strip() else line for line in lost(0).splitlines(True)
    )
    stream = Stream()
    assert stream.write("[rank0]:[W1116] slow\n") == ["[W1116] slow"]
    stream.write(labelled)
    assert stream.close() == SHORT
    plain = Stream(labelled=False)
    assert plain.write("[rank0]:[W1116] slow\n") == ["[rank0]:[W1116] slow"]
    plain.write(labelled)
    assert plain.close() == [f"[rank0]: {line}" for line in SHORT]


def test_full_tracebacks_are_shown_immediately():
    stream = Stream(full=True)
    assert stream.write(lost(0)) == lost(0).splitlines()
    assert stream.reader.final_output()[0] == "Traceback (most recent call last):"


def test_held_lines_have_a_deadline():
    stream = Stream()
    stream.write("Traceback (most recent call last):\n" + frame("a.py"), now=1.0)
    assert stream.reader.due() == 1.0 + _error_reports.MAX_HOLD, "there is more to come"
    stream.write("ValueError: no\n", now=2.0)
    assert stream.reader.due() == 2.0 + _error_reports.QUIET_PERIOD
    stream.write("a warning\n", now=3.9)
    assert stream.reader.due() == 1.0 + _error_reports.MAX_HOLD
    assert len(stream.close()) == 6
    assert stream.write("next\n", now=5.0) == ["next"]
    cut_off = "Traceback (most recent call last):\n" + frame("a.py")
    stream.write(cut_off, now=6.0)
    assert stream.close() == cut_off.splitlines()


def test_a_chain_of_user_exceptions_is_shown_in_full():
    text = (
        f"Traceback (most recent call last):\n{frame('a.py')}KeyError: 1\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        f"Traceback (most recent call last):\n{frame('b.py')}ValueError: no\n"
    )
    stream = Stream()
    stream.write(text)
    assert stream.close() == text.splitlines()


def test_final_output_begins_with_the_last_traceback():
    stream = Stream()
    traceback = f"Traceback (most recent call last):\n{frame('a.py')}"
    stream.write(f"noise\n{traceback}KeyError: old\nnoise\n{traceback}ValueError: new\n")
    stream.close()
    assert stream.reader.final_output() == f"{traceback}ValueError: new".splitlines()
    stream.reader.feed([b"Fatal Python error: \xff"], 0.0)
    assert stream.reader.final_output() == ["Fatal Python error: \ufffd"]


def test_final_output_drops_a_traceback_followed_by_much_output():
    stream = Stream()
    stream.write(lost(0))
    stream.close()
    stream.write("tidying up\n")
    assert stream.reader.final_output() == [*SHORT, "tidying up"]
    stream.write("line\n" * 100)
    assert stream.reader.final_output() == ["line"] * _error_reports.TAIL_LINES


@pytest.mark.parametrize("option", [[], ["--full-tracebacks"]])
def test_the_same_error_on_many_ranks_is_shown_once(phalanx, script, option):
    path = script(
        """
        import os, phalanx.errors

        def step():
            if os.environ["RANK"] == "3":
                raise ValueError("bad sample")
            try:
                raise RuntimeError("not yet")
            except RuntimeError as error:
                raise phalanx.errors.PeerLost("rank 3 is dead", group="dp", ranks=[3]) from error

        step()
        """
    )
    done = phalanx("run", "-n", 6, "--linger", 20, *option, path)
    assert done.returncode == 1
    whole = done.stderr.count("] phalanx.errors.PeerLost: rank 3 is dead")
    same = done.stderr.count("] (the same phalanx.errors.PeerLost as on rank ")
    assert (whole, same) == ((5, 0) if option else (1, 4)), done.stderr
