"""Whether the ranks have reduced the same backward pass, by what they tell in the header."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from ..errors import InvalidState, RankMismatch
from ._agreement import Named, assert_same_values
from ._channel import Channel
from ._header import Header

__all__ = ["assert_same_pass", "refuse_late", "warn_of_change"]


def assert_same_pass(header: Header, channel: Channel, number: int, proof: Named) -> None:
    """Raise, on every rank alike, if ranks are not in the same pass, or not with the same values.

    `number`: the one of this rank's pass. `proof`: the parameters to compare.
    """
    group = getattr(channel.group, "label", "")
    if not header.same_number() and not _others_have_left(header, channel, number):
        numbers = enumerate(header.numbers())
        told = ", ".join(f"rank {rank}: {number}" for rank, number in numbers)
        raise RankMismatch(
            f"ranks have reduced the gradients of different backward passes ({told}): a rank "
            "has kept one local with no_sync() that others reduced, or called backward more "
            "often. The gradients are invalid; call backward and no_sync() the same way on every "
            "rank",
            group=group,
            operation="backward",
        )
    without = header.without_weight()
    if without and without != header.with_data():
        told = ", ".join(map(str, without))
        raise RankMismatch(
            f"rank {told} has no weight and the others have: set ddp.weight on every rank",
            group=group,
            operation="backward",
        )
    if proof and not header.same_fingerprints():
        assert_same_values(proof, channel)


def refuse_late(names: Sequence[str]) -> None:
    """Raise, on every rank alike: these may have been stepped without what came late."""
    raise InvalidState(
        f"gradients of {', '.join(map(repr, names))} came after their bucket was reduced, and "
        "optimizers in backward step when a bucket is: the graph has changed although "
        "static_graph=True says that it does not. The parameters are invalid; go back to a "
        "checkpoint, and leave static_graph=True out"
    )


def warn_of_change() -> None:
    """Say that the graph is another one, where it was said that it would not be."""
    warnings.warn(
        "the graph of this backward pass is not that of the one before, although "
        "static_graph=True says so; the gradients are right all the same",
        RuntimeWarning,
        stacklevel=3,
    )


def _others_have_left(header: Header, channel: Channel, number: int) -> bool:
    """Tell whether ranks that are not in this pass have left the group."""
    away = {rank for rank, theirs in enumerate(header.numbers()) if theirs != number}
    return away.isdisjoint(channel.members())
