"""Asynchronous saves: the checkpoint holds the state as it was when staged."""

import os
import signal
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from phalanx.checkpoint import PerRank, Replicated, register_codec
from phalanx.checkpoint.components import (
    CheckpointStager,
    CheckpointStagerConfig,
    DefaultStager,
    SaveProgress,
    wrap_future,
)
from phalanx.errors import InvalidArgument, InvalidState, SaveFailed, SaveTimeout, UnsupportedState

from .internals import ProgressMeter
from .states import load, plain, same, together
from .writers import checkpointer, late, stopped, wait_until


def state(rank=0, step=0):
    """Return a state with tensors and values of every kind."""
    generator = torch.Generator().manual_seed(step)
    model = {
        "weight": torch.randn(700, 1001, generator=generator),
        "small": torch.randn(3, generator=generator).to(torch.bfloat16),
        "columns": torch.randn(40, 30, generator=generator).t(),
        "complex": torch.randn(6, dtype=torch.complex64, generator=generator).conj(),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(step),
    }
    model["tied"] = model["weight"]
    return {
        "model": Replicated(model),
        "unmarked": [torch.randn(300, 400, generator=generator), float("nan"), (1, None, True)],
        "own": PerRank({"seed": torch.full((5,), rank), "position": rank}),
        "step": step,
    }


def wreck(value):
    """Change all tensors of a state in place, as the next training step does."""
    if isinstance(value, torch.Tensor):
        value.zero_()
    elif isinstance(value, Replicated | PerRank):
        wreck(value.value)
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            wreck(each)


def unmarked(state):
    return {
        key: each.value if isinstance(each, Replicated) else each for key, each in state.items()
    }


@pytest.mark.parametrize(("size", "in_background"), [(1, True), (2, False), (3, True)])
def test_checkpoint_holds_the_state_at_staging_time(writers, tmp_path, size, in_background):
    path = str(tmp_path / "c")

    def save(rank):
        with checkpointer(writers[rank], rank, size, in_background=in_background) as made:
            for step in range(2):  # the second reuses the staging buffer
                mine = state(rank, step)
                staging, writing = made.save(path, mine, size=size, timeout=60)
                staging.result(60)
                wreck(mine)
                writing.result(60)
            return writing.report

    reports = together(size, save)
    for rank, report in enumerate(reports):
        assert same(plain(unmarked(state(rank, 1))), load(path, rank, size)[0])
        assert report.bytes_written > 700 * 1001 * 4 / size * 0.9
        if size > 1:  # a rank stages only its shard of replicated state
            assert report.bytes_staged < 700 * 1001 * 4 / size + 300 * 400 * 4 + (1 << 20)


def test_tensor_modified_during_staging_fails_the_save(writers, tmp_path):
    weight, mean = torch.ones(1 << 17), torch.ones(5)
    with checkpointer(writers[0]) as made, late(made):
        staging, writing = made.save(str(tmp_path / "c"), {"model": {"weight": weight}})
        assert not staging.done()
        weight.add_(1)
    for future in (staging, writing):
        with pytest.raises(SaveFailed, match=r"model/weight was changed.*Wait for the first"):
            future.result(60)
    assert not (tmp_path / "c").exists()
    with checkpointer(writers[0]) as made, late(made):
        _, writing = made.save(str(tmp_path / "c"), {"weight": weight, "mean": mean})
        mean.add_(1)  # as batch norm does in forward
    writing.result(60)
    assert load(tmp_path / "c")[0]["mean"].tolist() == [1] * 5


def test_paths_are_resolved_in_the_rank_process(writers, tmp_path, monkeypatch):
    odd = os.fsdecode(b"not \xff Unicode")
    with checkpointer(writers[0]) as made:
        writers[0].process_creation_future.result(60)
        monkeypatch.chdir(tmp_path)  # the writer process has another working directory
        for path in (odd, Path("a") / "c"):
            made.save(path, {"w": torch.ones(3)})[1].result(60)
            assert load(tmp_path / path)[0]["w"].tolist() == [1, 1, 1]
        (tmp_path / f"{odd}.txt").touch()
        _, writing = made.save(f"{odd}.txt/c", {"w": torch.ones(3)})
        with pytest.raises(SaveFailed, match=r"not \\udcff Unicode"):
            writing.result(60)
    assert sorted(os.listdir(tmp_path)) == sorted(["a", odd, f"{odd}.txt"])


def test_concurrent_saves_from_threads_are_serialized(writers, tmp_path):
    with checkpointer(writers[0]) as made:
        (tmp_path / "file").touch()

        def save(thread):
            told = 0
            for i in range(20):
                folder = tmp_path / ("file" if i % 5 == 0 else "good")
                try:
                    made.save(str(folder / f"{thread}-{i}"), {"step": i})
                except SaveFailed as error:
                    told += len(error.__notes__)  # one note per failed save
            return told

        told = sum(together(4, save))
        wait_until(lambda: all(write.done() for write in made._writes))
        told += len(made._failures())
        assert told == 16
        assert len(os.listdir(tmp_path / "good")) == 64


def test_saves_wait_for_pending_saves(writers, tmp_path, caplog):
    process = writers[0]
    process.process_creation_future.result(60)
    with checkpointer(process) as made, stopped(process):
        futures = [made.save(str(tmp_path / str(i)), {"w": torch.full((9,), i)}) for i in range(2)]
        assert [staging.result(60) for staging, _ in futures] == [None, None]  # a buffer each
        process.config.pending_timeout_secs = 0.01
        with pytest.raises(SaveTimeout, match=r"waited 0.01 s for the save to .*/0: \w+"):
            made.save(str(tmp_path / "2"), {"w": torch.ones(3)})
        process.config.pending_timeout_secs = 60
        threading.Timer(0.05, os.kill, (process.process.pid, signal.SIGCONT)).start()
        futures.append(made.save(str(tmp_path / "2"), {"w": torch.full((9,), 2)}))
        for i, (_, writing) in enumerate(futures):
            writing.result(60)
            assert load(tmp_path / str(i))[0]["w"].tolist() == [i] * 9
    assert "waits for 2 pending saves" in caplog.text


def test_progress_and_report(writers, tmp_path):
    process = writers[0]
    with checkpointer(process) as made:
        assert made.progress() is None
        with stopped(process):
            staging, writing = made.save(str(tmp_path / "c"), {"w": torch.ones(1000)})
            staging.result(60)
            wait_until(lambda: made.progress().phase == "preparing")
            told = made.progress()
            assert told == SaveProgress(str(tmp_path / "c"), "preparing", 0, 0, told.seconds, 0)
        writing.result(60)
        report = made.last_report
        assert made.progress() is None
        assert report.bytes_written == report.bytes_staged == 4000
        told = {"preparing", "writing", "flushing", "waiting for ranks", "committing"}
        assert report.phases.keys() == told
        assert report.bytes_per_second > 0
        assert report.total_seconds > sum(report.phases.values()) > report.phases["flushing"] > 0
        told = process._writer_thread.meter.progress("c", 0.0)
        assert (told.bytes_written, told.bytes_total) == (4000, 4000)


def test_restarted_save_resets_its_progress():
    meter = ProgressMeter()
    meter.restart()
    for _ in range(2):  # as when other ranks were still at the previous save
        meter.enter("writing")
        meter.expect(300)
        meter.wrote(100)
        meter.wrote(200)
    told = meter.progress("c", 0.0)
    assert (told.bytes_written, told.bytes_total) == (300, 300)


def test_staged_copy_is_written_only_once(writers, tmp_path):
    stager = DefaultStager(CheckpointStagerConfig(use_async_staging=False))
    copy = stager.stage({"w": torch.ones(3)})
    writers[0].write(copy, str(tmp_path / "c")).result(60)
    other = stager.stage({"w": torch.zeros(3)})
    with pytest.raises(InvalidState, match="was already written"):
        writers[0].write(copy, str(tmp_path / "d")).result(60)
    assert other["w"].data_ptr() == copy["w"].data_ptr()
    stager.close()


class Duplicate(CheckpointStager):
    """A user-defined stager."""

    def stage(self, state_dict, **kwargs):
        del kwargs
        copies = {key: each.clone() for key, each in state_dict.items()}
        self.made = [weakref.ref(each) for each in copies.values()]
        return copies

    def close(self):
        pass


def test_custom_stager(writers, tmp_path):
    with checkpointer(writers[0]) as made:
        made._checkpoint_stager = Duplicate()
        made.prepare({"w": torch.ones(3)}).result(1)  # a no-op for this stager
        weight = torch.ones(3)
        staging, writing = made.save(str(tmp_path / "c"), {"w": weight})
        staging.result(1)
        weight.zero_()
        writing.result(60)
        assert load(tmp_path / "c")[0]["w"].tolist() == [1, 1, 1]
        wait_until(lambda: made._checkpoint_stager.made[0]() is None)  # not until the next save


class Celsius:
    def __init__(self, degrees):
        self.degrees = degrees


def test_codec_registered_only_in_the_rank_process(writers, tmp_path):
    register_codec("celsius", Celsius, encode=lambda c: {"c": c.degrees}, decode=lambda d: d["c"])
    with checkpointer(writers[0]) as made:
        made.save(str(tmp_path / "c"), {"t": Replicated([Celsius(torch.ones(2))])})[1].result(60)
        assert load(tmp_path / "c")[0]["t"][0].tolist() == [1, 1]


def test_empty_state(writers, tmp_path):
    with checkpointer(writers[0]) as made:
        for empty in ({}, {"a": [], "b": torch.zeros(0, 3)}):
            made.save(str(tmp_path / "c"), empty)[1].result(60)
            assert same(empty, load(tmp_path / "c")[0])
            assert made.last_report.bytes_written == made.last_report.bytes_staged == 0


def test_writer_arguments_must_be_plain_values(writers, tmp_path):
    with checkpointer(writers[0]) as made:
        with pytest.raises(InvalidArgument, match="extra is a tensor"):
            made.save(str(tmp_path / "c"), {"step": 1}, extra=torch.ones(2))
        with pytest.raises(UnsupportedState, match="extra"):
            made.save(str(tmp_path / "c"), {"step": 1}, extra=object())
        _, writing = made.save(str(tmp_path / "c"), {"step": 1}, unknown=1)
        writing.result(60)  # unknown arguments go to the hook


def test_wrap_future():
    assert wrap_future(3).result(0) is None
    original = Future()
    wrapped = wrap_future(original)
    assert not wrapped.done()
    original.set_result(3)
    assert wrapped.result(0) is None
    failed = Future()
    failed.set_exception(KeyError("x"))
    with pytest.raises(KeyError):
        wrap_future(failed).result(0)
