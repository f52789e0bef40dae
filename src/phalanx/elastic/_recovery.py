"""What a survivor holds of a loop that has lost a rank, and the sum over all survivors.

A survivor holds the sums of the micro-batches that it has run, and those that lost ranks had
published. Survivors tell each other what they hold (`SurvivorReport`), run what is missing, and sum
a cover of what they have: see `_cover`. `MicroBatchLoop._recover` has the order of these steps,
since the micro-batches that are run again are iterations of the user's loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import _faultpoints as faultpoints
from ..ddp._gradient_fold import FoldedNode, GradientFold
from ..ddp._reducer import Reducer
from ..ddp._summation_tree import Node
from ..groups._store import from_json, to_json
from ._contributions import Contribution, LoopFlags
from ._cover import Cover, sum_cover

if TYPE_CHECKING:
    from ._run import ElasticRun


class NodeSums(NamedTuple):
    """The sums of the micro-batches of a node, on this rank."""

    gradients: dict[str, Tensor]  # by parameter; a missing one is the identity of the sum
    buffers: list[Tensor]  # as `BufferAverage.take_nodes` returns them


@dataclass(frozen=True)
class SurvivorReport:
    """What a survivor tells the others; sent as JSON."""

    nodes: list[Node]
    results: list[tuple[int, float, float]]
    """The number, the loss and the weight of each of its micro-batches."""
    signatures: list[float]
    used: list[str]
    """The parameters that got a gradient."""
    has_first: bool
    flags: LoopFlags


class LoopRecovery:
    """What this rank holds of a loop that has lost a rank."""

    def __init__(self, run: ElasticRun) -> None:
        self._run = run
        self._contributions = run._contributions
        """Those of the group that has lost a rank; only there has any rank published its sums."""
        self._adopted: dict[int, Contribution] = {}
        """What lost ranks had published, by their rank in the group that lost them."""
        self._held: dict[Node, NodeSums] = {}
        self._used: set[str] = set()
        self._reports: list[SurvivorReport] = []  # of all survivors, by rank

    def release(self) -> None:
        """Free the sums, whoever still refers to this object."""
        self._contributions = None
        self._held, self._adopted = {}, {}

    def hold(self, fold: GradientFold, *, clones: bool) -> None:
        """Keep the sums of micro-batches that this rank has run.

        Folds of redone micro-batches share the reducer's input slots, so the next range would
        overwrite them: they are copied. The slots of the first fold belong to the old reducer,
        which nothing writes to any more. Views suffice, and keep what this rank has published
        there, in case it is lost too.
        """
        reducer, buffers = self._run._reducer, self._run._buffers
        self._used |= {reducer.names[i] for i in fold.used}
        nodes = fold.nodes()
        of_buffers = buffers.take_nodes() if clones else buffers.nodes()
        for node, sums in zip(nodes, of_buffers or [[]] * len(nodes), strict=True):
            gradients = _gradients_of(node, reducer, clones=clones)
            self._held[node.lo, node.hi] = NodeSums(gradients, sums)

    def adopt(self) -> None:
        """Hold what lost ranks had published. All survivors do; the first one contributes it."""
        run = self._run
        if self._contributions is None:
            return
        section, parameters = run._run_state.section, dict(run._named)
        for each in self._contributions.of_dead_ranks(section, parameters):
            if each.rank in self._adopted:
                continue
            self._adopted[each.rank] = each
            of_buffers = run._buffers.adopt(each.buffers, list(each.gradients))
            for (node, gradients), sums in zip(each.gradients.items(), of_buffers, strict=True):
                self._held[node] = NodeSums(gradients, sums)
            self._used |= each.used

    def exchange(
        self, results: dict[int, tuple[float, float]], signature: int, flags: LoopFlags
    ) -> Cover:
        """Tell the other ranks what this one holds, and find what is missing.

        `results` has the loss and the weight of the micro-batches that it has run, by number.
        """
        run, adopted = self._run, self._adopted.values()
        results, signatures = dict(results), [float(signature)] if results else []
        for each in adopted:
            results.update(each.results)
            signatures.append(each.record.signature)
        mine = SurvivorReport(
            list(self._held),
            [(number, *pair) for number, pair in results.items()],
            signatures,
            sorted(self._used),
            run._buffers.has_first_values,
            LoopFlags.combine([flags, *(each.record.flags for each in adopted)]),
        )
        texts = run._comm.exchange(to_json(mine))
        self._reports = [from_json(text.encode(), SurvivorReport) for text in texts]
        return Cover([each.nodes for each in self._reports], run.micro_batches)

    @property
    def signatures(self) -> set[float]:
        """Those of the batches of all ranks."""
        return {found for each in self._reports for found in each.signatures}

    @property
    def flags(self) -> LoopFlags:
        """Those of all ranks."""
        return LoopFlags.combine(each.flags for each in self._reports)

    def results(self) -> tuple[list[float], list[float]]:
        """Return the losses and the weights of all micro-batches, by number."""
        found = {number: pair for each in self._reports for number, *pair in each.results}
        losses, weights = zip(*(found[i] for i in range(self._run.micro_batches)), strict=True)
        return [*losses], [*weights]

    def sum_gradients(self, cover: Cover, divisor: float) -> None:
        """Put the sum over all ranks, divided by `divisor`, in ``.grad``."""
        comm = self._run._comm
        with torch.no_grad():
            self._run._reducer.set_gradients(
                [each.gradients for each in self._contributed(cover)],
                lambda rows: sum_cover(comm, rows, cover, divisor),
                {name for each in self._reports for name in each.used},
            )
        if faultpoints.armed:
            faultpoints.reach("elastic:reduced")

    def sum_buffers(self, cover: Cover) -> None:
        """Combine the buffers of all ranks."""
        with_first = [rank for rank, each in enumerate(self._reports) if each.has_first]
        self._run._buffers.finish_cover(
            [each.buffers for each in self._contributed(cover)],
            cover,
            means_changed=bool(self.flags.means_changed),
            first_rank=with_first[0] if self.flags.firsts_changed else None,
        )

    def _contributed(self, cover: Cover) -> Iterable[NodeSums]:
        return [self._held[node] for node in cover.nodes_of(self._run._comm.rank)]


def _gradients_of(node: FoldedNode, reducer: Reducer, *, clones: bool) -> dict[str, Tensor]:
    """Return the gradients of a node by the names of parameters, as views or as copies.

    By name: the reducer of the next group may have other buckets, and more parameters.
    """
    return {
        reducer.names[i]: view.clone() if clones else view
        for bucket, sums in zip(reducer.buckets, node.sums, strict=True)
        for i, view in zip(bucket.members, sums.views, strict=True)
    }
