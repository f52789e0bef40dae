"""The sums of a rank's micro-batches, on the way to a sum that does not depend on the ranks.

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

import torch

from ..errors import InvalidState
from ._buckets import Bucket, BucketLayout, BucketPiece, FlatViews, Gradients, count_missing
from ._communicator import AnyWork, Communicator, TreeSum
from ._summation_tree import Combination, MicroBatchBlock


class GradientFold:
    """Folds the gradients of one rank's micro-batches, over and over."""

    def __init__(self, comm: Communicator, micro_batches: int) -> None:
        blocks = [
            MicroBatchBlock.of_rank(rank, comm.size, micro_batches) for rank in range(comm.size)
        ]
        self.block = blocks[comm.rank]
        self.combination = Combination(blocks)
        self.divisor = 1.0
        """What the sum of the step is divided by, equal on all ranks; set before its last pass."""
        self.used: set[int] = set()
        """The parameters that got a gradient from a micro-batch of this rank, by index."""
        self.graph_task: int | None = None  # of the backward pass in progress
        self._comm = comm
        self._position = self._height = 0
        self._is_nested = False
        self._layout: BucketLayout | None = None
        self._stacks: list[list[FlatViews]] = []
        self._shares_memory = False

    def begin(self, layout: BucketLayout) -> None:
        """Begin a step; the buckets are those of the layout until it ends."""
        self._position = self._height = 0
        self.used.clear()
        if layout is not self._layout:
            self._use_layout(layout)

    def _use_layout(self, layout: BucketLayout) -> None:
        comm, self._layout = self._comm, layout
        self._stacks = []
        are_shared = comm.shares_memory
        for bucket in layout.buckets:
            assert bucket.slots is not None, "sparse gradients are refused"
            stack = [bucket.flat_views(slot) for slot in bucket.slots]
            for _ in range(len(stack), self.block.depth):
                stack.append(bucket.flat_views(torch.empty_like(bucket.slots[0])))
            self._stacks.append(stack)
            are_shared = are_shared and comm.can_sum_trees_in_place(bucket.slots)
        # If one rank has no shared memory left, none can use the others'.
        self._shares_memory = all(shared for (shared,) in comm.gather_numbers([int(are_shared)]))

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch in progress is the last of this rank."""
        return self._position == len(self.block) - 1

    def end_micro_batch(self) -> None:
        """Count the micro-batch as folded."""
        self._height += 1 - self.block.merges[self._position]
        self._position += 1

    def note_arrival(self) -> None:
        """Note whether a gradient arrives in a run of autograd within another."""
        self._is_nested |= torch._C._current_graph_task_id() != self.graph_task

    def can_take(self, new: Gradients) -> bool:
        """Whether the gradients of a piece are final during backward."""
        return not self._is_nested and not count_missing(new)

    def take(self, bucket: Bucket, piece: BucketPiece, new: Gradients) -> None:
        """Fold the gradients of a piece and remove them from the parameters."""
        bottom = self._height - self.block.merges[self._position]
        stack = self._stacks[bucket.index]
        bucket.fold(piece, new, stack[bottom : self._height], into=stack[bottom])
        for i, gradient, parameter in zip(piece.members, new, piece.parameters, strict=True):
            if gradient is not None:
                self.used.add(i)
                parameter.grad = None

    def start_sum(self, bucket: Bucket) -> AnyWork | TreeSum:
        """Start to sum the subtrees of all ranks into the bucket."""
        assert bucket.slots is not None
        return self._comm.sum_trees(
            bucket.slots, self.combination, self.divisor, in_place=self._shares_memory
        )

    def refuse_late(self, names: list[str]) -> None:
        """Raise because gradients arrived after they were folded."""
        raise InvalidState(
            f"the gradient of {', '.join(map(repr, names))} was accumulated twice in one backward "
            "pass, the second time after it was added to the sum of the step. Call checkpoint("
            "use_reentrant=False), and call backward only once per micro-batch"
        )
