"""Gradients from before a backward pass, and those that come in it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Parameter

from ._buckets import Gradients, Piece, count_missing

__all__ = ["first_of", "pieces_of", "put_aside"]


def put_aside(parameters: Sequence[Parameter]) -> list[Tensor | None]:
    """Take every gradient that there is, so that what arrives is new; nothing if there is none."""
    olds = [parameter.grad for parameter in parameters]
    if count_missing(olds) == len(olds):
        return []
    for parameter in parameters:
        parameter.grad = None
    return olds


def pieces_of(pieces: Sequence[Piece]) -> dict[int, int]:
    """Tell of every parameter which piece it is in."""
    return {i: number for number, piece in enumerate(pieces) for i in piece.members}


def first_of(olds: Gradients, news: Gradients) -> Gradients:
    """Choose of every parameter the gradient that there was first."""
    if not olds:
        return news
    return [new if old is None else old for old, new in zip(olds, news, strict=True)]
