"""The constructor's arguments: defaults, conversions and validation.

Each function takes what the user passed and returns what the wrapper works with, or raises
before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..env import refuse_in_elastic_run
from ..errors import InvalidArgument, InvalidState, InvalidType
from ..groups._call_site import warn_user
from ..groups._current_group import default_group
from ._buckets import MIB, BucketCaps, DelayedReduction
from ._module_inspection import NamedParameter
from ._sync_batch_norm import GroupRef, SyncBatchNorm

NamedNorms = Sequence[tuple[str, nn.SyncBatchNorm]]

FIRST_BUCKET_BYTES = MIB
BUCKET_BYTES = 25 * MIB
SHARED_MEMORY_BUCKET_BYTES = 4 * MIB
"""With shared memory large buckets gain nothing, and gradients in small ones are still in the
cache when they are reduced."""
MAX_CAP_MIB = 1 << 40  # more than any module has, so that infinity means one bucket


def require_default_group(user: str = "DistributedDataParallel") -> dist.ProcessGroup:
    group = default_group()
    if group is None:
        refuse_in_elastic_run(user)
        raise InvalidArgument(
            "there is no group to reduce gradients in. Pass process_group=phalanx.groups."
            "new_group(), or enter one: with phalanx.groups.process_group(group)"
        )
    return group


def resolve_group(
    process_group: Any, device_mesh: Any, *, user: str = "DistributedDataParallel"
) -> dist.ProcessGroup:
    if process_group is not None and device_mesh is not None:
        raise InvalidState("pass process_group or device_mesh, not both")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise InvalidState(
                f"device_mesh must have one axis, but has {device_mesh.ndim}. "
                "Slice it, as in mesh['dp']"
            )
        process_group = device_mesh.get_group(mesh_dim=0)
    if process_group is None:
        return require_default_group(user)
    if not isinstance(process_group, dist.ProcessGroup):
        is_outside = process_group is dist.GroupMember.NON_GROUP_MEMBER
        kind = "NON_GROUP_MEMBER" if is_outside else type(process_group).__name__
        raise InvalidType(f"process_group must be a ProcessGroup, got {kind}")
    return process_group


def check_materialized(named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise for parameters without a shape, and for those without values."""
    for name, parameter in named:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise InvalidState(
                f"parameter {name!r} has no shape yet. Run a forward pass before wrapping it"
            )
        if parameter.device.type == "meta":
            raise InvalidState(f"parameter {name!r} has no values: it is on the meta device")


def check_parameters(named: Sequence[NamedParameter]) -> None:
    if not named:
        raise InvalidState("the module has no parameters")
    types = sorted({parameter.device.type for _, parameter in named})
    if len(types) > 1:
        raise InvalidArgument(f"parameters are on devices of different types: {', '.join(types)}")
    check_materialized(named)


def check_sync_batch_norms(sync_norms: NamedNorms, device: torch.device) -> None:
    torch_layers = [name for name, layer in sync_norms if not isinstance(layer, SyncBatchNorm)]
    if torch_layers and device.type == "cpu":
        raise InvalidArgument(
            f"{torch_layers[0]!r} is torch's SyncBatchNorm, which does not work on CPUs. Use ours: "
            "model = phalanx.ddp.SyncBatchNorm.convert_sync_batchnorm(model)"
        )


def set_sync_batch_norm_group(sync_norms: NamedNorms, group: dist.ProcessGroup) -> None:
    """Tell our layers the wrapper's group, which they use unless they were given one."""
    for _, layer in sync_norms:
        if isinstance(layer, SyncBatchNorm):
            layer.wrapper_group = GroupRef(group)


def resolve_devices(
    named: Sequence[NamedParameter], device_ids: Any, output_device: Any
) -> tuple[list[int] | None, int | None]:
    """Return the device of inputs, in a list, and torch's `output_device`; None on CPUs."""
    if device_ids is not None and len(device_ids) > 1:
        raise InvalidArgument(f"device_ids must contain exactly one device, got {len(device_ids)}")
    devices = {parameter.device for _, parameter in named}
    if not device_ids or len(devices) > 1 or next(iter(devices)).type == "cpu":
        if device_ids or output_device:
            raise InvalidArgument(
                f"device_ids={device_ids} and output_device={output_device} are for a module on "
                f"one accelerator, but this one is on {', '.join(sorted(map(str, devices)))}"
            )
        return None, None
    inputs = outputs = torch._utils._get_device_index(device_ids[0], True)
    if output_device is not None:
        outputs = torch._utils._get_device_index(output_device, True)
    return [inputs], outputs


def resolve_buffer_sync(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> tuple[bool, bool]:
    """Return whether buffers are sent before every forward pass, and whether at the start."""
    if broadcast_buffers is not None:
        warn_user(
            "broadcast_buffers is deprecated. Use forward_sync_buffers, which still sends buffers "
            "once at the start"
            + ("" if forward_sync_buffers is None else "; broadcast_buffers is ignored"),
            FutureWarning,
        )
    if forward_sync_buffers is None:
        return broadcast_buffers is not False, broadcast_buffers is not False
    return forward_sync_buffers, True


def resolve_delayed(
    named: Sequence[NamedParameter], delayed: Sequence[NamedParameter] | None, trigger: Any
) -> tuple[DelayedReduction, list[NamedParameter]]:
    """Return which parameters are reduced together, and which of them are not in the module."""
    if (delayed is None) != (trigger is None):
        raise InvalidArgument(
            "delay_all_reduce_named_params and param_to_hook_all_reduce must be passed together"
        )
    if delayed is None:
        return DelayedReduction(), []
    if not isinstance(trigger, Tensor) or not all(isinstance(p, Tensor) for _, p in delayed):
        raise InvalidType(
            "delay_all_reduce_named_params is a list of names with parameters, and "
            "param_to_hook_all_reduce is a parameter"
        )
    names: dict[Tensor, str] = {parameter: name for name, parameter in named}
    extra = [(name, parameter) for name, parameter in delayed if parameter not in names]
    for name, parameter in extra:
        if name in dict(named):
            raise InvalidArgument(f"the module has another parameter named {name!r}")
        names[parameter] = name
    return DelayedReduction(frozenset(names[p] for _, p in delayed), names.get(trigger, "")), extra


def resolve_bucket_caps(
    bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None, *, shared: bool
) -> BucketCaps:
    """Return the sizes of buckets; `shared`: ranks can read each other's memory."""
    if bucket_cap_mb_list:
        return tuple(map(_cap_in_bytes, bucket_cap_mb_list))
    if bucket_cap_mb is not None:
        return (_cap_in_bytes(bucket_cap_mb),)
    return (SHARED_MEMORY_BUCKET_BYTES,) if shared else (FIRST_BUCKET_BYTES, BUCKET_BYTES)


def _cap_in_bytes(mebibytes: float) -> int:
    if not isinstance(mebibytes, (int, float)) or not mebibytes > 0:
        raise InvalidArgument(f"a bucket's size must be a number of MiB above 0, got {mebibytes!r}")
    return max(1, int(min(mebibytes, MAX_CAP_MIB) * MIB))
