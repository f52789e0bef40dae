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
from ._tables import age, count, size, table

_MAX_VALUE_WIDTH = 60  # letters of a value that are shown
_ATTEMPTS = 10


@dataclass(frozen=True)
class Found:
    """A checkpoint, as far as its manifest tells."""

    path: str
    document: Manifest | None
    """Its manifest; None if it is damaged."""
    damage: str | None = None
    state: tuple[ManifestEntry, ...] = ()

    @property
    def step(self) -> int | None:
        """The step that its name tells."""
        return parse_step_name(os.path.basename(self.path.rstrip("/")))

    @property
    def bytes(self) -> int:
        """How many bytes its files have."""
        files = {} if self.document is None else self.document.files
        return sum(entry.bytes for entry in files.values())

    @property
    def seconds(self) -> float | None:
        """How old it is by the clock, where that can be asked."""
        try:
            return time.time() - os.stat(os.path.join(self.path, MANIFEST)).st_mtime
        except OSError:
            return None

    def entries(self) -> tuple[ManifestEntry, ...]:
        """Return what it holds; raises `DamagedCheckpoint`."""
        if self.document is None:
            raise DamagedCheckpoint(self.damage)
        return self.state

    def about(self) -> dict[str, Any]:
        """Tell a program what is known of it."""
        if self.document is None:
            return {"path": self.path, "step": self.step, "damaged": self.damage}
        return {
            "path": self.path,
            "step": self.step,
            "ranks": self.document.ranks,
            "tensors": sum(entry.tensor is not None for entry in self.entries()),
            "files": len(self.document.files),
            "bytes": self.bytes,
            "age_seconds": self.seconds,
        }


def find(path: str) -> list[Found]:
    """Return the checkpoint at a path, or those in it; raises `CheckpointNotFound` if none is."""
    with suppress(CheckpointNotFound):
        return [_read_checkpoint(path)]
    shelf = step_directory_at(path)
    for _ in range(_ATTEMPTS):
        steps = shelf.steps()
        found = [each for step in steps if (each := _read_step(shelf, step)) is not None]
        if found:
            return found
        if not steps:
            break  # and otherwise, all of them were removed just now: there are newer ones
    if "://" not in path and not os.path.exists(path):
        raise CheckpointNotFound(f"there is nothing at {path}")
    raise CheckpointNotFound(f"{path} is neither a checkpoint nor a folder of checkpoints")


def _read_step(shelf: StepDirectory, step: int) -> Found | None:
    """Read one of many, if it is still there; as strange as it may be, it hides no others."""
    place = shelf.place(step)
    try:
        return _read_checkpoint(place)
    except CheckpointNotFound:
        return None
    except (OSError, EOFError) as error:
        return Found(place, None, f"{place}: {error}")


def _read_checkpoint(path: str) -> Found:
    try:
        document = read_manifest(path)
        state = list_entries(document)
        tensors = [entry.tensor for entry in state if entry.tensor is not None]
        check_ranges(document.files, tensors)
        # Before any of it is compared: a name could lead out of the folder.
        for piece in (piece for tensor in tensors for piece in tensor.pieces):
            if piece.file not in document.files:
                raise MalformedManifest(f"it does not list {piece.file!r}")
    except DamagedCheckpoint as error:
        return Found(path, None, str(error))
    except MalformedManifest as error:
        return Found(path, None, f"{path}/{MANIFEST} cannot be used: {error}")
    return Found(path, document, None, tuple(state))


def newest(path: str) -> Found:
    """Return the checkpoint at a path, or the newest one in it."""
    return find(path)[-1]


def listing(found: list[Found]) -> list[str]:
    """List checkpoints with a total."""
    rows = [_listing_row(each) for each in found]
    head = ["step", "ranks", "tensors", "size", "age", "path"]
    total = f"{count(len(found), 'checkpoint')}, {size(sum(each.bytes for each in found))}"
    return [*table(head, rows, right="step ranks tensors size age"), "", total]


def _listing_row(each: Found) -> list[str]:
    old = "-" if each.seconds is None else age(each.seconds)
    step = "-" if each.step is None else str(each.step)
    if each.document is None:
        return [step, "-", "-", "damaged", old, each.path]
    tensors = sum(entry.tensor is not None for entry in each.entries())
    return [step, str(each.document.ranks), f"{tensors:,}", size(each.bytes), old, each.path]


class Listing:
    """One checkpoint in detail."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self.entries = found.entries()

    def lines(self) -> Iterator[str]:
        """Yield a head, a table of tensors and one of other values."""
        found = self.found
        assert found.document is not None
        tensors = [entry for entry in self.entries if entry.tensor is not None]
        values = [entry for entry in self.entries if entry.tensor is None]
        step = "" if found.step is None else f"step {found.step}, "
        old = "" if found.seconds is None else f", {age(found.seconds)} old"
        about = f"{count(len(tensors), 'tensor')} in {count(len(found.document.files), 'file')}"
        ranks = f"saved by {count(found.document.ranks, 'rank')}"
        yield f"{found.path}: {step}{size(found.bytes)}, {about}, {ranks}{old}"
        if tensors:
            rows = [[e.name, *_shape_of(e), size(e.bytes), e.owner] for e in tensors]
            yield ""
            yield from table(["tensor", "type", "shape", "size", "of"], rows, right="size")
        if values:
            yield ""
            yield from table(
                ["value", "is", "of"], [[e.name, _format_value(e.value), e.owner] for e in values]
            )

    def about(self) -> dict[str, Any]:
        """Tell a program all of it."""
        return {**self.found.about(), "state": [_entry_json(entry) for entry in self.entries]}


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


def differences(one: Found, two: Found) -> list[dict[str, Any]]:
    """Compare two states: what was added, removed, or changed, and how."""
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


def _by_name(found: Found) -> dict[_Key, ManifestEntry]:
    """Return what it holds by name and rank; names are for people, and two may look the same."""
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
    # As many ranks as have saved it have cut it into pieces: its bytes alone can tell.
    return stored_digest(path, one) == stored_digest(other_path, two)


def _format_entry(entry: ManifestEntry | None) -> str:
    if entry is None:
        return ""
    if entry.tensor is None:
        return _format_value(entry.value)
    return f"{entry.tensor.dtype}[{', '.join(map(str, entry.tensor.shape))}]"


def pair(path: str, other: str | None) -> tuple[Found, Found]:
    """Return two checkpoints to be compared; raises `InvalidArgument` if there is one only."""
    if other is not None:
        return newest(path), newest(other)
    found = find(path)
    if len(found) < 2:
        raise InvalidArgument(f"{path} has one checkpoint: name another to compare it with")
    return found[-2], found[-1]


def changes(one: Found, two: Found, found: list[dict[str, Any]]) -> list[str]:
    """Say how two checkpoints differ."""
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
    head = f"{one.path} -> {two.path}: {len(found):,} differ, {same:,} are the same"
    return [head, "", *table(["change", "name", "of", "how"], rows)] if rows else [head]


def verify_all(found: list[Found], progress: Callable[[int], None]) -> dict[str, list[str]]:
    """Read checkpoints again, and return what is wrong with each that is still there, by path."""
    problems = {}
    for each in found:
        hold = ReadLock() if "://" in each.path else lock_for_reading(each.path)
        if hold is not None:
            with closing(hold), suppress(CheckpointNotFound):
                problems[each.path] = verify(each.path, progress)
    return problems


def verdict(found: list[Found], problems: dict[str, list[str]]) -> list[str]:
    """Say what was verified, and what is damaged."""
    lines = []
    for each in found:
        bad = problems.get(each.path)
        lines += [f"damaged: {problem}" for problem in bad or ()]
        if bad is None:
            lines.append(f"removed meanwhile: {each.path}")
        elif not bad:
            lines.append(f"good: {each.path}, {size(each.bytes)}")
    return lines


def folder(path: str) -> tuple[StepDirectory, list[Found]]:
    """Return the folder at a path, and what is in it; raises `CheckpointNotFound` if it is none."""
    found = find(path)
    if found[0].path == path:
        raise CheckpointNotFound(
            f"{path} is a checkpoint itself: prune works on a folder of checkpoints"
        )
    return step_directory_at(path), found


def pruned(
    verdicts: list[RetentionDecision], before: dict[int | None, Found], *, dry_run: bool
) -> list[str]:
    """Say what became of each checkpoint, and how much room there is now."""
    would = "would be removed" if dry_run else "removed"
    rows = [
        [
            str(each.step),
            size(before[each.step].bytes) if each.step in before else "-",
            f"kept: {each.kept}" if each.kept else would,
        ]
        for each in verdicts
    ]
    gone = [before[each.step].bytes for each in verdicts if not each.kept and each.step in before]
    total = f"{count(len(gone), 'checkpoint')} {would}, {size(sum(gone))}"
    return [*table(["step", "size", "what"], rows, right="step size"), "", total]
