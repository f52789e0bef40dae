"""Exchange of text between all ranks of a group, ours or torch's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d_ext

from ._process_group import ProcessGroup

FIRST_ROUND_BYTES = 512  # a longer message takes a second round
LENGTH_BYTES = 4


def exchange_texts(
    text: str, group: dist.ProcessGroup, device: torch.device | None = None
) -> dict[int, str]:
    """Return every rank's text by rank, without ranks that have left."""
    encoded = text.encode(errors="surrogatepass")  # file names may contain surrogates
    data = (LENGTH_BYTES + len(encoded)).to_bytes(LENGTH_BYTES, "little") + encoded
    received = _allgather_bytes(data[:FIRST_ROUND_BYTES], FIRST_ROUND_BYTES, group, device)
    lengths = [int.from_bytes(message[:LENGTH_BYTES], "little") for message in received]
    rest = max(lengths) - FIRST_ROUND_BYTES
    if rest > 0:
        tails = _allgather_bytes(data[FIRST_ROUND_BYTES:], rest, group, device)
        received = [head + tail for head, tail in zip(received, tails, strict=True)]
    return {
        rank: message[LENGTH_BYTES:length].decode(errors="surrogatepass")
        for rank, (message, length) in enumerate(zip(received, lengths, strict=True))
        if length  # the rows of ranks that have left are zero
    }


def _allgather_bytes(
    data: bytes, width: int, group: dist.ProcessGroup, device: torch.device | None
) -> list[bytes]:
    own = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)
    own = own.to(device or device_of(group))
    rows = list(own.new_zeros(group.size(), width))
    group.allgather([rows], [own], c10d_ext.AllgatherOptions()).wait()
    return [bytes(row.tolist()) for row in rows]


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return a device whose tensors the group accepts, the CPU if possible."""
    if isinstance(group, ProcessGroup):
        types = set(group.devices)
    else:
        types = {device.type for device in group._device_types}
    return torch.device("cpu" if "cpu" in types or not types else min(types))
