"""Bytes: how many at once, and what they are known by."""

from __future__ import annotations

import xxhash

__all__ = ["CHUNK", "checksum"]

CHUNK = 2 << 20
"""Bytes that are hashed and then written while they are still in the processor's cache."""


def checksum(data: bytes | memoryview) -> str:
    """Return the checksum of some bytes, as manifests have it."""
    return xxhash.xxh3_128_hexdigest(data)
