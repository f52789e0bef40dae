"""Names of torch's class that other projects use, in terms of what we have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.optim import Optimizer

from ..errors import InvalidArgument, InvalidState, InvalidType
from ._channel import Channel
from ._comm_hook import check_hook
from ._compiling import Inside, running
from ._reducer import Reducer
from .hooks import allreduce_hook, fp16_compress_hook

__all__ = ["UpstreamNames"]


_MIXED_PRECISION = "pass mixed_precision= when you wrap the module"
_DELAY = "pass delay_all_reduce_named_params= when you wrap the module"
_JOIN = "use ddp.join() or phalanx.join.Join"
NOT_HERE = {
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
    _channel: Channel
    _ddp_sink_clone = True

    # -- the module that runs --------------------------------------------------------------

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        return running()

    def _inside_ddp_forward(self) -> AbstractContextManager[None]:
        return Inside(self)

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
        if self.reducer.is_under_way:
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
            "can_set_static_graph": not self.reducer.was_surprised,
            "iteration": len(steps),
        }
        if steps:
            last = steps[-1]
            data["avg_forward_compute_time"] = int(last.forward * 1e9)
            data["avg_backward_compute_time"] = int((last.backward - last.exposed) * 1e9)
            data["avg_backward_comm_time"] = int(last.exposed * 1e9)
        return data


def _refusing(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise InvalidState(
            f"{name}() works on the internals of torch's class, which phalanx does not have: "
            f"{instead}"
        )

    refuse.__name__, refuse.__qualname__ = name, f"{UpstreamNames.__qualname__}.{name}"
    return refuse


for _name, _instead in NOT_HERE.items():
    setattr(UpstreamNames, _name, _refusing(_name, _instead))
