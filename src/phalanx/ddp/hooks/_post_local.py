"""Post-local SGD: gradients of everybody at first, of a few afterwards (Lin et al. 2018,
arXiv:1808.07217). From then on the models are averaged now and then, by an averager."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ...errors import InvalidArgument
from ._communicate import average, check_group, completed, group_of, new_subgroup
from ._hook import GradBucket
from ._state import HookState, check_count, check_state

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]


class PostLocalSGDState(HookState):
    """Which groups average the gradients, and from which step on; the names are torch's."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,  # noqa: N803
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        """Set it up; a subgroup of None is made by torch, one for each machine with accelerators.

        Without `post_local_gradient_allreduce` every rank is on its own after the first steps.
        """
        super().__init__(process_group)
        self.subgroup = check_group(subgroup)
        self.start_localSGD_iter = check_count("start_localSGD_iter", start_localSGD_iter)
        self.post_local_gradient_allreduce = post_local_gradient_allreduce

    def local_group(self) -> dist.ProcessGroup:
        """Return the group that gradients are averaged in after the first steps."""
        if self.subgroup is None:
            self.subgroup = _machines_group()
        return self.subgroup

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "subgroup": None}


def post_localSGD_hook(  # noqa: N802
    state: PostLocalSGDState, bucket: GradBucket
) -> Future[Tensor]:
    """Average the gradients over all ranks in the first steps, then over the subgroup."""
    check_state(state, PostLocalSGDState, "post_localSGD_hook")
    is_global = state.iter < state.start_localSGD_iter
    state.maybe_increase_iter(bucket)
    if is_global:
        return average(group_of(state.process_group, bucket), bucket.buffer())
    if not state.post_local_gradient_allreduce:
        return completed(bucket.buffer())
    return average(state.local_group(), bucket.buffer())


def _machines_group() -> dist.ProcessGroup:
    try:
        return new_subgroup()
    except (RuntimeError, ValueError) as error:
        raise InvalidArgument(
            f"PostLocalSGDState has no subgroup, and torch makes none here: pass one, such as "
            f"group.split_group(ranks) returns ({error})"
        ) from error
