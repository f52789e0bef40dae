"""Failed asynchronous saves, and writer processes that die, do not start or do not exit."""

import errno
import os
import resource
import signal
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from phalanx.checkpoint.components import (
    CheckpointWriter,
    CheckpointWriterConfig,
    RankInfo,
    WriteFuture,
)
from phalanx.errors import (
    InvalidArgument,
    InvalidState,
    SaveFailed,
    SaveTimeout,
    UnsupportedState,
    WriterLost,
)

from .states import load, together
from .writers import any_size, checkpointer, make_process, stopped, wait_until


def test_failed_write_is_raised_and_the_writer_survives(writers, tmp_path):
    (tmp_path / "file").touch()
    with checkpointer(writers[0]) as made:
        _, writing = made.save(str(tmp_path / "file" / "c"), {"step": 1})
        with pytest.raises(SaveFailed, match="FileExistsError") as raised:
            writing.result(60)
        assert "in make_durable_directories" in str(raised.value.__cause__)
        pid = writers[0].process.pid
        _, writing = made.save(str(tmp_path / "c"), {"step": 2})
        writing.result(60)
        assert writers[0].process.pid == pid
        assert made.load(str(tmp_path / "c")) == {"step": 2}
        assert made.last_report is not None


def test_error_from_the_writer_process_keeps_its_class(writers, tmp_path):
    with checkpointer(writers[0]) as made:
        _, writing = made.save(str(tmp_path / "c"), {"step": 1}, size=0)
        with pytest.raises(InvalidArgument, match=r"^rank must be in \[0, 0\)"):
            writing.result(60)


def test_an_error_class_that_the_rank_does_not_know_becomes_its_base(writers, tmp_path):
    with checkpointer(writers[0]) as made:
        _, writing = made.save(str(tmp_path / "c"), {"step": 1}, size=-1)
        with pytest.raises(InvalidArgument, match=r"^no world has -1 ranks$"):
            writing.result(60)


class FailsOnceSeen(WriteFuture):
    """A write that fails just after somebody saw that it was pending."""

    def done(self):
        done = super().done()
        if not done:
            self.set_exception(SaveFailed("disk full"))
        return done


def test_a_write_that_fails_while_failures_are_collected_is_not_lost(writers):
    with checkpointer(writers[0]) as made:
        made._writes.append(FailsOnceSeen("c"))
        assert made._failures() == []
        (error,) = made._failures()
        assert str(error) == "disk full"


def test_unobserved_failure_is_raised_by_the_next_save(writers, tmp_path):
    (tmp_path / "file").touch()
    with checkpointer(writers[0]) as made:
        _, writing = made.save(str(tmp_path / "file" / "c"), {"step": 1})
        wait_until(writing.done)
        with pytest.raises(SaveFailed, match="FileExistsError") as raised:
            made.save(str(tmp_path / "c"), {"step": 2})
        assert "still being saved" in raised.value.__notes__[-1]
        _, writing = made.save(str(tmp_path / "d"), {"step": 3})  # raised only once
        writing.result(60)
        assert load(tmp_path / "c")[0] == {"step": 2}


def test_observed_failure_is_not_raised_again(writers, tmp_path):
    (tmp_path / "file").touch()
    with checkpointer(writers[0]) as made:
        _, writing = made.save(str(tmp_path / "file" / "c"), {"step": 1})
        assert isinstance(writing.exception(60), SaveFailed)
        made.save(str(tmp_path / "c"), {"step": 2})[1].result(60)


def test_unsupported_state_on_one_rank_is_raised_on_all(writers, tmp_path):
    def save(rank):
        with checkpointer(writers[rank], rank, 2) as made:
            mine = {"step": 1, "odd": object() if rank == 1 else 0}
            made.save(str(tmp_path / "c"), mine, size=2)[1].result(60)

    first, second = together(2, save)
    assert isinstance(second, UnsupportedState)
    assert isinstance(first, SaveFailed)
    assert "failed on rank 1" in str(first)
    assert "odd has unsupported type object" in str(first)
    assert not (tmp_path / "c").exists()


def test_bad_arguments_on_one_rank_fail_the_save_on_all(writers, tmp_path):
    def save(rank):
        with checkpointer(writers[rank], rank, 2) as made:
            more = {"extra": torch.ones(2)} if rank == 1 else {}
            made.save(str(tmp_path / "c"), {"step": 1}, size=2, timeout=60, **more)[1].result(60)

    first, second = together(2, save)
    assert isinstance(second, InvalidArgument)
    assert "failed on rank 1 while preparing" in str(first)
    assert "extra is a tensor" in str(first)


@pytest.mark.parametrize("wrong", [{"path": None}, {"path": b"c"}, {"extra": object()}])
def test_save_that_cannot_start_still_takes_a_number(writers, tmp_path, wrong):
    """Otherwise save numbers would differ between ranks, and parts of different saves would be
    combined into one checkpoint."""
    process = writers[1]
    with checkpointer(process, 1, 2) as made:
        before = process._save_number
        arguments = {"path": str(tmp_path / "c"), "state_dict": {"step": 1}, **wrong}
        with pytest.raises(TypeError):
            made.save(**arguments)
        assert process._save_number == before + 1


def test_killed_writer_process_is_replaced(writers, tmp_path):
    process = writers[0]
    with checkpointer(process) as made:
        process.process_creation_future.result(60)
        pid = process.process.pid
        with stopped(process):
            _, writing = made.save(str(tmp_path / "c"), {"step": 1})
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(WriterLost, match=f"writer process {pid} was killed by SIGKILL"):
                writing.result(60)
        _, writing = made.save(str(tmp_path / "c"), {"step": 2})
        writing.result(60)
        assert process.process.pid != pid
        assert load(tmp_path / "c")[0] == {"step": 2}


def without_descriptors(rank_info):
    """Leave the writer process one descriptor: to receive one, it needs two."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    with suppress(OSError):
        while True:
            last = os.dup(0)
    os.close(last)
    return any_size(rank_info)


def test_a_process_that_cannot_receive_a_buffer_exits(tmp_path):
    process = make_process(writer=without_descriptors)
    with checkpointer(process) as made:
        _, writing = made.save(str(tmp_path / "c"), {"a": torch.ones(2)})
        with pytest.raises(WriterLost, match="exited with code 1"):
            writing.result(30)
    process.close()


def test_a_buffer_that_cannot_be_sent_fails_one_save_at_once(writers, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    process = writers[0]
    process.process_creation_future.result(60)
    monkeypatch.setattr(process.config, "subprocess_kill_grace_secs", 60)
    with checkpointer(process) as made:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "send_fds", fail)
            _, writing = made.save(str(tmp_path / "c"), {"a": torch.ones(2)})
            with pytest.raises(SaveFailed, match="Too many open files") as raised:
                writing.result(30)
            assert isinstance(raised.value.__cause__, OSError)
            assert not isinstance(raised.value, WriterLost)
        monkeypatch.setattr(socket, "fromfd", fail)  # sending one must not need another
        made.save(str(tmp_path / "c"), {"a": torch.ones(2)})[1].result(60)


class OwnSignature(CheckpointWriter):
    """Takes and passes on what it likes."""

    def write(self, path, state_dict, *, suffix=""):
        return super().write(path + suffix, state_dict)


def own_signature(rank_info):
    return OwnSignature(CheckpointWriterConfig(10), rank_info)


def test_a_restarted_writer_of_any_signature_is_at_the_same_save(tmp_path):
    process = make_process(1, 2, own_signature)
    writer = own_signature(RankInfo(0, 2))  # of the other rank: without a process

    def save(rank):
        for step in range(3):
            path = str(tmp_path / f"{step}")
            if rank == 0:
                writer.write(path, {"step": step}, suffix="-c")
                continue
            if step == 2:
                process.process.kill()
                process.process.wait()
            process.write({"step": step}, path, suffix="-c").result(60)

    assert together(2, save) == [None, None]
    assert load(tmp_path / "2-c")[0] == {"step": 2}
    process.close()


@pytest.mark.usefixtures("foreground")
def test_close_waits_for_saves_and_rejects_new_ones(tmp_path):
    process = make_process()
    with checkpointer(process) as made:
        (tmp_path / "file").touch()
        with stopped(process):
            good = made.save(str(tmp_path / "c"), {"step": 1})[1]
            made.save(str(tmp_path / "file" / "c"), {"step": 1})
            with pytest.raises(KeyboardInterrupt):
                threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
                made.close()
            assert not good.done()
        with pytest.raises(SaveFailed, match="FileExistsError"):
            made.close()  # waits for both
        assert good.done()
        assert load(tmp_path / "c")[0] == {"step": 1}
        assert process.process.poll() == 0
        made.close()
        process.close()
        with pytest.raises(InvalidState, match="closed"):
            made.save(str(tmp_path / "c"), {"step": 2})
        with pytest.raises(InvalidState, match="closed"):
            process.write({"step": 2}, str(tmp_path / "c"))


def test_close_abandons_saves_after_its_timeout(tmp_path):
    process = make_process(subprocess_shutdown_timeout_secs=0.01, subprocess_kill_grace_secs=0.01)
    assert not process.process_creation_future.cancel()  # has no effect
    process.process_creation_future.result(60)
    never = Future()  # of a stager that hangs
    writing = process.write(never, str(tmp_path / "c"))
    process.close()
    with pytest.raises(SaveTimeout, match=r"was abandoned: still pending 0.01 s after close"):
        writing.result(60)
    never.set_result({"step": 1})  # too late
    assert process._writer_thread._ended.wait(30)
    assert process.process is None or process.process.poll() is not None
    assert not (tmp_path / "c").exists()


def third_time(rank_info, attempts):
    """Return a writer, but raise on the first two attempts, as on an overloaded machine."""
    count = len(os.listdir(attempts))
    Path(attempts, str(count)).touch()
    if count < 2:
        raise TimeoutError(f"too busy for attempt {count}")
    return any_size(rank_info)


def test_failed_start_of_the_writer_names_the_cause_and_is_retried(tmp_path):
    """Other ranks would wait for this one until the timeout."""
    (tmp_path / "attempts").mkdir()
    process = make_process(writer=third_time, arguments={"attempts": str(tmp_path / "attempts")})
    assert "too busy for attempt 0" in str(process.process_creation_future.exception(60))
    with checkpointer(process) as made:
        _, writing = made.save(str(tmp_path / "c"), {"step": 1})
        cause = "could not start: TimeoutError: too busy for attempt 1"
        with pytest.raises(SaveFailed, match=cause) as raised:
            writing.result(60)
        assert "in third_time" in str(raised.value.__cause__)
        made.save(str(tmp_path / "c"), {"step": 1})[1].result(60)
    process.close()


def test_functions_for_the_writer_process_must_be_picklable():
    with pytest.raises(InvalidArgument, match="must be picklable"):
        make_process(writer=lambda rank_info: rank_info)
