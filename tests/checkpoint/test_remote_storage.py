"""Checkpoints on storage without locks or renames: the manifest is written last."""

import os

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from phalanx.checkpoint.components import (
    CheckpointWriter,
    CheckpointWriterConfig,
    RankInfo,
    WriterHook,
)
from phalanx.errors import CheckpointNotFound, DamagedCheckpoint, SaveFailed, UnsupportedState
from phalanx.testing import Fault, kill

from .internals import LocalStorage, OpenCheckpoint, storage_at
from .states import ThreadExchange, load, mixed, plain, same, save, saved, together


class FlakyFileSystem(LocalFileSystem):
    """A file system on which tests can make operations fail."""

    protocol = "flaky"
    broken = frozenset()

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("flaky://"))

    def rm_file(self, path):
        self._fail("rm_file")
        super().rm_file(path)

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._fail("cat_file")
        return super().cat_file(path, start, end, **kwargs)

    def pipe_file(self, path, value, **kwargs):
        super().pipe_file(path, value, **kwargs)
        self._fail("pipe_file")

    def _fail(self, what):
        if what in self.broken:
            raise OSError("the network is down")


fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)


@pytest.mark.parametrize("scheme", ["memory://{name}/c", "flaky://{folder}/c", "file://{folder}/c"])
def test_save_and_load_on_fsspec_storage(tmp_path, scheme):
    url = scheme.format(name=tmp_path.name, folder=tmp_path)
    for step, meet in ((1, ThreadExchange), (2, None)):
        saved(url, [mixed(rank, step) for rank in range(2)], meet=meet)
        for rank in range(2):
            assert same(plain(mixed(rank, step)), load(url, rank, 2)[0])
    state = {"model": {key: torch.zeros_like(each) for key, each in mixed(0)["model"].items()}}
    load(url, 0, 2, state)
    assert same(state, {"model": mixed(0, 2)["model"]})
    if "memory" not in url:
        assert len(os.listdir(tmp_path / "c")) == 3, "the files of the first save are gone"
    with pytest.raises(CheckpointNotFound):
        load(url + "/nowhere")
    before = load(url, 1, 2)[0]
    errors = save(url, [{"w": torch.ones(3)}, {"w": 1j}])
    assert [type(error) for error in errors] == [SaveFailed, UnsupportedState]
    assert same(before, load(url, 1, 2)[0])


def save_there(ctx, url, step):
    CheckpointWriter(CheckpointWriterConfig(), RankInfo(0, 1)).write(url, mixed(0, step))


@pytest.mark.parametrize(
    ("point", "step"),
    [("tensor", 1), ("flush", 1), ("publish", 1), ("published", 2), ("discard", 2)],
)
def test_killed_rank_leaves_the_old_or_the_new_checkpoint(ranks, tmp_path, point, step):
    url = f"flaky://{tmp_path}/c"
    saved(url, [mixed(0, 1)])
    ranks.run(save_there, 1, args=(url, 2), faults=[Fault(f"checkpoint:{point}", kill(), rank=0)])
    assert same(plain(mixed(0, step)), load(url)[0])
    saved(url, [mixed(0, 3)])
    assert same(plain(mixed(0, 3)), load(url)[0])


def test_reader_retries_when_the_checkpoint_is_replaced(tmp_path, monkeypatch):
    """On an object store a file may vanish between reading the manifest and the last read."""
    url = f"memory://{tmp_path.name}/c"
    saved(url, [{"step": 1, "w": torch.full((3,), 1.0)}])
    original = OpenCheckpoint.open_files

    def open_files(checkpoint, tensors):
        original(checkpoint, tensors)
        if checkpoint.manifest.save_id not in replaced:
            replaced.append(checkpoint.manifest.save_id)
            monkeypatch.undo()
            saved(url, [{"step": 2, "w": torch.full((3,), 2.0)}])

    replaced = []
    for state in (None, {"step": 0, "w": torch.zeros(3)}):
        monkeypatch.setattr(OpenCheckpoint, "open_files", open_files)
        loaded, _ = load(url, state=state)
        assert loaded["step"] == 2
        assert loaded["w"].tolist() == [2.0] * 3
    assert len(replaced) == 2


def test_local_urls_do_not_use_fsspec(tmp_path):
    """fsspec overwrites the manifest in place: a kill would lose both checkpoints."""
    for scheme in ("file", "local"):
        assert isinstance(storage_at(f"{scheme}://{tmp_path}/c"), LocalStorage)
    saved(tmp_path / "c", [{"a": 1}])
    assert load(f"file://{tmp_path}/c")[0] == {"a": 1}


def test_failure_after_the_commit_does_not_undo_it(tmp_path, monkeypatch):
    url = f"flaky://{tmp_path}/c"
    saved(url, [{"w": torch.ones(3)}])
    monkeypatch.setattr(FlakyFileSystem, "broken", {"rm_file"})
    saved(url, [{"w": torch.zeros(3)}])
    assert same(load(url)[0], {"w": torch.zeros(3)})


def test_upload_that_arrives_despite_an_error(tmp_path, monkeypatch):
    url = f"flaky://{tmp_path}/c"
    saved(url, [{"w": torch.ones(3)}])
    monkeypatch.setattr(FlakyFileSystem, "broken", {"pipe_file"})
    (error,) = save(url, [{"w": torch.zeros(3)}])
    assert isinstance(error, SaveFailed)
    assert same(load(url)[0], {"w": torch.zeros(3)}), "its files were not taken for leftovers"


def test_a_manifest_that_cannot_be_read_is_not_replaced(tmp_path, monkeypatch):
    """Its files would stay for ever: no manifest names them, and nothing else removes them."""
    url = f"flaky://{tmp_path}/c"
    saved(url, [{"w": torch.ones(3)}])
    with monkeypatch.context() as patch:
        patch.setattr(FlakyFileSystem, "broken", {"cat_file"})
        (error,) = save(url, [{"w": torch.zeros(3)}])
    assert isinstance(error, SaveFailed)
    assert "while committing: OSError: the network is down" in str(error)
    assert same(load(url)[0], {"w": torch.ones(3)})
    saved(url, [{"w": torch.zeros(3)}])
    monkeypatch.setattr("phalanx.checkpoint._remote_storage.MAX_MANIFEST_BYTES", 1)
    with pytest.raises(DamagedCheckpoint, match="too large for a manifest"):
        load(url)
    saved(url, [{"w": torch.ones(3)}])  # which replaces that one


def test_files_of_a_failed_save_are_removed(tmp_path):
    url = f"flaky://{tmp_path}/c"
    saved(url, [{"w": torch.ones(3)}] * 2)

    class No(WriterHook):
        def pre_commit(self, path, **kwargs):  # noqa: ARG002 - whatever comes
            raise ValueError

        def post_commit(self, path, **kwargs):
            pass

    before = sorted(os.listdir(tmp_path / "c"))
    assert all(save(url, [{"w": torch.zeros(3)}] * 2, hook=lambda _: No()))
    assert sorted(os.listdir(tmp_path / "c")) == before


def test_failure_during_cleanup_does_not_hide_the_cause(tmp_path, monkeypatch):
    class Breaking(WriterHook):
        def pre_commit(self, path, **kwargs):  # noqa: ARG002 - it breaks whatever comes
            monkeypatch.setattr(FlakyFileSystem, "broken", {"cat_file"})
            raise ValueError("this came first")

        def post_commit(self, path, **kwargs):
            pass

    (error,) = save(f"flaky://{tmp_path}/c", [{"w": torch.ones(3)}], hook=lambda _: Breaking())
    assert isinstance(error, SaveFailed)
    assert "this came first" in str(error)


def test_messages_survive_removal_of_the_directory_by_others(tmp_path):
    board = storage_at(f"flaky://{tmp_path}/c").message_store()

    def come_and_go(rank):
        for _ in range(100):
            board.put(f"note.{rank}", "here")
            board.remove(f"note.{rank}")

    assert together(4, come_and_go) == [None] * 4


def test_truncated_message_is_ignored(tmp_path):
    board = storage_at(f"flaky://{tmp_path}/c").message_store()
    board.put("note.1", "the whole story")
    (file,) = (tmp_path / "c" / ".saving").iterdir()
    data = file.read_bytes()
    for size in range(len(data)):
        file.write_bytes(data[:size])
        assert board.get("note.1") is None
    file.write_bytes(data)
    assert board.get("note.1") == "the whole story"
