"""`phalanx checkpoint convert`: any layout becomes one of ours, atomically, in bounded memory."""

import gc
import tracemalloc
from contextlib import contextmanager

import pytest
import torch

from phalanx.errors import (
    CheckpointNotFound,
    DamagedCheckpoint,
    InvalidArgument,
    SaveFailed,
    UnsupportedState,
)

from .internals import MANIFEST, Manifest, _faultpoints, convert_checkpoint, verify
from .states import damage, load, mixed, same, saved
from .torch_states import kinds, save_archives, save_dcp, sharded_folder, sharded_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def own(rank):
    """Return a state of which ranks have a part in common."""
    common = {"weight": torch.arange(1 << 19), "tied": None, "betas": (0.9, 0.99), 0: torch.ones(2)}
    common["tied"] = common["weight"]
    return {"common": common, "own": torch.full((3,), rank), f"only{rank}": rank, "list": [rank, 1]}


@pytest.mark.parametrize("size", [1, 3])
def test_archives_become_a_checkpoint_of_as_many_ranks(tmp_path, size):
    save_archives(tmp_path / "torch", [own(rank) for rank in range(size)])
    done = convert_checkpoint(str(tmp_path / "torch"), str(tmp_path / "ours"))
    assert done.manifest.world_size == size
    assert len(done.manifest.files) == size
    assert verify(str(tmp_path / "ours")) == []
    for rank in range(size):
        assert same(load(tmp_path / "ours", rank, size)[0], own(rank))
    written = sum(entry.bytes for entry in done.manifest.files.values())
    assert written < 1.1 * own(0)["common"]["weight"].nbytes, "common and tied tensors once"
    saved(tmp_path / "expected", [own(rank) for rank in range(size)])
    assert names_of(tmp_path / "ours") == names_of(tmp_path / "expected")


def names_of(path):
    """Return where the ranks' states differ, according to the manifest."""
    manifest = Manifest.load((path / MANIFEST).read_bytes(), "it")
    return sorted((entry.name, entry.rank or 0) for entry in manifest.entries)


@pytest.mark.parametrize(
    ("save", "state"),
    [
        (sharded_folder, sharded_state),
        (lambda path: save_dcp(path, kinds()), kinds),
        (lambda path: save_archives(path, [kinds()]), kinds),
        (lambda path: saved(path, [kinds()]), kinds),
    ],
    ids=["sharded", "dcp", "archive", "ours"],
)
def test_converted_state_equals_the_source(tmp_path, save, state):
    save(tmp_path / "source")
    before = {each.name: each.read_bytes() for each in (tmp_path / "source").iterdir()}
    convert_checkpoint(str(tmp_path / "source"), str(tmp_path / "new" / "c"))
    assert same(state(), load(tmp_path / "new" / "c")[0])
    assert {each.name: each.read_bytes() for each in (tmp_path / "source").iterdir()} == before
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["c"], "no workspace is left"


def test_our_own_checkpoint_keeps_what_ranks_differ_in(tmp_path):
    states = [mixed(rank, 5) for rank in range(2)]
    saved(tmp_path / "source", states)
    convert_checkpoint(str(tmp_path / "source"), str(tmp_path / "copy"))
    assert names_of(tmp_path / "source") == names_of(tmp_path / "copy")
    for rank in range(2):
        expected = load(tmp_path / "source", rank, 2)[0]
        assert same(expected, load(tmp_path / "copy", rank, 2)[0])


def test_remote_destinations_are_written_and_not_replaced(tmp_path):
    pytest.importorskip("fsspec")
    save_archives(tmp_path / "torch", [own(rank) for rank in range(2)])
    remote = f"memory://{tmp_path.name}/c"
    convert_checkpoint(str(tmp_path / "torch"), remote)
    assert same(load(remote, 1, 2)[0], own(1))
    with pytest.raises(InvalidArgument, match="already exists"):
        convert_checkpoint(str(tmp_path / "torch"), remote)
    convert_checkpoint(remote, str(tmp_path / "back"))
    assert same(load(tmp_path / "back", 0, 2)[0], own(0))


@pytest.mark.parametrize("kind", ["directory", "file", "link", "checkpoint"])
def test_existing_destination_is_refused(tmp_path, kind):
    save_archives(tmp_path / "torch", [own(0)])
    there = tmp_path / "there"
    make = {
        "directory": there.mkdir,
        "file": there.touch,
        "link": lambda: there.symlink_to("nowhere"),
        "checkpoint": lambda: saved(there, [{"a": 1}]),
    }
    make[kind]()
    with pytest.raises(InvalidArgument, match="there already exists"):
        convert_checkpoint(str(tmp_path / "torch"), str(there))
    if kind == "checkpoint":
        assert load(there)[0] == {"a": 1}


@contextmanager
def at(point, action):
    """Call a function at a point of a save."""

    def reached(name):
        if name == f"checkpoint:{point}":
            action()

    _faultpoints.arm(reached)
    try:
        yield
    finally:
        _faultpoints.disarm(reached)


def test_destination_that_appears_meanwhile_is_not_touched(tmp_path):
    save_archives(tmp_path / "torch", [own(0), own(1)])
    there = tmp_path / "there"
    with at("written", lambda: there.mkdir(exist_ok=True)), pytest.raises(InvalidArgument):
        convert_checkpoint(str(tmp_path / "torch"), str(there))
    assert list(there.iterdir()) == []
    assert sorted(each.name for each in tmp_path.iterdir()) == ["there", "torch"]


def test_nothing_is_at_the_destination_before_everything_is_written(tmp_path):
    save_archives(tmp_path / "torch", [own(rank) for rank in range(3)])
    seen = []
    with at("publish", lambda: seen.append((tmp_path / "there").exists())):
        convert_checkpoint(str(tmp_path / "torch"), str(tmp_path / "there"))
    assert seen == [False]


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    """Also while ranks are compared, and where tensors are views or not contiguous."""
    size = 1 << 18
    states = [
        {
            **{f"common{i}": torch.full((size,), float(i)) for i in range(3)},
            **{f"own{i}": torch.full((2, size // 2), float(rank)).t() for i in range(3)},
        }
        for rank in range(2)
    ]
    save_archives(tmp_path / "torch", states)
    del states
    gc.collect()

    def live():
        tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
        return len({each.data_ptr() for each in tensors if each.numel() >= size // 2})

    before, seen = live(), []
    with at("tensor", lambda: seen.append(live() - before)):
        convert_checkpoint(str(tmp_path / "torch"), str(tmp_path / "there"))
    assert len(seen) >= 9
    assert max(seen) <= 1, "nothing but the memory of the last view"


def test_damaged_source_is_reported_as_such_and_nothing_is_written(tmp_path):
    save_archives(tmp_path / "torch", [own(rank) for rank in range(3)])
    file = tmp_path / "torch" / "checkpoint_1.pt"
    data = file.read_bytes()
    at = data.index(own(1)["own"].numpy().tobytes())
    file.write_bytes(data[:at] + b"\7" + data[at + 1 :])
    saved(tmp_path / "source", [mixed(rank, 5) for rank in range(2)])
    damage(tmp_path / "source")
    for name in ("torch", "source"):
        with pytest.raises(DamagedCheckpoint, match="checksum"):
            convert_checkpoint(str(tmp_path / name), str(tmp_path / "new" / "c"))
        assert not list((tmp_path / "new").iterdir())


def test_failure_while_writing_ends_all_ranks(tmp_path):
    save_archives(tmp_path / "torch", [own(rank) for rank in range(3)])

    def fail():
        raise OSError(28, "No space left on device")

    with at("flush", fail), pytest.raises(SaveFailed, match="No space left"):
        convert_checkpoint(str(tmp_path / "torch"), str(tmp_path / "new" / "c"))
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": b"bytes"}}, r"a\.b has unsupported type bytes"),
        ({"a": torch.ones(1).expand(1 << 40)}, "a is an expanded tensor"),
        ({"a": torch.ones(2).to_sparse()}, "a in .* is a tensor of layout|cannot load"),
    ],
)
def test_what_ours_cannot_store_is_named(tmp_path, state, message):
    save_archives(tmp_path / "torch", [state])
    with pytest.raises((UnsupportedState, DamagedCheckpoint), match=message):
        convert_checkpoint(str(tmp_path / "torch"), str(tmp_path / "c"))
    assert not (tmp_path / "c").exists()


def test_missing_source_or_rank_is_named(tmp_path):
    with pytest.raises(CheckpointNotFound, match="no checkpoint at"):
        convert_checkpoint(str(tmp_path / "nowhere"), str(tmp_path / "c"))
    save_archives(tmp_path / "torch", [own(rank) for rank in range(3)])
    (tmp_path / "torch" / "checkpoint_1.pt").unlink()
    with pytest.raises(DamagedCheckpoint, match="lacks the state of rank 1"):
        convert_checkpoint(str(tmp_path / "torch"), str(tmp_path / "c"))


def test_large_rank_in_a_name_costs_no_memory(tmp_path):
    save_archives(tmp_path / "torch", [{"a": 1}])
    (tmp_path / "torch" / "checkpoint_0.pt").rename(tmp_path / "torch" / "checkpoint_20000000.pt")
    tracemalloc.start()
    try:
        with pytest.raises(DamagedCheckpoint, match="lacks the state of rank 0"):
            convert_checkpoint(str(tmp_path / "torch"), str(tmp_path / "c"))
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()
