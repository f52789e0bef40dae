"""Accumulation of this rank's micro-batch gradients in the order of a tree.

A step's gradient is a sum over its micro-batches in the order of one tree (`_summation_tree`).
`GradientFold` adds the gradients of this rank's block to a stack of flat tensors per bucket, piece
by piece as they arrive, so that no micro-batch's gradients are held beside the stack. The bottom of
the stack is the bucket itself and the slots behind it, where the reduction reads this rank's
subtrees; what comes above is only in use between micro-batches and is private.

Every bit of a gradient counts. A piece may therefore be folded during backward only if nothing can
be added to it afterwards: all of its gradients have arrived, and autograd adds up what reaches a
parameter before it accumulates once. Only nested runs of autograd (reentrant activation
checkpointing) accumulate again. Where those have been seen, pieces are folded after backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidState
from ._buckets import Bucket, BucketLayout, BucketPiece, FlatViews, Gradients, count_missing
from ._communicator import AnyWork, Communicator, OrderedSum
from ._summation_tree import SummationPlan


class GradientFold:
    """Adds up the gradients of this rank's micro-batches, one step after another."""

    def __init__(self, comm: Communicator, plan: SummationPlan) -> None:
        self.divisor = 1.0
        """What the sum of the step is divided by, equal on all ranks; set before its last pass."""
        self.used: set[int] = set()
        """The parameters that got a gradient from a micro-batch of this rank, by index."""
        self._comm = comm
        self._plan = plan
        self._position = self._height = 0
        self._graph_task: int | None = None  # of the backward pass in progress
        self._is_nested = False
        self._layout: BucketLayout | None = None
        self._stacks: list[list[FlatViews]] = []

    def begin(self, layout: BucketLayout) -> None:
        """Begin a step; the buckets are those of the layout until it ends."""
        self._position = self._height = 0
        self.used.clear()
        if layout is self._layout:
            return
        self._layout, self._stacks = layout, []
        for bucket in layout.buckets:
            assert bucket.slots is not None, "sparse gradients are refused"
            shared = bucket.slots.tensor
            private = range(len(shared), self._plan.block.depth)
            flats = [*shared, *(torch.empty_like(shared[0]) for _ in private)]
            self._stacks.append([bucket.flat_views(flat) for flat in flats])

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch in progress is the last of this rank."""
        return self._position == len(self._plan.block) - 1

    def end_micro_batch(self) -> None:
        """Count the micro-batch as folded."""
        self._height += 1 - self._plan.block.merges[self._position]
        self._position += 1

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
        bottom = self._height - self._plan.block.merges[self._position]
        stack = self._stacks[bucket.index]
        bucket.fold(piece, new, stack[bottom : self._height], into=stack[bottom])
        for i, gradient, parameter in zip(piece.members, new, piece.parameters, strict=True):
            if gradient is not None:
                self.used.add(i)
                parameter.grad = None

    def start_sum(self, bucket: Bucket) -> AnyWork | OrderedSum:
        """Start to sum the subtrees of all ranks into the bucket."""
        assert bucket.slots is not None
        return self._comm.ordered_sum(bucket.slots, self._plan, self.divisor)

    def refuse_late(self, names: list[str]) -> None:
        """Raise because gradients arrived after they were folded."""
        raise InvalidState(
            f"the gradient of {', '.join(map(repr, names))} was accumulated twice in one backward "
            "pass, the second time after it was added to the sum of the step. Call checkpoint("
            "use_reentrant=False), and call backward only once per micro-batch"
        )
