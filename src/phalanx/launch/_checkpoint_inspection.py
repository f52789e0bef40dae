"""What `phalanx checkpoint` finds and prints, as tables and as JSON; works without torch.

A damaged checkpoint is listed as such and never hides the others.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from .._formatting import format_age, format_count, format_size, format_table
from ..checkpoint._manifest import (
    MANIFEST,
    MalformedManifest,
    Manifest,
    ManifestEntry,
    TensorEntry,
    check_ranges,
    list_entries,
)
from ..checkpoint._retention import RetentionDecision
from ..checkpoint._step_directory import (
    ReadLock,
    StepDirectory,
    lock_for_reading,
    parse_step_name,
    read_manifest,
    step_directory_at,
)
from ..checkpoint._verify import stored_digest, verify
from ..errors import CheckpointNotFound, DamagedCheckpoint, InvalidArgument

_MAX_VALUE_WIDTH = 60  # characters of a value that are shown
_ATTEMPTS = 10


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint as its manifest describes it."""

    path: str
    manifest: Manifest | None
    """The manifest; None if it is damaged."""
    damage: str | None = None
    state: tuple[ManifestEntry, ...] = ()

    @property
    def step(self) -> int | None:
        """The step in the directory's name."""
        return parse_step_name(os.path.basename(self.path.rstrip("/")))

    @property
    def bytes(self) -> int:
        """The total size of its files."""
        files = {} if self.manifest is None else self.manifest.files
        return sum(entry.bytes for entry in files.values())

    @property
    def age_seconds(self) -> float | None:
        """The age of the manifest file; None for remote storage."""
        try:
            return time.time() - os.stat(os.path.join(self.path, MANIFEST)).st_mtime
        except OSError:
            return None

    def entries(self) -> tuple[ManifestEntry, ...]:
        """Return its entries; raise `DamagedCheckpoint` if it is damaged."""
        if self.manifest is None:
            raise DamagedCheckpoint(self.damage)
        return self.state

    def to_json(self) -> dict[str, Any]:
        """Return a summary for JSON."""
        if self.manifest is None:
            return {"path": self.path, "step": self.step, "damaged": self.damage}
        return {
            "path": self.path,
            "step": self.step,
            "ranks": self.manifest.ranks,
            "tensors": sum(entry.tensor is not None for entry in self.entries()),
            "files": len(self.manifest.files),
            "bytes": self.bytes,
            "age_seconds": self.age_seconds,
        }


def find_checkpoints(path: str) -> list[CheckpointInfo]:
    """Return the checkpoint at a path, or all checkpoints in that directory."""
    with suppress(CheckpointNotFound):
        return [_read_checkpoint(path)]
    directory = step_directory_at(path)
    for _ in range(_ATTEMPTS):
        steps = directory.steps()
        found = [each for step in steps if (each := _read_step(directory, step)) is not None]
        if found:
            return found
        if not steps:
            break  # otherwise all of them were just removed, so there are newer ones
    if "://" not in path and not os.path.exists(path):
        raise CheckpointNotFound(f"{path} does not exist")
    raise CheckpointNotFound(f"{path} contains no checkpoint")


def _read_step(directory: StepDirectory, step: int) -> CheckpointInfo | None:
    """Read one checkpoint; None if it was removed meanwhile. Errors mark it as damaged."""
    place = directory.path_of(step)
    try:
        return _read_checkpoint(place)
    except CheckpointNotFound:
        return None
    except (OSError, EOFError) as error:
        return CheckpointInfo(place, None, f"{place}: {error}")


def _read_checkpoint(path: str) -> CheckpointInfo:
    try:
        manifest = read_manifest(path)
        state = list_entries(manifest)
        tensors = [entry.tensor for entry in state if entry.tensor is not None]
        check_ranges(manifest.files, tensors)
        # Before any file is read: a name could lead out of the directory.
        for piece in (piece for tensor in tensors for piece in tensor.pieces):
            if piece.file not in manifest.files:
                raise MalformedManifest(f"it does not list the file {piece.file!r}")
    except DamagedCheckpoint as error:
        return CheckpointInfo(path, None, str(error))
    except MalformedManifest as error:
        return CheckpointInfo(path, None, f"{path}/{MANIFEST} is malformed: {error}")
    return CheckpointInfo(path, manifest, None, tuple(state))


def newest_checkpoint(path: str) -> CheckpointInfo:
    """Return the checkpoint at a path, or the newest one in that directory."""
    return find_checkpoints(path)[-1]


def listing_lines(found: list[CheckpointInfo]) -> list[str]:
    """Return a table of checkpoints and their total size."""
    rows = [_listing_row(each) for each in found]
    head = ["step", "ranks", "tensors", "size", "age", "path"]
    total_bytes = sum(each.bytes for each in found)
    total = f"{format_count(len(found), 'checkpoint')}, {format_size(total_bytes)}"
    return [*format_table(head, rows, right="step ranks tensors size age"), "", total]


def _listing_row(each: CheckpointInfo) -> list[str]:
    age = "-" if each.age_seconds is None else format_age(each.age_seconds)
    step = "-" if each.step is None else str(each.step)
    if each.manifest is None:
        return [step, "-", "-", "damaged", age, each.path]
    tensors = sum(entry.tensor is not None for entry in each.entries())
    return [step, str(each.manifest.ranks), f"{tensors:,}", format_size(each.bytes), age, each.path]


class CheckpointDetails:
    """One checkpoint in detail."""

    def __init__(self, found: CheckpointInfo) -> None:
        self.found = found
        self.entries = found.entries()

    def lines(self) -> Iterator[str]:
        """Yield a summary, a table of tensors and a table of other values."""
        found = self.found
        assert found.manifest is not None
        tensors = [entry for entry in self.entries if entry.tensor is not None]
        values = [entry for entry in self.entries if entry.tensor is None]
        step = "" if found.step is None else f"step {found.step}, "
        age = "" if found.age_seconds is None else f", {format_age(found.age_seconds)} old"
        counts = format_count(len(tensors), "tensor")
        files = format_count(len(found.manifest.files), "file")
        ranks = format_count(found.manifest.ranks, "rank")
        size = format_size(found.bytes)
        yield f"{found.path}: {step}{size}, {counts} in {files}, saved by {ranks}{age}"
        if tensors:
            rows = [[e.name, *_shape_of(e), format_size(e.bytes), e.owner] for e in tensors]
            yield ""
            yield from format_table(["tensor", "type", "shape", "size", "of"], rows, right="size")
        if values:
            yield ""
            yield from format_table(
                ["value", "is", "of"], [[e.name, _format_value(e.value), e.owner] for e in values]
            )

    def to_json(self) -> dict[str, Any]:
        """Return the summary and all entries for JSON."""
        return {**self.found.to_json(), "state": [_entry_json(entry) for entry in self.entries]}


def _shape_of(entry: ManifestEntry) -> tuple[str, str]:
    assert entry.tensor is not None
    return entry.tensor.dtype, " x ".join(map(str, entry.tensor.shape)) or "-"


def _format_value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_VALUE_WIDTH else f"{text[: _MAX_VALUE_WIDTH - 1]}…"


def _entry_json(entry: ManifestEntry) -> dict[str, Any]:
    about: dict[str, Any] = {"name": entry.name, "rank": entry.rank}
    if entry.tensor is None:
        return {**about, "value": entry.value}
    tensor = entry.tensor
    return {**about, "dtype": tensor.dtype, "shape": tensor.shape, "bytes": entry.bytes}


def differences(one: CheckpointInfo, two: CheckpointInfo) -> list[dict[str, Any]]:
    """Return what was added, removed or changed between two checkpoints."""
    before, after = _by_name(one), _by_name(two)

    def is_same(key: _Key) -> bool:
        return _have_same_bytes(one.path, before[key].tensor, two.path, after[key].tensor)

    found = []
    for key in [*before, *(key for key in after if key not in before)]:
        how = _compare_entries(before.get(key), after.get(key))
        if how is None and not is_same(key):
            how = "changed", f"values of {_format_entry(before[key])}"
        if how is not None:
            kind, text = how
            found.append({"name": key[0], "rank": key[1], "change": kind, "how": text})
    return found


_Key = tuple[str, int | None, int]


def _by_name(found: CheckpointInfo) -> dict[_Key, ManifestEntry]:
    """Return the entries by name, rank and occurrence: printed names need not be unique."""
    seen: Counter[tuple[str, int | None]] = Counter()
    entries = {}
    for entry in found.entries():
        key = entry.name, entry.rank
        entries[*key, seen[key]] = entry
        seen[key] += 1
    return entries


def _compare_entries(
    one: ManifestEntry | None, two: ManifestEntry | None
) -> tuple[str, str] | None:
    if one is None or two is None:
        assert one or two
        return ("removed", _format_entry(one)) if one else ("added", _format_entry(two))
    if _format_entry(one) != _format_entry(two):
        return "changed", f"{_format_entry(one)} -> {_format_entry(two)}"
    if one.value != two.value:
        return "changed", f"{_format_value(one.value)} -> {_format_value(two.value)}"
    return None


def _have_same_bytes(
    path: str, one: TensorEntry | None, other_path: str, two: TensorEntry | None
) -> bool:
    if one is None or two is None:
        return True
    pieces = [[(each.at[1] - each.at[0], each.xxh3_128) for each in it.pieces] for it in (one, two)]
    lengths = [[length for length, _ in each] for each in pieces]
    if lengths[0] == lengths[1]:
        return pieces[0] == pieces[1]
    # Another number of ranks sharded it differently, so only the data can be compared.
    return stored_digest(path, one) == stored_digest(other_path, two)


def _format_entry(entry: ManifestEntry | None) -> str:
    if entry is None:
        return ""
    if entry.tensor is None:
        return _format_value(entry.value)
    return f"{entry.tensor.dtype}[{', '.join(map(str, entry.tensor.shape))}]"


def checkpoints_to_compare(path: str, other: str | None) -> tuple[CheckpointInfo, CheckpointInfo]:
    """Return the two given checkpoints, or the newest two in a directory."""
    if other is not None:
        return newest_checkpoint(path), newest_checkpoint(other)
    found = find_checkpoints(path)
    if len(found) < 2:
        raise InvalidArgument(f"{path} has only one checkpoint: give a second path to compare with")
    return found[-2], found[-1]


def diff_lines(one: CheckpointInfo, two: CheckpointInfo, found: list[dict[str, Any]]) -> list[str]:
    """Return a table of the differences."""
    same = len(one.entries()) - sum(each["change"] != "added" for each in found)
    rows = [
        [
            each["change"],
            each["name"],
            "all" if each["rank"] is None else f"rank {each['rank']}",
            each["how"],
        ]
        for each in found
    ]
    head = f"{one.path} -> {two.path}: {len(found):,} differ, {same:,} are equal"
    return [head, "", *format_table(["change", "name", "of", "how"], rows)] if rows else [head]


def verify_all(
    found: list[CheckpointInfo], progress: Callable[[int], None]
) -> dict[str, list[str]]:
    """Verify checkpoints; return the problems by path, without those removed meanwhile."""
    problems = {}
    for each in found:
        hold = ReadLock() if "://" in each.path else lock_for_reading(each.path)
        if hold is not None:
            with closing(hold), suppress(CheckpointNotFound):
                problems[each.path] = verify(each.path, progress)
    return problems


def verify_lines(found: list[CheckpointInfo], problems: dict[str, list[str]]) -> list[str]:
    """Return one line per checkpoint or problem."""
    lines = []
    for each in found:
        bad = problems.get(each.path)
        lines += [f"damaged: {problem}" for problem in bad or ()]
        if bad is None:
            lines.append(f"removed meanwhile: {each.path}")
        elif not bad:
            lines.append(f"good: {each.path}, {format_size(each.bytes)}")
    return lines


def checkpoint_directory(path: str) -> tuple[StepDirectory, list[CheckpointInfo]]:
    """Return the directory at a path and its checkpoints."""
    found = find_checkpoints(path)
    if found[0].path == path:
        raise CheckpointNotFound(f"{path} is a checkpoint; prune needs a directory of checkpoints")
    return step_directory_at(path), found


def prune_lines(
    decisions: list[RetentionDecision], before: dict[int | None, CheckpointInfo], *, dry_run: bool
) -> list[str]:
    """Return a table of what was kept and removed, and the freed size."""
    would = "would be removed" if dry_run else "removed"
    rows = [
        [
            str(each.step),
            format_size(before[each.step].bytes) if each.step in before else "-",
            f"kept: {each.kept}" if each.kept else would,
        ]
        for each in decisions
    ]
    gone = [before[each.step].bytes for each in decisions if not each.kept and each.step in before]
    total = f"{format_count(len(gone), 'checkpoint')} {would}, {format_size(sum(gone))}"
    return [*format_table(["step", "size", "what"], rows, right="step size"), "", total]
