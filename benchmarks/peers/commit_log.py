"""What a worker of a training job logs: its start, the samples it ran, the steps it committed.

One file per process, a JSON array per line, written at once: a worker that is killed loses at most
the line it was writing. This module imports nothing that takes long, since a log begins before
``import torch`` and tells how long that takes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Ids = list[tuple[int, int, int]]
"""Sample ids as ranges: start, stop, stride."""


class CommitLog:
    """Writes the log of this process."""

    def __init__(self, directory: Path, *, slot: int, attempt: int = 0) -> None:
        path = directory / f"{slot}.{attempt}.{os.getpid()}.log"
        self._file = path.open("w", buffering=1)
        self._write("start", time.time_ns(), slot, attempt, os.getpid())

    @classmethod
    def of_rank(cls, directory: Path) -> CommitLog:
        """Open the log of a rank that a launcher started."""
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return cls(directory, slot=int(os.environ["RANK"]), attempt=attempt)

    def imported(self) -> None:
        """Note that torch is imported."""
        self._write("imported", time.time_ns())

    def ran(self, step: int, ids: Sequence[int]) -> None:
        """Note which samples this worker is about to add to the gradients of a step."""
        self._write("ran", step, to_ranges(ids))

    def abandon(self, step: int) -> None:
        """Note that the gradients of a step were thrown away."""
        self._write("abandon", step)

    def commit(
        self, step: int, *, generation: int, world: int, loss: float, samples: int | None = None
    ) -> None:
        """Note that the optimizer has made a step.

        Arguments:
            step: its number, from 1.
            generation: a number that changes when the members of the group do.
            world: how many workers contributed to the step.
            loss: the loss of the step.
            samples: how many have contributed to it, if more may than those workers have run.
        """
        self._write("commit", step, time.time_ns(), generation, world, loss, samples)

    def end(self, digest: str) -> None:
        """Note the digest of the final state."""
        self._write("end", digest)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, *fields: Any) -> None:
        self._file.write(json.dumps(fields) + "\n")


@dataclass(frozen=True)
class Commit:
    """A step that a worker committed."""

    step: int
    time: int
    """In nanoseconds since the epoch."""
    generation: int
    world: int
    loss: float
    samples: int | None = None


@dataclass
class WorkerLog:
    """What one process has logged so far."""

    slot: int
    attempt: int
    """How often all workers were restarted. Steps after the restored checkpoint are undone."""
    pid: int
    started: int
    imported: int | None = None
    ran: dict[int, Ids] = field(default_factory=dict)
    """The samples of each step."""
    commits: list[Commit] = field(default_factory=list)
    digest: str | None = None

    def add(self, line: str) -> None:
        """Add a line of the log."""
        kind, *fields = json.loads(line)
        if kind == "ran":
            step, ids = fields
            self.ran.setdefault(step, []).extend((a, b, c) for a, b, c in ids)
        elif kind == "commit":
            self.commits.append(Commit(*fields))
        elif kind == "abandon":
            self.ran.pop(fields[0], None)
        elif kind == "imported":
            (self.imported,) = fields
        elif kind == "end":
            (self.digest,) = fields
        else:
            raise ValueError(f"a commit log has no line {line!r}")

    @classmethod
    def begin(cls, line: str) -> WorkerLog:
        """Make the log of a process from its first line."""
        kind, time_, slot, attempt, pid = json.loads(line)
        assert kind == "start"
        return cls(slot, attempt, pid, time_)


class LogFollower:
    """Reads the logs of a job while its workers write them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._logs: dict[str, WorkerLog] = {}
        self._offsets: dict[str, int] = {}

    @property
    def workers(self) -> list[WorkerLog]:
        """The workers that have started, in that order."""
        return sorted(self._logs.values(), key=lambda worker: worker.started)

    def read(self) -> list[WorkerLog]:
        """Read what is new and return all workers."""
        for path in self._directory.glob("*.log"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path.name, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]  # the last line may be incomplete
            self._offsets[path.name] = self._offsets.get(path.name, 0) + len(whole)
            for line in whole.decode().splitlines():
                if path.name in self._logs:
                    self._logs[path.name].add(line)
                else:
                    self._logs[path.name] = WorkerLog.begin(line)
        return self.workers


def to_ranges(ids: Sequence[int]) -> Ids:
    """Write sample ids as few ranges."""
    ranges: Ids = []
    i = 0
    while i < len(ids):
        stride = ids[i + 1] - ids[i] if i + 1 < len(ids) else 1
        stride = max(1, stride)
        end = i + 1
        while end < len(ids) and ids[end] == ids[end - 1] + stride:
            end += 1
        ranges.append((ids[i], ids[end - 1] + 1, stride))
        i = end
    return ranges
