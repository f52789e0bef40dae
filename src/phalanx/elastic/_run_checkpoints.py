"""The checkpoints of an elastic run: which it restores, and what it has saved.

Where membership is fixed, all ranks restore and save together. In a run whose ranks may be lost,
all have the same state: each restores by itself, and the leader saves alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from torch._C._distributed_c10d import HashStore

from .. import _faultpoints as faultpoints
from ..checkpoint import CheckpointManager
from ..errors import CheckpointDirectoryInUse, InvalidArgument, InvalidState
from ..groups import ProcessGroup, new_group
from ._run_state import RunPosition, RunState

LOCK_INTERVAL = 0.05  # seconds between two attempts to save in a directory that is in use


@dataclass(frozen=True, kw_only=True)
class RestoreRequest:
    """What a script has passed to `ElasticRun.restore`."""

    directory: str | os.PathLike[str]
    step: int | None
    rewind: bool
    """Whether later steps are removed."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Those of `CheckpointManager`."""

    def __post_init__(self) -> None:
        if self.rewind and self.step is None:
            raise InvalidArgument("rewind=True needs step=, the step to continue from")


class RunCheckpoints:
    """The checkpoints of a run, in the directory that it was last restored from."""

    def __init__(
        self,
        state: RunState,
        report_differences: Callable[[list[str]], None],
        *,
        lock_timeout: float,
    ) -> None:
        self._state = state
        self._lock_timeout = lock_timeout
        """Seconds to wait for another process that saves to the directory: one that was the leader
        before, and is leaving."""
        self._report_differences = report_differences
        self.request: RestoreRequest | None = None
        """The last one."""
        self.manager: CheckpointManager | None = None
        """That of the directory; None before a restore."""
        self._saved: int | None = None  # the step when all ranks called `save` last
        self._written: int | None = None  # the step that this rank has written or read last

    def restore(
        self,
        request: RestoreRequest,
        group: ProcessGroup | None,
        *,
        has_begun: bool = False,
        may_rewind: bool = True,
    ) -> int:
        """Restore what a script asks for; return the number of completed steps.

        `has_begun`: the run has made steps since the script first asked. It may have removed the
        step that it began with, and if it was rewound all checkpoints are its own. So the newest is
        the right one. `may_rewind`: whether this rank removes later steps; one rank does.
        """
        self.close()
        self.request = request
        step = None if request.rewind and has_begun else request.step
        rewind_to = step if request.rewind and may_rewind else None
        manager = self.manager = _open(request.directory, group, **request.options)
        self._saved = self._written = None
        if step is None or (has_begun and step not in manager.steps()):
            step = manager.latest()
        if step is not None:
            self._state.load_checkpoint(manager, step, self._report_differences)
            self._saved = self._written = self._state.position.steps
        if rewind_to is not None:
            _rewind(request.directory, group, rewind_to)
        return self._state.position.steps

    def is_saved(self, step: int) -> bool:
        """Whether all ranks called `save` after this step, or began with it."""
        return step == self._saved

    def save(
        self, now: RunPosition, group: ProcessGroup | None, directory: Any, *, writes: bool
    ) -> None:
        """Save the run to a directory or, if that is None, to the one that it was restored from.

        `writes`: whether this rank takes part; the others note that it is saved.
        """
        if directory is not None:
            if writes:
                with closing(_open(directory, group)) as manager:
                    self._write(manager, now)
            return
        if self.manager is None:
            raise InvalidState(
                "there is no directory to save to. Call run.restore(directory) before the loop (it "
                "may be empty), or run.save(directory)"
            )
        if writes:
            self._write(self.manager, now)
        self._saved = now.steps

    def _write(self, manager: CheckpointManager, now: RunPosition) -> None:
        if faultpoints.armed:
            faultpoints.reach("elastic:save")
        state, deadline = self._state.to_save(now), time.monotonic() + self._lock_timeout
        while True:
            try:
                manager.save(now.steps, state)
                break
            except CheckpointDirectoryInUse:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(LOCK_INTERVAL)
        if faultpoints.armed:
            faultpoints.reach("elastic:saved")
        if manager is self.manager:
            self._written = now.steps

    def save_before_exit(self, now: RunPosition) -> bool:
        """Save unless this step is saved; return whether there is a directory to save to."""
        if self.manager is None:
            return False
        # A leader before this one may have been lost while it saved.
        if self._written != now.steps and self.manager.latest() != now.steps:
            self._write(self.manager, now)
        return True

    def close(self) -> None:
        """Wait for pending saves."""
        if self.manager is not None:
            self.manager.close()


def _open(
    directory: str | os.PathLike[str], group: ProcessGroup | None, **options: Any
) -> CheckpointManager:
    """Open a directory for the ranks of a group, or for this process only."""
    if group is None:
        group = new_group("local", store=HashStore(), rank=0, world_size=1, name="alone")
    return CheckpointManager(directory, group=group, **options)


def _rewind(directory: str | os.PathLike[str], group: ProcessGroup | None, step: int) -> None:
    # With a manager of its own: one that has changed the directory keeps others from saving there.
    with closing(_open(directory, group)) as checkpoints:
        checkpoints.rewind(step)
