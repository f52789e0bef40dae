import io
import os
import pty
import re
from contextlib import suppress

import pytest

from .conftest import eventually, unlabelled
from .internals import MAX_LINE_BYTES, LineSplitter, OutputSource, Screen


def cut(*chunks):
    lines = LineSplitter()
    return [line for chunk in chunks for line in lines.feed(chunk)] + lines.finish()


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([b"a\nb\n"], [b"a", b"b"]),
        ([b"a", b"b", b"\nc"], [b"ab", b"c"]),
        ([b"no end"], [b"no end"]),
        ([b"\n\n"], [b"", b""]),
        ([b"windows\r\n", b"split\r", b"\n"], [b"windows", b"split"]),
        ([b"\r10%", b"\r50%\r", b"100%\n"], [b"100%"]),
        ([b"10%\r", b"20%\r"], [b"20%"]),
        ([b"\r10%\r   \r", b"next\n"], [b"next"]),
        ([b"\r10%\r   \r"], []),
        ([b"\x1b[31mred\x1b[0m \x1b[A\x1b[2Kmoved\n"], [b"\x1b[31mred\x1b[0m moved"]),
    ],
)
def test_lines_are_what_a_terminal_would_show(chunks, expected):
    assert cut(*chunks) == expected


def test_a_line_without_end_is_split():
    lines = LineSplitter()
    cut_off = [line for _ in range(100) for line in lines.feed(b"x" * 4096)]
    assert {len(line) for line in cut_off} <= {MAX_LINE_BYTES + 4096}
    assert len(b"".join(cut_off) + lines.unfinished) == 100 * 4096


def test_progress_without_a_terminal_is_printed_at_intervals():
    err = io.BytesIO()
    screen = Screen(io.BytesIO(), err, environ={}, progress_interval=0.0)
    bar = OutputSource("[rank 0] ", is_error=True)
    for text in (b"10%", b"20%", b"   "):
        screen.show_unfinished(bar, text, is_progress=True)
    screen.show_unfinished(bar, b"half a line", is_progress=False)
    screen.flush()
    assert err.getvalue() == b"[rank 0] 10%\n[rank 0] 20%\n"


def test_stdout_and_stderr_stay_separate(phalanx, script):
    path = script("import sys; print('to out'); print('to err', file=sys.stderr)")
    done = phalanx("run", "-n", 2, path)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] to out", "[rank 1] to out"]
    assert sorted(done.stderr.splitlines()) == ["[rank 0] to err", "[rank 1] to err"]


def test_no_prefix_prints_plain_lines(phalanx, script):
    done = phalanx("run", "-n", 2, "--no-prefix", script("print('plain')"))
    assert done.stdout == "plain\nplain\n"


def test_output_that_is_not_utf_8_is_passed_through(script, launcher):
    path = script("import os; os.write(1, b'\\xff\\xfe\\n')")
    reader, writer = os.pipe()
    process = launcher("run", "-n", 1, path, stdout=writer)
    os.close(writer)
    assert os.read(reader, 100) == b"[rank 0] \xff\xfe\n"
    process.communicate()
    os.close(reader)


def test_a_file_gets_the_last_state_of_a_progress_bar(phalanx, script):
    path = script(
        """
        import sys
        for percent in range(0, 101, 10):
            sys.stderr.write(f"\\r{percent}%")
            sys.stderr.flush()
        print("not ended", end="")
        """
    )
    done = phalanx("run", "-n", 2, path)
    for rank in range(2):
        assert unlabelled(done.stderr, rank) == ["100%"]
        assert unlabelled(done.stdout, rank) == ["not ended"]


def test_heavy_output_of_all_ranks_is_neither_lost_nor_interleaved(phalanx, script):
    path = script(
        """
        import os, sys
        rank, lines = os.environ["RANK"], 20_000
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=False, write_through=False)
        for i in range(lines):
            sys.stdout.write(f"{rank} out {i} {'x' * (i % 200)}\\n")
            sys.stderr.write(f"{rank} err {i}\\n")
        """
    )
    done = phalanx("run", "-n", 4, path)
    assert done.returncode == 0
    for name, text in (("out", done.stdout), ("err", done.stderr)):
        assert len(text.splitlines()) == 80_000
        for rank in range(4):
            numbers = [line.split()[:3] for line in unlabelled(text, rank)]
            assert numbers == [[str(rank), name, str(i)] for i in range(20_000)]


def test_ranks_continue_when_stdout_is_closed(script, launcher, tmp_path):
    path = script(
        """
        import pathlib
        for i in range(100_000): print("x" * 20)
        pathlib.Path("finished").touch()
        """
    )
    reader, writer = os.pipe()
    process = launcher("run", "-n", 1, path, stdout=writer)
    os.close(writer)
    os.read(reader, 10)
    os.close(reader)
    assert process.wait(20) == 0
    assert (tmp_path / "finished").exists()


def test_output_that_is_not_read_during_a_restart_is_shown_once(script, launcher, tmp_path):
    path = script(
        """
        import os, pathlib, sys
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        pathlib.Path("attempt" + attempt).touch()
        for number in range(1000):
            print(attempt, number, "x" * 70)
        sys.exit(3 if attempt == "0" else 0)
        """
    )
    reader, writer = os.pipe()
    options = ["-n", 1, "--no-prefix", "--max-restarts", 1]
    timing = {"drain_timeout": 1.0}
    process = launcher("run", *options, path, stdout=writer, timing=timing)
    os.close(writer)
    eventually((tmp_path / "attempt1").exists, what="restart")
    with os.fdopen(reader) as pipe:
        lines = pipe.read().splitlines()
    assert process.wait(20) == 0
    assert lines == [f"{attempt} {i} {'x' * 70}" for attempt in range(2) for i in range(1000)]


def test_no_output_is_lost_on_a_nonblocking_stdout(script, launcher):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    path = script("for i in range(50_000): print(i)")
    process = launcher("run", "-n", 1, "--no-prefix", path, stdout=writer)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read().split() == [str(i) for i in range(50_000)]
    assert process.wait(20) == 0


class Terminal:
    """A pseudo-terminal for the launcher, with the text it has shown."""

    def __init__(self):
        self.master, self.slave = pty.openpty()
        os.set_blocking(self.master, False)
        self.seen = ""

    def shows(self, pattern):
        with suppress(OSError):  # nothing there yet, or everybody has left
            self.seen += os.read(self.master, 1 << 16).decode()
        return re.search(pattern, self.seen)

    def wait_for(self, pattern):
        return eventually(lambda: self.shows(pattern), what=lambda: f"{pattern!r} in {self.seen!r}")


@pytest.fixture
def terminal():
    terminal = Terminal()
    yield terminal
    os.close(terminal.master)
    os.close(terminal.slave)


# Draws a bar, and continues when the test has seen it.
BAR = """
    import os, pathlib, sys, time
    rank = os.environ["RANK"]
    sys.stderr.write("\\r 10%|#   |")
    while not pathlib.Path("seen").exists():
        time.sleep(0.005)
    sys.stderr.write("\\r100%|####|\\n")
"""


def test_a_terminal_shows_progress_live(script, launcher, terminal, tmp_path):
    env = {"TERM": "xterm", "NO_COLOR": "1"}
    process = launcher(
        "run", "-n", 2, script(BAR), stdout=terminal.slave, stderr=terminal.slave, env=env
    )
    # Both bars are shown, one per row, and the cursor moves back to redraw them.
    terminal.wait_for(r"\[rank \d\]  10%\|#   \|\r\n\[rank \d\]  10%\|#   \|")
    (tmp_path / "seen").touch()
    assert process.wait(20) == 0
    terminal.wait_for(r"\x1b\[J")
    for rank in range(2):
        terminal.wait_for(rf"\[rank {rank}\] 100%\|####\|\r\n")
    assert "\x1b[3" not in terminal.seen


def test_a_terminal_shows_a_prompt_before_the_end_of_its_line(script, launcher, terminal, tmp_path):
    path = script(BAR.replace("\\r 10%|#   |", "name? "))
    process = launcher("run", "-n", 1, path, stdout=terminal.slave, stderr=terminal.slave)
    terminal.wait_for(r"name\? ")
    (tmp_path / "seen").touch()
    assert process.wait(20) == 0


@pytest.mark.parametrize(("setting", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_labels_are_coloured_on_a_terminal(script, launcher, terminal, setting, coloured):
    env = {"TERM": "xterm", **setting}
    launcher(
        "run", "-n", 2, script("print('hi')"), stdout=terminal.slave, stderr=terminal.slave, env=env
    )
    for rank in range(2):
        before, after = (r"\x1b\[\d+m", r"\x1b\[0m") if coloured else ("", "")
        terminal.wait_for(rf"{before}\[rank {rank}\] {after}hi")


def test_output_to_a_file_has_no_colour(phalanx, script):
    done = phalanx("run", "-n", 2, script("import sys; sys.exit(3)"), env={"TERM": "xterm"})
    assert "\x1b" not in done.stdout + done.stderr
