"""The commands of `phalanx checkpoint`, without their options.

The function of each command returns its output as JSON and as lines of text. A damaged checkpoint
is listed as such and never hides the others. torch is imported for checkpoints that torch wrote,
and to convert; nothing else needs it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from .._formatting import format_age, format_count, format_size, format_table
from ..checkpoint._checkpoint_directory import (
    checkpoint_directory_at,
    lock_for_reading,
    parse_step_name,
)
from ..checkpoint._manifest import MANIFEST, FileEntry, Manifest, ManifestEntry, TensorEntry
from ..checkpoint._retention import RetentionPolicy, prune
from ..checkpoint._storage import is_remote, strip_file_scheme
from ..checkpoint._verify import read_checked_manifest, stored_digest, verify
from ..errors import CheckpointNotFound, DamagedCheckpoint, InvalidArgument, UnsupportedState

if TYPE_CHECKING:
    from ..checkpoint._torch_formats import TorchSummary

_MAX_VALUE_WIDTH = 60  # characters of a value that are shown
_ATTEMPTS = 10
Output: TypeAlias = tuple[Any, Iterable[str]]


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint as its manifest describes it, or the summary of one that torch wrote."""

    path: str
    manifest: Manifest | TorchSummary | None  # None if it is damaged
    damage: str | None = None

    @property
    def step(self) -> int | None:
        return parse_step_name(os.path.basename(self.path.rstrip("/")))

    @property
    def files(self) -> dict[str, FileEntry]:
        return {} if self.manifest is None else self.manifest.files

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    @property
    def age_seconds(self) -> float | None:
        """The age of the manifest file, or of a file of torch; None for remote storage."""
        is_ours = self.manifest is None or isinstance(self.manifest, Manifest)
        name = MANIFEST if is_ours else next(iter(self.files), "")
        try:
            return time.time() - os.stat(os.path.join(self.path, name)).st_mtime
        except OSError:
            return None

    @property
    def entries(self) -> list[ManifestEntry]:
        """Its entries; raises `DamagedCheckpoint` if it is damaged."""
        if self.manifest is None:
            raise DamagedCheckpoint(self.damage)
        return self.manifest.entries

    @property
    def format(self) -> str:
        """What wrote it."""
        ours = "phalanx"
        return ours if isinstance(self.manifest, Manifest | None) else self.manifest.format

    def digest(self, tensor: TensorEntry) -> str:
        """Return the checksum of all bytes of a tensor."""
        if isinstance(self.manifest, Manifest | None):
            return stored_digest(self.path, tensor)
        return self.manifest.digest(tensor)

    @property
    def tensors(self) -> int:
        return sum(entry.tensor is not None for entry in self.entries)

    def to_json(self) -> dict[str, Any]:
        summary = {"path": self.path, "step": self.step}
        if self.manifest is None:
            return {**summary, "damaged": self.damage}
        return {
            **summary,
            "format": self.format,
            "ranks": self.manifest.world_size,
            "tensors": self.tensors,
            "files": len(self.manifest.files),
            "bytes": self.bytes,
            "age_seconds": self.age_seconds,
        }


def find_checkpoints(path: str) -> list[CheckpointInfo]:
    """Return the checkpoint at a path, or all checkpoints in that directory."""
    path = strip_file_scheme(path)
    with suppress(CheckpointNotFound):
        return [_read_checkpoint(path)]
    directory = checkpoint_directory_at(path)
    for _ in range(_ATTEMPTS):
        steps, found = directory.steps(), []
        for each in map(directory.path_of, steps):
            try:
                found.append(_read_checkpoint(each))
            except CheckpointNotFound:
                pass  # it was removed meanwhile
            except (OSError, EOFError) as error:
                found.append(CheckpointInfo(each, None, f"{each}: {error}"))
        if found:
            return found
        if not steps:
            break  # otherwise all of them were just removed, so there are newer ones
    if not is_remote(path) and not os.path.exists(path):
        raise CheckpointNotFound(f"{path} does not exist")
    if directory.torch_layout():  # after steps, next to which there may be any file
        return [_read_torch_checkpoint(path)]
    if found := _find_torch_checkpoints(path):
        return found
    raise CheckpointNotFound(f"{path} contains no checkpoint")


def _read_checkpoint(path: str) -> CheckpointInfo:
    try:
        return CheckpointInfo(path, read_checked_manifest(path, Manifest))
    except DamagedCheckpoint as error:
        return CheckpointInfo(path, None, str(error))


def _read_torch_checkpoint(path: str) -> CheckpointInfo:
    from ..checkpoint._torch_formats import summarize_torch_checkpoint

    try:
        return CheckpointInfo(path, summarize_torch_checkpoint(path))
    except (DamagedCheckpoint, UnsupportedState) as error:
        return CheckpointInfo(path, None, str(error))


def _find_torch_checkpoints(path: str) -> list[CheckpointInfo]:
    """Return what torch wrote into subdirectories, in the order of the numbers in their names."""
    if is_remote(path) or not os.path.isdir(path):
        return []
    names = sorted(os.listdir(path), key=lambda name: ([*map(int, re.findall(r"\d+", name))], name))
    inner = [each for name in names if os.path.isdir(each := os.path.join(path, name))]
    layouts = [checkpoint_directory_at(each).torch_layout() for each in inner]
    return [
        _read_torch_checkpoint(each)
        for each, layout in zip(inner, layouts, strict=True)
        if layout not in ("", "hugging face")
    ]


def list_checkpoints(path: str) -> Output:
    rows, found = [], find_checkpoints(path)
    for each in found:
        step = "-" if each.step is None else str(each.step)
        age = "-" if each.age_seconds is None else format_age(each.age_seconds)
        ranks, tensors, size = "-", "-", "damaged"
        if each.manifest is not None:
            ranks, size = str(each.manifest.world_size), format_size(each.bytes)
            tensors = f"{each.tensors:,}"
        rows.append([step, ranks, tensors, size, age, each.path])
    head = ["step", "ranks", "tensors", "size", "age", "path"]
    total_bytes = sum(each.bytes for each in found)
    total = f"{format_count(len(found), 'checkpoint')}, {format_size(total_bytes)}"
    table = format_table(head, rows, right="step ranks tensors size age")
    return [each.to_json() for each in found], [*table, "", total]


def show_checkpoint(path: str) -> Output:
    found = find_checkpoints(path)[-1]
    state: list[dict[str, Any]] = []
    tensors, values = [], []
    for name, rank, tensor, value in found.entries:
        about, owner = {"name": name, "rank": rank}, _format_owner(rank)
        if tensor is None:
            state.append({**about, "value": value})
            values.append([name, _format_value(value), owner])
        else:
            dtype, dims, size = tensor.dtype, tensor.shape, tensor.bytes
            state.append({**about, "dtype": dtype, "shape": dims, "bytes": size})
            shape = " x ".join(map(str, dims)) or "-"
            tensors.append([name, dtype, shape, format_size(size), owner])
    assert found.manifest is not None
    step = "" if found.step is None else f"step {found.step}, "
    age = "" if found.age_seconds is None else f", {format_age(found.age_seconds)} old"
    counts = format_count(len(tensors), "tensor")
    files = format_count(len(found.manifest.files), "file")
    ranks = format_count(found.manifest.world_size, "rank")
    total, by = (
        format_size(found.bytes),
        "" if found.format == "phalanx" else f" with {found.format}",
    )
    lines = [f"{found.path}: {step}{total}, {counts} in {files}, saved by {ranks}{by}{age}"]
    if tensors:
        head = ["tensor", "dtype", "shape", "size", "rank"]
        lines += ["", *format_table(head, tensors, right="size")]
    if values:
        lines += ["", *format_table(["name", "value", "rank"], values)]
    return {**found.to_json(), "state": state}, lines


def _format_owner(rank: int | None) -> str:
    return "all" if rank is None else str(rank)


def _format_value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_VALUE_WIDTH else f"{text[: _MAX_VALUE_WIDTH - 1]}…"


def compare_checkpoints(path: str, other: str | None) -> Output:
    """Return what differs between two checkpoints, or between the newest two of a directory."""
    if other is not None:
        one, two = find_checkpoints(path)[-1], find_checkpoints(other)[-1]
    elif len(checkpoints := find_checkpoints(path)) < 2:
        raise InvalidArgument(f"{path} has only one checkpoint: give a second path to compare with")
    else:
        one, two = checkpoints[-2:]
    before, after = _by_name(one, two), _by_name(two, one)
    found, rows = [], []
    for key in before | after:
        if key not in after:
            change, difference = "removed", _format_entry(before[key])
        elif key not in before:
            change, difference = "added", _format_entry(after[key])
        else:
            change, difference = "changed", _difference(one, before[key], two, after[key])
        if difference:
            name, rank, _ = key
            found.append({"name": name, "rank": rank, "change": change, "difference": difference})
            rows.append([change, name, _format_owner(rank), difference])
    same = len(before) - sum(each["change"] != "added" for each in found)
    head = f"{one.path} -> {two.path}: {len(found):,} differ, {same:,} are equal"
    table = ["", *format_table(["change", "name", "rank", "difference"], rows)] if rows else []
    return found, [head, *table]


def _by_name(
    found: CheckpointInfo, other: CheckpointInfo
) -> dict[tuple[str, int | None, int], ManifestEntry]:
    """Return the entries by name, rank and occurrence: printed names need not be unique.

    What all ranks have is repeated for each rank if the other one has it for each, from torch.
    """
    seen: Counter[tuple[str, int | None]] = Counter()
    entries = {}
    is_repeated = other.format != "phalanx"
    ranks = sorted({each.rank for each in other.entries if each.rank is not None and is_repeated})
    for entry in found.entries:
        for rank in ranks if ranks and entry.rank is None else [entry.rank]:
            key = entry.name, rank
            entries[*key, seen[key]] = entry
            seen[key] += 1
    return entries


def _difference(
    one: CheckpointInfo, old: ManifestEntry, two: CheckpointInfo, new: ManifestEntry
) -> str:
    """Return how an entry has changed, or "" if it has not."""
    if _format_entry(old) != _format_entry(new):
        return f"{_format_entry(old)} -> {_format_entry(new)}"
    if old.value != new.value:
        return f"{_format_value(old.value)} -> {_format_value(new.value)}"
    if old.tensor is None or new.tensor is None:
        return ""
    shards = [
        [(each.at[1] - each.at[0], each.xxh3_128) for each in tensor.shards]
        for tensor in (old.tensor, new.tensor)
    ]
    lengths = [[length for length, _ in each] for each in shards]
    if lengths[0] == lengths[1] and one.format == two.format == "phalanx":
        is_same = shards[0] == shards[1]
    else:  # torch has no checksums, or another number of ranks sharded it differently
        is_same = one.digest(old.tensor) == two.digest(new.tensor)
    return "" if is_same else f"values of {_format_entry(old)}"


def _format_entry(entry: ManifestEntry) -> str:
    if entry.tensor is None:
        return _format_value(entry.value)
    return f"{entry.tensor.dtype}{entry.tensor.shape}"


def verify_checkpoints(path: str, progress_bar: Callable[[int], Any]) -> Output:
    """Verify checkpoints; return the problems by path, without those removed meanwhile."""
    found = find_checkpoints(path)
    problems: dict[str, list[str]] = {}
    lines = []
    with progress_bar(sum(each.bytes for each in found)) as bar:
        for each in found:
            lock = ExitStack() if is_remote(each.path) else lock_for_reading(each.path)
            if lock is not None:
                with lock, suppress(CheckpointNotFound):
                    problems[each.path] = _verify(each, bar.update)
            if each.path not in problems:
                lines.append(f"removed meanwhile: {each.path}")
            elif not problems[each.path]:
                lines.append(f"good: {each.path}, {format_size(each.bytes)}")
            else:
                lines += [f"damaged: {problem}" for problem in problems[each.path]]
    return problems, lines


def _verify(found: CheckpointInfo, progress: Callable[[int], None]) -> list[str]:
    if not checkpoint_directory_at(found.path).torch_layout():
        return verify(found.path, progress)
    from ..checkpoint._torch_formats import verify_torch_checkpoint

    return verify_torch_checkpoint(found.path, progress)


def convert(source: str, destination: str) -> Output:
    """Write a checkpoint of any layout as one of ours; return what was written."""
    from ..checkpoint._conversion import convert_checkpoint

    done = convert_checkpoint(source, destination)
    made = CheckpointInfo(strip_file_scheme(destination), done.manifest)
    counts = [
        format_count(made.tensors, "tensor"),
        format_count(len(made.entries) - made.tensors, "value"),
        format_count(len(made.files), "file"),
        format_count(done.manifest.world_size, "rank"),
    ]
    line = f"{source} ({done.source_format}) -> {made.path}: {format_size(made.bytes)}, "
    return {**made.to_json(), "source": source, "source_format": done.source_format}, [
        line + ", ".join(counts)
    ]


def prune_checkpoints(
    path: str, keep_last: int, keep_every: int | None, *, dry_run: bool
) -> Output:
    """Remove old checkpoints; return what was kept and removed, and the freed size."""
    policy = RetentionPolicy(keep_last, keep_every)
    found = find_checkpoints(path)
    if found[0].path == strip_file_scheme(path):
        raise InvalidArgument(f"{path} is a checkpoint; prune needs a directory of checkpoints")
    if any(each.format != "phalanx" for each in found):
        raise InvalidArgument(f"{path} has checkpoints of torch; prune removes those of phalanx")
    sizes = {each.step: each.bytes for each in found}
    decisions = prune(checkpoint_directory_at(path), policy, dry_run=dry_run)
    would = "would be removed" if dry_run else "removed"
    rows = [
        [
            str(step),
            format_size(sizes[step]) if step in sizes else "-",
            f"kept: {kept}" if kept else would,
        ]
        for step, kept in decisions
    ]
    gone = [sizes[step] for step, kept in decisions if not kept and step in sizes]
    total = f"{format_count(len(gone), 'checkpoint')} {would}, {format_size(sum(gone))}"
    table = format_table(["step", "size", "action"], rows, right="step size")
    return [each._asdict() for each in decisions], [*table, "", total]
