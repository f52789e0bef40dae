"""The wrapper: a module whose gradients are the same on every rank after backward."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchsClass
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from ..errors import InvalidArgument, InvalidState
from ..join import _JoinConfig
from . import _arguments as arguments
from ._agreement import assert_same_values, verify_parameters
from ._buffer_sync import BufferSync
from ._channel import Channel
from ._comm_hook import CommHook, check_hook
from ._compiling import cap_for_compiler, compilable, keep_compiler_out, not_compiled
from ._distributed_autograd import on_any_backward
from ._joining import Joining
from ._outputs import on_backward
from ._precision import MixedPrecision, Precision, cast_buffers
from ._reducer import Reducer
from ._state import DataParallelState
from ._stats import StepStats
from ._survey import Survey
from ._upstream import UpstreamNames

__all__ = ["DistributedDataParallel"]

REDUCTIONS = ("mean", "sum")


class DistributedDataParallel(  # type: ignore[misc]  # what torch's class has is of other types
    DataParallelState, UpstreamNames, BufferSync, Joining, TorchsClass
):
    """Wraps a module so that every rank has the gradient of all ranks' batches after backward.

    Takes what torch's class of the same name takes, and needs none of its hints: parameters that
    are not used, graphs that change, and activation checkpointing are right by default.

    It derives from torch's class, so that whatever asks for one of that takes it. Torch's
    constructor does not run, so every method that needs what it makes is overridden.
    """

    mixed_precision: MixedPrecision | None  # type: ignore[assignment]

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        reduce: str = "mean",
        check_sync_every: int = 0,
    ) -> None:
        DataParallelState.__init__(self)  # and not torch's class, which would make its own reducer
        self._join_config, self._join_block = _JoinConfig.construct_disabled_join_config(), None
        if reduce not in REDUCTIONS:
            raise InvalidArgument(f"reduce is 'mean' or 'sum', not {reduce!r}")
        if check_reduction:
            warnings.warn(
                "check_reduction is deprecated, and does nothing", FutureWarning, stacklevel=2
            )
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._survey = Survey.of(module, self.parameters_to_ignore)
        self._delay, self._more = arguments.delay_of(
            self._survey.parameters, delay_all_reduce_named_params, param_to_hook_all_reduce
        )
        if self._more:
            self._survey = Survey.of(module, self.parameters_to_ignore, self._more)
        named = self._survey.parameters
        arguments.check_parameters(named)
        arguments.check_layers(self._survey.sync_norms, named[0][1].device)
        self.mixed_precision = arguments.choose_precision(mixed_precision, named)
        self.process_group = arguments.choose_group(process_group, device_mesh)
        self.device_mesh = device_mesh
        self.device_ids, self.output_device = arguments.devices_of(named, device_ids, output_device)
        self.forward_sync_buffers, at_start = arguments.buffer_syncing(
            broadcast_buffers, forward_sync_buffers
        )
        self.dim = dim
        self.module = module
        self.device = named[0][1].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({p.device for _, p in named}) > 1
        self.find_unused_parameters = find_unused_parameters
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.require_forward_param_sync = True
        self._reduce = reduce
        self._check_sync_every = check_sync_every
        self._bucket_sizes = (bucket_cap_mb, bucket_cap_mb_list)
        self._hook: tuple[object, Callable[[Any, Any], Any]] | None = None
        if init_sync:
            verify_parameters(named, Channel(self.process_group, self.device))
        arguments.check_trainable(named)
        self._set_precision()
        self._connect()
        if init_sync:
            self.reducer.broadcast_parameters()
            if at_start:
                self._sync_buffers()

    def _set_precision(self) -> None:
        config = self.mixed_precision
        if config is not None and config.buffer_dtype is not None:
            cast_buffers(self.module, config.buffer_dtype, ignored=self.parameters_to_ignore)
        if config is not None and config.gradient_dtype is not None:
            # Not every group and device can add up every type: better now than in backward.
            trial = torch.zeros(1, dtype=config.gradient_dtype, device=self.device)
            Channel(self.process_group, self.device).sum(trial).wait()

    def _connect(self) -> None:
        """Make what works through the group."""
        self._channel = Channel(self.process_group, self.device)
        arguments.lend_group(self._survey.sync_norms, self.process_group)
        self._precision = None
        if self.mixed_precision is not None:
            parameters = [p for _, p in self._survey.parameters]
            self._precision = Precision(self.mixed_precision, self.module, parameters)
        caps = arguments.choose_caps(*self._bucket_sizes, shared=self._channel.shares_memory)
        self.bucket_bytes_cap = cap_for_compiler(caps.rest)
        self.reducer = Reducer(
            self._survey.parameters,
            self._channel,
            caps=caps,
            sparse=self._survey.sparse,
            delay=self._delay,
            reduce=self._reduce,
            keeps_views=self.gradient_as_bucket_view,
            is_static=self.static_graph,
            check_every=self._check_sync_every,
            precision=self._precision,
        )
        if self._hook is not None:
            self.reducer.use_hook(CommHook(*self._hook, self._channel))

    # -- training --------------------------------------------------------------------------

    @not_compiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's inputs; the backward pass from its outputs is reduced."""
        keep_compiler_out()
        began = time.perf_counter()
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        output = self._post_forward(self._run_ddp_forward(*inputs, **kwargs))
        self.reducer.forward_seconds += time.perf_counter() - began
        return output

    @not_compiled
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Begin a step; return the inputs, on the device of the module."""
        if self._join_config.enable:
            self._begin_step_of_join()
        if torch.is_grad_enabled():
            self.reducer.prepare()
        if self._join_config.enable:
            self._tell_what_follows()
        elif self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self.device_ids:
            moved_inputs, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = moved_inputs[0], moved_kwargs[0]
        return inputs, kwargs

    @not_compiled
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward():
            run = compilable(self.module)
            if self._precision is None:
                return run(*inputs, **kwargs)
            return self._precision.run(run, inputs, kwargs)

    @not_compiled
    def _post_forward(self, output: Any) -> Any:
        """Have the backward pass from an output reduced; return the output."""
        if self.buffer_hook is not None:
            self._finish_forward(output)
        tracks = torch.is_grad_enabled()
        syncs = tracks and self.require_backward_grad_sync
        is_step = tracks or not self._join_config.enable  # who has no data does not see the others
        # To set an attribute takes a module long.
        if is_step and self.require_forward_param_sync != syncs:
            self.require_forward_param_sync = syncs
        if tracks:
            on_backward(output, on_any_backward(self.reducer, adds_up=self._reduce == "sum"))
        return output

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward pass is reduced; what it says when that begins counts."""
        return self.reducer.synchronises

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, synchronises: bool) -> None:
        self.reducer.synchronises = synchronises

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Keep backward passes in the body local; the first one after it reduces the sum.

        What counts is where backward is called, on every rank alike.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def weight(self) -> float | None:
        """What this rank's loss is a mean over: its number of samples or tokens, say.

        Once it is set, on every rank, gradients are those of the mean over everything that the
        ranks have processed since they were reduced last. None counts every rank the same.
        """
        return self.reducer.weights.current

    @weight.setter
    def weight(self, weight: float | None) -> None:
        self.reducer.weights.current = weight

    def backward(self, loss: Tensor, *, weight: float | None = None, **kwargs: Any) -> None:
        """Call ``loss.backward(**kwargs)``, with a weight for this pass if one is given."""
        before = self.weight
        self.weight = before if weight is None else weight
        try:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.weight = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients; what backward passes in `no_sync` have added counts no more."""
        super().zero_grad(set_to_none)
        self.reducer.forget_local()

    def train(self, mode: bool = True) -> DistributedDataParallel:
        """Set whether the module trains or evaluates."""
        nn.Module.train(self, mode)
        return self

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Have a hook reduce the gradients: ``hook(state, bucket)`` returns a future of the mean.

        `bucket` is a `GradBucket`. There is one hook for good, the same on every rank.
        """
        check_hook(hook)
        if self._hook is not None:
            raise InvalidState("a module has one communication hook, and this one has it already")
        self._hook = state, hook
        self.reducer.use_hook(CommHook(state, hook, self._channel))

    # -- what it shows ---------------------------------------------------------------------

    def stats(self) -> list[StepStats]:
        """List what the last steps cost, oldest first."""
        return self.reducer.stats.steps()

    def assert_in_sync(self) -> None:
        """Raise, on every rank, if any parameter has not the same value on all; all ranks call."""
        assert_same_values(self._survey.parameters, self._channel)

    # -- devices ---------------------------------------------------------------------------

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """Divide inputs over devices, along `dim`."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Move inputs to a device."""
        from torch.distributed.utils import _to_kwargs

        return _to_kwargs(inputs, kwargs, torch.device(self.device_type, device_id), False)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Collect outputs on a device, along `dim`."""
        return gather(outputs, output_device, dim=self.dim)
