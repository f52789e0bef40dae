"""A call under way, as whoever looks after the group sees it."""

from __future__ import annotations

from ._record import Call

__all__ = ["Pending"]


class Pending:
    """What is known of a call that is being waited for; a `Work` is one."""

    call: Call
    timeout: float
    """Seconds that the call may take."""
    peer: int | None = None
    """The one rank that a send or receive depends on; None where it is everybody."""

    # Filled in once the call is overdue; most never are, so these cost an ordinary call nothing.
    has_dead_peer = False
    """Whether a rank that the call needs was dead when somebody last looked."""
    next_question = 0.0
    """When the others are to be asked again; whether they live is seen without asking."""

    @property
    def deadline(self) -> float:
        """When the call must have ended."""
        return self.call.started + self.timeout

    def is_completed(self) -> bool:
        """Tell whether the call has ended, well or badly."""
        raise NotImplementedError

    def engine_is_done(self) -> bool:
        """Tell whether the engine has let go of the call, whatever the group thinks of it."""
        raise NotImplementedError

    def attend_future(self) -> bool:
        """End the future if the call cannot succeed any more, and tell whether it has ended."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until the call has ended."""
        raise NotImplementedError
