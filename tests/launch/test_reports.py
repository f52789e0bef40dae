"""What is shown of the errors that ranks write to stderr."""

from pathlib import Path

import pytest

import phalanx
from phalanx.launch import _reports
from phalanx.launch._reports import ReportReader, SeenReports

INSIDE = f"{Path(phalanx.__file__).parent}/groups/_work.py"
TORCH = "/opt/lib/python3.11/site-packages/torch/_tensor.py"


def frame(path, line=1):
    return f'  File "{path}", line {line}, in step\n    call()\n    ^^^^^^\n'


def lost(rank, *, after=""):
    """What Python writes of a lost peer: an error of ours, and what led to it inside of phalanx."""
    return (
        f"Traceback (most recent call last):\n{frame(INSIDE)}RuntimeError: not yet\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        f"Traceback (most recent call last):\n{frame('train.py')}{frame(TORCH)}{frame(INSIDE)}"
        f"phalanx.errors.PeerLost: allreduce #9 (group 'dp', rank {rank}): rank 3 is dead\n"
        f"  rank {1 - rank}: gave up\n  rank 3: dead\n{after}"
    )


SHORT = [
    "Traceback (most recent call last):",
    *frame("train.py").splitlines(),
    "  (2 frames inside phalanx and torch; --full-tracebacks shows them)",
    "phalanx.errors.PeerLost: allreduce #9 (group 'dp', rank 0): rank 3 is dead",
    "  rank 1: gave up",
    "  rank 3: dead",
]


class Stream:
    """A rank's stderr, and what the screen shows of it."""

    def __init__(self, rank=0, seen=None, **options):
        self.reader = ReportReader(seen or SeenReports(), rank, **options)

    def write(self, text, *, now=0.0):
        return self._shown(self.reader.feed(text.encode().splitlines(), now))

    def close(self):
        return self._shown(self.reader.release())

    @staticmethod
    def _shown(lines):
        return [line.decode() for line in lines]


def test_an_error_of_ours_is_shown_without_what_is_internal():
    stream = Stream()
    assert stream.write("before\n" + lost(0)) == ["before"]
    assert stream.close() == SHORT
    assert stream.reader.last_words() == SHORT


def test_the_same_error_is_shown_once_and_what_follows_it_is_not_lost():
    seen = SeenReports()
    first, second = Stream(0, seen), Stream(1, seen)
    first.write(lost(0))
    first.close()
    second.write(lost(1, after="saved step 12\n"))
    assert second.close() == ["(the same phalanx.errors.PeerLost as on rank 0)", "saved step 12"]
    assert second.reader.last_words()[-4].endswith("rank 1): rank 3 is dead")
    first.write(lost(0))
    assert first.close() == SHORT, "again, for it is the same rank's"


def test_other_errors_are_shown_as_they_are_unless_they_are_the_same():
    text = (
        f"Traceback (most recent call last):\n{frame('a.py')}{frame(TORCH)}ValueError: no\nmore\n"
    )
    other = text.replace("a.py", "b.py")
    seen = SeenReports()
    for rank, written, shown in [
        (0, text, text.splitlines()),
        (1, other, other.splitlines()),
        (2, text, ["(the same ValueError as on rank 0)"]),
    ]:
        stream = Stream(rank, seen)
        stream.write(written)
        assert stream.close() == shown


def test_a_usage_error_is_shown_once():
    seen = SeenReports()
    shown = []
    for rank in range(2):
        stream = Stream(rank, seen)
        stream.write("usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --foo\n")
        shown += stream.close()
    assert shown == [
        "usage: train.py [-h]",
        "train.py: error: unrecognized arguments: --foo",
        "(the same usage error as on rank 0)",
    ]


def test_torch_need_not_name_the_rank_again():
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


def test_a_user_who_wants_all_of_it_gets_it_at_once():
    stream = Stream(full=True)
    assert stream.write(lost(0)) == lost(0).splitlines()
    assert stream.reader.last_words()[0] == "Traceback (most recent call last):"


def test_what_is_held_back_has_a_deadline():
    stream = Stream()
    stream.write("Traceback (most recent call last):\n" + frame("a.py"), now=1.0)
    assert stream.reader.due() == 1.0 + _reports.LONGEST_HOLD, "there is more to come"
    stream.write("ValueError: no\n", now=2.0)
    assert stream.reader.due() == 2.0 + _reports.QUIET
    stream.write("a warning\n", now=3.9)
    assert stream.reader.due() == 1.0 + _reports.LONGEST_HOLD
    assert len(stream.close()) == 6
    assert stream.write("next\n", now=5.0) == ["next"]
    cut_off = "Traceback (most recent call last):\n" + frame("a.py")
    stream.write(cut_off, now=6.0)
    assert stream.close() == cut_off.splitlines()


def test_a_chain_of_the_users_own_stays_whole():
    text = (
        f"Traceback (most recent call last):\n{frame('a.py')}KeyError: 1\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        f"Traceback (most recent call last):\n{frame('b.py')}ValueError: no\n"
    )
    stream = Stream()
    stream.write(text)
    assert stream.close() == text.splitlines()


def test_last_words_begin_with_the_last_traceback():
    stream = Stream()
    traceback = f"Traceback (most recent call last):\n{frame('a.py')}"
    stream.write(f"noise\n{traceback}KeyError: old\nnoise\n{traceback}ValueError: new\n")
    stream.close()
    assert stream.reader.last_words() == f"{traceback}ValueError: new".splitlines()
    stream.reader.feed([b"Fatal Python error: \xff"], 0.0)
    assert stream.reader.last_words() == ["Fatal Python error: \ufffd"]


def test_a_report_that_much_came_after_was_not_the_end():
    stream = Stream()
    stream.write(lost(0))
    stream.close()
    stream.write("tidying up\n")
    assert stream.reader.last_words() == [*SHORT, "tidying up"]
    stream.write("line\n" * 100)
    assert stream.reader.last_words() == ["line"] * _reports.TAIL_LINES


@pytest.mark.parametrize("option", [[], ["--full-tracebacks"]])
def test_six_ranks_tell_one_story(phalanx, script, option):
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
