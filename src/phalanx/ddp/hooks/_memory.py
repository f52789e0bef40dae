"""What is remembered of gradients goes by the names of their parameters.

A module puts its parameters into other buckets after the first step, when training goes on from a
checkpoint, or when some are frozen: a bucket's number says nothing of what is in it. Torch's own
buckets know no names; what is remembered of them goes by their number, as torch's hooks have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = ["Key", "Memory", "bucket_key", "known_parts", "names_of", "parts_by_name"]

Key = int | str
"""The name of a parameter, or the number of a bucket whose parameters have none."""
Memory = dict[Key, Tensor]


def names_of(bucket: Any) -> Sequence[str] | None:
    """Tell what the parameters of a bucket are called, if that is known."""
    names: Sequence[str] | None = getattr(bucket, "names", None)
    return names


def bucket_key(bucket: Any) -> Key:
    """Tell under what to remember that which belongs to these parameters in this order only."""
    names = names_of(bucket)
    return bucket.index() if names is None else "\n".join(names)


def parts_by_name(bucket: Any, flat: Tensor) -> dict[Key, Tensor]:
    """Show what belongs to each parameter in a tensor that lies as the bucket's buffer does."""
    names = names_of(bucket)
    if names is None:
        return {bucket.index(): flat}
    start = flat.storage_offset() - bucket.buffer().storage_offset()
    return {
        name: flat.as_strided(like.shape, like.stride(), start + like.storage_offset())
        for name, like in zip(names, bucket.gradients(), strict=True)
    }


def known_parts(memory: Memory, parts: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Recall what is remembered of some parts, where it has their shape."""
    found = {key: memory[key].to(part.device) for key, part in parts.items() if key in memory}
    return {key: known for key, known in found.items() if known.shape == parts[key].shape}
