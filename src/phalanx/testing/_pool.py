"""Processes as ranks, started once for many runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from ..errors import InvalidState
from ._crew import Crew
from ._function_reference import Reference
from ._outcome import settle
from ._run import check_size, mortal_ranks
from ._task import Surroundings, Task, pack_arguments
from .faults import Fault

__all__ = ["RankPool"]


class RankPool:
    """Processes that run a body as the ranks of a group, again and again.

    A rank that fails, dies or hangs is replaced before the next run; the others are used again.
    Bodies find themselves in the caller's directory, with its environment, import path and warning
    filters, one thread and the same random seed.
    """

    def __init__(
        self, size: int = 4, *, backend: str = "gloo", preload: Sequence[str] = ()
    ) -> None:
        self.size = check_size(size)
        """The largest number of ranks that a run can have."""
        self.backend = backend
        """The backend of the groups that a body's context makes."""
        self.preload = tuple(preload)
        """Modules that are imported once for all ranks, besides torch and `phalanx.groups`."""
        self._processes: Crew | None = None
        self._closed = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to import torch in the background, so that the first run waits less."""
        with self._lock:
            self._hire()

    def run(
        self,
        body: Callable[..., Any],
        ranks: int | None = None,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = 30.0,
        linger: float = 1.0,
        faults: Sequence[Fault] = (),
        expect_dead: Iterable[int] = (),
        name: str | None = None,
    ) -> list[Any]:
        """Call ``body(context, *args, **kwargs)`` on every rank and return the results by rank.

        The body is a function of a module, and what it takes and returns can be pickled. A rank
        that had to die has `Died` or `Stopped` for a result: one that a fault ends, or that is
        in `expect_dead`. All failures are raised as one `RankFailures`, which calls the body
        `name`; once a rank has failed, the others have `linger` seconds to finish.
        """
        __tracebackhide__ = True
        size = check_size(self.size if ranks is None else ranks, most=self.size)
        doomed = frozenset(expect_dead)
        mortal = mortal_ranks(faults, doomed, size=size)
        task = Task(
            body=Reference.of(body),
            arguments=pack_arguments(args, kwargs or {}),
            size=size,
            backend=self.backend,
            timeout=timeout,
            surroundings=Surroundings.here(),
            faults=tuple(faults),
        )
        with self._lock:
            try:
                reports, outputs = self._hire().work(task, linger=linger, mortal=mortal)
            except BaseException:  # an interrupt, perhaps: nobody knows what they are up to
                self._dismiss()
                raise
        return settle(
            name or str(task.body), reports, mortal=mortal, doomed=doomed, outputs=outputs
        )

    def _hire(self) -> Crew:
        if self._closed:
            raise InvalidState("the pool is closed")
        if self._processes is None:
            self._processes = Crew(self.preload)
        return self._processes

    def _dismiss(self) -> None:
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._closed = True
            self._dismiss()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
