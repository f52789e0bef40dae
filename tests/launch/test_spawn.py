"""`phalanx.spawn`: results, output, failures, and nothing left behind."""

import contextlib
import io
import linecache
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import phalanx
from phalanx.errors import InvalidArgument, InvalidType, RanksFailed, RanksTimeout

from .conftest import DEADLINE, clean_env, eventually, is_alive, read_pid, unlabelled
from .internals import OutputPump, RankExit, _CallerStream, describe


def interactive(source, name="<cell 1>"):
    """Define a function as a notebook does: in ``__main__``, with its source in memory only."""
    source = textwrap.dedent(source)
    lines = source.splitlines(keepends=True)
    linecache.cache[name] = (len(source), None, lines, name)
    namespace = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), namespace)  # noqa: S102 - source of a test
    return namespace["fn"]


def gone(pids):
    return not any(map(is_alive, pids))


def test_results_are_in_order_of_rank_and_output_goes_to_the_callers_streams(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "beside.py").write_text("LABEL = 'found beside the caller'")
    suffix = "!"

    def fn(factor, *, offset):
        import beside

        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        print(f"{beside.LABEL}{suffix}")
        print("ünïcode", file=sys.stderr)
        return rank * factor + offset, size, os.getpid(), os.getcwd(), sys.argv

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        results = phalanx.spawn(fn, (10,), n=2, kwargs={"offset": 5})
    assert [each[:2] for each in results] == [(5, 2), (15, 2)]
    assert [each[3:] for each in results] == [(os.getcwd(), sys.argv)] * 2
    for rank, (_, _, pid, *_) in enumerate(results):
        assert unlabelled(out.getvalue(), rank) == ["found beside the caller!"]
        assert unlabelled(err.getvalue(), rank) == ["ünïcode"]
        assert not is_alive(pid)


def test_output_is_written_as_the_callers_stream_can_show_it():
    """`sys.stdout` may be None or closed, or have another encoding."""
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        assert not _CallerStream(stream).isatty()
        assert _CallerStream(stream).write(b"lost") == 4
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    _CallerStream(ascii_only).write("ü\n".encode())
    assert ascii_only.buffer.getvalue() == b"\\xfc\n"
    ascii_only.close()


class OnlyWrites:
    """What programs put in the place of `sys.stdout` to copy it."""

    def write(self, _):
        raise RuntimeError("broken")


def test_a_stream_that_can_only_write_or_fails_does_not_end_the_output_thread():
    stream = _CallerStream(OnlyWrites())
    assert not stream.isatty()
    for call in (stream.fileno, lambda: stream.write(b"text")):
        with pytest.raises(OSError, match=r"OnlyWrites|broken"):
            call()


def test_the_caller_may_have_closed_its_descriptors(script):
    path = script("""
        import os, phalanx
        os.close(0), os.close(1)
        assert phalanx.spawn(lambda: int(os.environ["RANK"]), n=2, timeout=float("inf")) == [0, 1]
    """)
    done = subprocess.run([sys.executable, path], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_first_failure_is_raised_with_rank_and_traceback(tmp_path, capsys):
    fn = interactive(
        """
        import os, pathlib, time

        class Unpicklable(Exception):
            def __init__(self, first, second):
                super().__init__(f"{first} and {second}")
                self.function = lambda: 0

        def fn(folder):
            rank = os.environ["RANK"]
            pathlib.Path(folder, "pid" + rank).write_text(str(os.getpid()))
            while not pathlib.Path(folder, "pid0").exists():
                time.sleep(0.005)
            if rank == "1":
                raise Unpicklable("the cause", "its detail")
            time.sleep(60)
        """
    )
    with pytest.raises(RanksFailed) as caught:
        phalanx.spawn(fn, (str(tmp_path),), n=2, linger=0)
    first, *report, last = str(caught.value).splitlines()
    assert first == "rank 1 failed first: exit code 1"
    assert [line.strip() for line in report] == [
        "Traceback (most recent call last):",
        'File "<cell 1>", line 15, in fn',
        'raise Unpicklable("the cause", "its detail")',
        "Unpicklable: the cause and its detail",
    ]
    assert last == "rank 0 stopped"
    assert "[rank 1] Unpicklable: the cause" in capsys.readouterr().err
    assert gone([read_pid(tmp_path / f"pid{rank}") for rank in range(2)])


FAILS_TO_LOAD = """
class FailsToLoad:
    def __reduce__(self):
        return int, ("not a number",)
fn = FailsToLoad
"""


@pytest.mark.parametrize(
    ("fn", "complaint"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 0 failed first: SIGKILL"),
        (threading.Lock, "InvalidType: the result of rank 0, of type lock, cannot be pickled: "),
        (
            interactive(FAILS_TO_LOAD),
            "the result of rank 0, of type FailsToLoad, cannot be unpickled: ValueError",
        ),
        (lambda: sys.exit(0), "rank 0 exited with code 0 before fn returned. Return from fn"),
    ],
    ids=["killed", "unpicklable", "fails to load", "exited"],
)
def test_a_rank_without_a_usable_result_is_named(fn, complaint):
    with pytest.raises(RanksFailed) as caught:
        phalanx.spawn(fn, n=1)
    assert complaint in str(caught.value)


def takes_one(value):
    return value


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"fn": 3}, InvalidType, "fn must be callable, got int"),
        ({"args": 3}, InvalidType, r"args must be a tuple or list, got int; write args=\(value,\)"),
        ({"args": "word"}, InvalidType, "args must be a tuple or list, got str"),
        ({"args": ()}, InvalidType, r"takes_one\(value\) .*missing a required argument: 'value'"),
        ({"kwargs": {"other": 1}}, InvalidType, r"takes_one\(value\) does not accept"),
        ({"kwargs": [1]}, InvalidType, "kwargs must be a mapping, got list"),
        ({"n": 0}, InvalidArgument, "at least 1 or 'auto', got 0"),
        ({"n": 2.0}, InvalidType, "n must be a number of ranks or 'auto', got 2.0"),
        ({"n": True}, InvalidType, "n must be a number of ranks or 'auto', got True"),
        ({"timeout": 0}, InvalidArgument, "timeout must be positive or None, got 0"),
        ({"grace": -1}, InvalidArgument, "grace must not be negative"),
        ({"args": (threading.Lock(),)}, InvalidType, r"args\[0\] of type lock cannot be pickled"),
    ],
)
def test_misuse_is_refused_before_a_process_starts(options, error, complaint):
    with pytest.raises(error, match=complaint):
        phalanx.spawn(**{"fn": takes_one, "args": (1,), "n": 1, **options})


def test_a_function_that_cannot_be_pickled_is_named():
    lock = threading.Lock()

    def locked():
        return lock

    with pytest.raises(
        InvalidType, match=r"fn \(.*locked\), with the globals .* cannot be pickled"
    ):
        phalanx.spawn(locked)


@pytest.mark.usefixtures("foreground")
def test_ctrl_c_ends_the_ranks_and_raises_keyboard_interrupt(tmp_path):
    def fn(folder):
        pathlib.Path(folder, "pid").write_text(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        phalanx.spawn(fn, (str(tmp_path),), n=1)
    assert signal.getsignal(signal.SIGINT) is before
    assert not is_alive(read_pid(tmp_path / "pid"))


@pytest.mark.usefixtures("foreground")
def test_ctrl_c_after_the_last_rank_has_ended_is_not_lost(monkeypatch):
    finish = OutputPump.finish

    def interrupted(self, **options):
        signal.raise_signal(signal.SIGINT)
        finish(self, **options)

    monkeypatch.setattr(OutputPump, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        phalanx.spawn(int, n=1)


def test_spawn_works_in_a_thread_and_on_a_rank():
    """A rank may call spawn: the inner ranks have their own variables."""

    def inner():
        return os.environ["RANK"], os.environ["WORLD_SIZE"]

    def outer():
        return phalanx.spawn(inner, n=2), os.environ["WORLD_SIZE"]

    with ThreadPoolExecutor(1) as pool:
        (result,) = pool.submit(phalanx.spawn, outer, n=1).result()
    assert result == ([("0", "2"), ("1", "2")], "1")


SCRIPT = """
import dataclasses, enum, os
import phalanx

print("script runs as", __name__)

class Colour(enum.Enum):
    RED = 1

@dataclasses.dataclass
class Point:
    x: int
    colour: Colour = Colour.RED

    def moved(self):
        return self.x + step()

def step():
    return 1

points = phalanx.spawn(lambda x: Point(x + int(os.environ["RANK"])), (10,), n=2)
assert points == [Point(10), Point(11)] and points[0].colour is Colour.RED

def step():
    return 100

assert Point(1).moved() == points[0].moved() - 9 == 101
print("done")
"""


def test_a_script_without_a_main_guard_does_not_run_on_the_ranks(script):
    """Nor does a result replace what the script defined: its class sees a redefined function."""
    done = subprocess.run(
        [sys.executable, script(SCRIPT)], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("script runs as __main__\ndone\n", "")


def test_a_module_that_spawns_when_imported_does_not_multiply(script, monkeypatch):
    path = script("import phalanx\ndef fn(): pass\nphalanx.spawn(fn, n=1)\n", name="unguarded.py")
    monkeypatch.syspath_prepend(path.parent)
    with pytest.raises(RanksFailed, match="InvalidState: phalanx.spawn was called while a rank im"):
        import unguarded  # noqa: F401


ENDLESS = """
import os, pathlib, time
import phalanx

def fn():
    pathlib.Path("pid" + os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(60)

phalanx.spawn(fn, n=2)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_caller(script, tmp_path, number):
    path = script(ENDLESS)
    with subprocess.Popen(
        [sys.executable, path], cwd=tmp_path, env=clean_env(), stderr=subprocess.DEVNULL
    ) as process:
        try:
            ranks = [read_pid(tmp_path / f"pid{rank}") for rank in range(2)]
            process.send_signal(number)
            assert process.wait(DEADLINE) == -number
        finally:
            process.kill()
    eventually(lambda: gone(ranks), what="end of the ranks")


@pytest.mark.slow
def test_a_timeout_shows_what_the_ranks_are_doing(tmp_path):
    fn = interactive(
        """
        import os, time
        def stuck():
            time.sleep(60)
        def fn():
            os.environ["RANK"] == "1" and stuck()
        """
    )
    with pytest.raises(RanksTimeout) as caught:
        phalanx.spawn(fn, n=2, timeout=8)
    assert isinstance(caught.value, TimeoutError)
    first, second, *stacks = str(caught.value).splitlines()
    assert (first, second) == ("timed out after 8 s", "rank 1 did not finish")
    assert any('File "<cell 1>", line 4 in stuck' in line for line in stacks)


def test_a_timeout_names_the_late_ranks_and_their_last_output():
    ended = RankExit(rank=0, code=0, at=1.0)
    stack = ["Current thread (most recent call first):", '  File "train.py", line 3 in load']
    late = RankExit(rank=1, code=-15, at=2.1, was_terminated=True, final_output=stack)
    outcome = phalanx.launch.Outcome(exits=[ended, late], timeout=2)
    assert outcome.exit_code == 124
    assert describe(outcome).splitlines() == [
        "timed out after 2 s",
        "rank 1 did not finish",
        "rank 1:",
        *(f"    {line}" for line in stack),
    ]


@pytest.mark.slow
def test_groups_and_large_tensors():
    def fn():
        import torch
        import torch.distributed as dist

        from phalanx.groups import new_group

        group = new_group()
        mine = torch.full((64 << 20,), float(group.rank() + 1))  # 256 MiB
        total = mine[:2].clone()
        group.allreduce(total).wait()
        group.shutdown()
        dist.init_process_group()
        dist.all_reduce(both := torch.ones(1))
        dist.destroy_process_group()
        return total, both, mine

    results = phalanx.spawn(fn, n=2)
    for rank, (total, both, mine) in enumerate(results):
        assert total.tolist() == [3.0, 3.0]
        assert both.item() == 2.0
        assert mine.shape == (64 << 20,)
        assert bool((mine == rank + 1).all())


def test_import_does_not_load_what_spawn_needs():
    code = "import sys, phalanx; phalanx.spawn; print({'torch', 'cloudpickle'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
