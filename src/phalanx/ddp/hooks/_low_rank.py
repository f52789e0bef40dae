"""Matrices of low rank: the arithmetic of PowerSGD, which knows nothing of ranks or buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

__all__ = [
    "Factors",
    "Shape",
    "multiply",
    "multiply_transposed",
    "orthogonalize",
    "stacked",
]

Shape = tuple[int, int]


@dataclass(frozen=True)
class Factors:
    """Matrices, or one factor of each, one after the other in one flat tensor."""

    flat: Tensor
    parts: list[Tensor]

    @classmethod
    def of(cls, flat: Tensor, shapes: Sequence[Shape]) -> Factors:
        """Divide a flat tensor; it is what is sent, and its parts are what is reckoned with."""
        return cls(flat, stacked(flat, shapes))

    @classmethod
    def empty(cls, like: Tensor, shapes: Sequence[Shape]) -> Factors:
        """Make room for factors."""
        return cls.of(like.new_empty(sum(rows * columns for rows, columns in shapes)), shapes)

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of the parts."""
        return [(len(part), part.shape[1]) for part in self.parts]

    def orthogonalize(self, epsilon: float) -> None:
        """Make the columns of each factor orthonormal."""
        for part in self.parts:
            orthogonalize(part, epsilon)


def stacked(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Show a flat tensor as matrices, one after the other."""
    ends = list(accumulate(rows * columns for rows, columns in shapes))
    parts = torch.tensor_split(flat, ends[:-1]) if shapes else ()
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


# On a CPU, BLAS takes 3 to 15 times as long for the same products of a thin matrix that lies row by
# row, as factors do.


def multiply(matrix: Tensor, thin: Tensor, *, out: Tensor) -> None:
    """Multiply a matrix by a thin one."""
    torch.mm(matrix, thin.T.contiguous().T, out=out)


def multiply_transposed(matrix: Tensor, thin: Tensor, *, out: Tensor) -> None:
    """Multiply the transpose of a matrix by a thin one."""
    out.copy_((thin.T.contiguous() @ matrix).T)


def orthogonalize(matrix: Tensor, epsilon: float) -> None:
    """Make the columns of a matrix orthonormal, in place.

    Without an epsilon that is exact, and columns that are zero, or depend on others, do no harm.
    With one it is the Gram-Schmidt process with the epsilon added to every norm: such columns
    become nearly zero then.
    """
    if epsilon:
        for i, column in enumerate(matrix.unbind(1)):
            column.div_(column.norm() + epsilon)
            rest = matrix[:, i + 1 :]
            rest.addr_(column, column @ rest, alpha=-1)
    else:
        # LAPACK has no halves.
        full = matrix.float() if matrix.dtype in (torch.float16, torch.bfloat16) else matrix
        matrix.copy_(torch.linalg.qr(full).Q)
