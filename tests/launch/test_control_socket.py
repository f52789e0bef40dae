"""The control socket of a run, with clients that misbehave, and the directories of runs."""

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading

import pytest

from phalanx.errors import InvalidState

from .conftest import clean_env, eventually
from .internals import ControlServer, find_run, find_runs, run_directory, send_request


def answer(request):
    if request.reply.set_running_or_notify_cancel():
        request.reply.set_result({"ranks": request.fields.get("ranks")})


@contextlib.contextmanager
def clients(path, count):
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(count)]
        for each in made:
            each.connect(str(path))
        yield made


def serving():
    return [each for each in threading.enumerate() if each.name == "phalanx-control-client"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "control.sock"


def test_silent_clients_do_not_delay_others(path, monkeypatch):
    monkeypatch.setattr("phalanx.launch._control_socket.REQUEST_TIMEOUT", 1000)
    with contextlib.closing(ControlServer(path, answer)), clients(path, 3):
        assert send_request(path, ranks=2) == {"ranks": 2}


def test_requests_wait_for_the_supervisor_at_the_same_time(path):
    requests = []
    with contextlib.closing(ControlServer(path, requests.append)), clients(path, 3) as made:
        for number, client in enumerate(made):
            client.sendall(json.dumps({"ranks": number}).encode() + b"\n")
        eventually(lambda: len(requests) == 3, what="requests")
        for each in requests:
            answer(each)
        assert [json.loads(each.makefile().readline()) for each in made] == [
            {"ranks": 0},
            {"ranks": 1},
            {"ranks": 2},
        ]


def test_too_many_clients_are_refused_until_one_leaves(path, monkeypatch):
    monkeypatch.setattr("phalanx.launch._control_socket.MAX_CLIENTS", 2)
    requests = []

    def put(request):
        requests.append(request)
        answer(request)

    with contextlib.closing(ControlServer(path, put)), clients(path, 2) as made:
        eventually(lambda: len(serving()) == 2, what="clients")
        for _ in range(20):  # before and after the request was sent
            assert "serving 2 other clients. Try again" in send_request(path, ranks=2)["error"]
        assert requests == []
        made[0].close()
        eventually(lambda: len(serving()) == 1, what="end of the client")
        assert send_request(path, ranks=2) == {"ranks": 2}


def test_a_client_without_a_thread_is_refused(path, monkeypatch):
    with contextlib.closing(ControlServer(path, answer)):
        start = threading.Thread.start

        def fail(thread):
            if thread.name == "phalanx-control-client":
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            for _ in range(20):
                assert "can't start new thread" in send_request(path, ranks=2)["error"]
        assert send_request(path, ranks=2) == {"ranks": 2}


def test_a_request_whose_client_has_left_is_not_carried_out(path, monkeypatch):
    """The launcher was suspended until the client gave up."""
    requests, is_left = [], threading.Event()
    start = threading.Thread.start

    def start_late(thread):
        if thread.name == "phalanx-control-client":
            is_left.wait(20)
        start(thread)

    def put(request):
        requests.append(request)
        answer(request)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    with contextlib.closing(ControlServer(path, put)):
        with clients(path, 1) as made:
            made[0].sendall(b'{"ranks": 3}\n')
        is_left.set()
        assert send_request(path, ranks=2) == {"ranks": 2}
        eventually(lambda: not serving(), what="end of the client")
    assert [each.fields for each in requests] == [{"ranks": 2}]


def test_a_client_may_close_its_sending_half(path):
    with contextlib.closing(ControlServer(path, answer)), clients(path, 1) as made:
        made[0].sendall(b'{"ranks": 3}')
        made[0].shutdown(socket.SHUT_WR)
        assert json.loads(made[0].makefile().readline()) == {"ranks": 3}


def test_silent_clients_do_not_delay_the_exit(path):
    code = """
        import pathlib, socket, sys, threading
        from phalanx.launch import _control_socket

        _control_socket.REQUEST_TIMEOUT = 1000
        path = pathlib.Path(sys.argv[1])
        server = _control_socket.ControlServer(path, lambda request: None)
        clients = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for client in clients:
            client.connect(str(path))
        clients[0].sendall(b"{}\\n")
        while threading.active_count() < 5:
            pass
        server.close()
        print("closed")
    """
    script = path.with_name("script.py")
    script.write_text("if True:\n" + code)
    command = [sys.executable, str(script), str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=clean_env(), timeout=20, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def test_a_socket_that_cannot_be_created_is_reported(path):
    missing = path.parent / "missing" / path.name
    with pytest.raises(InvalidState, match="cannot create the control socket.*XDG_RUNTIME_DIR"):
        ControlServer(missing, answer)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Directories where launchers of this user may have their runs; none is one of this machine."""
    user = os.geteuid()
    found = [tmp_path / name for name in ("xdg", f"user/{user}", "scratch", "tmp")]
    for each in found:
        each.mkdir(parents=True)
    monkeypatch.setattr("phalanx.launch._run_directory.RUNTIME_DIRECTORIES", tmp_path / "user")
    monkeypatch.setattr("phalanx.launch._run_directory.TEMPORARY_DIRECTORY", tmp_path / "tmp")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    return found


def test_runs_are_found_whatever_the_environment_of_their_launcher(places, monkeypatch, cli):
    assert cli("ps").stdout == "no elastic runs\n"
    with contextlib.ExitStack() as stack:

        def start(script, **environ):
            made = run_directory(script, min_ranks=1, environ=environ)
            return stack.enter_context(made)

        xdg, user, _, tmp = places
        runs = [start("a.py", XDG_RUNTIME_DIR=str(xdg)), start("b.py", XDG_RUNTIME_DIR=str(user))]
        runs.append(start("c.py"))
        with monkeypatch.context() as patch:
            patch.setattr("tempfile.tempdir", str(tmp))
            runs.append(start("d.py"))
        assert len({each.path.parent for each in runs}) == 4
        assert find_runs() == runs
        assert [find_run(name) for name in "abcd"] == runs
        listed = cli("ps").stdout
        assert [line.split()[1] for line in listed.splitlines()[1:]] == [
            "a.py",
            "b.py",
            "c.py",
            "d.py",
        ]
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(user))
        monkeypatch.setattr("tempfile.tempdir", str(tmp))
        assert find_runs() == [runs[1], runs[3]], "each base counts once"
    assert find_runs() == []


def test_bases_of_other_users_are_skipped(places, monkeypatch):
    xdg, _, scratch, tmp = places
    with run_directory("a.py", min_ranks=1) as run:
        (scratch / f"phalanx-{os.geteuid()}").symlink_to(tmp)
        (tmp / f"phalanx-{os.geteuid()}").write_text("")
        assert find_runs() == [run]
        stranger = os.geteuid() + 1
        (scratch / f"phalanx-{stranger}").mkdir()
        with monkeypatch.context() as patch:
            patch.setattr("os.geteuid", lambda: stranger)
            assert find_runs() == []
    assert [*(xdg / "phalanx").iterdir()] == []


@pytest.mark.parametrize("run", ["", "b"])
def test_scale_needs_the_id_of_a_run(places, cli, run):
    with run_directory("a.py", min_ranks=1) as only:
        refused = cli("scale", run, 2)
    assert refused.returncode == 2
    expected = f"no elastic run 'b'. Running: {only.info.id}" if run else "must not be empty"
    assert expected in refused.stderr


@pytest.mark.parametrize(
    "fields",
    [
        {"id": 7},
        {"script": ["train.py"]},
        {"script": None},
        {"pid": "7"},
        {"pid": None},
        {"pid": -1, "pid_since": None},
        {"pid": 10**30, "pid_since": None},
        {"pid_since": "7"},
        {"started": "today"},
        {"started": None},
        {"min_ranks": {}},
    ],
    ids=str,
)
def test_a_damaged_description_does_not_hide_other_runs(places, cli, fields):
    with (
        run_directory("a.py", min_ranks=1) as damaged,
        run_directory("b.py", min_ranks=1) as run,
    ):
        description = damaged.path / "run.json"
        known = json.loads(description.read_text())
        description.write_text(json.dumps({**known, **fields}))
        assert find_runs() == [run]
        assert len(cli("ps").stdout.splitlines()) == 2


def test_a_deeply_nested_description_does_not_hide_other_runs(places):
    with (
        run_directory("a.py", min_ranks=1) as damaged,
        run_directory("b.py", min_ranks=1) as run,
    ):
        (damaged.path / "run.json").write_text("[" * 100_000)
        assert find_runs() == [run]


@pytest.mark.parametrize("failing", ["mkdir", "chmod", "write_text", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_base_that_is_full_or_read_only_is_reported(places, monkeypatch, failing, code):
    base = places[0] / "phalanx"
    base.mkdir(mode=0o755)

    def fail(path, *_, **__):
        if path == base and failing == "mkdir":
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        raise OSError(code, os.strerror(code), str(path))

    with (
        monkeypatch.context() as patch,
        pytest.raises(InvalidState, match=f"{os.strerror(code)}.*Set XDG_RUNTIME_DIR to"),
    ):
        patch.setattr(f"pathlib.Path.{failing}", fail)
        with run_directory("train.py", min_ranks=1):
            pass
    assert [*base.iterdir()] == []


def test_a_read_only_base_is_not_changed_without_need(places, monkeypatch):
    (places[0] / "phalanx").mkdir(mode=0o700)
    monkeypatch.setattr("pathlib.Path.chmod", None)
    with run_directory("train.py", min_ranks=1) as run:
        assert find_runs() == [run]


def test_no_temporary_directory_is_reported(places, monkeypatch, cli):
    def fail():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", fail)
    with (
        pytest.raises(InvalidState, match="No usable temporary directory.*XDG_RUNTIME_DIR"),
        run_directory("train.py", min_ranks=1, environ={}),
    ):
        pass
    with run_directory("train.py", min_ranks=1) as run:
        assert find_runs() == [run]


def test_an_error_of_the_caller_is_not_that_of_the_directory(places):
    with pytest.raises(OSError, match="^mine$"), run_directory("train.py", min_ranks=1):
        raise OSError("mine")
