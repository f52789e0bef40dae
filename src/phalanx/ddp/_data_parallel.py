"""DistributedDataParallel: a module whose gradients are equal on every rank after backward.

The class derives from torch's, so that `isinstance` checks accept it, but torch's constructor
never runs: every method of torch's class that needs what it builds is overridden here, works on
the reducer, or raises.

A gradient goes from here to `_autograd_hooks` (which notice it), `_reducer` and
`_backward_pass` (which decide when to reduce it), `_buckets` (which hold it) and the process
group.

Everything that holds a reference to the group is built in `_connect_to_store` and left out of
`__getstate__`. A new attribute of that kind must be added to `UNPICKLED`.
"""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel as TorchsClass
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs
from torch.optim import Optimizer

from ..errors import InvalidArgument, InvalidState, InvalidType, MisuseError
from ..join import _JoinConfig
from . import _config
from ._autograd_hooks import on_backward
from ._buffer_sync import BufferSync
from ._comm_hook import CommHook, check_hook
from ._communicator import Communicator
from ._interop import (
    ActiveModule,
    active_module,
    compilable,
    compiler_bucket_cap,
    exclude_package_from_compiler,
    not_compiled,
)
from ._join_hook import Joining
from ._mixed_precision import MixedPrecision, PrecisionPolicy, cast_buffers
from ._module_inspection import ModuleInventory
from ._parameter_consistency import assert_same_values, verify_parameters
from ._reducer import Reducer, backward_callback
from ._stats import StepStats
from .hooks import allreduce_hook, fp16_compress_hook

PREFIX = "module."
UNPICKLED = (
    "reducer",
    "process_group",
    "_channel",
    "_survey",
    "_precision",
    "device_mesh",
    "_join_config",
    "_join_block",
)


class DataParallelState(nn.Module):
    """What saving, loading, copying and pickling a wrapped module mean."""

    module: nn.Module
    reducer: Reducer
    parameters_to_ignore: set[str]
    _survey: ModuleInventory
    _precision: PrecisionPolicy | None
    _extra_parameters: list[tuple[str, Parameter]]
    """Parameters besides the module's own."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_load_state_dict_pre_hook(_accept_unprefixed_names)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_rebuild_after_load)  # type: ignore[no-untyped-call]

    def _connect(self) -> None:
        raise NotImplementedError

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the module, with ``module.`` before each name, as torch's class."""
        with nullcontext() if self._precision is None else self._precision.without_copies():
            return super().state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state with ``module.`` before each name, or with the module's own names."""
        renamed = _plain_names(self, state_dict)
        if renamed:
            state_dict = _with_prefix(state_dict, renamed)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _take_over(self) -> None:
        """Reduce the gradients of the parameters that the module has now, if they are others."""
        survey = ModuleInventory.of(self.module, self.parameters_to_ignore, self._extra_parameters)
        known = {id(parameter) for _, parameter in self._survey.parameters}
        if known != {id(parameter) for _, parameter in survey.parameters}:
            self._survey = survey
            self._reconnect()

    def _reconnect(self) -> None:
        """Make another reducer in the place of the one there is."""
        before = self.reducer
        before.close()
        self._connect()
        self.reducer.adopt(before)

    def __getstate__(self) -> dict[str, Any]:
        if self.reducer.optimizers:
            raise InvalidState(
                "cannot copy or pickle a wrapped module that has optimizers in backward. Copy "
                "ddp.module, wrap it and register the optimizers again"
            )
        state = {name: value for name, value in vars(self).items() if name not in UNPICKLED}
        state["_synchronises"] = self.reducer.syncs_gradients
        state["_weight"] = self.reducer.weights.current
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        synchronises, weight = state.pop("_synchronises"), state.pop("_weight")
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        self._join_config, self._join_block = _JoinConfig.construct_disabled_join_config(), None
        try:
            self.process_group = _config.require_default_group()
        except MisuseError as error:
            raise InvalidState(
                "a wrapped module is copied or loaded without its group, and needs another: enter "
                "one first, with phalanx.groups.process_group(group)"
            ) from error
        self.device_mesh = None
        self._survey = ModuleInventory.of(
            self.module, self.parameters_to_ignore, self._extra_parameters
        )
        self._connect()
        self.reducer.syncs_gradients = synchronises
        self.reducer.weights.current = weight


def _rebuild_after_load(wrapper: DataParallelState, _: Any) -> None:
    wrapper._take_over()


def _accept_unprefixed_names(
    wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Have torch find the entries of a wrapper, if they have the names of the module itself."""
    names = [name.removeprefix(prefix) for name in state_dict if name.startswith(prefix)]
    renamed = _plain_names(wrapper, names)
    values = {name: state_dict.pop(prefix + name) for name in renamed}
    for name, value in values.items():
        state_dict[prefix + PREFIX + name] = value


def _plain_names(wrapper: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the names of a state that lack the ``module.`` of the wrapper; none if it is its own.

    A part of the module may be called ``module`` too, and any state may have further entries, so
    what counts is how many names are known either way.
    """
    names = set(names)
    plain = set(wrapper.get_submodule("module").state_dict())
    own = _names_beside_module(wrapper) | {PREFIX + name for name in plain}
    as_own, as_plain = len(names & own), len(names & plain)
    if as_plain <= as_own and (as_own or any(name.startswith(PREFIX) for name in names)):
        return set()
    # A part of the module may know names that it has no longer, so unknown ones go there too.
    others = {name for name in names - own if not name.startswith(PREFIX)}
    lacking = names & plain | others
    return {name for name in lacking if PREFIX + name not in names or PREFIX + name in lacking}


def _names_beside_module(wrapper: nn.Module) -> set[str]:
    """Return the names in its state of what a subclass has registered on the wrapper itself."""
    state: dict[str, Any] = {}
    wrapper._save_to_state_dict(state, "", keep_vars=True)
    for name, child in wrapper.named_children():
        if name != "module":
            child.state_dict(destination=state, prefix=f"{name}.")
    return set(state)


def _with_prefix(state: Mapping[str, Any], renamed: set[str]) -> dict[str, Any]:
    """Put ``module.`` before names, and before those of the modules whose version is told."""
    prefixed = OrderedDict(
        (PREFIX + name if name in renamed else name, value) for name, value in state.items()
    )
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        prefixed._metadata = OrderedDict(  # type: ignore[attr-defined]
            (f"{PREFIX}{name}".removesuffix("."), value) for name, value in versions.items()
        )
    return prefixed


_MIXED_PRECISION = "pass mixed_precision= when you wrap the module"
_DELAY = "pass delay_all_reduce_named_params= when you wrap the module"
_JOIN = "use ddp.join() or phalanx.join.Join"
UNSUPPORTED = {
    "_ddp_init_helper": "wrap the module again, or call _update_process_group() for another group",
    "_register_accum_grad_hook": "use register_comm_hook()",
    "_fire_reducer_autograd_hook": "use register_comm_hook()",
    "_delayed_all_reduce_hook": _DELAY,
    "_register_delay_all_reduce_hook": _DELAY,
    "_root_copy_hook": _MIXED_PRECISION,
    "_module_wait_for_copy_hook": _MIXED_PRECISION,
    "_check_global_requires_backward_grad_sync": _JOIN,
    "_match_all_reduce_for_bwd_pass": _JOIN,
    "_match_unused_params_allreduce": _JOIN,
}
"""Methods that work on the internals of torch's class, and what to use instead."""


class UpstreamNames:
    """Torch's underscore names."""

    reducer: Reducer
    module: nn.Module
    process_group: dist.ProcessGroup
    parameters_to_ignore: set[str]
    static_graph: bool
    forward_sync_buffers: bool
    _channel: Communicator
    _ddp_sink_clone = True

    # -- the module that runs --------------------------------------------------------------

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        return active_module()

    def _inside_ddp_forward(self) -> AbstractContextManager[None]:
        return ActiveModule(self)

    def _lazy_init(self) -> None:
        """Do nothing: the constructor leaves nothing to the first forward pass."""

    @property
    def _distributed_rank(self) -> int:
        return self._channel.rank

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        raise err_type(err_msg)

    def _check_default_group(self) -> None:
        """Do nothing: a module is copied and pickled whichever group it has."""

    # -- parameters ------------------------------------------------------------------------

    @staticmethod
    def _get_data_parallel_params(module: Any, named_params: bool = False) -> Iterable[Any]:
        """Yield the parameters whose gradients are reduced."""
        ignored: set[str] = getattr(module, "parameters_to_ignore", set())
        inner = module.module if isinstance(module, UpstreamNames) else module
        for name, parameter in inner.named_parameters():
            if name not in ignored:
                yield (name, parameter) if named_params else parameter

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Have parameters and buffers of a module left alone when it is wrapped."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        for name, parameter in module.named_parameters():
            if name in params_and_buffers_to_ignore:
                parameter._ddp_ignored = True  # type: ignore[attr-defined]
        for name, buffer in module.named_buffers():
            if name in params_and_buffers_to_ignore:
                buffer._ddp_ignored = True  # type: ignore[attr-defined]

    # -- the reducer -----------------------------------------------------------------------

    def _set_static_graph(self) -> None:
        self.static_graph = self.reducer.is_static = True

    def _remove_autograd_hooks(self) -> None:
        self.reducer.close()

    def _check_reducer_finalized(self) -> None:
        if self.reducer.is_running:
            raise InvalidState("a backward pass of this module has not come to its end")

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Have `_DDPSink` copy what it passes on, or not; a wrapped module needs none."""
        self._ddp_sink_clone = val

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        """Accept a hint of torch's: here the entries of sparse gradients are found."""

    def _clear_grad_buffer(self) -> None:
        """Do nothing: gradients that are reduced late have no buffer of their own."""

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Reduce in another group from now on; between steps, and on every rank of it."""
        self._check_reducer_finalized()
        self.process_group = new_process_group
        self._reconnect()

    def _reconnect(self) -> None:
        raise NotImplementedError

    # -- communication hooks -----------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        raise NotImplementedError

    def _check_comm_hook(self, hook: Callable[[Any, Any], Any]) -> None:
        check_hook(hook)

    def _register_builtin_comm_hook(self, comm_hook_type: c10d.BuiltinCommHookType) -> None:
        """Register a hook that torch has in C++, by its name there."""
        hooks = {
            c10d.BuiltinCommHookType.ALLREDUCE: allreduce_hook,
            c10d.BuiltinCommHookType.FP16_COMPRESS: fp16_compress_hook,
        }
        if comm_hook_type not in hooks:
            raise InvalidType(f"a BuiltinCommHookType is needed, not {comm_hook_type!r}")
        self.register_comm_hook(None, hooks[comm_hook_type])

    # -- optimizers --------------------------------------------------------------------------

    def _register_fused_optim(
        self, optim: type[Optimizer], *args: Any, optim_params: Any = None, **kwargs: Any
    ) -> Optimizer:
        """Have an optimizer step at the end of every backward pass that is reduced; return it."""
        return self.reducer.optimizers.fuse(optim, optim_params, *args, **kwargs)

    def _setup_in_backward_optimizers(self) -> None:
        """Do nothing: the reducer looks for them itself."""

    # -- logging ---------------------------------------------------------------------------

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Accept a setting of torch's: here every step is measured."""
        if sample_rate < 1:
            raise InvalidArgument(f"a sample rate is 1 or more, not {sample_rate}")

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Tell about the module under torch's names."""
        steps = self.reducer.stats.steps()
        data: dict[str, Any] = {
            "world_size": self._channel.size,
            "rank": self._channel.rank,
            "module_name": type(self.module).__name__,
            "backend_name": self.process_group.name(),
            "broadcast_buffers": self.forward_sync_buffers,
            "num_parameter_tensors": len(self.reducer.parameters),
            "total_parameter_size_bytes": sum(p.nbytes for p in self.reducer.parameters),
            "bucket_sizes": ", ".join(str(b.nbytes) for b in self.reducer.buckets),
            "static_graph": self.static_graph,
            "can_set_static_graph": not self.reducer.graph_ever_changed,
            "iteration": len(steps),
        }
        if steps:
            last = steps[-1]
            data["avg_forward_compute_time"] = int(last.forward * 1e9)
            data["avg_backward_compute_time"] = int((last.backward - last.exposed) * 1e9)
            data["avg_backward_comm_time"] = int(last.exposed * 1e9)
        return data


def _unsupported(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise InvalidState(
            f"{name}() works on the internals of torch's class, which phalanx does not have: "
            f"{instead}"
        )

    refuse.__name__, refuse.__qualname__ = name, f"{UpstreamNames.__qualname__}.{name}"
    return refuse


for _name, _instead in UNSUPPORTED.items():
    setattr(UpstreamNames, _name, _unsupported(_name, _instead))


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
        self._survey = ModuleInventory.of(module, self.parameters_to_ignore)
        self._delay, self._extra_parameters = _config.resolve_delayed(
            self._survey.parameters, delay_all_reduce_named_params, param_to_hook_all_reduce
        )
        if self._extra_parameters:
            self._survey = ModuleInventory.of(
                module, self.parameters_to_ignore, self._extra_parameters
            )
        named = self._survey.parameters
        _config.check_parameters(named)
        _config.check_sync_batch_norms(self._survey.sync_norms, named[0][1].device)
        self.mixed_precision = _config.resolve_mixed_precision(mixed_precision, named)
        self.process_group = _config.resolve_group(process_group, device_mesh)
        self.device_mesh = device_mesh
        self.device_ids, self.output_device = _config.resolve_devices(
            named, device_ids, output_device
        )
        self.forward_sync_buffers, at_start = _config.resolve_buffer_sync(
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
            verify_parameters(named, Communicator(self.process_group, self.device))
        _config.check_trainable(named)
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
            Communicator(self.process_group, self.device).sum(trial).wait()

    def _connect(self) -> None:
        """Make what works through the group."""
        self._channel = Communicator(self.process_group, self.device)
        _config.set_sync_batch_norm_group(self._survey.sync_norms, self.process_group)
        self._precision = None
        if self.mixed_precision is not None:
            parameters = [p for _, p in self._survey.parameters]
            self._precision = PrecisionPolicy(self.mixed_precision, self.module, parameters)
        caps = _config.resolve_bucket_caps(*self._bucket_sizes, shared=self._channel.shares_memory)
        self.bucket_bytes_cap = compiler_bucket_cap(caps.rest)
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
        exclude_package_from_compiler()
        began = time.perf_counter()
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        output = self._post_forward(self._run_ddp_forward(*inputs, **kwargs))
        self.reducer.forward_seconds += time.perf_counter() - began
        return output

    @not_compiled
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Begin a step; return the inputs, on the device of the module."""
        if self._join_config.enable:
            self._begin_join_step()
        if torch.is_grad_enabled():
            self.reducer.prepare()
        if self._join_config.enable:
            self._announce_backward()
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
            on_backward(output, backward_callback(self.reducer, adds_up=self._reduce == "sum"))
        return output

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward pass is reduced; what it says when that begins counts."""
        return self.reducer.syncs_gradients

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, synchronises: bool) -> None:
        self.reducer.syncs_gradients = synchronises

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
        self.reducer.drop_local_grads()

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
