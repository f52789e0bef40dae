"""DistributedDataParallel: a module whose gradients are equal on every rank after backward.

The class derives from torch's, so that `isinstance` checks accept it, but torch's constructor
never runs: every method of torch's class that needs what it builds is overridden here, works on
the reducer, or raises.

Everything that holds a reference to the group is built in `_connect` and left out of
`__getstate__`. A new attribute of that kind must be added to `NOT_PICKLED`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

from ..errors import InvalidArgument, InvalidState, InvalidType, MisuseError
from ..groups import _profiler
from ..groups._call_site import warn_user
from ..join import Join, Joinable, JoinHook, _JoinConfig
from . import _config, _interop, _join_hook
from ._autograd_hooks import on_backward
from ._buckets import BucketOptions
from ._buffer_sync import BufferHook, BufferSynchronizer, _BufferCommHook, _BufferCommHookLocation
from ._comm_hook import CommHook, check_hook, hook_name
from ._communicator import BROADCAST_BUCKET_BYTES, Communicator, broadcast_coalesced
from ._mixed_precision import MixedPrecision, PrecisionPolicy, cast_buffers, resolve_mixed_precision
from ._module_inspection import ModuleInventory, NamedParameter
from ._parameter_consistency import assert_same_values, verify_parameters
from ._reducer import Reducer, backward_callback
from ._stats import StepStats, logging_data
from .hooks import allreduce_hook, fp16_compress_hook
from .hooks._base import check_count

PREFIX = "module."
MIN_WEIGHT, MAX_WEIGHT = 1e-9, 1e15
"""Gradients are multiplied by weights and their quotients. Beyond these bounds the products would
overflow or vanish."""
NOT_PICKLED = (
    "reducer", "process_group", "_comm", "_inventory", "_precision_policy", "_buffer_sync",
    "device_mesh", "_join_config", "_join_block",
)  # fmt: skip


class DistributedDataParallel(Joinable, TorchDDP):
    """Wrap a module so that backward leaves the mean gradient of all ranks' batches in `.grad`.

    Drop-in for torch's class of the same name. Unused parameters, graphs that change between
    steps and activation checkpointing work without flags. Every rank passes the same arguments.

    Arguments:
        module: the module to train. Its parameters must have the same names, shapes and dtypes on
            every rank.
        device_ids: the one accelerator that inputs are moved to; leave it out for CPU modules and
            modules on several devices.
        output_device: accepted for compatibility; outputs stay where the module puts them.
        dim: the dim along which `scatter` and `gather` split and concatenate.
        broadcast_buffers: deprecated. False means buffers are never synchronized, not even at
            construction. Ignored if `forward_sync_buffers` is given.
        init_sync: whether to compare the module between ranks and broadcast rank 0's parameters
            and buffers at construction.
        process_group: the group to reduce in; by default this thread's current group, else torch's
            default group.
        bucket_cap_mb: MiB at which a bucket is full; the gradient that fills it may exceed this.
            Default 4 on shared memory, else 25 after a first bucket of 1.
        find_unused_parameters: accepted for compatibility; no effect.
        check_reduction: deprecated; no effect.
        gradient_as_bucket_view: whether `.grad` is a view of the bucket after backward (default),
            or a tensor of its own, which costs a copy.
        static_graph: assert that the graph never changes, so that optimizers in backward may step
            bucket by bucket. A gradient that is late for its step raises `InvalidState`; any other
            change warns.
        delay_all_reduce_named_params: pairs of name and parameter, reduced together in one call.
        param_to_hook_all_reduce: the parameter whose gradient triggers that call.
        mixed_precision: a `MixedPrecision` (ours or torch's): dtypes to compute, reduce and keep
            buffers in.
        device_mesh: a mesh with one axis, instead of `process_group`.
        skip_all_reduce_unused_params: accepted for compatibility; no effect.
        bucket_cap_mb_list: the same, bucket by bucket; the last value applies to the rest.
            Overrides `bucket_cap_mb`.
        batched_grad_copy: accepted for compatibility; no effect.
        forward_sync_buffers: whether every forward pass begins with rank 0's buffers; True by
            default.
        reduce: "mean" or "sum" of the ranks' gradients. With `weight` set, both give the mean over
            all samples.
        check_sync_every: compare all parameters on every N-th reduced backward pass; 0 never.

    Raises:
        RankMismatch: if the module differs between ranks; on every rank.
        InvalidArgument, InvalidState, InvalidType: if an argument is wrong.

    Example::

        model = phalanx.DDP(nn.Linear(8, 1))
        model(inputs).sum().backward()  # model.module.weight.grad is equal on every rank
        optimizer.step()
    """

    mixed_precision: MixedPrecision | None  # type: ignore[assignment]
    reducer: Reducer  # type: ignore[assignment]  # as the others, not of torch's type
    device: torch.device
    _comm: Communicator
    _precision_policy: PrecisionPolicy | None
    _buffer_sync: BufferSynchronizer
    _divide_by_initial_world_size = True
    _ddp_sink_clone = True
    # What methods that are inherited from torch read:
    logger = _delay_grad_buffer = None
    use_side_stream_for_tensor_copies = False

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
        """See the class."""
        nn.Module.__init__(self)  # torch's constructor would build its own reducer
        self.register_load_state_dict_pre_hook(_accept_unprefixed_names)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(DistributedDataParallel._rebuild_if_replaced)  # type: ignore[no-untyped-call]
        self._join_config, self._join_block = _JoinConfig.construct_disabled_join_config(), None
        if reduce not in ("mean", "sum"):
            raise InvalidArgument(f"reduce must be 'mean' or 'sum', got {reduce!r}")
        if check_reduction:
            warn_user("check_reduction is deprecated and does nothing", FutureWarning)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.module = module
        self._extra_parameters: list[NamedParameter] = []
        self._inventory = self._inspect_module()
        self._delay, self._extra_parameters = _config.resolve_delayed(
            self._inventory.parameters, delay_all_reduce_named_params, param_to_hook_all_reduce
        )
        if self._extra_parameters:
            self._inventory = self._inspect_module()
        named = self._inventory.parameters
        _config.check_parameters(named)
        _config.check_sync_batch_norms(self._inventory.sync_norms, named[0][1].device)
        self.mixed_precision = resolve_mixed_precision(mixed_precision, named)
        self.process_group = _config.resolve_group(process_group, device_mesh)
        self.device_mesh = device_mesh
        self.device_ids, self.output_device = _config.resolve_devices(
            named, device_ids, output_device
        )
        self.forward_sync_buffers, sync_buffers_at_start = _config.resolve_buffer_sync(
            broadcast_buffers, forward_sync_buffers
        )
        self.dim = dim
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
        self._check_sync_every = check_count("check_sync_every", check_sync_every)
        self._bucket_sizes = (bucket_cap_mb, bucket_cap_mb_list)
        self._hook: tuple[object, Callable[[Any, Any], Any]] | None = None
        comm = Communicator(self.process_group, self.device)
        if init_sync:
            verify_parameters(named, comm)
        if not any(parameter.requires_grad for _, parameter in named):
            raise InvalidState("no parameter of the module requires a gradient: nothing to reduce")
        precision = self.mixed_precision
        if precision is not None and precision.buffer_dtype is not None:
            cast_buffers(module, precision.buffer_dtype, ignored=self.parameters_to_ignore)
        if precision is not None and precision.gradient_dtype is not None:
            # Not every group and device can sum every dtype. Fail here, not in backward.
            trial = torch.zeros(1, dtype=precision.gradient_dtype, device=self.device)
            comm.sum(trial).wait()
        self._connect()
        if init_sync:
            self.reducer.broadcast_parameters()
            if sync_buffers_at_start:
                self._sync_buffers()

    def _inspect_module(self) -> ModuleInventory:
        return ModuleInventory(self.module, self.parameters_to_ignore, self._extra_parameters)

    def _connect(self, buffer_hook: _BufferCommHook | None = None) -> None:
        """Build everything that refers to the process group."""
        self._comm = Communicator(self.process_group, self.device)
        _config.set_sync_batch_norm_group(self._inventory.sync_norms, self.process_group)
        self._buffer_sync = BufferSynchronizer(self._inventory, self._comm, buffer_hook)
        self._precision_policy = reduce_dtype = None
        if self.mixed_precision is not None:
            reduce_dtype = self.mixed_precision.gradient_dtype
            parameters = [p for _, p in self._inventory.parameters]
            self._precision_policy = PrecisionPolicy(self.mixed_precision, self.module, parameters)
        caps = _config.resolve_bucket_caps(*self._bucket_sizes, shared=self._comm.shares_memory)
        # Read by torch's compiler, which splits no graph into smaller parts than this minimum.
        self.bucket_bytes_cap = max(caps[-1], c10d._DEFAULT_FIRST_BUCKET_BYTES)
        self.reducer = Reducer(
            self._inventory.parameters,
            self._comm,
            BucketOptions(caps, self._inventory.sparse, self._delay, reduce_dtype),
            reduce=self._reduce,
            grad_is_view=self.gradient_as_bucket_view,
            is_static=self.static_graph,
            check_every=self._check_sync_every,
            precision=self._precision_policy,
        )
        if self._hook is not None:
            self.reducer.use_hook(CommHook(*self._hook, self._comm))

    def _reconnect(self) -> None:
        before = self.reducer
        before.close()
        self._connect(self.buffer_hook)
        self.reducer.take_settings_from(before)

    def _rebuild_if_replaced(self, _: object) -> None:
        """Build a new reducer if loading a state has replaced parameters."""
        inventory = self._inspect_module()
        if {p for _, p in self._inventory.parameters} != {p for _, p in inventory.parameters}:
            self._inventory = inventory
            self._reconnect()

    # -- training --------------------------------------------------------------------------

    @_interop.not_compiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's inputs; the backward pass from its outputs is reduced."""
        _interop.exclude_package_from_compiler()
        began = time.perf_counter()
        with _profiler.record("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            output = self._post_forward(self._run_ddp_forward(*inputs, **kwargs))
        self.reducer.forward_seconds += time.perf_counter() - began
        return output

    @_interop.not_compiled
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Begin a step; return the inputs, on the device of the module."""
        is_join_step = self._join_config.enable and self._is_step()
        if is_join_step:
            _join_hook.announce_step(self)
        if torch.is_grad_enabled():
            self.reducer.prepare()
        if self._is_step() and self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if is_join_step:
            _join_hook.announce_backward(self)
        if self.device_ids:
            moved_inputs, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])  # type: ignore[no-untyped-call]
            inputs, kwargs = moved_inputs[0], moved_kwargs[0]
        return inputs, kwargs

    def _is_step(self) -> bool:
        """Whether a forward pass is a step. In a join only with gradients: some ranks evaluate."""
        return torch.is_grad_enabled() or not self._join_config.enable

    @_interop.not_compiled
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward():
            run = _interop.compilable(self.module)
            if self._precision_policy is None:
                return run(*inputs, **kwargs)
            return self._precision_policy.run(run, inputs, kwargs)

    @_interop.not_compiled
    def _post_forward(self, output: Any) -> Any:
        """Arrange that the backward pass from an output is reduced; return the output."""
        if self.buffer_hook is not None:
            if self._check_sync_bufs_post_fwd():
                self._sync_buffers()
            self._buffer_sync.wait_in_backward(output)
        grad_enabled = torch.is_grad_enabled()
        syncs = grad_enabled and self.require_backward_grad_sync
        # Setting an attribute of a module is slow.
        if self._is_step() and self.require_forward_param_sync != syncs:
            self.require_forward_param_sync = syncs
        if grad_enabled:
            on_backward(output, backward_callback(self.reducer))
        return output

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward passes are reduced; read when a pass begins."""
        return self.reducer.syncs_gradients

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, synchronizes: bool) -> None:
        self.reducer.syncs_gradients = synchronizes

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Skip the reduction for backward passes in this block.

        The first pass after it reduces the accumulated sum. Only where `backward()` is called
        matters. Blocks nest. All ranks must agree on which passes are in a block.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def weight(self) -> float | None:
        """The number of samples or tokens that this rank's loss is a mean over.

        Set it on every rank, and gradients are those of the mean over all samples of all ranks
        since the last reduction. None weighs all ranks equally.
        """
        return self.reducer.weights.current

    @weight.setter
    def weight(self, weight: float | None) -> None:
        if weight is not None:
            weight = float(weight)
            if weight and not MIN_WEIGHT <= weight <= MAX_WEIGHT:  # NaN is not, either
                raise InvalidArgument(
                    f"weight must be 0 or between {MIN_WEIGHT:g} and {MAX_WEIGHT:g}, "
                    f"got {weight:g}. Only ratios matter: scale the weights of all ranks equally"
                )
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
        """Reset the gradients, including those that passes in `no_sync` have accumulated."""
        super().zero_grad(set_to_none)
        self.reducer.drop_local_grads()

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Let a hook reduce the gradients: ``hook(state, bucket)`` returns a future of the mean.

        `bucket` is a `GradBucket`. Register one hook, the same on every rank; it cannot be
        replaced.
        """
        check_hook(hook)
        if self._hook is not None:
            raise InvalidState(
                f"this module already has a communication hook, {hook_name(self._hook[1])}; it can "
                "have one communication hook"
            )
        self._hook = state, hook
        self.reducer.use_hook(CommHook(state, hook, self._comm))

    def stats(self) -> list[StepStats]:
        """List the timings of the last steps, oldest first."""
        return self.reducer.stats.steps()

    def assert_in_sync(self) -> None:
        """Raise on every rank if a parameter differs between ranks. Every rank must call this."""
        assert_same_values(self._inventory.parameters, self._comm)

    # -- buffers ---------------------------------------------------------------------------

    @property
    def broadcast_buffers(self) -> bool:
        """Torch's older name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward pass synchronizes buffers."""
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and bool(self._inventory.buffers())
        )

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return not self._buffer_sync.runs_after_forward and self.will_sync_module_buffers()

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self._buffer_sync.runs_after_forward and self.will_sync_module_buffers()

    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: BufferHook,
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Let a hook synchronize buffers; backward waits for the futures that it returns."""
        self.buffer_hook = _BufferCommHook(hook, state, comm_hook_location)

    @property  # type: ignore[override]
    def buffer_hook(self) -> _BufferCommHook | None:
        """The hook that synchronizes buffers, or None for a broadcast."""
        return self._buffer_sync.hook

    @buffer_hook.setter
    def buffer_hook(self, hook: _BufferCommHook | None) -> None:
        self._buffer_sync.hook = hook

    def _sync_buffers(self) -> None:
        # In a join, rank 0 may be out of data and have old buffers.
        if self._join_config.enable:
            self._sync_module_buffers(self._find_common_rank(self._comm.rank, True))
        else:
            self._sync_module_buffers(min(self._comm.members()))  # 0, unless it has left

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        with _profiler.record("DistributedDataParallel.sync_buffers"):
            self._buffer_sync.sync(authoritative_rank)

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        buffers = self._inventory.buffers() if bufs is None else bufs
        limit = BROADCAST_BUCKET_BYTES if bucket_size is None else bucket_size
        broadcast_coalesced(buffers, self._comm, root=authoritative_rank, limit=limit)

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        broadcast_coalesced(tensors, self._comm, root=authoritative_rank, limit=buffer_size)

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        """Agree on the highest rank for which `rank_cond` is true."""
        # Counted from 1: ranks that left the group contribute 0.
        (highest,) = max(self._comm.gather_numbers([input_rank + 1 if rank_cond else 0]))
        if not highest:
            raise InvalidArgument("no candidate for the common rank: rank_cond is False on all")
        return int(highest) - 1

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        _config.check_sync_batch_norms(ModuleInventory(module, ()).sync_norms, self.device)

    # -- uneven inputs ---------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        optimizers: Iterable[Optimizer] = (),
    ) -> Join:
        """Let ranks run out of data at different steps of a loop in the block.

        Arguments:
            divide_by_initial_world_size: whether ranks without data count in the mean gradient.
            enable: False makes the block do nothing.
            throw_on_early_termination: whether uneven inputs raise `UnevenInputs` on all ranks.
            optimizers: optimizers to give the state of a rank that had data to the end.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            optimizers=optimizers,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    join_hook_arguments = ("divide_by_initial_world_size",)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Make the hook for a rank without data; takes `divide_by_initial_world_size`."""
        return _join_hook._DDPJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def supports_leaving(self) -> bool:
        """Whether ranks without data may leave the group; hooks need all ranks."""
        return self._hook is None and self.buffer_hook is None

    @property
    def is_in_step(self) -> bool:
        """Whether a backward pass is expected or running."""
        return self.reducer.expects_backward or self.reducer.is_running

    @property
    def join_optimizers(self) -> list[Optimizer]:
        """The optimizers in backward."""
        return self.reducer.optimizers.all()

    @property
    def join_device(self) -> torch.device:
        """The device of the module."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group in which gradients are reduced."""
        return self.process_group

    @property
    def _ranks_leave(self) -> bool:
        """Whether ranks without data leave the group, so that no rank shadows the others."""
        return self._join_block is not None and self._join_block.leaves

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        """Give every rank the training state of a rank that had data to the end."""
        _join_hook.sync_final_model(self, is_last_joiner)

    # -- saving, loading, copying ----------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the module, with ``module.`` before each name."""
        policy = self._precision_policy
        with nullcontext() if policy is None else policy.without_copies():
            return super().state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state with ``module.`` before each name, or with the module's own names."""
        renamed = _unprefixed_names(self, state_dict)
        if renamed:
            state_dict = _with_prefix(state_dict, renamed)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def __getstate__(self) -> dict[str, Any]:
        if self.reducer.optimizers:
            raise InvalidState(
                "cannot copy or pickle a wrapped module that has optimizers in backward. Copy "
                "ddp.module, wrap it and register the optimizers again"
            )
        state = {name: value for name, value in vars(self).items() if name not in NOT_PICKLED}
        state["_syncs_gradients"] = self.reducer.syncs_gradients
        state["_weight"] = self.reducer.weights.current
        state["_buffer_hook"] = self.buffer_hook
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_syncs_gradients" not in state:
            raise InvalidState(
                f"this {type(self).__name__} was pickled with torch's DistributedDataParallel, "
                "which drop-in replaces. Unpickle it without drop-in and save its state dict"
            )
        syncs_gradients, weight = state.pop("_syncs_gradients"), state.pop("_weight")
        buffer_hook = state.pop("_buffer_hook")
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        self._join_config, self._join_block = _JoinConfig.construct_disabled_join_config(), None
        try:
            self.process_group = _config.require_default_group()
        except MisuseError as error:
            raise InvalidState(
                "a copied or unpickled DistributedDataParallel needs a process group, and there is "
                "no default group. Enter one first: with phalanx.groups.process_group(group)"
            ) from error
        self.device_mesh = None
        self._inventory = self._inspect_module()
        self._connect(buffer_hook)
        self.reducer.syncs_gradients = syncs_gradients
        self.reducer.weights.current = weight

    # -- torch's underscore names ----------------------------------------------------------

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        return _interop.active_module()

    def _inside_ddp_forward(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return _interop.ActiveModule(self)

    @property
    def _distributed_rank(self) -> int:
        return self._comm.rank

    def _check_default_group(self) -> None:
        """Do nothing: a module can be copied and pickled with any group."""

    @staticmethod
    def _get_data_parallel_params(module: Any, named_params: bool = False) -> Iterable[Any]:
        ignored: set[str] = getattr(module, "parameters_to_ignore", set())
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        for name, parameter in inner.named_parameters():
            if name not in ignored:
                yield (name, parameter) if named_params else parameter

    def _set_static_graph(self) -> None:
        self.static_graph = True
        self.reducer._set_static_graph()

    def _remove_autograd_hooks(self) -> None:
        self.reducer.close()

    def _check_reducer_finalized(self) -> None:
        self.reducer._check_reducer_finalized()

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        self.reducer._set_sparse_metadata(global_unique_ids)

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Reduce in another group from now on. Call it between steps, on every rank of it."""
        self._check_reducer_finalized()
        self.process_group = new_process_group
        self._reconnect()

    def _check_comm_hook(self, hook: Callable[[Any, Any], Any]) -> None:
        check_hook(hook)

    def _register_builtin_comm_hook(self, comm_hook_type: c10d.BuiltinCommHookType) -> None:
        hooks = {
            c10d.BuiltinCommHookType.ALLREDUCE: allreduce_hook,
            c10d.BuiltinCommHookType.FP16_COMPRESS: fp16_compress_hook,
        }
        if comm_hook_type not in hooks:
            raise InvalidType(
                f"comm_hook_type must be a BuiltinCommHookType, got {comm_hook_type!r}"
            )
        self.register_comm_hook(None, hooks[comm_hook_type])

    def _register_fused_optim(
        self, optim: type[Optimizer], *args: Any, optim_params: Any = None, **kwargs: Any
    ) -> Optimizer:
        """Make an optimizer that steps at the end of every reduced backward pass; return it."""
        return self.reducer.optimizers.register(optim, optim_params, *args, **kwargs)

    def _setup_in_backward_optimizers(self) -> None:
        """Do nothing: the reducer finds them."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.reducer._set_ddp_runtime_logging_sample_rate(sample_rate)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return logging_data(self)


_interop.refuse_methods(
    DistributedDataParallel,
    {
        "_ddp_init_helper": "wrap the module again, or call _update_process_group()",
        "_register_accum_grad_hook": _interop.USE_COMM_HOOK,
        "_fire_reducer_autograd_hook": _interop.USE_COMM_HOOK,
        "_delayed_all_reduce_hook": _interop.USE_DELAY,
        "_register_delay_all_reduce_hook": _interop.USE_DELAY,
        "_root_copy_hook": _interop.USE_MIXED_PRECISION,
        "_module_wait_for_copy_hook": _interop.USE_MIXED_PRECISION,
        "_check_global_requires_backward_grad_sync": _interop.USE_JOIN,
        "_match_all_reduce_for_bwd_pass": _interop.USE_JOIN,
        "_match_unused_params_allreduce": _interop.USE_JOIN,
    },
)


def _accept_unprefixed_names(
    wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Rename entries in place if they have the names of the wrapped module."""
    names = [name.removeprefix(prefix) for name in state_dict if name.startswith(prefix)]
    renamed = _unprefixed_names(wrapper, names)
    values = {name: state_dict.pop(prefix + name) for name in renamed}
    for name, value in values.items():
        state_dict[prefix + PREFIX + name] = value


def _unprefixed_names(wrapper: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the names of a state that lack ``module.``; none if it is the wrapper's own state."""
    # A submodule may be called ``module`` too, and a state may have further entries, so compare how
    # many names are known with and without the prefix.
    names = set(names)
    plain = set(wrapper.get_submodule("module").state_dict())
    own = _names_outside_module(wrapper) | {PREFIX + name for name in plain}
    as_own, as_plain = len(names & own), len(names & plain)
    if as_plain <= as_own and (as_own or any(name.startswith(PREFIX) for name in names)):
        return set()
    # Parts of the module may accept old names, so unknown names are passed on to them.
    others = {name for name in names - own if not name.startswith(PREFIX)}
    lacking = names & plain | others
    return {name for name in lacking if PREFIX + name not in names or PREFIX + name in lacking}


def _names_outside_module(wrapper: nn.Module) -> set[str]:
    """Return the state names of what a subclass has registered on the wrapper itself."""
    state: dict[str, Any] = {}
    wrapper._save_to_state_dict(state, "", keep_vars=True)
    for name, child in wrapper.named_children():
        if name != "module":
            child.state_dict(destination=state, prefix=f"{name}.")
    return set(state)


def _with_prefix(state: Mapping[str, Any], renamed: set[str]) -> dict[str, Any]:
    """Return a copy with ``module.`` before some names, and in the versions of modules."""
    prefixed = OrderedDict(
        (PREFIX + name if name in renamed else name, value) for name, value in state.items()
    )
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        prefixed._metadata = OrderedDict(  # type: ignore[attr-defined]
            (f"{PREFIX}{name}".removesuffix("."), value) for name, value in versions.items()
        )
    return prefixed
