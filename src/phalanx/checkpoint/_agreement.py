"""What ranks do together that is no save: all of them raise if one of them does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from .. import errors
from ..errors import CheckpointError
from ._meeting import Company

__all__ = ["agree", "by_rank"]

T = TypeVar("T")


def agree(company: Company, doing: str, action: Callable[[], T]) -> list[T]:
    """Do something on every rank and return what came of it, by rank, or raise on every rank.

    What `action` returns must be something that JSON can say. Unlike in a save, an error is raised
    as it is where it happened; nothing has to be taken back elsewhere.
    """
    said: dict[str, Any] = {"at": company.place(doing)}  # as in a save, which others may be at
    try:
        said["did"] = action()
    except BaseException as error:
        said |= {"failed": str(error), "kind": type(error).__name__}
        with suppress(Exception):  # whoever cannot be told will miss us soon
            company.exchange(json.dumps(said))
        raise
    told = [json.loads(text) for text in company.exchange(json.dumps(said))]
    if any(each["at"] != said["at"] for each in told):
        places = by_rank(each["at"][1] for each in told)
        raise CheckpointError(f"ranks have met in different calls: {places}")
    for rank, each in enumerate(told):
        if "failed" in each:
            raise _kind(each["kind"])(
                f"rank {rank} failed while {doing}: {each['kind']}: {each['failed']}"
            )
    return [each["did"] for each in told]


def by_rank(values: Iterable[Any]) -> str:
    """List what each rank has said."""
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def _kind(name: str) -> type[CheckpointError]:
    """Return the error of a name, if it is one of checkpoints."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, CheckpointError):
        return kind
    return CheckpointError
