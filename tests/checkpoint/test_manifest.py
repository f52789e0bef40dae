"""The manifest: human-readable, checksummed and validated."""

import json
import re

import pytest
import torch

from phalanx.errors import DamagedCheckpoint, UnsupportedState

from .internals import MANIFEST, Manifest, checksum, decode_state, verify
from .states import load, mixed, save, saved

EMPTY = checksum(b"")


def seal(fields):
    """Encode a manifest with a valid checksum, whatever its contents."""
    rest = fields if isinstance(fields, bytes) else json.dumps(fields)[1:].encode()
    return f'{{\n  "xxh3_128": "{checksum(rest)}",\n'.encode() + rest


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """Return the path of a checkpoint and the fields of its manifest."""
    path = tmp_path_factory.mktemp("honest") / "c"
    saved(path, [mixed(0), mixed(1)])
    fields = json.loads((path / MANIFEST).read_bytes())
    del fields["xxh3_128"]
    return path, fields


def tensor_of(fields):
    return fields["state"]["model"]["weight"]["$tensor"]


def with_change(honest, change):
    """Change the fields of a manifest and decode it."""
    fields = json.loads(json.dumps(honest[1]))
    change(fields)
    manifest = Manifest.load(seal(fields), "c/manifest.json")
    return decode_state(manifest, 0, "c/manifest.json")


def test_manifest_is_human_readable(honest):
    text = (honest[0] / MANIFEST).read_text()
    assert '\n  "format": "phalanx checkpoint",\n  "version": 1,\n' in text
    assert '\n    "step": 0,\n' in text
    weight = next(line for line in text.splitlines() if '"weight"' in line)
    assert '"dtype": "float32", "shape": [64, 33]' in weight


def test_unchanged_manifest_is_accepted(honest):
    with_change(honest, dict.copy)


CHANGES = {
    "unknown version": (lambda f: f.update(version=2), "has version 2"),
    "version of no use": (lambda f: f.update(version="1"), "version"),
    "other format": (lambda f: f.update(format="x"), "format"),
    "unknown field": (lambda f: f.update(x=1), "unknown field"),
    "missing field": (lambda f: f.pop("files"), "missing"),
    "no ranks": (lambda f: f.update(ranks=0), "ranks"),
    "bad save": (lambda f: f.update(save="../x"), "save"),
    "negative size": (lambda f: next(iter(f["files"].values())).update(bytes=-1), "bytes"),
    "absurd size": (lambda f: next(iter(f["files"].values())).update(bytes=10**30), "bytes"),
    "text for a size": (lambda f: next(iter(f["files"].values())).update(bytes="1"), "bytes"),
    "bad checksum": (lambda f: tensor_of(f)["pieces"][0].update(xxh3_128="zz"), "xxh3_128"),
    "other checksum": (
        lambda f: f["state"].update(again={"$tensor": _other_checksum(tensor_of(f))}),
        "different tensors at",
    ),
    "other shape for the same bytes": (
        lambda f: f["state"].update(again={"$tensor": {**tensor_of(f), "shape": [33, 64]}}),
        "different tensors at",
    ),
    "negative shape": (lambda f: tensor_of(f).update(shape=[-1]), "shape"),
    "wrong shape": (lambda f: tensor_of(f).update(shape=[64, 34]), "its shards have 8448 bytes"),
    "absurd shape": (lambda f: tensor_of(f).update(shape=[2**40, 2**40]), "too large"),
    "absurd empty shape": (lambda f: tensor_of(f).update(shape=[0, 2**61, 2**61]), "too large"),
    "many dimensions": (lambda f: tensor_of(f).update(shape=[1] * 65 + [64, 33]), "shards"),
    "unknown type": (
        lambda f: tensor_of(f).update(dtype="float31"),
        "which this torch does not store",
    ),
    "no type": (lambda f: tensor_of(f).update(dtype="Tensor"), "which this torch does not store"),
    **{
        f"quantized {name}": (
            lambda f, name=name: tensor_of(f).update(dtype=name),
            "does not store",
        )
        for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
    },
    "unknown device": (lambda f: tensor_of(f).update(device="toaster"), "unknown device"),
    "unknown file": (
        lambda f: tensor_of(f)["pieces"][0].update(file="../../etc/passwd"),
        "not a file of the checkpoint",
    ),
    "range outside": (
        lambda f: tensor_of(f)["pieces"][0].update(at=[10**9, 10**9 + 8448]),
        r"\.\.1000008448 of .*, which is not a range of its data",
    ),
    "range in the header": (
        lambda f: tensor_of(f)["pieces"][0].update(at=[0, 8448]),
        r"0\.\.8448 of .*, which is not a range of its data",
    ),
    "range backwards": (
        lambda f: tensor_of(f)["pieces"][0]["at"].reverse(),
        "not a range of its data",
    ),
    "shard twice": (
        lambda f: tensor_of(f)["pieces"].extend(tensor_of(f)["pieces"]),
        "same shard twice",
    ),
    "a gap": (lambda f: f["state"].pop("model"), "overlap or leave a gap|tensors end"),
}


def _other_checksum(tensor):
    other = json.loads(json.dumps(tensor))
    other["pieces"][0]["xxh3_128"] = "0" * 32
    return other


@pytest.mark.parametrize("name", CHANGES)
def test_invalid_field_is_rejected(honest, name):
    change, message = CHANGES[name]
    with pytest.raises(DamagedCheckpoint, match=f"^c/manifest.json cannot be used: .*{message}"):
        with_change(honest, change)


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/x.safetensors", "a/b.safetensors", ".x.safetensors", "x.bin", "", "x\0"],
)
def test_file_name_outside_the_directory_is_rejected(honest, name):
    def change(fields):
        fields["files"][name] = fields["files"].pop(next(iter(fields["files"])))

    with pytest.raises(DamagedCheckpoint):
        with_change(honest, change)


def sealed(rest):
    """Encode a manifest that is valid up to `rest`."""
    start = b'"format": "phalanx checkpoint", "version": 1, "save": "0123456789abcdef", '
    return seal(start + b'"ranks": 1, "files": {}, ' + rest)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not begin like a manifest"),
        (b"{}", "does not begin"),
        (b'{\n  "xxh3_128": "' + b"0" * 32 + b'",\n}', "checksum is wrong"),
        (seal(b"}"), "JSON"),
        (seal(b'"a": 1}'), "missing required field"),
        (sealed(b'"xxh3_128": 2, "state": 1}'), "unknown field"),
        (sealed(b'"state": NaN}'), "JSON"),
        (sealed(b'"state": ' + b"[" * 100_000), "deep"),
        (sealed(b'"state": ' + b"9" * 10_000 + b"}"), "out of range"),
        (sealed(b'"state": "x"} x'), "JSON"),
        (seal(b"\x00}"), "JSON"),
        (sealed(b'"state": ["\\uD800"]}'), "truncated"),
        (sealed(b'"state": ["\\uD800 and so on"]}'), "JSON"),
        (sealed(b'"state": ["\xff"]}'), "utf-8"),
        (sealed(b'"ranks": 2, "state": 1}'), "same key twice: 'ranks'"),
        (sealed(b'"state": [{"a": 1, "b": 2, "\\u0062": 3}]}'), "same key twice: 'b'"),
        (seal(b'"version": 2, "files": 1}'), "has version 2, this phalanx reads version 1"),
    ],
)
def test_malformed_manifest_is_rejected(data, message):
    with pytest.raises(DamagedCheckpoint, match=f"^m cannot be used: its? .*({message})"):
        Manifest.load(data, "m")


def test_too_deep_state_is_rejected(honest):
    def change(fields):
        for _ in range(500):
            fields["state"] = [fields["state"]]

    with pytest.raises(DamagedCheckpoint, match="nested"):
        with_change(honest, change)


def test_oversized_manifest_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.checkpoint._manifest.MAX_MANIFEST_BYTES", 1000)
    saved(tmp_path / "c", [{"a": [1.5] * 100}])
    (error,) = save(tmp_path / "c", [{"a": [1.5] * 1000}])
    assert isinstance(error, UnsupportedState)
    assert "the manifest would have " in str(error)
    assert load(tmp_path / "c")[0] == {"a": [1.5] * 100}


def backwards(fields):
    name = next(iter(fields["files"]))
    fields["files"] = {name: {"bytes": 50, "header": {"bytes": 100, "xxh3_128": EMPTY}}}
    piece = {"file": name, "at": [100, 50], "xxh3_128": EMPTY}
    fields["state"] = {"$tensor": {"dtype": "uint8", "shape": [0], "pieces": [piece]}}


def deep(wrap):
    def change(fields):
        fields["files"], fields["state"] = {}, 1
        for _ in range(350):
            fields["state"] = wrap(fields["state"])

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (backwards, "at 100..50 of "),
        (deep(lambda inner: {"$tuple": [inner]}), "nested too deep"),
        (deep(lambda inner: {"$per_rank": {"0": inner}}), "nested too deep"),
        (
            lambda f: f.update(files={}, state={"$per_rank": {"9" * 5000: 1}}),
            "has an invalid '$per_rank': ",
        ),
    ],
)
def test_verify_rejects_invalid_fields(honest, tmp_path, change, message):
    fields = json.loads(json.dumps(honest[1]))
    change(fields)
    (tmp_path / MANIFEST).write_bytes(seal(fields))
    (problem,) = verify(str(tmp_path))
    assert problem.startswith(f"{tmp_path / MANIFEST} cannot be used: ")
    assert message in problem


def test_any_bit_flip_in_the_manifest_is_detected(honest, tmp_path):
    data = bytearray((honest[0] / MANIFEST).read_bytes())
    for place in range(0, len(data), 97):
        data[place] ^= 1
        with pytest.raises(DamagedCheckpoint):
            Manifest.load(bytes(data), "m")
        data[place] ^= 1
    Manifest.load(bytes(data), "m")


def test_manual_edit_is_detected(tmp_path):
    saved(tmp_path / "c", [{"lr": 0.1}])
    file = tmp_path / "c" / MANIFEST
    file.write_text(file.read_text().replace("0.1", "0.2"))
    with pytest.raises(DamagedCheckpoint, match=re.escape(f"{file} cannot be used: its checksum")):
        load(tmp_path / "c")


def test_manifest_size_per_tensor_is_bounded(tmp_path):
    """The manifest grows with the number of tensors, not with depth or world size."""
    state = {f"layer.{i}": torch.zeros(1) for i in range(2000)}
    saved(tmp_path / "c", [state])
    assert (tmp_path / "c" / MANIFEST).stat().st_size < 2000 * 250
