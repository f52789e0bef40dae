"""Loading: full, partial and in place; all or nothing."""

import gc
import os
import shutil
import weakref

import pytest
import torch
from torch.distributed.checkpoint import _experimental

from phalanx.checkpoint import (
    PerRank,
    Replicated,
    RNGState,
    make_sync_checkpointer,
    register_codec,
)
from phalanx.checkpoint.components import CheckpointReader, CheckpointWriter, RankInfo
from phalanx.errors import CheckpointNotFound, DamagedCheckpoint, MissingKeys, StateMismatch

from .internals import MANIFEST
from .states import load, mixed, same, saved, trained


@pytest.fixture
def path(tmp_path):
    """A checkpoint of two ranks."""
    saved(tmp_path / "c", [mixed(0, 5), mixed(1, 5)])
    return tmp_path / "c"


def zeros():
    return {"model": {"weight": torch.zeros(64, 33), "bias": torch.zeros(7)}}


def test_requested_keys_are_loaded_in_place(path):
    state = zeros()
    weight = state["model"]["weight"]
    loaded, missing = load(path, 1, 2, state)
    assert loaded is state
    assert state["model"]["weight"] is weight
    assert missing == []
    assert same(state, {"model": mixed(0, 5)["model"]})


def test_loaded_state_is_freed_without_garbage_collection(path):
    gc.collect()
    gc.disable()
    try:
        loaded, _ = load(path, 0, 2)
        weight = weakref.ref(loaded["model"]["weight"])
        del loaded
        assert weight() is None
    finally:
        gc.enable()


def test_missing_keys_are_returned_and_left_unchanged(path):
    state = {**zeros(), "new": 3, "step": None}
    state["model"]["scale"] = torch.ones(2)
    loaded, missing = load(path, 0, 2, state)
    assert missing == ["model.scale", "new"]
    assert loaded["new"] == 3
    assert loaded["step"] == 5
    assert torch.equal(loaded["model"]["scale"], torch.ones(2))


def test_strict_raises_for_missing_keys(path):
    checkpointer = make_sync_checkpointer()
    with pytest.raises(MissingKeys, match=r"missing keys: \['new'\]"):
        checkpointer.load(path, {"new": 1}, strict=True)
    with pytest.raises(RuntimeError):
        checkpointer.load(path, {"new": 1}, strict=True)
    assert checkpointer.load(path, {"new": 1}) == {"new": 1}
    state = {**zeros(), "step": 0, "new": 1}
    with pytest.raises(MissingKeys):
        checkpointer.load(path, state, strict=True)
    assert same(state, {**zeros(), "step": 0, "new": 1}), "nothing is touched"
    with pytest.raises(MissingKeys, match=r"\['own', 'position'\]"):
        load(path, 7, 8, strict=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"bias": torch.zeros(8)},
            r"model\.bias is float32\[7\] in the checkpoint, expected float32\[8\]",
        ),
        ({"bias": torch.zeros(7, dtype=torch.float64)}, r"model\.bias .* expected float64\[7\]"),
        ({"bias": 3}, r"model\.bias is float32\[7\] in the checkpoint, expected int"),
        ({"bias": {}}, r"model\.bias .* expected dict"),
        ([1], r"model is a dict in the checkpoint, expected list"),
        (torch.zeros(1), r"model is a dict in the checkpoint, expected float32\[1\]"),
    ],
)
def test_mismatch_is_named_and_nothing_is_loaded(path, wrong, message):
    weight = torch.zeros(64, 33)
    model = {"weight": weight, **wrong} if isinstance(wrong, dict) else wrong
    state = {"step": 0, "model": model}
    with pytest.raises(StateMismatch, match=message):
        load(path, 0, 2, state)
    assert state["step"] == 0
    assert not weight.any()


class Subclass(torch.Tensor):
    pass


def freed():
    tensor = torch.zeros(64, 33)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.zeros(64, 33, device="meta"), "meta device"),
        (lambda: torch.zeros(33).expand(64, 33), "an expanded tensor"),
        (lambda: torch.zeros(64, 33).to_sparse(), "of layout torch.sparse_coo"),
        (lambda: torch.zeros(64, 33).as_subclass(Subclass), "Subclass"),
        (freed, "storage was freed"),
    ],
)
def test_tensor_that_cannot_be_loaded_in_place_is_named(path, make, why):
    bias = torch.zeros(7)
    with pytest.raises(StateMismatch, match=rf"model\.weight cannot be loaded in place: .*{why}"):
        load(path, 0, 2, {"model": {"bias": bias, "weight": make()}})
    assert not bias.any()


def test_inference_tensors_are_loaded(tmp_path):
    for url in (tmp_path / "c", f"memory://{tmp_path.name}/c"):
        saved(url, [{"a": torch.ones(2, 3), "b": torch.ones(2)}])
        with torch.inference_mode():
            state = {"a": torch.zeros(3, 2).t(), "b": torch.zeros(2)}
        load(url, state=state)
        assert same(state, {"a": torch.ones(2, 3), "b": torch.ones(2)})


class Picky:
    """An object whose load_state_dict raises."""

    def __init__(self, value=1):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):  # noqa: ARG002 - whatever it is
        raise LookupError("not this one")


def test_failing_codec_or_object_leaves_other_tensors_unchanged(tmp_path):
    def decode(value):
        raise FileNotFoundError(f"no {value} here")

    register_codec("test.picky", Picky, encode=lambda picky: picky.value, decode=decode)
    saved(tmp_path / "c", [{"w": torch.ones(2), "coded": Picky(7), "object": {"value": 3}}])
    for asked, error in (({"coded": None}, FileNotFoundError), ({"object": Picky()}, LookupError)):
        state = {"w": torch.zeros(2), **asked}
        with pytest.raises(error, match="no 7 here|not this one"):
            load(tmp_path / "c", state=state)
        assert not state["w"].any()


def test_damage_leaves_the_whole_state_unchanged(path):
    for file in path.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    state = {**zeros(), "own": torch.zeros(5, dtype=torch.int64), "step": None}
    with pytest.raises(
        DamagedCheckpoint, match=r"rank\d-\w+\.safetensors cannot be used: .*checks"
    ):
        load(path, 1, 2, state)
    assert same({**zeros(), "own": torch.zeros(5, dtype=torch.int64), "step": None}, state)


def test_damage_in_an_unneeded_file_is_ignored(path):
    (other,) = path.glob("rank1-*.safetensors")
    other.unlink()
    assert load(path, 0, 2, {"own": None, "step": 0})[0]["step"] == 5
    with pytest.raises(DamagedCheckpoint, match=r"lacks a file: .*rank1-"):
        load(path, 0, 2)


def test_strided_and_conjugate_tensors_are_loaded_in_place(tmp_path):
    values = {
        "a": torch.randn(4, 6),
        "c": torch.randn(3, dtype=torch.complex64),
        "n": torch.ones(0),
    }
    saved(tmp_path / "c", [values])
    base = torch.zeros(6, 4)
    conjugate = torch.zeros(3, dtype=torch.complex64)
    state = {"a": base.t(), "c": conjugate.conj(), "n": torch.ones(0)}
    load(tmp_path / "c", state=state)
    assert torch.equal(base, values["a"].t())
    assert torch.equal(conjugate, values["c"].conj().resolve_conj())


def test_load_bumps_the_version_counter(tmp_path):
    saved(tmp_path / "c", [{"w": torch.ones(3)}])
    weight = torch.zeros(3, requires_grad=True)
    loss = (weight * weight).sum()
    load(tmp_path / "c", state={"w": weight})
    assert torch.equal(weight.detach(), torch.ones(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Loader:
    """A data loader that knows its position."""

    def __init__(self):
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def everything(model, optimizer, loader):
    parts = {"optimizer": optimizer, "loader": PerRank(loader), "rng": RNGState(), "step": 3}
    return {"model": Replicated(model), **parts}


def test_objects_are_loaded_by_load_state_dict(tmp_path):
    model, optimizer = trained()
    loader = Loader()
    loader.position = 17
    saved(tmp_path / "c", [everything(model, optimizer, loader)] * 2)
    drawn = torch.rand(3)
    other_model, other_optimizer = trained()
    other_loader = Loader()
    state = everything(other_model, other_optimizer, other_loader)
    loaded, missing = load(tmp_path / "c", 1, 2, state)
    assert missing == []
    assert same(model.state_dict(), dict(other_model.state_dict()))
    assert same(optimizer.state_dict(), other_optimizer.state_dict())
    assert other_loader.position == 17
    assert loaded["model"] == Replicated(other_model)
    assert torch.equal(torch.rand(3), drawn)


def test_optimizer_state_keeps_its_keys_and_types(tmp_path):
    _, optimizer = trained()
    saved(tmp_path / "c", [{"optimizer": optimizer}])
    loaded = load(tmp_path / "c")[0]["optimizer"]
    assert same(optimizer.state_dict(), loaded)
    assert set(loaded["state"]) == {0, 1, 2, 3}
    assert isinstance(loaded["param_groups"][0]["betas"], tuple)


def test_resumed_training_matches_uninterrupted_training(tmp_path):
    def steps(model, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.randn(4, 5)).square().sum().backward()
            optimizer.step()

    model, optimizer = trained()
    saved(tmp_path / "c", [{"m": model, "o": optimizer, "r": RNGState()}])
    steps(model, optimizer, 3)
    other, other_optimizer = trained()
    load(tmp_path / "c", state={"m": other, "o": other_optimizer, "r": RNGState()})
    steps(other, other_optimizer, 3)
    assert same(model.state_dict(), dict(other.state_dict()))


def test_lists_and_tuples_are_loaded_by_index(tmp_path):
    saved(tmp_path / "c", [{"l": [torch.ones(2), 1, 2], "t": (1, "x")}])
    tensor = torch.zeros(2)
    loaded, missing = load(tmp_path / "c", state={"l": [tensor, 0], "t": (0, "", 5)})
    assert loaded["l"][0] is tensor
    assert tensor.tolist() == [1, 1]
    assert loaded["l"][1:] == [1, 2]
    assert loaded["t"] == (1, "x", 5)
    assert missing == ["t[2]"]


def test_rank_argument_loads_the_state_of_another_rank(path):
    assert CheckpointReader(RankInfo(7, 8)).read(path, rank=1)[0]["position"] == {
        "epoch": 1,
        "sample": 1,
    }
    loaded, missing = load(path, 7, 8)
    assert missing == ["own", "position"]
    assert set(loaded) == {"model", "optimizer", "step"}
    with pytest.raises(
        MissingKeys, match=r"position was saved per rank, by ranks 0, 1 only.*rank="
    ):
        load(path, 7, 8, {"position": None})


@pytest.mark.parametrize("rank", [-1, "1", 1.0])
def test_bad_rank_argument_is_rejected(path, rank):
    with pytest.raises(ValueError, match="rank must be a non-negative integer"):
        CheckpointReader(RankInfo(0, 2)).read(path, rank=rank)


def test_state_that_is_entirely_per_rank(tmp_path):
    saved(tmp_path / "c", [PerRank({"r": 0}), PerRank({"r": 1})])
    assert load(tmp_path / "c", 1, 2)[0] == {"r": 1}
    with pytest.raises(MissingKeys, match="was saved per rank, by ranks 0, 1 only"):
        load(tmp_path / "c", 2, 4)


@pytest.mark.parametrize(
    "map_location",
    ["cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, _: storage, None],
)
def test_map_location_accepts_torchs_forms(path, map_location):
    assert load(path, map_location=map_location)[0]["model"]["bias"].device.type == "cpu"


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # by upstream's reader
def test_other_arguments_are_ignored_as_upstream_does(tmp_path):
    """With and without a state: upstream's reader takes any keyword and uses none."""
    upstream = _experimental.CheckpointWriter(
        _experimental.CheckpointWriterConfig(), _experimental.RankInfo(0, 1)
    )
    upstream.write(str(tmp_path / "theirs"), {"a": torch.ones(3)})
    saved(tmp_path / "ours", [{"a": torch.ones(3)}])
    theirs = _experimental.CheckpointReader(_experimental.RankInfo(0, 1))
    ours = CheckpointReader(RankInfo(0, 1))
    for state in (None, {"a": torch.zeros(3)}):
        for options in ({"weights_only": False, "mmap": True}, {"rnak": 1}):
            expected = theirs.read(str(tmp_path / "theirs"), state, **options)
            assert same(expected[0], ours.read(tmp_path / "ours", state, **options)[0])
            assert same(expected[0], ours.read(tmp_path / "theirs", state, **options)[0])


def test_map_location_changes_the_device(path):
    for where in ("meta", {"cpu": "meta"}):
        assert load(path, map_location=where)[0]["model"]["bias"].is_meta


def test_missing_checkpoint_is_file_not_found(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("nowhere", "empty", "file"):
        with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
            load(tmp_path / name)
        assert issubclass(CheckpointNotFound, FileNotFoundError)


def test_links_pipes_and_directories_are_rejected(path, tmp_path):
    (file,) = path.glob("rank0-*.safetensors")
    data = file.read_bytes()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(data)

    def link():
        file.symlink_to(elsewhere)

    for make in (link, lambda: os.mkfifo(file), file.mkdir):
        file.unlink()
        make()
        with pytest.raises(DamagedCheckpoint, match="rank0-.* cannot be used"):
            load(path)
        if file.is_dir() and not file.is_symlink():
            file.rmdir()
            file.touch()
    file.unlink()
    file.write_bytes(data)
    load(path)
    shutil.move(path / MANIFEST, elsewhere)
    (path / MANIFEST).symlink_to(elsewhere)
    with pytest.raises(DamagedCheckpoint, match=f"{MANIFEST} cannot be used"):
        load(path)


def test_checkpoint_directory_may_be_a_symlink(path, tmp_path):
    (tmp_path / "link").symlink_to(path)
    assert load(tmp_path / "link", 0, 2)[0]["step"] == 5
    saved(tmp_path / "link", [{"step": 6}])
    assert (tmp_path / "link").is_symlink()
    assert load(path)[0]["step"] == 6


def test_reader_and_writer_signatures_match_upstream():
    import inspect

    from torch.distributed.checkpoint import _experimental as upstream

    for ours in (CheckpointReader, CheckpointWriter):
        theirs = getattr(upstream, ours.__name__)
        for name in ("__init__", "read" if ours is CheckpointReader else "write"):
            theirs_takes = inspect.signature(getattr(theirs, name)).parameters
            assert set(theirs_takes) <= set(inspect.signature(getattr(ours, name)).parameters)
    assert RankInfo(1, 2) == RankInfo(global_world_size=2, global_rank=1)
