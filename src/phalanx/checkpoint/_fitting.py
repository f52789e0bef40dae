"""Load into a state that is there already: in place where it can be, and only if all of it fits.

A `Fitting` is made in two steps. First it compares what is wanted with what there is, and has all
of it read, verified and decoded; then `apply` changes the caller's state, with nothing left that
the checkpoint could do wrong. Objects come first then: they are all that may still say no.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import MissingKeys, StateMismatch
from ._codecs import codec_for
from ._dtypes import name_of_dtype
from ._loading import OpenCheckpoint
from ._marks import Alike, PerRank
from ._meeting import names_of
from ._paths import Path, display
from ._structure import (
    Absent,
    Branch,
    Node,
    Scalar,
    TensorLeaf,
    absences,
    complaint_about,
    leaves,
    rebuild,
)

__all__ = ["Fitting", "Fresh"]

Fresh = Callable[[TensorLeaf], Tensor]
"""Return a tensor of the checkpoint on the device where it is wanted."""
_Give = Callable[[], Any]
"""Put a value in its place, and return it."""


class Fitting:
    """What is to be loaded into a state, and what of it is missing."""

    def __init__(self, checkpoint: OpenCheckpoint, tree: Node, state: Any, fresh: Fresh) -> None:
        self.missing: list[str] = []
        self._checkpoint = checkpoint
        self._fresh = fresh
        self._in_place: list[tuple[TensorLeaf, Tensor]] = []
        self._held: dict[int, Tensor] = {}
        """What could not be read later, by place in the list above."""
        self._new: list[Node] = []
        self._built: list[Any] = []
        """What was made of each of those."""
        self._loads: list[_Give] = []
        """What objects do to take their state."""
        self._give = self._fit(state, tree, ())
        self._prepare()

    def _prepare(self) -> None:
        """Have all that is wanted verified; new values are made, tensors that exist wait."""
        new = [leaf for node in self._new for leaf in leaves(node)]
        in_place = [leaf for leaf, _ in self._in_place]
        self._checkpoint.open_files([*new, *in_place])
        self._built = [rebuild(node, self._fresh) for node in self._new]
        stays = self._checkpoint.stays([*new, *in_place])
        for place, leaf in enumerate(in_place):
            if stays:
                self._checkpoint.verify(leaf)
            else:
                self._held[place] = self._checkpoint.fetch(leaf)

    def apply(self) -> Any:
        """Change the state, and return it."""
        for load in self._loads:
            load()
        for place, (leaf, tensor) in enumerate(self._in_place):
            with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
                if place in self._held:
                    tensor.copy_(self._held.pop(place))
                else:
                    self._load_in_place(leaf, tensor)
        return self._give()

    def _load_in_place(self, leaf: TensorLeaf, tensor: Tensor) -> None:
        is_lazy = tensor.is_conj() or tensor.is_neg()  # its memory is not what it shows
        if tensor.is_cpu and tensor.is_contiguous() and not is_lazy:
            self._checkpoint.read_into(leaf, tensor)
            with suppress(RuntimeError):  # one that was made in inference mode has no version
                torch.autograd.graph.increment_version(tensor)
        else:
            tensor.copy_(self._checkpoint.fetch(leaf))

    def _fit(self, target: Any, node: Node, path: Path) -> _Give:
        """Compare what is wanted at one place with what there is."""
        if isinstance(node, Absent):
            raise _missing(path, node)
        if isinstance(target, Alike | PerRank):
            inner, mark = self._fit(target.value, node, path), type(target)
            return lambda: mark(inner())
        if isinstance(target, Tensor):
            return self._fit_tensor(target, node, path)
        if isinstance(target, dict):
            return self._fit_dict(target, node, path)
        if type(target) in (list, tuple):
            return self._fit_list(target, node, path)
        if callable(getattr(target, "load_state_dict", None)):
            for place, absent in absences(node, path):
                raise _missing(place, absent)  # half of an object's state is none
            state = self._build(node)
            self._loads.append(lambda: target.load_state_dict(state()))
            return lambda: target
        if target is None or codec_for(target) is not None:
            return self._build(node)
        if not isinstance(node, Scalar):
            raise _mismatch(path, type(target).__name__, node)
        return self._build(node)

    def _fit_tensor(self, target: Tensor, node: Node, path: Path) -> _Give:
        complaint = complaint_about(target) or _complaint_about_strides(target)
        if complaint:
            raise StateMismatch(f"{display(path)} cannot be loaded in place: it is {complaint}")
        shape = tuple(target.shape)
        if not isinstance(node, TensorLeaf) or (node.shape, node.dtype) != (shape, target.dtype):
            raise _mismatch(path, f"{name_of_dtype(target.dtype)}{[*shape]}", node)
        self._in_place.append((node, target))
        return lambda: target

    def _fit_dict(self, target: dict[Any, Any], node: Node, path: Path) -> _Give:
        if not isinstance(node, Branch) or node.kind != "dict":
            raise _mismatch(path, "dict", node)
        gives: dict[Any, _Give] = {}
        for key, value in target.items():
            if key in node.children:
                gives[key] = self._fit(value, node.children[key], (*path, key))
            else:
                self.missing.append(display((*path, key)))

        def give() -> Any:
            for key, each in gives.items():
                target[key] = each()
            return target

        return give

    def _fit_list(self, target: Any, node: Node, path: Path) -> _Give:
        kind = type(target).__name__
        if not isinstance(node, Branch) or node.kind != kind:
            raise _mismatch(path, kind, node)
        gives: list[_Give] = []
        for place in range(max(len(target), len(node.children))):
            where = (*path, place)
            if place not in node.children:
                self.missing.append(display(where))
                gives.append(partial(target.__getitem__, place))
            elif place < len(target):
                gives.append(self._fit(target[place], node.children[place], where))
            else:
                gives.append(self._build(node.children[place]))
        return lambda: type(target)(give() for give in gives)

    def _build(self, node: Node) -> _Give:
        """Take over what there is, whatever it is."""
        place = len(self._new)
        self._new.append(node)
        return lambda: self._built[place]


def _complaint_about_strides(tensor: Tensor) -> str:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    if any(length > 1 and stride == 0 for length, stride in sizes):
        return "an expanded tensor, many elements of which are one; give a copy (contiguous)"
    return ""


def _missing(path: Path, absent: Absent) -> MissingKeys:
    return MissingKeys(
        f"{display(path)} differs from rank to rank, and the checkpoint has it for "
        f"{names_of(absent.ranks)} only; say which one to load (rank=…), or leave it out"
    )


def _mismatch(path: Path, wanted: str, node: Node) -> StateMismatch:
    if isinstance(node, TensorLeaf):
        found = f"{name_of_dtype(node.dtype)}{[*node.shape]}"
    elif isinstance(node, Branch):
        found = f"a {node.kind}"
    else:
        assert isinstance(node, Scalar)
        found = f"{node.value!r:.40}"
    return StateMismatch(f"{display(path)} is {found} in the checkpoint, and {wanted} here")
