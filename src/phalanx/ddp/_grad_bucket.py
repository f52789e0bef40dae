"""What a communication hook is given: the gradients of one bucket, under torch's names for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ..errors import InvalidArgument, InvalidType
from ._local_part import whole

__all__ = ["GradBucket"]


class GradBucket:
    """The gradients of some parameters, flat and one by one.

    Has the methods of ``torch.distributed.GradBucket``, so that hooks written for torch take it,
    and `group`, which torch leaves its hooks to guess.
    """

    __slots__ = ("_buffer", "_gradients", "_index", "_is_last", "_parameters", "group", "names")

    def __init__(
        self,
        index: int,
        buffer: Tensor,
        gradients: Sequence[Tensor],
        parameters: Sequence[Parameter],
        is_last: bool,
        *,
        group: dist.ProcessGroup | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._gradients = gradients
        self._parameters = parameters
        self._is_last = is_last
        self.group = group
        """The group that the module reduces its gradients in; None if nobody has said."""
        self.names = names
        """What the parameters are called in the module, in order; None if nobody has said.

        A bucket may have other parameters after the first step, or when training goes on from a
        checkpoint: what is remembered of gradients goes by these."""

    def __repr__(self) -> str:
        kind = str(self._buffer.dtype).removeprefix("torch.")
        what = f"{len(self._parameters)} gradients, {kind}[{self._buffer.numel()}]"
        return f"<GradBucket {self._index}: {what}{', the last' if self._is_last else ''}>"

    def index(self) -> int:
        """Tell which bucket of the module this is."""
        return self._index

    def buffer(self) -> Tensor:
        """Return the flat tensor in which the gradients lie one after the other."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """List the gradients: views of the buffer, shaped and laid out as their parameters are."""
        return list(self._gradients)

    def parameters(self) -> list[Parameter]:
        """List the parameters, in the order of their gradients."""
        return [whole(parameter) for parameter in self._parameters]

    def is_last(self) -> bool:
        """Tell whether no other bucket follows in this backward pass."""
        return self._is_last

    def set_buffer(self, tensor: Tensor) -> None:
        """Have the gradients lie in another tensor, which may be of another dtype."""
        if not isinstance(tensor, Tensor):
            raise InvalidType(f"a bucket's buffer is a Tensor, not {type(tensor).__name__}")
        old, self._buffer = self._buffer, self._checked(tensor)
        if old.is_sparse:
            self._gradients = [tensor]
        else:
            self._gradients = [_moved(each, old, tensor) for each in self._gradients]

    def _checked(self, tensor: Tensor) -> Tensor:
        """Refuse what has no room for the gradients, here where it is still known who gave it."""
        old = self._buffer
        if old.is_sparse:
            fits, wanted = tensor.is_sparse and tensor.shape == old.shape, f"sparse {[*old.shape]}"
        else:
            needed = sum(each.numel() for each in self._gradients)
            fits = (
                tensor.layout is torch.strided
                and tensor.dim() == 1
                and tensor.is_contiguous()
                and tensor.numel() >= needed
            )
            wanted = f"flat, with {needed} elements or more"
        if not fits:
            raise InvalidArgument(
                f"the buffer of bucket {self._index} is {wanted}, and not "
                f"{str(tensor.layout).removeprefix('torch.')} {[*tensor.shape]}"
            )
        return tensor


def _moved(view: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Show in one buffer what a view shows in another."""
    offset = view.storage_offset() - old.storage_offset()
    return new.as_strided(view.shape, view.stride(), new.storage_offset() + offset)
