"""Read checkpoints, at any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidArgument, MissingKeys
from ._fitting import Fitting
from ._loading import OpenCheckpoint, reading
from ._meeting import names_of
from ._paths import display
from ._storage import storage_at
from ._structure import Absent, Node, TensorLeaf, absences, leaves, rebuild
from ._types import STATE_DICT, RankInfo

__all__ = ["CheckpointReader"]

_MEANINGLESS = {"mmap", "weights_only"}
"""What upstream hands to `torch.load`; here, only values are ever loaded."""


class CheckpointReader:
    """Read states from storage, verified before anything of it is handed out."""

    def __init__(self, rank_info: RankInfo) -> None:
        self._rank_info = rank_info

    def read(
        self,
        path: str | os.PathLike[str],
        state_dict: STATE_DICT | None = None,
        *,
        map_location: Any = None,
        rank: int | None = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> tuple[STATE_DICT, list[str]]:
        """Return the state at `path`, and the keys that are missing; strict, raise if there are.

        Given a state, load only what it has: tensors in place, objects through their
        ``load_state_dict``, for None whatever there is. Nothing of it is touched unless all of
        it was found to fit and verified. Where ranks differ, each gets its own of a checkpoint of
        as many ranks, or what rank `rank` has saved.
        """
        unknown = set(kwargs) - _MEANINGLESS
        if unknown:
            raise InvalidArgument(f"reading a checkpoint takes no {', '.join(sorted(unknown))}")
        own = self._rank_info.global_rank if rank is None else rank
        if type(own) is not int or own < 0:
            raise InvalidArgument(f"rank={rank!r} is not the number of a rank")
        locate = _Locator(map_location)

        def prepare(checkpoint: OpenCheckpoint) -> Callable[[], tuple[Any, list[str]]]:
            tree = checkpoint.tree(own)
            if state_dict is None:
                state, missing = _read_all(checkpoint, tree, locate)
            else:
                fitting = Fitting(checkpoint, tree, state_dict, locate.fresh(checkpoint))
                missing = fitting.missing
            if strict and missing:
                raise MissingKeys(f"the checkpoint at {path} is missing keys: {missing}")
            return lambda: (state if state_dict is None else fitting.apply(), missing)

        with reading(storage_at(os.fsdecode(path)), prepare) as finish:
            return finish()


def _read_all(checkpoint: OpenCheckpoint, tree: Node, locate: _Locator) -> tuple[Any, list[str]]:
    if isinstance(tree, Absent):
        raise MissingKeys(
            f"{checkpoint.path} has state of its own for {names_of(tree.ranks)} "
            "and nothing else; say which one to load (rank=…)"
        )
    checkpoint.open_files(leaves(tree))
    state = rebuild(tree, locate.fresh(checkpoint))
    return state, [display(path) for path, _ in absences(tree)]


class _Locator:
    """Where new tensors go: what `map_location` says, as for `torch.load`, or as they were."""

    def __init__(self, map_location: Any) -> None:
        self._map = map_location

    def fresh(self, checkpoint: OpenCheckpoint) -> Callable[[TensorLeaf], Tensor]:
        """Return how to get a tensor of a checkpoint; those that were one memory are one again."""
        known: dict[Any, Tensor] = {}

        def get(leaf: TensorLeaf) -> Tensor:
            places = tuple((piece.file, piece.at) for piece in leaf.data.pieces)
            identity = (leaf.name if 0 in leaf.shape else places, leaf.dtype, leaf.shape)
            if identity not in known:
                known[identity] = self._move(checkpoint.fetch(leaf), leaf.device)
            return known[identity]

        return get

    def _move(self, tensor: Tensor, saved_on: str) -> Tensor:
        if callable(self._map):
            storage = self._map(tensor.untyped_storage(), saved_on)
            return tensor if storage is None else tensor.to(storage.device)
        if isinstance(self._map, dict):
            return tensor.to(self._map.get(saved_on, self._map.get(f"{saved_on}:0", "cpu")))
        if self._map is not None:
            return tensor.to(self._map)
        there = torch.accelerator.current_accelerator()
        is_there = there is not None and there.type == saved_on
        return tensor.to(saved_on) if is_there else tensor
