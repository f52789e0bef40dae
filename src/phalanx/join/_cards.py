"""Texts that ranks show each other, of any length, in one small collective if they are short."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from ..groups import ProcessGroup

__all__ = ["device_of", "exchange"]

CARD = 256
"""Bytes of a card; what does not fit on it takes another round."""
LENGTH = 4
"""Bytes of a card in which it says how long the text is."""


def exchange(text: str, group: dist.ProcessGroup) -> dict[int, str]:
    """Give every rank everybody's text; those who have left the group have none."""
    data = len(text.encode()).to_bytes(LENGTH, "little") + text.encode()
    cards = _gather(_bytes_of(data[:CARD].ljust(CARD, b"\0"), group), group)
    sent = {rank: bytes(card.tolist()) for rank, card in enumerate(cards)}
    # All zero is the card of nobody: a text has at least one byte.
    lengths = {
        rank: LENGTH + int.from_bytes(card[:LENGTH], "little") for rank, card in sent.items()
    }
    there = [rank for rank, length in lengths.items() if length > LENGTH]
    rest = max(lengths[rank] for rank in there) - CARD
    if rest > 0:
        more = _gather(_bytes_of(data[CARD:].ljust(rest, b"\0"), group), group)
        sent = {rank: sent[rank] + bytes(more[rank].tolist()) for rank in there}
    return {rank: sent[rank][LENGTH : lengths[rank]].decode() for rank in there}


def _gather(mine: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Collect equally many bytes of every rank; zeros of those who have left."""
    rows = list(mine.new_zeros(group.size(), mine.numel()))
    group.allgather([rows], [mine], c10d.AllgatherOptions()).wait()
    return rows


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Tell where a group takes tensors from: the CPU, if it does."""
    if isinstance(group, ProcessGroup):
        types = set(group.devices)
    else:
        types = {device.type for device in group._device_types}
    return torch.device("cpu" if "cpu" in types or not types else min(types))


def _bytes_of(data: bytes, group: dist.ProcessGroup) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device_of(group))
