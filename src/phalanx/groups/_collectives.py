"""Every collective, in both of torch's call forms, brought into one.

``group.allreduce(tensor, op=ReduceOp.MAX, timeout=...)`` and ``group.allreduce([tensor], opts)``
mean the same; so do the tensor and list forms of the others. Each method checks its arguments,
adapts them to what the engine has, and hands over to `_issue`, which numbers and records the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from . import _validate as validate
from ._adapt import adapt_reduction, plain_op
from ._collective_base import CollectiveBase, Tensors, Timeout, also_named, is_plain_real, with_op
from ._joint import JointWork
from ._work import Work

__all__ = ["Collectives"]

AVG = ReduceOp.AVG


class Collectives(CollectiveBase):
    """The collectives of a group, in terms of its engine."""

    # -- reductions ------------------------------------------------------------------------

    def allreduce(
        self,
        tensors: Tensor | Tensors | None = None,
        op: Any = None,
        timeout: Timeout = None,
        *,
        opts: Any = None,
        tensor: Tensor | None = None,
    ) -> Work:
        """Reduce a tensor over all ranks, in place, so that every rank has the result."""
        # The call of calls: what nearly everybody does, a plain sum or mean, takes a short way.
        if op is AVG and opts is timeout is None and self._short:
            if work := self._short.mean(tensors):
                return work
        elif op is opts is timeout is None:
            if self._short and (work := self._short.sum(tensors)):
                return work
            if (
                isinstance(tensors, Tensor)
                and tensors.dtype in self._quick_types
                and is_plain_real(tensors)
            ):
                return self._issue_sum(tensors)
        mine = validate.single("allreduce", tensors if tensor is None else tensor)
        opts, op = self._reduce_options(c10d.AllreduceOptions, "allreduce", opts, op, timeout)
        if mine[0].is_sparse:
            return self._reduce_sparse(opts, op, mine)
        return self._reduce("allreduce", self._engine.allreduce, opts, op, mine)

    def allreduce_coalesced(
        self, tensors: Tensors, op: Any = None, timeout: Timeout = None, *, opts: Any = None
    ) -> Work:
        """Reduce several tensors of one dtype over all ranks, in place, in one call."""
        name, kind = "allreduce_coalesced", c10d.AllreduceCoalescedOptions
        mine = validate.flat_list(name, tensors)
        validate.same_dtype(name, mine)
        opts, op = self._reduce_options(kind, name, opts, op, timeout)
        if not mine:
            return self.barrier(timeout=timeout)
        return self._reduce(name, self._engine.allreduce_coalesced, opts, op, mine)

    @also_named(tensor="tensors")
    def reduce(
        self,
        tensors: Tensor | Tensors,
        root: Any = 0,
        op: Any = None,
        timeout: Timeout = None,
        *,
        opts: Any = None,
    ) -> Work:
        """Reduce a tensor over all ranks, in place on the rank `root`."""
        mine = validate.single("reduce", tensors)
        opts = self._options(c10d.ReduceOptions, "reduce", opts, timeout, root)
        opts, op = self._reduce_options(c10d.ReduceOptions, "reduce", opts, op, None)
        self._check_tensors("reduce", mine, op)
        # Only the root's tensor may change, whatever the engine uses for scratch.
        scratch = mine if self._rank == opts.rootRank else [mine[0].detach().clone()]
        return self._reduce(
            "reduce", self._engine.reduce, opts, op, scratch, outputs=mine, terms=(opts.rootRank,)
        )

    @also_named(output="output_tensors", input="input_tensors")
    def reduce_scatter(
        self,
        output_tensors: Tensor | Tensors,
        input_tensors: Tensors | Sequence[Tensors],
        op: Any = None,
        timeout: Timeout = None,
        *,
        opts: Any = None,
    ) -> Work:
        """Reduce a list of tensors over all ranks; rank i keeps the i-th."""
        name, kind = "reduce_scatter", c10d.ReduceScatterOptions
        output = validate.single(name, output_tensors)
        inputs = validate.nested_list(name, input_tensors)
        validate.same_length(name, inputs, self._size, word="input")
        validate.same_dtype(name, [*output, *inputs])
        validate.numel(name, output[0], inputs[self._rank].numel(), word="output")
        opts, op = self._reduce_options(kind, name, opts, op, timeout)
        self._check_tensors(name, [*output, *inputs], op)
        plan = adapt_reduction(
            self._traits, name, op, inputs=inputs, outputs=output, size=self._parties
        )
        return self._issue(
            name,
            inputs,
            plan.starting(self._engine.reduce_scatter),
            (plan.outputs, [plan.inputs], with_op(opts, plan.op)),
            outputs=output,
            timeout=opts.timeout,
            terms=(plain_op(op),),
            finish=plan.finish,
            single=len({part.numel() for part in inputs}) == 1,
        )

    @also_named(outputTensor="output", inputTensor="input")
    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,
        opts: Any = None,
        timeout: Timeout = None,
        *,
        op: Any = None,
    ) -> Work:
        """Reduce a tensor over all ranks; rank i keeps the i-th part of it."""
        name, kind = "reduce_scatter_single", c10d.ReduceScatterOptions
        opts, op = self._reduce_options(kind, name, opts, op, timeout)
        return self._reduce_parts(name, [output], [input], opts, op)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Reduce several tensors over all ranks; rank i keeps the i-th part of each."""
        name = "reduce_scatter_single_coalesced"
        opts, op = self._reduce_options(c10d.ReduceScatterOptions, name, opts, None, None)
        return self._reduce_parts(name, outputs, inputs, opts, op)

    # -- one to all, all to one ------------------------------------------------------------

    @also_named(tensor="tensors")
    def broadcast(
        self,
        tensors: Tensor | Tensors,
        root: Any = 0,
        timeout: Timeout = None,
        *,
        opts: Any = None,
    ) -> Work:
        """Copy a tensor from the rank `root` to every rank."""
        mine = validate.single("broadcast", tensors)
        opts = self._options(c10d.BroadcastOptions, "broadcast", opts, timeout, root)
        args = (self._movable("broadcast", mine), opts)
        return self._issue(
            "broadcast",
            mine,
            self._engine.broadcast,
            args,
            timeout=opts.timeout,
            terms=(opts.rootRank,),
        )

    @also_named(input_tensor="input_tensors")
    def gather(
        self,
        output_tensors: Tensors | Sequence[Tensors],
        input_tensors: Tensor | Tensors,
        root: Any = 0,
        timeout: Timeout = None,
        *,
        opts: Any = None,
    ) -> Work:
        """Collect a tensor from every rank on the rank `root`."""
        mine = validate.single("gather", input_tensors)
        opts = self._options(c10d.GatherOptions, "gather", opts, timeout, root)
        outputs = validate.nested_list("gather", output_tensors)
        if self._rank == opts.rootRank:
            validate.one_for_each_rank("gather", outputs, mine[0], self._size, word="output")
        moved = self._movable("gather", outputs)
        args = ([moved] if outputs else [], self._movable("gather", mine), opts)
        return self._issue(
            "gather",
            mine,
            self._engine.gather,
            args,
            outputs=outputs,
            timeout=opts.timeout,
            terms=(opts.rootRank,),
        )

    @also_named(output_tensor="output_tensors")
    def scatter(
        self,
        output_tensors: Tensor | Tensors,
        input_tensors: Tensors | Sequence[Tensors] = (),
        root: Any = 0,
        timeout: Timeout = None,
        *,
        opts: Any = None,
    ) -> Work:
        """Hand out a list of tensors from the rank `root`; rank i receives the i-th."""
        mine = validate.single("scatter", output_tensors)
        opts = self._options(c10d.ScatterOptions, "scatter", opts, timeout, root)
        inputs = validate.nested_list("scatter", input_tensors)
        if self._rank == opts.rootRank:
            validate.one_for_each_rank("scatter", inputs, mine[0], self._size, word="input")
        moved = self._movable("scatter", inputs)
        args = (self._movable("scatter", mine), [moved] if inputs else [], opts)
        return self._issue(
            "scatter",
            mine,
            self._engine.scatter,
            args,
            timeout=opts.timeout,
            terms=(opts.rootRank,),
        )

    # -- all to all ------------------------------------------------------------------------

    @also_named(input_tensor="input_tensors")
    def allgather(
        self,
        output_tensors: Tensors | Sequence[Tensors],
        input_tensors: Tensor | Tensors,
        timeout: Any = None,
        *,
        opts: Any = None,
    ) -> Work:
        """Collect a tensor from every rank in a list on every rank."""
        mine = validate.single("allgather", input_tensors)
        outputs = validate.nested_list("allgather", output_tensors)
        validate.one_for_each_rank("allgather", outputs, mine[0], self._size, word="output")
        opts = self._options(c10d.AllgatherOptions, "allgather", opts, timeout)
        args = ([self._movable("allgather", outputs)], self._movable("allgather", mine), opts)
        work = self._issue(
            "allgather", mine, self._engine.allgather, args, outputs=outputs, timeout=opts.timeout
        )
        work.is_gathered()
        return work

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: Timeout = None
    ) -> Work:
        """Collect a tensor from every rank, one after the other, in one tensor on every rank."""
        return self._gather_into("all_gather_single", [output], [input], opts, timeout)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Collect several tensors from every rank, each in one tensor on every rank."""
        return self._gather_into("all_gather_single_coalesced", outputs, inputs, opts, None)

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None
    ) -> Work:
        """Collect a list of tensors from every rank: ``output_lists[rank][i]``."""
        name = "allgather_coalesced"
        mine = validate.flat_list(name, input_list)
        lists = [validate.flat_list(name, outputs) for outputs in output_lists]
        validate.same_length(name, lists, self._size, word="list of output")
        opts = self._options(c10d.AllgatherOptions, name, opts, None)
        for outputs in lists:
            validate.same_length(name, outputs, len(mine), word="output", each="input")
        for i, tensor in enumerate(mine):
            column = [outputs[i] for outputs in lists]
            validate.one_for_each_rank(name, column, tensor, self._size, word="output")
        # One call for each, for engines differ in what they accept in one list.
        method = self._engine.allgather
        pairs = [
            (self._movable(name, [outputs[i] for outputs in lists]), self._movable(name, [tensor]))
            for i, tensor in enumerate(mine)
        ]
        return self._issue(
            name,
            mine,
            lambda: JointWork([method([outs], ins, opts) for outs, ins in pairs]),
            (),
            outputs=[tensor for outputs in lists for tensor in outputs],
            timeout=opts.timeout,
            single=len(mine) == 1,
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
        timeout: Timeout = None,
    ) -> Work:
        """Send the i-th part of a tensor to rank i and receive one part from each."""
        name = "all_to_all_single"
        both = self._movable_rows(
            name, validate.single(name, output) + validate.single(name, input)
        )
        validate.same_dtype(name, [output, input])
        sizes = self._size
        into = validate.splits(name, output, list(output_split_sizes or ()), sizes, word="output")
        out_of = validate.splits(name, input, list(input_split_sizes or ()), sizes, word="input")
        opts = self._options(c10d.AllToAllOptions, name, opts, timeout)
        args = (*self._movable_rows(name, both), into, out_of, opts)
        return self._issue(
            name,
            [input],
            self._engine.alltoall_base,
            args,
            outputs=[output],
            timeout=opts.timeout,
            uneven=True,
        )

    def alltoall(
        self,
        output_tensors: Tensors,
        input_tensors: Tensors,
        opts: Any = None,
        timeout: Timeout = None,
    ) -> Work:
        """Send the i-th tensor of a list to rank i and receive one tensor from each."""
        outputs = validate.flat_list("alltoall", output_tensors)
        inputs = validate.flat_list("alltoall", input_tensors)
        validate.same_length("alltoall", outputs, self._size, word="output")
        validate.same_length("alltoall", inputs, self._size, word="input")
        validate.same_dtype("alltoall", [*outputs, *inputs])
        opts = self._options(c10d.AllToAllOptions, "alltoall", opts, timeout)
        method, args, finish = self._exchange(
            self._movable("alltoall", outputs), self._movable("alltoall", inputs), opts
        )
        return self._issue(
            "alltoall",
            inputs,
            method,
            args,
            outputs=outputs,
            timeout=opts.timeout,
            uneven=True,
            finish=finish,
        )

    def barrier(self, opts: Any = None, timeout: Timeout = None) -> Work:
        """Wait until every rank has come here."""
        if opts is timeout is None and self._short and (work := self._short.barrier()):
            return work
        opts = self._options(c10d.BarrierOptions, "barrier", opts, timeout)
        return self._issue("barrier", [], self._engine.barrier, (opts,), timeout=opts.timeout)

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank has come here; every barrier of ours names who is missing."""
        del wait_all_ranks  # a timeout names them all in any case
        self.barrier(timeout=timeout).wait()

    # -- point to point --------------------------------------------------------------------

    def send(
        self, tensors: Tensor | Tensors, dstRank: int, tag: int = 0, timeout: Timeout = None
    ) -> Work:
        """Send a tensor to one rank."""
        method = self._engine.send
        return self._transfer("send", method, tensors, dstRank, tag, timeout, word="destination")

    def recv(
        self, tensors: Tensor | Tensors, srcRank: int, tag: int = 0, timeout: Timeout = None
    ) -> Work:
        """Receive a tensor from one rank."""
        method = self._engine.recv
        return self._transfer("recv", method, tensors, srcRank, tag, timeout, word="source")

    def recv_anysource(
        self, tensors: Tensor | Tensors, tag: int = 0, timeout: Timeout = None
    ) -> Work:
        """Receive a tensor from whichever rank sends one; ``work.source_rank()`` tells which."""
        mine = validate.single("recv_anysource", tensors)
        if timeout is not None:
            validate.seconds(timeout)
        args = (self._movable("recv_anysource", mine), tag)
        return self._issue(
            "recv_anysource",
            mine,
            self._engine.recv_anysource,
            args,
            timeout=timeout,
            transfer=True,
        )

    # -- torch's other names for the same --------------------------------------------------

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
