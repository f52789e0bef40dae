"""What the flight recorder adds to every call.

The recorder looks for the user's line from where it stands in the call, so it is timed there: the
same group makes the same calls with it and with one that records nothing. The ``fake`` backend
moves nothing, so there is next to no noise; the rest of the call is the same for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from benchmarks.entry import Aim, Competitors, entry
from benchmarks.stats import Compare
from phalanx.groups._flight_recorder import Call, FlightRecorder
from phalanx.testing import RankContext


class Blank(FlightRecorder):
    """A recorder that hands out the same call again and again."""

    def __init__(self) -> None:
        super().__init__()
        self._call = super().begin("allreduce", [])
        self._call.started = math.inf  # so that it is never overdue

    def begin(
        self,
        operation: str,  # noqa: ARG002
        tensors: Sequence[torch.Tensor],  # noqa: ARG002
        *,
        transfer: bool = False,  # noqa: ARG002
    ) -> Call:
        """Return the one call."""
        return self._call


@entry(
    title="An allreduce that moves nothing: what the flight recorder adds",
    peer="blank",
    compare=Compare.ADDED,
    aims=[Aim("recorder", at_most=2e-6)],
    repeats=100,
    process_sets=5,
    seconds=0.02,
)
def recorder(ctx: RankContext) -> Iterator[Competitors]:
    groups = {name: ctx.group("fake", name=name) for name in ("recorder", "blank")}
    groups["blank"]._issuer.recorder = Blank()
    tensor = torch.zeros(4)
    with_it, without = groups["recorder"], groups["blank"]
    yield {
        "blank": lambda: without.allreduce(tensor).wait(),
        "recorder": lambda: with_it.allreduce(tensor).wait(),
    }
