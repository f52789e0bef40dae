"""Malicious and damaged checkpoints of torch: a clear error, and no code runs.

Nothing outside of the folder is read, and memory stays within the size of the files.
"""

import collections
import copyreg
import os
import pickle
import random
import resource
import shutil
import struct
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from phalanx.errors import (
    DamagedCheckpoint,
    MissingKeys,
    StateMismatch,
    UnsupportedState,
)

from .internals import verify_torch_checkpoint
from .states import load, same
from .torch_states import (
    read_metadata,
    save_archives,
    save_dcp,
    sharded_folder,
    sharded_state,
    write_metadata,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"


@pytest.fixture
def folder(tmp_path):
    """A folder of sharded tensors that is not yet damaged."""
    sharded_folder(tmp_path / "c")
    return tmp_path / "c"


@pytest.fixture(autouse=True)
def unchanged_torch(tmp_path):
    """Whatever is loaded, torch's classes stay as they are and no command is run."""
    classes = [
        *[each for each in vars(dcp_metadata).values() if isinstance(each, type)],
        filesystem._StorageInfo,
        torch.Size,
        collections.OrderedDict,
    ]
    for each in classes:
        copyreg._slotnames(each)  # which pickle caches on the class
    before = [{**vars(each)} for each in classes]
    yield
    assert [{**vars(each)} for each in classes] == before
    assert not list(tmp_path.rglob("proof"))


def text(value):
    data = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def named(module, name):
    return text(module) + text(name) + pickle.STACK_GLOBAL


def call(function, *arguments):
    """Return the opcodes that call a function."""
    return function + pickle.MARK + b"".join(arguments) + pickle.TUPLE + pickle.REDUCE


def build(instance, state):
    return instance + state + pickle.BUILD


def slots(**attributes):
    """Return a state that sets attributes with setattr."""
    items = b"".join(text(key) + value for key, value in attributes.items())
    return (
        pickle.MARK
        + pickle.NONE
        + pickle.EMPTY_DICT
        + pickle.MARK
        + items
        + pickle.SETITEMS
        + pickle.TUPLE
    )


SIZE = named("torch", "Size")
NEW_METADATA = named(METADATA, "Metadata") + pickle.EMPTY_TUPLE + pickle.NEWOBJ
ITSELF = pickle.EMPTY_LIST + pickle.MEMOIZE + pickle.BINGET + b"\0" + pickle.APPEND


def twice(index):
    """Return the opcodes for a tuple of an object in the memo, twice, which is the next one."""
    return (pickle.BINGET + bytes([index])) * 2 + pickle.TUPLE2 + pickle.MEMOIZE


MULTIPLIED = pickle.EMPTY_TUPLE + pickle.MEMOIZE + b"".join(map(twice, range(60)))
MANY_KEYS = b"".join(text(str(i)) + pickle.NONE for i in range(10_000))
COPY = pickle.BINGET + b"\1" + pickle.BINGET + b"\0" + pickle.TUPLE1 + pickle.REDUCE
COPIED = (
    *[pickle.EMPTY_DICT, pickle.MEMOIZE, pickle.MARK, MANY_KEYS, pickle.SETITEMS],
    *[named("collections", "OrderedDict"), pickle.MEMOIZE, COPY * 10_000],
)
INDEX = named(METADATA, "MetadataIndex") + pickle.EMPTY_TUPLE + pickle.NEWOBJ


def item(key, value):
    return pickle.EMPTY_DICT + key + value + pickle.SETITEM


PICKLES = {
    "key that takes forever to hash": item(MULTIPLIED, pickle.NONE),
    "keys that take forever to hash": (
        pickle.EMPTY_DICT + pickle.MARK + MULTIPLIED + pickle.NONE + pickle.SETITEMS
    ),
    "copies of a dict": b"".join(COPIED),
    "name that takes forever to print": build(
        NEW_METADATA,
        item(
            text("storage_data"),
            item(build(INDEX, item(text("fqn"), MULTIPLIED)), pickle.NONE),
        ),
    ),
    "system": call(named("os", "system"), text("touch proof")),
    "posix": call(named("posix", "system"), text("touch proof")),
    "global": pickle.GLOBAL + b"os\nsystem\n(" + text("touch proof") + b"tR",
    "eval": call(named("builtins", "eval"), text("open('proof', 'w')")),
    "getattr": call(named("builtins", "getattr"), named("torch", "Size"), text("__init__")),
    "import": call(named("importlib", "import_module"), text("os")),
    "torch.load": call(named("torch", "load"), text("proof")),
    "torch.hub": call(named("torch.hub", "load"), text("proof")),
    "serialization": call(named("torch.serialization", "load"), text("proof")),
    "dotted module": call(named(FILESYSTEM, "os.system"), text("touch proof")),
    "dotted class": call(named("torch", "Size.__init__"), text("x")),
    "dotted dtype": named("torch", "float32.__class__"),
    "dunder": named("torch", "__builtins__"),
    "module of torch": named("torch", "os"),
    "class of DCP": named(FILESYSTEM, "FileSystemReader"),
    "function of DCP": named(f"{METADATA}", "dataclass"),
    "path": call(named("pathlib", "Path.home")),
    "empty name": named("torch", ""),
    "number as module": pickle.BININT1 + b"\1" + text("system") + pickle.STACK_GLOBAL,
    "list as name": text("torch") + pickle.EMPTY_LIST + pickle.STACK_GLOBAL,
    "record as name": text("torch") + NEW_METADATA + pickle.STACK_GLOBAL,
    "attributes of a class": build(named(METADATA, "Metadata"), slots(__setstate__=SIZE)),
    "attributes of Size": build(SIZE, slots(__hash__=SIZE)),
    "attributes of dict": build(named("collections", "OrderedDict"), slots(get=SIZE)),
    "attributes of a dtype": build(named("torch", "float32"), slots(itemsize=SIZE)),
    "attributes of a path": build(call(named("pathlib", "PosixPath"), text("x")), slots(open=SIZE)),
    "call of a dtype": call(named("torch", "float32"), text("x")),
    "call of a record": call(NEW_METADATA, text("x")),
    "state of Metadata": build(NEW_METADATA, slots(state_dict_metadata=SIZE)),
    "another root": SIZE,
    "itself": ITSELF,
    "persistent id": pickle.PERSID + b"proof\n",
    "binary persistent id": text("proof") + pickle.BINPERSID,
    "extension": pickle.EXT1 + b"\1",
    "instance": pickle.MARK + text("touch proof") + pickle.INST + b"os\nsystem\n",
    "object": pickle.MARK + SIZE + pickle.OBJ,
    "keywords": SIZE + pickle.EMPTY_TUPLE + pickle.EMPTY_DICT + pickle.NEWOBJ_EX,
    "long text": pickle.BINUNICODE8 + struct.pack("<Q", 1 << 40) + b"x",
    "long bytes": pickle.BINBYTES8 + struct.pack("<Q", 1 << 40) + b"x",
    "long array": pickle.BYTEARRAY8 + struct.pack("<Q", 1 << 33),
    "long frame": pickle.FRAME + struct.pack("<Q", 1 << 40),
    "large memo": pickle.NONE + pickle.LONG_BINPUT + struct.pack("<I", 2**32 - 1),
    "unknown memo": pickle.BINGET + b"\7",
    "empty stack": pickle.BUILD,
    "nothing": b"",
    "deep": pickle.MARK * 100_000,
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickle_that_dcp_does_not_write_is_rejected(folder, monkeypatch, name):
    monkeypatch.chdir(folder.parent)
    data = pickle.PROTO + b"\4" + PICKLES[name] + pickle.STOP
    (folder / ".metadata").write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=r"c/\.metadata cannot be used: "):
        load(folder)
    (problem,) = verify_torch_checkpoint(str(folder), lambda _: None)
    assert ".metadata cannot be used" in problem


@pytest.mark.parametrize(
    "name", ["system", "eval", "getattr", "serialization", "attributes of a class", "large memo"]
)
def test_hostile_value_inside_of_valid_metadata_is_rejected(folder, monkeypatch, name):
    """The attack stands where the metadata names its version, which nothing reads."""
    monkeypatch.chdir(folder.parent)
    metadata = read_metadata(folder)
    metadata.version = "a version that is easy to find"
    data = pickle.dumps(metadata, 4)
    honest = pickle.SHORT_BINUNICODE + bytes([len(metadata.version)]) + metadata.version.encode()
    assert data.count(honest) == 1
    data = data[:2] + data[11:]  # without the frame, whose length would be wrong
    (folder / ".metadata").write_bytes(data.replace(honest, PICKLES[name]))
    if name == "large memo":
        assert same(load(folder)[0], sharded_state()), "costs nothing"
        return
    with pytest.raises(DamagedCheckpoint):
        load(folder)


def chunk(offsets, sizes):
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def place(metadata, **changes):
    """Change the place of a chunk."""
    info = next(iter(metadata.storage_data.values()))
    for name, value in changes.items():
        setattr(info, name, value)


def grid(metadata):
    return metadata.state_dict_metadata["grid"]


def replace_chunk(metadata, i, *box):
    grid(metadata).chunks[i] = chunk(*box)


def remove_place(metadata):
    del metadata.storage_data[next(iter(metadata.storage_data))]


def share_bytes(metadata):
    one, two = [each for each in metadata.storage_data.values() if "__0_" in each.relative_path]
    two.offset, two.length = one.offset, one.length


def change_path(metadata, path):
    metadata.planner_data["rows"] = path


def multiplied():
    value = ()
    for _ in range(60):
        value = value, value
    return value


def share_empty_chunks(metadata):
    """Make many tensors have one list of many chunks, which is in the pickle once."""
    grid(metadata).chunks += [chunk([0, 0], [0, 0])] * 1000
    many = {f"{i}": grid(metadata) for i in range(1000)}
    metadata.state_dict_metadata.update(many)


def set_property(metadata, name, value):
    setattr(grid(metadata).properties, name, value)


CHANGES = {
    "parent": (lambda m: place(m, relative_path="../../secret"), "not a file of the folder"),
    "absolute": (lambda m: place(m, relative_path="/etc/passwd"), "not a file of the folder"),
    "inner": (lambda m: place(m, relative_path="a/b"), "not a file of the folder"),
    "dot": (lambda m: place(m, relative_path=".."), "not a file of the folder"),
    "null": (lambda m: place(m, relative_path="a\0b"), "not a file of the folder"),
    "newline": (lambda m: place(m, relative_path="a\n"), "not a file of the folder"),
    "number": (lambda m: place(m, relative_path=3), "not a file of the folder"),
    "missing file": (lambda m: place(m, relative_path="__9_0.distcp"), "No such file"),
    "negative": (lambda m: place(m, offset=-1), "at an invalid place"),
    "bool": (lambda m: place(m, offset=True), "at an invalid place"),
    "huge": (lambda m: place(m, length=2**70), "at an invalid place"),
    "beyond the end": (lambda m: place(m, length=2**40), "share|it has .* bytes, but"),
    "too short": (lambda m: place(m, length=100), r"is in 100 bytes|not an archive"),
    "shared bytes": (share_bytes, "two entries share"),
    "no place": (remove_place, "is in no file"),
    "overlap": (lambda m: replace_chunk(m, 1, [0, 3], [3, 4]), "is in no file|overlap"),
    "gap": (lambda m: grid(m).chunks.pop(), "overlap or leave a gap"),
    "twice": (lambda m: grid(m).chunks.append(grid(m).chunks[0]), "two chunks at"),
    "outside": (lambda m: replace_chunk(m, 2, [3, 0], [2, 8]), "overlap or leave a gap|in no file"),
    "other dimensions": (lambda m: replace_chunk(m, 0, [0], [3]), "of other dimensions"),
    "enormous shape": (lambda m: setattr(grid(m), "size", torch.Size([2**40] * 3)), "too large"),
    "larger shape": (lambda m: setattr(grid(m), "size", torch.Size([50, 7])), "leave a gap"),
    "enormous chunk": (lambda m: replace_chunk(m, 0, [0, 0], [2**30, 2**30]), "is in .* bytes"),
    "no size": (lambda m: setattr(grid(m), "size", None), "is not a torch.Size"),
    "list of sizes": (lambda m: setattr(grid(m), "size", [5, 7]), "is not a torch.Size"),
    "many dimensions": (lambda m: setattr(grid(m), "size", torch.Size([1] * 99)), "at most 64"),
    "no chunks": (lambda m: setattr(grid(m), "chunks", None), "no list of chunks"),
    "another dtype": (
        lambda m: set_property(m, "dtype", torch.int32),
        r"float32\[3, 4\], expected",
    ),
    "wider dtype": (
        lambda m: set_property(m, "dtype", torch.float64),
        r"float32\[3, 4\], expected",
    ),
    "sparse": (lambda m: set_property(m, "layout", torch.sparse_coo), "not a dense tensor"),
    "no properties": (lambda m: setattr(grid(m), "properties", 1), "no valid dtype"),
    "text as tensor": (lambda m: m.state_dict_metadata.update(grid="x"), "not what DCP writes"),
    "numbers as names": (lambda m: m.state_dict_metadata.update({3: grid(m)}), "a key of type int"),
    "no tensors": (lambda m: setattr(m, "state_dict_metadata", None), "is not a dict"),
    "no places": (lambda m: setattr(m, "storage_data", [1]), "is not a dict"),
    "index": (lambda m: m.storage_data.update({"x": 1}), "not what DCP writes"),
    "planner": (lambda m: setattr(m, "planner_data", [1]), "is not a dict"),
    "path of a number": (lambda m: change_path(m, (0,)), "no valid place in the state"),
    "empty path": (lambda m: change_path(m, ()), "no valid place in the state"),
    "negative index": (lambda m: change_path(m, ("a", -1)), "no valid place in the state"),
    "deep path": (lambda m: change_path(m, ("a",) * 200), "no valid place in the state"),
    "path of a list": (lambda m: change_path(m, ["a"]), "no valid place in the state"),
    "same path": (lambda m: change_path(m, ("grid",)), "occurs twice"),
    "path in a value": (lambda m: change_path(m, ("grid", "x")), "is inside a value"),
    "path that multiplies itself": (
        lambda m: change_path(m, multiplied()),
        "no valid place in the state",
    ),
    "place that multiplies itself": (
        lambda m: place(m, relative_path=multiplied()),
        "not a file of the folder",
    ),
    "shared chunks": (share_empty_chunks, "its tensors have .* chunks"),
    "huge index": (lambda m: change_path(m, ("a", 2**60)), "most of them missing"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_metadata_that_contradicts_itself_is_rejected(folder, name):
    (folder.parent / "secret").write_bytes(b"secret")
    (folder.parent.parent / "secret").write_bytes(b"secret")
    change, message = CHANGES[name]
    metadata = read_metadata(folder)
    change(metadata)
    write_metadata(folder, metadata)
    state = {key: torch.zeros_like(each) for key, each in sharded_state().items()}
    with pytest.raises((DamagedCheckpoint, UnsupportedState), match=message):
        load(folder)
    with pytest.raises((DamagedCheckpoint, UnsupportedState, StateMismatch, MissingKeys)):
        load(folder, state=state, strict=True)
    assert not any(each.any() for each in state.values())


def test_bad_list_and_dict_in_one_place_is_rejected(folder):
    metadata = read_metadata(folder)
    metadata.planner_data = {"grid": ("a", 0), "rows": ("a", "b")}
    write_metadata(folder, metadata)
    with pytest.raises(DamagedCheckpoint, match="a is a list and a dict"):
        load(folder)


def test_links_are_not_followed(folder):
    (folder / "__0_0.distcp").rename(folder.parent / "elsewhere")
    (folder / "__0_0.distcp").symlink_to("../elsewhere")
    with pytest.raises(DamagedCheckpoint, match="symbolic links"):
        load(folder)


def test_damage_of_data_is_found_before_the_state_changes(folder):
    file = folder / "__1_0.distcp"
    honest = file.read_bytes()
    for damaged in (honest[: len(honest) // 2], honest[:-1], b"", b"\0" * len(honest)):
        file.write_bytes(damaged)
        check_rejected(folder)
    tensor = sharded_state()["grid"][:3, 4:].contiguous().numpy().tobytes()
    at = honest.index(tensor)
    file.write_bytes(honest[:at] + bytes([honest[at] ^ 1]) + honest[at + 1 :])
    check_rejected(folder, match="checksum")
    assert any("checksum" in each for each in verify_torch_checkpoint(str(folder), lambda _: None))


def check_rejected(folder, match=None):
    state = {key: torch.zeros_like(each) for key, each in sharded_state().items()}
    for target in (None, state):
        with pytest.raises(DamagedCheckpoint, match=match):
            load(folder, state=target)
    assert not any(each.any() for each in state.values())


class Command:
    def __reduce__(self):
        return os.system, ("touch proof",)


def test_archive_that_runs_a_command_is_rejected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_archives(tmp_path / "a", [{"a": Command()}])
    save_dcp(tmp_path / "b", {"a": Command(), "b": torch.ones(2)})
    for name in "ab":
        with pytest.raises(UnsupportedState, match="needs .*system"):
            load(tmp_path / name)
    assert same(load(tmp_path / "b", state={"b": torch.zeros(2)})[0], {"b": torch.ones(2)})


def rewrite(path, change, *, compress=False):
    """Change the records of an archive."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    change(records)
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in records.items():
            archive.writestr(name, data)


def replace_in_pickle(old, new):
    def change(records):
        (name,) = [each for each in records if each.endswith("data.pkl")]
        assert records[name].count(old) >= 1
        records[name] = records[name].replace(old, new)

    return change


def big_endian(records):
    (name,) = [each for each in records if each.endswith("byteorder")]
    records[name] = b"big"


def without_data(records):
    del records[next(each for each in records if "/data/" in each)]


ARCHIVES = {
    # 21 elements in memory and in the shape: more than there are, or a negative number.
    "longer": (replace_in_pickle(b"K\x15", b"M\xff\xff"), "is not in it|exceeds|cannot load"),
    "negative": (replace_in_pickle(b"K\x15", b"J\xff\xff\xff\xff"), "cannot load|is not in it"),
    "huge": (
        replace_in_pickle(b"K\x15", b"\x8a\x07" + (2**50).to_bytes(7, "little")),
        "is not in it|exceeds|cannot load",
    ),
    "no data": (without_data, "cannot load|is not in it"),
    "byte order": (big_endian, "byte order of another machine"),
    "other class": (replace_in_pickle(b"_rebuild_tensor_v2", b"_import_dotted_name"), "needs|load"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_archive_that_contradicts_itself_is_rejected(tmp_path, name):
    save_archives(tmp_path / "c", [{"a": torch.randn(21)}])
    change, message = ARCHIVES[name]
    rewrite(tmp_path / "c" / "checkpoint_0.pt", change)
    with pytest.raises((DamagedCheckpoint, UnsupportedState), match=message):
        load(tmp_path / "c")


def test_compressed_archive_is_rejected_before_it_fills_the_memory(tmp_path):
    save_archives(tmp_path / "c", [{"a": torch.zeros(1 << 22)}])
    file = tmp_path / "c" / "checkpoint_0.pt"
    rewrite(file, lambda _: None, compress=True)
    assert file.stat().st_size < 1 << 16
    with pytest.raises(DamagedCheckpoint, match="is compressed"):
        load(tmp_path / "c")


def test_list_that_multiplies_itself_is_rejected(tmp_path):
    value = [0]
    for _ in range(40):
        value = [value, value]
    save_archives(tmp_path / "c", [{"a": value}])
    with pytest.raises(DamagedCheckpoint, match="nested too deeply"):
        load(tmp_path / "c")


def test_list_that_contains_itself_is_rejected(tmp_path):
    value = []
    value.append(value)
    save_archives(tmp_path / "c", [{"a": value}])
    with pytest.raises(DamagedCheckpoint, match="nested too deeply"):
        load(tmp_path / "c")


def test_memory_of_expanded_and_overlapping_tensors_is_that_of_the_file(tmp_path):
    base = torch.ones(1000)
    views = [base[i:] for i in range(500)]
    save_archives(tmp_path / "c", [{"large": torch.ones(1).expand(1 << 40), "views": views}])
    loaded, _ = load(tmp_path / "c")
    assert loaded["large"].shape == (1 << 40,)
    assert len({each.untyped_storage().data_ptr() for each in loaded["views"]}) == 1


def test_expanded_tensor_that_loading_would_copy_is_rejected(tmp_path):
    one = torch.ones(1, dtype=torch.complex64)
    for name, each in {"conj": one.conj(), "neg": one.conj().imag}.items():
        save_archives(tmp_path / name, [{"large": each.expand(1 << 40)}])
        with pytest.raises(UnsupportedState, match="large is an expanded tensor"):
            load(tmp_path / name)


@pytest.mark.parametrize("seed", range(2))
def test_random_damage_raises_one_of_our_errors(tmp_path, seed):
    sharded_folder(tmp_path / "dcp")
    save_dcp(tmp_path / "values", {"a": (torch.ones(3), [1, "x"]), "b": {"c": 2.5}})
    save_archives(tmp_path / "archives", [{"a": torch.ones(3), "b": [torch.zeros(2).t(), 3]}])
    rng = random.Random(seed)
    files = sorted(each for each in tmp_path.rglob("*") if each.is_file())
    honest = {file: file.read_bytes() for file in files}
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limit[1]))
    try:
        for _ in range(100):
            file = rng.choice(files)
            data = bytearray(honest[file])
            for _ in range(rng.randrange(1, 4)):
                at = rng.randrange(len(data))
                data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(1, 3))
            file.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)
            with suppress(DamagedCheckpoint, UnsupportedState):
                load(file.parent)
            file.write_bytes(honest[file])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    shutil.rmtree(tmp_path / "dcp")
