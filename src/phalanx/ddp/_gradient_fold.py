"""Accumulation of this rank's micro-batch gradients in the order of a tree.

A step's gradient is a sum over its micro-batches in the order of one tree (`_summation_tree`).
`GradientFold` adds the gradients of this rank's block to a stack of flat tensors per bucket, piece
by piece as they arrive, so that no micro-batch's gradients are held beside the stack. The bottom of
the stack are the input slots of the bucket, where the reduction reads this rank's subtrees; what
comes above is only in use between micro-batches and is private.

The reduction does not write to the stack. If it fails, because a peer has died, the stack still has
what this rank has computed in the step: see `GradientFold.nodes`.

Every bit of a gradient counts. A piece may therefore be folded during backward only if nothing can
be added to it afterwards: all of its gradients have arrived, and autograd adds up what reaches a
parameter before it accumulates once. Only nested runs of autograd (reentrant activation
checkpointing) accumulate again. Where those have been seen, pieces are folded after backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _faultpoints as faultpoints
from ..errors import InvalidState
from ._buckets import Bucket, BucketLayout, BucketPiece, FlatViews, Gradients, count_missing
from ._communicator import AnyWork, Communicator, OrderedSum
from ._summation_tree import LeafBlock, SummationPlan, fold_nodes


class FoldedNode(NamedTuple):
    """The sum of the micro-batches [lo, hi), a node of the tree, on this rank."""

    lo: int
    hi: int
    sums: list[FlatViews]  # by bucket; not divided


class GradientFold:
    """Adds up the gradients of this rank's micro-batches, one step after another."""

    def __init__(
        self, comm: Communicator, plan: SummationPlan, block: LeafBlock | None = None
    ) -> None:
        """`block`: other micro-batches than those of the plan, whose sums are not reduced."""
        self.divisor = 1.0
        """What the sum of the step is divided by, equal on all ranks; set before a bucket is
        reduced, which may be in the last backward pass."""
        self.used: set[int] = set()
        """The parameters that got a gradient from a micro-batch of this rank, by index."""
        self._comm = comm
        self._plan = plan
        self._block = plan.block if block is None else block
        self._is_reduced = block is None
        self._position = self._height = 0
        self._is_partial = False  # whether a micro-batch is folded in part
        self._graph_task: int | None = None  # of the backward pass in progress
        self._is_nested = False
        self._layout: BucketLayout | None = None
        self._stacks: list[list[FlatViews]] = []
        self._header_input = torch.empty(0)  # where the reduction reads the pass header

    def begin(self, layout: BucketLayout) -> None:
        """Begin a step; the buckets are those of the layout until it ends."""
        self._position = self._height = 0
        self._is_partial = False
        self.used.clear()
        if layout is self._layout:
            return
        self._layout, self._stacks = layout, []
        for bucket in layout.buckets:
            assert bucket.slots is not None, "sparse gradients are refused"
            shared, numel = bucket.slots.inputs, bucket.buffer.numel()
            private = range(len(shared), self._block.depth)
            flats = [*shared, *(torch.zeros_like(shared[0]) for _ in private)]
            self._stacks.append([bucket.flat_views(flat[:numel]) for flat in flats])
            # The last one has the header. In other inputs it stays zero.
            self._header_input = shared[0, numel : bucket.payload.numel()]

    def release(self) -> None:
        """Let go of the buckets, which are about to be replaced, and of the sums in them."""
        self._layout, self._stacks = None, []
        self._header_input = torch.empty(0)

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch in progress is the last of this rank, so that a sum follows."""
        return self._is_reduced and self._position == len(self._block) - 1

    def end_micro_batch(self) -> None:
        """Count the micro-batch as folded: all of its pieces are."""
        self._height += 1 - self._block.merges[self._position]
        self._position += 1
        self._is_partial = False

    def nodes(self) -> list[FoldedNode]:
        """List the largest nodes that the micro-batches folded in this step have completed.

        They are views of the stack, valid until the next micro-batch, and intact if the reduction
        has failed. There is none if a backward pass has raised in the middle: some of its gradients
        are in the sums then, and others are not.
        """
        if self._is_partial:
            return []
        block = self._block
        folded = range(block.lo, block.lo + self._position)
        nodes, _ = fold_nodes(((leaf, leaf + 1) for leaf in folded), block.leaves)
        assert len(nodes) == self._height
        levels = zip(*self._stacks, strict=True)  # one node of all buckets after the other
        return [
            FoldedNode(lo, hi, list(sums)) for (lo, hi), sums in zip(nodes, levels, strict=False)
        ]

    # -- during backward -------------------------------------------------------------------

    def run_backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Call ``loss.backward``, and know its graph task from those that run within it."""

        def note_graph_task(_: object) -> None:
            self._graph_task = torch._C._current_graph_task_id()

        if loss.grad_fn is None:  # a parameter, which nothing can nest in
            loss = loss.view_as(loss)
        assert loss.grad_fn is not None
        handle = loss.grad_fn.register_prehook(note_graph_task)
        try:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        finally:
            handle.remove()
            self._graph_task = None

    def detect_nesting(self) -> None:
        """Note whether a gradient arrives in a run of autograd within another."""
        self._is_nested |= torch._C._current_graph_task_id() != self._graph_task

    def is_final(self, new: Gradients) -> bool:
        """Whether nothing can be added to the gradients of a piece in this pass."""
        return not self._is_nested and not count_missing(new)

    def fold(self, bucket: Bucket, piece: BucketPiece, new: Gradients) -> None:
        """Add the gradients of a piece to the sums, and remove them from the parameters."""
        self._is_partial = True
        bottom = self._height - self._block.merges[self._position]
        stack = self._stacks[bucket.index]
        bucket.fold(piece, new, stack[bottom : self._height], into=stack[bottom])
        for i, gradient, parameter in zip(piece.members, new, piece.parameters, strict=True):
            if gradient is not None:
                self.used.add(i)
                parameter.grad = None

    def start_sum(self, bucket: Bucket) -> AnyWork | OrderedSum:
        """Start to sum the subtrees of all ranks into the bucket."""
        assert bucket.slots is not None
        assert self._layout is not None
        if bucket is self._layout.buckets[-1]:
            self._header_input.copy_(self._layout.header.space)  # written where it will be read
        if faultpoints.armed:
            faultpoints.reach("ddp:reduce_fold")
        return self._comm.ordered_sum(bucket.slots, self._plan, self.divisor)

    def refuse_late(self, names: list[str]) -> None:
        """Raise because gradients arrived after they were folded."""
        raise InvalidState(
            f"the gradient of {', '.join(map(repr, names))} was accumulated twice in one backward "
            "pass, the second time after it was added to the sum of the step. Call checkpoint("
            "use_reentrant=False), and call backward only once per micro-batch"
        )
