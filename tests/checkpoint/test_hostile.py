"""Fuzzing of corrupted and malicious files: a clear error, and no state is touched.

The suite runs 2,000 inputs, half of them in ``make test-slow``, and with PHALANX_SOAK set
(``make soak``) many more. Every input is derived from a number, which a failure reports.
"""

import json
import os
import random
import shutil

import pytest
import torch

from cases import in_two_suites
from phalanx.checkpoint import PerRank
from phalanx.errors import CheckpointNotFound, DamagedCheckpoint, MissingKeys, StateMismatch

from .internals import MANIFEST, verify
from .states import load, same, saved
from .test_manifest import seal

SOAK = "PHALANX_SOAK" in os.environ
SHARES = 8
"""Number of tests that share the inputs."""
COUNT = (24_000 if SOAK else 2_000) // SHARES

STRANGE = [
    None, True, -1, 0, 1, 2**31, 2**62, 2**64, 10**40, 1.5, "", "x", "../../../etc/passwd",
    "/etc/passwd", "\0", "nan", [], {}, [[]], {"": {}}, "float64", "int1", "0" * 32,
    {"$tensor": {}}, {"$tensor": None}, {"$per_rank": {"0": 1}}, {"$dict": [[None, None]]},
    {"$tuple": [1, {"$float": "inf"}]}, {"$codec": ["x", {}]}, {"$size": [2**62, 2**62]},
]  # fmt: skip


def wanted():
    return {
        "model": {"w": torch.zeros(40, 3), "h": torch.zeros(5, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(0.0)}}, "betas": (0.0, 0.0)},
        "note": "",
        "own": torch.zeros(3),
    }


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Return the files of a small checkpoint with values of every kind, by name."""
    path = tmp_path_factory.mktemp("original") / "c"
    torch.manual_seed(0)
    state = {
        "model": {"w": torch.randn(40, 3), "h": torch.randn(5).bfloat16(), "none": torch.ones(0)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "betas": (0.9, 0.999)},
        "note": "something",
        "nan": float("nan"),
    }
    saved(path, [{**state, "own": PerRank(torch.full((3,), float(rank)))} for rank in range(2)])
    return {file.name: file.read_bytes() for file in path.iterdir()}


def flip(data, rng):
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def cut(data, rng):
    return data[: rng.randrange(len(data))]


def grow(data, rng):
    return data + rng.randbytes(rng.randrange(1, 50))


def splice(data, rng):
    place, size = rng.randrange(len(data)), rng.randrange(1, 40)
    return data[:place] + rng.randbytes(size) + data[place + size :]


def header_length(data, rng):
    return rng.randbytes(8) + data[8:]


def places(value, path=()):
    """Yield the paths of all values in a JSON document."""
    yield path
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(each, (*path, key))


def rewrite(data, rng):
    """Change values of a manifest and recompute its checksum."""
    fields = json.loads(data)
    del fields["xxh3_128"]
    for _ in range(rng.randrange(1, 3)):
        *way, last = rng.choice([path for path in places(fields) if path])
        parent = fields
        for key in way:
            parent = parent[key]
        act = rng.randrange(4)
        if act == 0 and isinstance(parent, dict):
            parent[str(rng.choice(STRANGE))] = parent.pop(last)
        elif act == 1:
            del parent[last]
        elif act == 2 and isinstance(parent[last], int):
            parent[last] += rng.choice([-1, 1, 8, -8, 2**40])
        else:
            parent[last] = json.loads(json.dumps(rng.choice(STRANGE)))
    return seal(fields)


def respell(data, rng):
    """Damage the text of a manifest and recompute its checksum."""
    damaged = rng.choice([flip, cut, splice])(data[data.index(b",\n") + 2 :], rng)
    return seal(damaged)


def mutate(files, number):
    """Return the files with some damage."""
    rng = random.Random(number)
    files = dict(files)
    if number % 2:
        act = rng.choice([rewrite, rewrite, rewrite, respell, respell, flip, cut, grow, splice])
        files[MANIFEST] = act(files[MANIFEST], rng)
    else:
        name = rng.choice(sorted(set(files) - {MANIFEST}))
        act = rng.choice([flip, flip, cut, grow, splice, header_length, None])
        if act is None:
            del files[name]
        else:
            files[name] = act(files[name], rng)
    return files


@pytest.mark.parametrize("share", in_two_suites(SHARES))
def test_corrupted_checkpoints_are_rejected(original, tmp_path, share):
    folder = tmp_path / "around" / "c"
    folder.mkdir(parents=True)
    put(folder, original)
    honest = load(folder, 1, 2)[0]
    surroundings = listing(tmp_path)
    files, survived = original, 0
    for number in range(share * COUNT, (share + 1) * COUNT):
        before, files = files, mutate(original, number)
        put(folder, files, before)
        whole = try_to_load(folder, None, number)
        state = wanted()
        if try_to_load(folder, state, number) is None:
            assert same(wanted(), state), f"input {number} was loaded in part"
        is_good = try_to_verify(folder, number) == []
        # A splice may write the bytes that were there: the names of files are random.
        may_be_good = files[MANIFEST] != original[MANIFEST] or files == original
        assert may_be_good or not is_good, f"input {number} is not good"
        if whole is not None:
            survived += 1
            if files[MANIFEST] == original[MANIFEST]:
                assert same(honest, whole), f"input {number} is not what was saved"
        if number % 100 == 0:
            assert listing(tmp_path) == surroundings, f"input {number} wrote something"
    assert listing(tmp_path) == surroundings
    assert survived < COUNT / 4, "an enemy may rewrite values, but most damage is noticed"


def try_to_load(folder, state, number):
    try:
        return load(folder, 1, 2, state)[0]
    except (DamagedCheckpoint, CheckpointNotFound, StateMismatch, MissingKeys):
        return None
    except BaseException as error:
        raise AssertionError(f"input {number} is not handled: {error!r}") from error


def try_to_verify(folder, number):
    try:
        return verify(str(folder))
    except CheckpointNotFound as error:
        return [str(error)]
    except BaseException as error:
        raise AssertionError(f"input {number} is not handled: {error!r}") from error


def put(folder, files, before=None):
    """Write the files that differ from those already there."""
    for name, data in files.items():
        if before is None or before.get(name) != data:
            # A new file: ext4 flushes the disk when a file is truncated and rewritten.
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_bytes(data)
    for name in set(before or ()) - set(files):
        (folder / name).unlink()


def listing(root):
    """List everything below a directory except the checkpoint."""
    return sorted(str(path) for path in root.rglob("*") if path.parent.name != "c")


def test_huge_sparse_file_is_rejected_without_reading_it(original, tmp_path):
    folder = tmp_path / "c"
    folder.mkdir()
    put(folder, original)
    (file,) = folder.glob("rank0-*")
    os.truncate(file, 1 << 40)
    with pytest.raises(DamagedCheckpoint, match="expected"):
        load(folder)
    shutil.rmtree(folder)
