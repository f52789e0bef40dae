"""Time constants of process groups, in seconds.

There is one `Timing` per process; `override_timing` replaces it, so that tests need not wait out
production values. Most objects read it when they are created, and keep what they read. Threads
that serve many groups, and functions without an object, read it each time.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property


@dataclass(frozen=True)
class Timing:
    """How often to check and how long to wait, apart from the timeouts that users set."""

    watch_interval: float = 0.25
    """Seconds between two polls of the watchdog; a poll is one short store request."""
    report_timeout: float = 0.75
    """Seconds for healthy ranks to write their reports: three polls of their watchdogs."""
    report_timeout_after_death: float = 0.03
    """The same after a death, which is raised immediately. Ranks that also wait report in time."""
    query_interval: float = 0.1  # seconds between two store queries about one overdue call
    overdue_after: float = 0.25
    """Seconds a wait blocks in the engine before the failure detector is asked."""
    overdue_poll_interval: float = 0.04  # seconds between two checks of an overdue call
    dead_peer_poll_interval: float = 0.02
    """The same after a death; what the rank sent before may still arrive."""
    diagnosis_timeout: float = 3.0  # seconds to find out why an engine's connection broke
    request_timeout: float = 2.0
    """Seconds for one store request; on the same machine it takes about 50 microseconds."""
    exit_grace: float = 1.0  # seconds at interpreter exit for worker threads to finish
    background_check_interval: float = 0.25
    """Seconds between two checks of a caller whose work runs on a worker thread."""
    poll_interval: float = 0.05
    """Seconds a wait in a store blocks its connection; also between two checks of threads."""
    brief_poll_interval: float = 0.01
    """Seconds between two checks for what comes soon: reports, a free port, merging groups."""
    other_groups_interval: float = 1.0
    """Seconds between two checks whether missing ranks are forming another group."""
    deadline_grace: float = 0.5
    """Seconds after the deadline for the worker thread to raise the more precise error."""
    idle_linger: float = 0.5
    """Seconds a hosted store without leases stays open if no group on it was closed."""
    remote_close_timeout: float = 600.0
    """Seconds for ranks on other machines to close their group before the hosted store closes."""
    port_release_timeout: float = 1.0
    """Seconds for another process to release the port that a store needs."""
    rejoin_check_interval: float = 0.5
    """Seconds between two checks of a rank in `rejoin`; a death or an abort ends a wait sooner."""
    rejoin_retry_delay: float = 0.01
    """Seconds before a rank in `rejoin` waits again after a wait that ended early."""

    @cached_property
    def first_wait(self) -> timedelta:
        """The same as `overdue_after`, made once since every wait passes it to the engine."""
        return timedelta(seconds=self.overdue_after)


_default = Timing()


def default_timing() -> Timing:
    return _default


@contextmanager
def override_timing(**changes: float) -> Generator[Timing, None, None]:
    """Change some of the process's time constants for the body of a ``with`` statement."""
    global _default  # noqa: PLW0603 - one value per process is the point
    before = _default
    _default = replace(before, **changes)
    try:
        yield _default
    finally:
        _default = before
