"""Retention: which checkpoints are kept and which are removed."""

import os
import threading
from contextlib import closing

import pytest
import torch

from phalanx.checkpoint import CheckpointManager
from phalanx.errors import DamagedCheckpoint

from .internals import (
    LocalCheckpointDirectory,
    Manifest,
    ManifestOutline,
    RetentionPolicy,
    prune,
    step_name,
    storage_at,
)
from .states import damage, filled, names, state_of


def test_keep_last_and_keep_every(tmp_path):
    with filled(tmp_path / "run", range(0, 50, 5), keep_last=2, keep_every=20) as folder:
        assert folder.steps() == [0, 20, 40, 45]
        assert folder.latest() == 45
        assert folder.load()["step"] == 45
        assert folder.load(20)["step"] == 20
    assert names(tmp_path / "run") == [step_name(step) for step in (0, 20, 40, 45)]


def test_keep_last_without_keep_every(tmp_path):
    with filled(tmp_path, [0, 1000, 2000, 2001, 2002], keep_last=2) as folder:
        assert folder.steps() == [2001, 2002]


def test_manifest_outline_reads_only_the_file_list(tmp_path):
    filled(tmp_path, [1])
    manifest = (tmp_path / "step-00000001" / "manifest.json").read_bytes()
    assert ManifestOutline.load(manifest, "it").files == Manifest.load(manifest, "it").files != {}
    for place in range(0, len(manifest), 17):
        flipped = bytearray(manifest)
        flipped[place] ^= 1
        for damaged in (manifest[:place], bytes(flipped)):
            with pytest.raises(DamagedCheckpoint, match="it cannot be used"):
                ManifestOutline.load(damaged, "it")
    document = Manifest.load(manifest, "it")
    document.version = 2
    with pytest.raises(DamagedCheckpoint, match="version 2"):
        ManifestOutline.load(document.dump(), "it")


def test_symlinked_step_is_neither_removed_nor_followed(tmp_path):
    folder = filled(tmp_path / "run", [1])
    folder.close()
    os.symlink(folder.path(1), folder.path(2))
    with pytest.raises(OSError, match="step-00000002"):
        LocalCheckpointDirectory(str(tmp_path / "run")).remove(2)
    assert folder.load(1)["step"] == 1


def test_damaged_steps_do_not_count_and_are_kept(tmp_path):
    folder = filled(tmp_path, [1, 2, 3], keep_last=5)
    for step, name in ((3, "manifest.json"), (2, None)):
        place = folder.path(step)
        file = name or next(each for each in os.listdir(place) if each.startswith("rank"))
        os.truncate(os.path.join(place, file), 10)
    folder.close()
    folder = filled(tmp_path, [4, 5], keep_last=2)
    assert folder.steps() == [2, 3, 4, 5]


def test_last_good_step_is_kept_when_newer_ones_are_damaged(tmp_path):
    """Also when only the data is damaged, which is not read right after a save."""
    folder = filled(tmp_path, [1, 2, 3], keep_last=5)
    damage(folder.path(3))
    local = LocalCheckpointDirectory(str(tmp_path))
    for dry_run in (True, False):
        verdicts = prune(local, RetentionPolicy(last=1), dry_run=dry_run)
        assert [each.kept for each in verdicts] == [None, "the last one", "damaged"]
    assert folder.steps() == [2, 3]
    damage(folder.path(2))
    assert [each.kept for each in prune(local, RetentionPolicy(last=1))] == ["damaged", "damaged"]


def test_foreign_files_are_left_alone(tmp_path):
    folder = filled(tmp_path / "run", [1, 2, 3], keep_last=5)
    os.rename(folder.path(2), tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder.path(2))
    (tmp_path / "run" / "step-00000001" / "notes.txt").write_text("the best one")
    (tmp_path / "run" / "log.txt").write_text("")
    (tmp_path / "run" / "step-00000000").mkdir()
    folder.close()
    folder = filled(tmp_path / "run", [4], keep_last=1)
    assert folder.steps() == [1, 2, 4]
    assert (tmp_path / "elsewhere" / "manifest.json").exists()
    assert {"log.txt", "step-00000000"} <= set(names(tmp_path / "run"))


def test_step_locked_for_reading_is_not_removed(tmp_path):
    folder = filled(tmp_path, [1], keep_last=1)
    hold = LocalCheckpointDirectory(str(tmp_path)).lock_for_reading(1)
    folder.save(2, state_of(2))
    assert folder.steps() == [1, 2]
    hold.close()
    folder.save(3, state_of(3))
    assert folder.steps() == [3]


def test_reader_without_a_lock_can_finish(tmp_path):
    folder = filled(tmp_path, [1], keep_last=1)
    with closing(storage_at(folder.path(1)).snapshot()) as snapshot:
        (name,) = [each for each in os.listdir(folder.path(1)) if each.startswith("rank")]
        with closing(snapshot.open(name)) as source:
            folder.save(2, state_of(2))
            assert folder.steps() == [2]
            data = bytearray(source.length)
            source.read_into(memoryview(data), 0)
    assert bytes(data).count(torch.tensor(1.0).numpy().tobytes()) >= 50


def test_concurrent_readers_are_not_disturbed_by_retention(tmp_path):
    folder = filled(tmp_path, [0], keep_last=1)
    done = threading.Event()
    seen, errors = set(), []

    def read():
        reader = CheckpointManager(tmp_path)
        while not done.is_set():
            try:
                loaded = reader.load()
                assert loaded["weight"].tolist() == [float(loaded["step"])] * 50
                seen.add(loaded["step"])
            except BaseException as error:  # noqa: BLE001 - the test tells
                errors.append(error)
                return

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(1, 20):
        folder.save(step, state_of(step))
    done.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(seen) > 1


def test_removal_is_durable_before_files_are_unlinked(tmp_path, monkeypatch):
    folder = filled(tmp_path, [1], keep_last=1)
    order = []

    def note(name, of_what):
        function = getattr(os, name)

        def wrapper(*args, **kwargs):
            order.append((name, os.path.basename(of_what(*args))))
            return function(*args, **kwargs)

        monkeypatch.setattr(os, name, wrapper)

    note("rename", lambda source, _: source)
    note("fsync", lambda fd: os.readlink(f"/proc/self/fd/{fd}"))
    note("unlink", lambda path, **_: path)
    folder.save(2, state_of(2))
    renamed = order.index(("rename", "step-00000001"))
    assert order[renamed + 1] == ("fsync", tmp_path.name)
    assert [name for name, _ in order[renamed + 2 :]] == ["unlink"] * 2
