"""Transfer of optimizer state between ranks.

Used after uneven steps, where all ranks take over one rank's state, and by `ShardedOptimizer`,
where each rank has the state of its shard. A JSON description of the states comes first, so a state
that cannot be sent raises on every rank. Then the tensors of each owner follow as bytes, in few
calls. Nothing is pickled.
"""

from __future__ import annotations

import copy
import json
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from .._formatting import dtype_name
from ..errors import InvalidState
from ..groups._call_site import warn_user
from ..groups._reductions import as_bytes
from ..groups._text_exchange import exchange_texts
from ..groups._torch_integration import from_local, is_dtensor, to_local
from ._gather import start_transfer

OptimizerStates = dict[int, dict[str, Any]]
"""The state of each parameter, by its index among all parameters of the optimizer.

While it is sent, the settings of the n-th param group have the index -1 - n."""

SHARDED = "names of local tensors"  # the key under which a sent state has them
CHUNK_BYTES = 64 << 20  # sent in one call, unless a single tensor is larger


def gather_states(
    own: OptimizerStates, group: dist.ProcessGroup, device: torch.device, *, to: int | None
) -> OptimizerStates | None:
    """Collect copies of all ranks' states on one rank, which alone gets them, or on all."""
    collected: OptimizerStates = {}
    texts = exchange_texts(_describe(own), group)
    for owner, described in {rank: _read(text, rank) for rank, text in texts.items()}.items():
        collected |= _transfer(described, own, owner, group, device, to)
    if to not in (None, group.rank()):
        return None
    for index, state in own.items():
        collected[index] = {
            name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            for name, value in state.items()
        }
    return dict(sorted(collected.items()))


def broadcast_optimizer_state(
    optimizer: Optimizer, group: dist.ProcessGroup, device: torch.device, *, root: int
) -> None:
    """Replace every rank's state and settings of an optimizer by those of one rank."""
    parameters = _parameters(optimizer)
    own: OptimizerStates = {}
    if group.rank() == root:
        for i, p in enumerate(parameters):
            if p in optimizer.state:
                own[i] = _with_local_tensors(optimizer.state[p], p)
        for number, each in enumerate(optimizer.param_groups):
            sent = {
                k: v for k, v in each.items() if k != "params" and (_is_tensor(v) or _is_plain(v))
            }
            own[-1 - number] = sent
    described = _read(_broadcast_text(_describe(own), root, group, device), root)
    for index, state in _transfer(described, own, root, group, device, None).items():
        if index < 0:
            optimizer.param_groups[-1 - index].update(state)
            continue
        parameter, sharded = parameters[index], state.pop(SHARDED)
        for name, value in state.items():
            same_type = isinstance(value, Tensor) and value.device.type == parameter.device.type
            # The number of a device may differ between ranks.
            received = value.to(parameter.device) if same_type else value
            whole = from_local(received, parameter) if name in sharded else received
            optimizer.state[parameter][name] = whole


def _with_local_tensors(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Replace the DTensors of a state by local tensors, if they are sharded as the parameter is."""
    sharded = [
        name
        for name, value in state.items()
        if is_dtensor(value)
        and is_dtensor(parameter)
        and (value.shape, value.placements) == (parameter.shape, parameter.placements)
    ]
    return {**state, **{name: to_local(state[name]) for name in sharded}, SHARDED: sharded}


class TensorSpec(NamedTuple):
    dtype: str
    shape: list[int]
    device_type: str

    @property
    def nbytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize

    def from_bytes(self, data: Tensor) -> Tensor:
        # A copy, so that saving one tensor does not save the memory of all.
        tensor = data.clone().view(getattr(torch, self.dtype)).view(self.shape)
        return tensor.to(self.device_type)


def _broadcast_text(text: str, root: int, group: dist.ProcessGroup, device: torch.device) -> str:
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    length = torch.tensor([len(data)], device=device)
    start_transfer(length, root, group, None).wait()
    if group.rank() != root:
        data = torch.empty(int(length), dtype=torch.uint8, device=device)
    start_transfer(data, root, group, None).wait()
    return bytes(data.tolist()).decode()


def _read(text: str, rank: int) -> list[Any]:
    """Return the description of a rank's states, or raise, as every rank does that reads it."""
    description = json.loads(text)
    if isinstance(description, str):
        raise InvalidState(
            f"optimizer state of rank {rank} cannot be sent: {description}. State values must be "
            "tensors, or numbers, strings and None, also in lists, tuples and dicts"
        )
    return list(description)


def _describe(states: OptimizerStates) -> str:
    """Describe states in JSON; a single string says what cannot be sent."""
    described = []
    for index, state in states.items():
        fields: list[tuple[str, str, Any]] = []
        for name, value in state.items():
            if _is_tensor(value):
                spec = TensorSpec(dtype_name(value.dtype), [*value.shape], value.device.type)
                fields.append((name, "tensor", spec))
            elif _is_plain(value):
                fields.append((name, "tuple" if isinstance(value, tuple) else "value", value))
            else:
                kind = type(value).__name__
                return json.dumps(f"{name!r} of parameter {index} is a {kind}")
        described.append((index, fields))
    return json.dumps(described)


def _is_tensor(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout is torch.strided and not is_dtensor(value)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def _transfer(
    described: Sequence[Any],
    own: OptimizerStates,
    owner: int,
    group: dist.ProcessGroup,
    device: torch.device,
    to: int | None,
) -> OptimizerStates:
    """Send one owner's states to one rank or all; return them on other ranks that receive them."""
    is_owner = group.rank() == owner
    if owner == to or not (is_owner or to in (None, group.rank())):
        return {}
    chunks: list[list[tuple[int, str, TensorSpec]]] = [[]]
    length = 0
    for index, fields in described:
        for name, kind, value in fields:
            if kind == "tensor":
                spec = TensorSpec(*value)
                length += spec.nbytes
                if chunks[-1] and length > CHUNK_BYTES:
                    chunks.append([])
                    length = spec.nbytes
                chunks[-1].append((index, name, spec))
    states = {
        index: {name: tuple(value) if kind == "tuple" else value for name, kind, value in fields}
        for index, fields in described
    }
    for chunk in filter(None, chunks):
        sizes = [spec.nbytes for _, _, spec in chunk]
        if is_owner:
            parts = [own[index][name].contiguous() for index, name, _ in chunk]
            flat = torch.cat([as_bytes(part).to(device) for part in parts])
        else:
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        if len(flat):
            start_transfer(flat, owner, group, to).wait()
        if not is_owner:
            for (index, name, spec), piece in zip(chunk, torch.split(flat, sizes), strict=True):
                states[index][name] = spec.from_bytes(piece)
    return {} if is_owner else states


class UntrackedOptimizers:
    """Finds optimizers that step in a join and were not passed to it.

    After a join all ranks hold one rank's model. If their optimizer states differ, the next steps
    make the models diverge without an error.
    """

    def __init__(self, joinables: Iterable[object], tracked: Iterable[object]) -> None:
        modules = (each for each in joinables if isinstance(each, nn.Module))
        self._joined = {id(parameter) for module in modules for parameter in module.parameters()}
        for optimizer in tracked:
            if isinstance(optimizer, Optimizer):
                self._joined -= set(map(id, _parameters(optimizer)))
        self._seen: dict[int, Optimizer] = {}
        self._handle: RemovableHandle | None = None

    def watch(self) -> None:
        self._thread = threading.get_ident()  # other threads may be other ranks
        self._seen.clear()
        self._handle = register_optimizer_step_post_hook(self._record)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _record(self, optimizer: Optimizer, *_: object) -> None:
        if threading.get_ident() == self._thread:
            self._seen[id(optimizer)] = optimizer

    def warn(self) -> None:
        """Warn about optimizers whose state now differs between ranks."""
        for optimizer in self._seen.values():
            parameters = set(map(id, _parameters(optimizer)))
            if any(optimizer.state.values()) and parameters & self._joined:
                warn_user(
                    f"the state of {type(optimizer).__name__} differs between ranks, since ranks "
                    "that ran out of data made fewer steps. Pass optimizers=[...] to the join if "
                    "training continues"
                )


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
