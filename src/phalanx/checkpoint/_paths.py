"""Where a value is in a state: for people, and as a name that no two values share."""

from __future__ import annotations

import json
from typing import TypeAlias

__all__ = ["Key", "Path", "display", "name_of"]

Key: TypeAlias = str | int | float | bool | None
"""A dict's key or a list's index; what JSON could not keep as a key is kept beside it."""
Path: TypeAlias = tuple[Key, ...]


def display(path: Path) -> str:
    """Write a path the way that it is said: ``optimizer.param_groups[0].lr``."""
    text = ""
    for key in path:
        if isinstance(key, str):
            text += f".{key}" if text else key
        else:
            text += f"[{key}]"
    return text or "the state"


def name_of(path: Path) -> str:
    """Write a path so that different paths have different names: ``model/layer.weight``."""
    return "/".join(map(_part, path))


def _part(key: Key) -> str:
    if not isinstance(key, str):
        return json.dumps(key)
    plain = key.replace("~", "~0").replace("/", "~1")
    # "0" is not 0, and the safetensors format keeps one name for itself.
    return json.dumps(plain) if _looks_otherwise(plain) else plain


def _looks_otherwise(key: str) -> bool:
    if not key or key.startswith('"') or key == "__metadata__":
        return True
    if key[0].isalpha() and key not in ("true", "false", "null", "NaN", "Infinity"):
        return False  # as nearly all are
    try:
        json.loads(key)
    except (ValueError, RecursionError):
        return False
    return True
