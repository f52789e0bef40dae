"""Exchange of text between all ranks of a group, ours or torch's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from ..groups import ProcessGroup

FIRST_ROUND_BYTES = 256  # a longer text takes a second round
LENGTH_BYTES = 4


def exchange_texts(text: str, group: dist.ProcessGroup) -> dict[int, str]:
    """Return every rank's text by rank, without ranks that have left; the text is not empty."""
    data = len(text.encode()).to_bytes(LENGTH_BYTES, "little") + text.encode()
    first = data[:FIRST_ROUND_BYTES].ljust(FIRST_ROUND_BYTES, b"\0")
    received = dict(enumerate(_allgather_bytes(first, group)))
    lengths = {
        rank: LENGTH_BYTES + int.from_bytes(message[:LENGTH_BYTES], "little")
        for rank, message in received.items()
    }
    # The rows of ranks that have left are zero.
    present = [rank for rank, length in lengths.items() if length > LENGTH_BYTES]
    rest = max(lengths[rank] for rank in present) - FIRST_ROUND_BYTES
    if rest > 0:
        more = _allgather_bytes(data[FIRST_ROUND_BYTES:].ljust(rest, b"\0"), group)
        received = {rank: received[rank] + more[rank] for rank in present}
    return {rank: received[rank][LENGTH_BYTES : lengths[rank]].decode() for rank in present}


def _allgather_bytes(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device_of(group))
    rows: list[Tensor] = list(own.new_zeros(group.size(), own.numel()))
    group.allgather([rows], [own], c10d.AllgatherOptions()).wait()
    return [bytes(row.tolist()) for row in rows]


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return a device whose tensors the group accepts, the CPU if possible."""
    if isinstance(group, ProcessGroup):
        types = set(group.devices)
    else:
        types = {device.type for device in group._device_types}
    return torch.device("cpu" if "cpu" in types or not types else min(types))
