import io
import json
import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

import phalanx.launch
from phalanx.env import usable_cores
from phalanx.errors import InvalidArgument, RanksFailed

from .conftest import read_pid, unlabelled

PRINT_ENV = "import json, os; print(json.dumps(dict(os.environ)))"
PRINT_ARGS = "import sys; print(sys.argv[1:])"


def envs(done, ranks):
    assert done.returncode == 0, done.stderr
    return [json.loads(unlabelled(done.stdout, rank)[0]) for rank in range(ranks)]


def test_each_rank_gets_torchrun_compatible_variables(phalanx, script):
    found = envs(phalanx("run", "-n", 3, script(PRINT_ENV)), 3)
    for rank, env in enumerate(found):
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "ROLE_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "PYTHONUNBUFFERED": "1",
        }
        assert expected.items() <= env.items()
        assert 0 < int(env["MASTER_PORT"]) < 65536
    for shared in ("MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        assert len({env[shared] for env in found}) == 1


@pytest.mark.parametrize("ranks", [1, 2, 50])
def test_cores_are_divided_among_ranks(ranks):
    expected = str(max(1, usable_cores() // ranks))
    assert phalanx.launch._job.default_env(ranks)["OMP_NUM_THREADS"] == expected


def test_a_user_set_omp_num_threads_is_kept(phalanx, script):
    chosen = envs(phalanx("run", "-n", 2, script(PRINT_ENV), env={"OMP_NUM_THREADS": "7"}), 2)
    assert [env["OMP_NUM_THREADS"] for env in chosen] == ["7", "7"]


def test_rank_variables_of_an_outer_launcher_are_overwritten(phalanx, script):
    stale = {"RANK": "5", "WORLD_SIZE": "9", "MASTER_ADDR": "elsewhere", "GROUP_RANK": "3"}
    found = envs(phalanx("run", "-n", 1, script(PRINT_ENV), env=stale), 1)
    assert found[0]["OMP_NUM_THREADS"] == str(usable_cores())
    assert (found[0]["RANK"], found[0]["WORLD_SIZE"]) == ("0", "1")
    assert (found[0]["MASTER_ADDR"], found[0]["GROUP_RANK"]) == ("127.0.0.1", "0")


def test_auto_starts_one_rank_per_core(phalanx, script):
    found = envs(phalanx("run", "-n", "auto", script(PRINT_ENV)), usable_cores())
    assert found[0]["WORLD_SIZE"] == str(usable_cores())


def test_arguments_after_the_script_are_passed_to_it(phalanx, script):
    path = script(PRINT_ARGS)
    done = phalanx("run", "-n", 1, path, "--lr", "0.1", "-n", "x", "--help", "--", "-m")
    assert unlabelled(done.stdout, 0) == ["['--lr', '0.1', '-n', 'x', '--help', '--', '-m']"]


@pytest.mark.parametrize(
    ("args", "note"),
    [
        (["--elastic"], "--elastic after the script is an argument of the script; put it before"),
        (["--lr", "1", "--standby", "--elastic"], "put it before train.py for an elastic run"),
        (["--standby"], "put it before train.py for a run with a standby"),
        (["--drop-in"], "put it before train.py for a run with the drop-in"),
        (["elastic", "--elastic-net"], ""),
    ],
)
def test_options_of_the_launcher_after_the_script_are_noted(phalanx, script, args, note):
    script("import sys; print(sys.argv[1:])", name="train.py")
    done = phalanx("run", "-n", 1, "train.py", *args)
    assert (done.returncode, done.stdout) == (0, f"[rank 0] {args}\n")
    assert done.stderr.startswith("phalanx: note: " if note else "")
    assert done.stderr.count("\n") == bool(note)
    assert note in done.stderr


def test_options_that_the_launcher_has_got_are_not_noted(phalanx, script):
    script("", name="train.py")
    assert "note" not in phalanx("run", "--elastic", "-n", 1, "train.py", "--elastic").stderr


def test_a_module_is_searched_on_the_ranks_python_path(script):
    script("print('found')", name="elsewhere/odd_one.py")
    out, place = io.BytesIO(), str(script("", name="elsewhere/other.py").parent)
    with pytest.raises(InvalidArgument, match="module 'odd_one' not found"):
        phalanx.launch.run("odd_one", ranks=1, module=True)
    env = {**os.environ, "PYTHONPATH": place}
    phalanx.launch.run("odd_one", ranks=1, module=True, env=env, stdout=out)
    assert out.getvalue() == b"[rank 0] found\n"


@pytest.mark.parametrize("what", [["missing.py"], ["-m", "missing"], ["-m", "missing.train"]])
def test_a_missing_script_is_reported_once(cli, what):
    done = cli("run", "-n", 3, *what)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "[rank" not in done.stderr
    assert done.stderr.count("'missing") == 1


def test_module_option_runs_a_module_with_arguments(phalanx, script):
    script("", name="package/__init__.py")
    script(PRINT_ARGS, name="package/train.py")
    done = phalanx("run", "-n", 2, "-m", "package.train", "--lr", "1")
    assert unlabelled(done.stdout, 1) == ["['--lr', '1']"]


def test_only_rank_0_reads_stdin(phalanx, script, tmp_path):
    path = script("import os, sys; print(repr(sys.stdin.read()))")
    typed = tmp_path / "typed"
    typed.write_text("hello")
    with typed.open() as stdin:
        done = phalanx("run", "-n", 2, path, stdin=stdin)
    assert unlabelled(done.stdout, 0) == ["'hello'"]
    assert unlabelled(done.stdout, 1) == ["''"]


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["-n", "0", "here.py"], "must be N, MIN:N or 'auto', with positive integers, got '0'"),
        (["-n", "x", "here.py"], "must be N, MIN:N or 'auto', with positive integers, got 'x'"),
        (["-n", "-1", "here.py"], "must be N, MIN:N or 'auto', with positive integers, got '-1'"),
        (["here.py"], "Missing option '-n'"),
        (["-n", "2"], "Missing argument 'SCRIPT'"),
        (["-n", "2", "missing.py"], "script 'missing.py' not found"),
        (["-n", "2", "."], "'.' is a directory"),
        (["-n", "2", "--nnodes", "2", "missing.py"], "script 'missing.py' not found"),
        (["-n", "2", "--grace", "-1", "here.py"], "-1.0 is not in the range x>=0"),
        (["-n", "2", "--max-restarts", "x", "here.py"], "'x' is not a valid integer range"),
        (["-n", "2", "--unknown", "here.py"], "No such option"),
        (["-n", "1025", "here.py"], "the number of ranks must be at most 1024"),
        (["-n", "7" * 5000, "here.py"], "the number of ranks must be at most 1024"),
        (["-n", "7" * 5000 + ":auto", "here.py"], "the number of ranks must be at most 1024"),
        (["-n", "0" * 5000 + "1", "here.py"], "the number of ranks must be at most 1024"),
        (["-n", "2", "--grace", "nan", "here.py"], "grace must be a number of seconds"),
        (["-n", "2", "--linger", "nan", "here.py"], "linger must be a finite number"),
        (["-n", "2", "--linger", "inf", "here.py"], "linger must be a finite number"),
        (
            ["-n", "2", "--nnodes", "1", "--grace", "inf", "here.py"],
            "grace must be a finite number of seconds for torchrun",
        ),
        (
            ["-n", "2", "--nnodes", "1", "--grace", "nan", "here.py"],
            "grace must be a finite number of seconds for torchrun",
        ),
    ],
)
def test_usage_errors_are_reported(cli, script, args, complaint):
    script("", name="here.py")
    done = cli("run", *args)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert done.stdout == ""


def test_api_returns_the_outcome(script):
    out = io.BytesIO()
    path = script("import os, sys; print(os.environ['RANK'], sys.argv[1], os.environ['MINE'])")
    env = {**os.environ, "MINE": "yes"}
    outcome = phalanx.launch.run(path, ["arg"], ranks=2, env=env, stdout=out, prefix=False)
    assert sorted(out.getvalue().splitlines()) == [b"0 arg yes", b"1 arg yes"]
    assert outcome.exit_code == 0
    assert outcome.first_failure is None
    assert sorted((each.rank, each.code) for each in outcome.exits) == [(0, 0), (1, 0)]


def test_api_raises_ranks_failed(script):
    path = script("import os, sys; sys.exit('out of luck')")
    with pytest.raises(RanksFailed, match=r"rank 0 failed first: exit code 1\n\s+out of luck"):
        phalanx.launch.run(path, ranks=1, stderr=io.BytesIO())


def test_api_returns_failures_with_check_false(script):
    path = script("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    outcome = phalanx.launch.run(path, ranks=1, stderr=io.BytesIO(), check=False)
    assert outcome.first_failure is not None
    assert (outcome.first_failure.rank, outcome.first_failure.code, outcome.exit_code) == (
        0,
        -9,
        137,
    )


@pytest.mark.usefixtures("foreground")
def test_api_raises_keyboard_interrupt_and_restores_the_handler(script):
    path = script(
        """
        import os, signal, time
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
        """
    )
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        phalanx.launch.run(path, ranks=1, stderr=io.BytesIO())
    assert signal.getsignal(signal.SIGINT) is before


def test_api_works_outside_the_main_thread(script):
    out = io.BytesIO()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(phalanx.launch.run, script("print('hi')"), ranks=1, stdout=out)
        assert job.result().exit_code == 0
    assert out.getvalue() == b"[rank 0] hi\n"


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 0},
        {"ranks": 1, "grace": -1},
        {"ranks": 1, "grace": math.nan},
        {"ranks": 1, "linger": -1},
        {"ranks": 1, "linger": math.nan},
        {"ranks": 1, "linger": math.inf},
        {"ranks": 1, "max_restarts": -1},
    ],
    ids=str,
)
def test_api_rejects_invalid_arguments(script, options):
    with pytest.raises(InvalidArgument):
        phalanx.launch.run(script(""), **options)


def test_an_infinite_grace_never_kills(launcher, script, tmp_path):
    path = script(
        """
        import os, pathlib, signal, time

        stop = []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        pathlib.Path("ready").write_text(str(os.getpid()))
        while not stop:
            time.sleep(0.005)
        print("saved", flush=True)
        """
    )
    process = launcher("run", "-n", 1, "--grace", "inf", path)
    read_pid(tmp_path / "ready")
    process.terminate()
    out, err = process.communicate(timeout=20)
    assert unlabelled(out, 0) == ["saved"], err
    assert "Traceback" not in err


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (1, 2), (0, 1, 2)], ids=str)
def test_ranks_run_although_descriptors_of_the_launcher_are_closed(
    launcher, script, tmp_path, closed
):
    path = script(
        """
        import os, pathlib, sys
        print("to stdout")
        print("to stderr", file=sys.stderr)
        pathlib.Path("ran-" + os.environ["RANK"]).touch()
        """
    )
    redirections = " ".join(f"{fd}>&-" for fd in closed)
    process = launcher("run", "-n", 2, path, before=["sh", "-c", f'exec "$@" {redirections}', "sh"])
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert {each.name for each in tmp_path.glob("ran-*")} == {"ran-0", "ran-1"}
    assert sorted(out.splitlines()) == (
        [] if 1 in closed else ["[rank 0] to stdout", "[rank 1] to stdout"]
    )
    assert "Traceback" not in err


def test_the_exit_code_of_a_rank_is_kept_without_stderr(launcher, script):
    path = script("import sys; sys.exit(3)")
    process = launcher("run", "-n", 2, path, before=["sh", "-c", 'exec "$@" >&- 2>&-', "sh"])
    process.communicate(timeout=30)
    assert process.returncode == 3


def test_torchrun_is_called_without_stdout(script, monkeypatch):
    called = []
    monkeypatch.setattr("os.execve", lambda *args: called.append(args[1]))
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    phalanx.launch._job.exec_torchrun(["python"], ranks=1)
    assert called == [["python"]]


def test_a_module_runs_in_a_deleted_working_directory(script, tmp_path, monkeypatch):
    script("print('found')", name="elsewhere/odd_one.py")
    deleted = tmp_path / "deleted"
    deleted.mkdir()
    monkeypatch.chdir(deleted)
    deleted.rmdir()
    out, env = io.BytesIO(), {**os.environ, "PYTHONPATH": str(tmp_path / "elsewhere")}
    phalanx.launch.run("odd_one", ranks=1, module=True, env=env, stdout=out)
    assert out.getvalue() == b"[rank 0] found\n"
    with pytest.raises(InvalidArgument, match="module 'missing' not found"):
        phalanx.launch.run("missing", ranks=1, module=True)


def test_public_names():
    assert phalanx.launch.__all__ == ["Outcome", "RankExit", "run"]
