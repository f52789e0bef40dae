"""Folders of torch's DCP and of its experimental checkpointer load bit for bit."""

import gc
import pickle
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _experimental as upstream
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from phalanx.checkpoint import make_sync_checkpointer
from phalanx.checkpoint.components import CheckpointReader, RankInfo
from phalanx.errors import (
    CheckpointNotFound,
    DamagedCheckpoint,
    InvalidArgument,
    MissingKeys,
    StateMismatch,
    UnsupportedState,
)

from .internals import Source, convert_checkpoint
from .states import load, same, trained
from .torch_states import (
    kinds,
    save_archives,
    save_dcp,
    sharded_folder,
    sharded_state,
    zeros_like,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled"  # by DCP, since one process saves
)

SAVERS = {
    "dcp": save_dcp,
    "archives": lambda path, state: save_archives(path, [state]),
}


@pytest.fixture(params=SAVERS)
def saver(request):
    return SAVERS[request.param]


def test_state_of_every_kind_equals_what_was_saved(tmp_path, saver):
    saver(tmp_path / "c", kinds())
    loaded, missing = load(tmp_path / "c")
    assert missing == []
    assert list(loaded) == list(kinds())
    for key, value in kinds().items():
        assert same(value, loaded[key]), key


def test_state_of_every_kind_is_loaded_in_place(tmp_path, saver):
    saver(tmp_path / "c", kinds())
    state = zeros_like(kinds())
    tensors = [state["transposed"], state["nested"]["list"][0], state["conjugate"]]
    checkpointer = make_sync_checkpointer()
    assert checkpointer.load(str(tmp_path / "c"), state, strict=True) is state
    assert same(kinds(), state)
    after = [state["transposed"], state["nested"]["list"][0], state["conjugate"]]
    assert all(one is two for one, two in zip(tensors, after, strict=True))


def test_missing_and_mismatching_keys_are_reported_as_for_ours(tmp_path, saver):
    saver(tmp_path / "c", kinds())
    state = {"float32": torch.zeros(3, 4), "other": 1, "nested": {"more": 2}}
    assert load(tmp_path / "c", state=state)[1] == ["other", "nested.more"]
    with pytest.raises(MissingKeys):
        load(tmp_path / "c", state=state, strict=True)
    untouched = torch.zeros(3, 4)
    with pytest.raises(StateMismatch, match=r"bfloat16 is bfloat16\[3, 4\] in the checkpoint"):
        load(tmp_path / "c", state={"float32": untouched, "bfloat16": torch.zeros(3, 4)})
    assert not untouched.any()


def test_only_what_is_asked_for_is_read(tmp_path):
    """With one file per entry, files of other entries may be missing."""
    save_dcp(tmp_path / "c", kinds(), single_file_per_rank=False)
    with open(tmp_path / "c" / ".metadata", "rb") as file:
        places = pickle.load(file).storage_data
    files = {index.fqn: info.relative_path for index, info in places.items()}
    assert len({*files.values()}) == len(files)
    for key in set(files) - {"float32", "large"}:
        (tmp_path / "c" / files[key]).unlink()
    state = {"float32": torch.zeros(3, 4), "large": None}
    assert same(load(tmp_path / "c", state=state)[0], {k: kinds()[k] for k in state})
    with pytest.raises(DamagedCheckpoint, match="No such file"):
        load(tmp_path / "c")
    with pytest.raises(DamagedCheckpoint, match="No such file"):
        load(tmp_path / "c", state={"float32": torch.zeros(3, 4), "betas": None})


def test_data_without_checksums_is_read(tmp_path, saver):
    torch.serialization.set_crc32_options(False)
    try:
        saver(tmp_path / "c", kinds())
    finally:
        torch.serialization.set_crc32_options(True)
    assert same(kinds(), load(tmp_path / "c")[0])


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_of_any_pickle_protocol_is_read(tmp_path, protocol):
    save_dcp(tmp_path / "c", kinds())
    file = tmp_path / "c" / ".metadata"
    file.write_bytes(pickle.dumps(pickle.loads(file.read_bytes()), protocol))
    assert same(kinds(), load(tmp_path / "c")[0])


def test_state_that_was_not_flattened_is_read(tmp_path):
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    writer = dcp.FileSystemWriter(tmp_path / "c", sync_files=False)
    dcp.save(
        {"a": torch.ones(2), "b": {"c": 3}}, storage_writer=writer, planner=planner, no_dist=True
    )
    assert same(load(tmp_path / "c")[0], {"a": torch.ones(2), "b": {"c": 3}})


def test_remote_folders_are_read(tmp_path, saver):
    fsspec = pytest.importorskip("fsspec")
    saver(tmp_path / "c", kinds())
    fsspec.filesystem("memory").put(str(tmp_path / "c"), f"/{tmp_path.name}/c", recursive=True)
    loaded, _ = load(f"memory://{tmp_path.name}/c", state=zeros_like(kinds()))
    assert same(kinds(), loaded)


def test_optimizer_with_numbered_parameters_is_loaded_from_dcp(tmp_path):
    """DCP turns the numbers of parameters into strings; the optimizer gets numbers again."""
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save_dcp(tmp_path / "c", state)
    other, fresh = trained()
    fresh = torch.optim.AdamW(other.parameters())
    load(tmp_path / "c", state={"model": other, "optimizer": fresh}, strict=True)
    assert same(dict(model.state_dict()), dict(other.state_dict()))
    assert same(optimizer.state_dict(), fresh.state_dict())
    target = zeros_like(optimizer.state_dict())
    assert load(tmp_path / "c", state={"optimizer": target})[1] == []
    assert same(optimizer.state_dict(), target)
    assert same(optimizer.state_dict(), load(tmp_path / "c")[0]["optimizer"])
    convert_checkpoint(str(tmp_path / "c"), str(tmp_path / "ours"))
    assert same(optimizer.state_dict(), load(tmp_path / "ours")[0]["optimizer"])


def test_strings_that_look_like_numbers_stay_strings(tmp_path):
    """As keys of a `ParameterList`, and of what only resembles an optimizer."""
    model = torch.nn.ParameterList([torch.ones(2), torch.zeros(2)])
    resembling = {"state": {"7": torch.ones(1)}, "param_groups": [{"params": [0, 1]}]}
    save_dcp(tmp_path / "c", {"model": model.state_dict(), "other": resembling})
    assert same(load(tmp_path / "c")[0], {"model": {**model.state_dict()}, "other": resembling})


def test_tensors_that_shared_memory_share_it_again(tmp_path):
    base = torch.arange(6.0)
    save_archives(tmp_path / "c", [{"a": base, "tied": base, "view": base[2:4]}])
    loaded, _ = load(tmp_path / "c")
    loaded["a"].fill_(1)
    assert loaded["tied"].eq(1).all()
    assert loaded["view"].eq(1).all()


def test_each_rank_reads_its_own_archive(tmp_path):
    save_archives(
        tmp_path / "c", [{"rank": rank, "a": torch.full((2,), rank)} for rank in range(3)]
    )
    for rank in range(3):
        reader = upstream.CheckpointReader(upstream.RankInfo(rank, 3))
        assert same(reader.read(str(tmp_path / "c"))[0], load(tmp_path / "c", rank, 3)[0])
    reader = CheckpointReader(RankInfo(3, 4))
    assert reader.read(tmp_path / "c", rank=1)[0]["rank"] == 1
    with pytest.raises(FileNotFoundError):
        upstream.CheckpointReader(upstream.RankInfo(3, 4)).read(str(tmp_path / "c"))
    with pytest.raises(CheckpointNotFound, match=r"no state of rank 3, only of ranks 0, 1, 2"):
        load(tmp_path / "c", 3, 4)


@pytest.mark.parametrize("name", ["checkpoint_00.pt", "checkpoint_\u0660.pt"])
def test_name_that_torch_does_not_write_is_no_archive(tmp_path, name):
    save_archives(tmp_path / "c", [{"a": 1}])
    (tmp_path / "c" / name).write_bytes(b"")
    assert load(tmp_path / "c")[0] == {"a": 1}


def test_load_into_strided_tensors_copies_one_at_a_time(tmp_path, monkeypatch):
    names = ["a", "b", "c"]
    save_archives(tmp_path / "c", [{name: torch.ones(512, 256) for name in names}])
    state = {name: torch.zeros(256, 512).t() for name in names}
    read, seen = Source.read_chunks, []

    def live(*args):
        found = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        seen.append(len({each.data_ptr() for each in found if each.nbytes == 512 * 256 * 4}))
        return read(*args)

    monkeypatch.setattr(Source, "read_chunks", live)
    loaded, _ = load(tmp_path / "c", state=state)
    assert same(loaded, {name: torch.ones(512, 256) for name in names})
    assert max(seen) <= len(names) + 1


def test_our_checkpoint_in_the_same_folder_comes_first(tmp_path):
    save_archives(tmp_path / "c", [{"whose": "torch's"}])
    make_sync_checkpointer().save(str(tmp_path / "c"), {"whose": "ours"})
    assert load(tmp_path / "c")[0] == {"whose": "ours"}


def test_chunks_along_two_dimensions_are_assembled(tmp_path):
    sharded_folder(tmp_path / "c")
    assert same(load(tmp_path / "c")[0], sharded_state())
    target = {"grid": torch.zeros(7, 5).t(), "rows": torch.zeros(4, 3, dtype=torch.bfloat16)}
    assert same(load(tmp_path / "c", state=target)[0], sharded_state())


class Unknown:
    """A class that torch.load(weights_only=True) does not admit."""

    def __init__(self):
        self.tensor = torch.ones(2)


def test_unsafe_value_raises_only_if_it_is_asked_for(tmp_path):
    save_dcp(tmp_path / "c", {"a": torch.ones(2), "config": Unknown()})
    assert same(load(tmp_path / "c", state={"a": torch.zeros(2)})[0], {"a": torch.ones(2)})
    with pytest.raises(UnsupportedState, match=r"test_torch_formats\.Unknown.*add_safe_globals"):
        load(tmp_path / "c")


def test_value_of_a_class_that_was_admitted_but_has_no_codec_is_named(tmp_path):
    save_archives(tmp_path / "c", [{"config": Unknown()}])
    with (
        torch.serialization.safe_globals([Unknown]),
        pytest.raises(UnsupportedState, match=r"config in .* has the type Unknown"),
    ):
        load(tmp_path / "c")


def test_hugging_face_layouts_are_named(tmp_path):
    state = {"a": torch.ones(2), "b": torch.zeros(3)}
    for distributed in (False, True):
        path = str(tmp_path / str(distributed))
        writer = dcp.HuggingFaceStorageWriter(path, save_distributed=distributed)
        dcp.save(state, storage_writer=writer, no_dist=True)
        with pytest.raises(InvalidArgument, match="HuggingFaceStorageReader"):
            load(path)
    for each in (state, {"a": torch.ones(2)}):
        save_dcp(tmp_path / "c", each, serialization_format=SerializationFormat.SAFETENSORS)
        with pytest.raises(UnsupportedState, match=r"__0_0\.distcp is a safetensors file"):
            load(tmp_path / "c")
        shutil.rmtree(tmp_path / "c")


class Doubled(dcp._extension.StreamTransformExtension):
    """An extension of DCP."""

    def transform_to(self, output):
        return output

    def transform_from(self, stream):
        return stream

    def get_descriptor(self):
        return "doubled"

    @staticmethod
    def from_descriptor(_version):
        return Doubled()

    @staticmethod
    def registry_name():
        return "doubled"


def test_transformed_data_is_named(tmp_path):
    save_dcp(tmp_path / "c", {"a": torch.ones(2)}, _extensions=[Doubled()])
    with pytest.raises(UnsupportedState, match="'a' was transformed .*doubled"):
        load(tmp_path / "c")


def on_two_ranks(ctx, root):
    """Save sharded states in every way; return what they were, whole."""
    dist.init_process_group("gloo", store=ctx.store, rank=ctx.rank, world_size=ctx.size)
    mesh = init_device_mesh("cpu", (ctx.size,))
    torch.manual_seed(0)
    whole = {
        "rows": torch.randn(5, 7).bfloat16(),
        "columns": torch.randn(5, 7, dtype=torch.complex64),
        "one row": torch.randn(1, 3),
        "none": torch.empty(0, 3),
    }
    state = {
        key: distribute_tensor(each, mesh, [Shard(int(key == "columns"))])
        for key, each in whole.items()
    }
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    for each in model:
        fully_shard(each, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    state["model"], state["optimizer"] = get_state_dict(model, optimizer)
    whole |= gathered({key: state[key] for key in ("model", "optimizer")})
    state[f"own{ctx.rank}"] = whole[f"own{ctx.rank}"] = torch.full((2,), ctx.rank)
    state["step"] = whole["step"] = 7
    dcp.save(state, checkpoint_id=f"{root}/sync")
    dcp.async_save(state, checkpoint_id=f"{root}/async").result()
    dcp.save({"rank": ctx.rank}, checkpoint_id=f"{root}/alone", use_collectives=False)
    dist.destroy_process_group()
    return whole


def gathered(state):
    if hasattr(state, "full_tensor"):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: gathered(each) for key, each in state.items()}
    if isinstance(state, list):
        return list(map(gathered, state))
    return state


@pytest.mark.slow  # every rank imports FSDP and DTensor
@pytest.mark.filterwarnings("ignore")
def test_sharded_tensors_of_two_ranks_are_whole(ranks, tmp_path):
    one, two = ranks.run(on_two_ranks, 2, args=(str(tmp_path),), timeout=60)
    for name in ("sync", "async"):
        loaded, _ = load(tmp_path / name, 1, 4)
        assert {*loaded} == {*one, *two}
        for key, value in {**one, **two}.items():
            assert same(value, loaded[key]), key
    for rank in range(2):
        assert load(tmp_path / "alone", rank, 2)[0] == {"rank": rank}
    with pytest.raises(CheckpointNotFound, match="only of ranks 0, 1"):
        load(tmp_path / "alone", 2, 4)
