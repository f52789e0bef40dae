"""Checks that ranks have the same parameters: names, shapes and dtypes, or values.

All checks are collective: every rank calls them, and every rank raises.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from .._formatting import format_ranks
from ..errors import RankMismatch
from ._communicator import Communicator
from ._dtensor import local_tensor

NamedTensors = Sequence[tuple[str, Tensor]]


def verify_parameters(
    named: NamedTensors,
    comm: Communicator,
    *,
    what: str = "modules",
    advice: str = "Make the same module on every rank before wrapping it",
    operation: str = "DistributedDataParallel",
    compares_frozen: bool = True,
) -> None:
    """Raise unless all ranks have parameters of the same names, shapes, strides and dtypes.

    `compares_frozen`: whether all must have frozen the same ones.
    """
    short = [
        (name, t.dtype, *t.shape, *t.stride(), compares_frozen and t.requires_grad)
        for name, t in named
    ]
    rows = comm.gather_numbers([_digest(repr(short))])
    digests = {digest for (digest,) in rows if digest}  # 0: the rank has left
    if len(digests) > 1:
        texts = comm.exchange("\n".join(_describe(name, tensor) for name, tensor in named))
        theirs = {rank: text.split("\n") for rank, text in enumerate(texts) if text}
        raise RankMismatch(
            f"ranks have different {what}: {_first_difference(theirs)}. {advice}",
            group=comm.label,
            operation=operation,
        )


def assert_same_values(named: NamedTensors, comm: Communicator) -> None:
    """Raise, naming the first parameter whose value is not the same on all ranks."""
    rows = comm.gather_numbers([1, *(_fingerprint_of(tensor) for _, tensor in named)])
    values = {rank: row[1:] for rank, row in enumerate(rows) if row[0]}  # 0: the rank has left
    first = min(values)
    differing = [i for i in range(len(named)) if len({row[i] for row in values.values()}) > 1]
    if differing:
        index, *more = differing
        others = [rank for rank, row in values.items() if row[index] != values[first][index]]
        also = f" (and {len(more)} more parameters differ)" if more else ""
        raise RankMismatch(
            f"parameter {named[index][0]!r} differs: {format_ranks(others)} and rank {first} have "
            f"different values{also}. Something other than the optimizer step changed it on some "
            "ranks",
            group=comm.label,
            operation="assert_in_sync",
            ranks=others,
        )


def fingerprint(named: NamedTensors) -> int:
    """Return 60 bits that depend on every bit of the values."""
    return _digest(" ".join(str(_fingerprint_of(tensor)) for _, tensor in named)) >> 3


def _fingerprint_of(tensor: Tensor) -> int:
    tensor = local_tensor(tensor).detach()
    if tensor.device.type == "cpu":
        return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return int(torch.hash_tensor(tensor).item()) & (2**63 - 1)


def _describe(name: str, tensor: Tensor) -> str:
    grad = "" if tensor.requires_grad else ", frozen"
    order = "" if tensor.is_contiguous() else f", strides {list(tensor.stride())}"
    return f"{name}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{order}{grad}"


def _digest(text: str) -> int:
    """Return 63 bits that are the same in every process, and never 0."""
    first_bytes = hashlib.sha256(text.encode()).digest()[:8]
    return (int.from_bytes(first_bytes, "little") >> 1) | 1


def _first_difference(lists: dict[int, list[str]]) -> str:
    first = min(lists)
    mine = lists[first]
    rank, theirs = next((rank, theirs) for rank, theirs in lists.items() if theirs != mine)
    pairs = enumerate(zip_longest(mine, theirs))
    index, one, other = next((i, one, other) for i, (one, other) in pairs if one != other)
    if one is not None and other is not None:
        return f"parameter {index} is {one!r} on rank {first} and {other!r} on rank {rank}"
    who, extra = (first, one) if other is None else (rank, other)
    return (
        f"rank {first} has {len(mine)} parameters and rank {rank} has {len(theirs)}; "
        f"only rank {who} has {extra!r}"
    )
