"""Several machines: torch's own launcher does that, so it takes over.

Scripts need not know: what they find in their environment is the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NoReturn

from ._job import Ranks, count_ranks, python_command, thread_env

__all__ = ["Machines", "hand_over", "torchrun_command"]


@dataclass(frozen=True, kw_only=True)
class Machines:
    """How several machines find each other: torchrun's options, by their names."""

    nnodes: str | None = None
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_backend: str | None = None
    rdzv_id: str | None = None
    master_addr: str | None = None
    master_port: int | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) is not None for each in fields(self))

    def options(self) -> list[str]:
        """Return the options that were given, as torchrun spells them."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        if self._means_c10d():
            given["rdzv_backend"] = "c10d"
        return [
            f"--{name.replace('_', '-')}={value}"
            for name, value in given.items()
            if value is not None
        ]

    def _means_c10d(self) -> bool:
        # torchrun's default backend wants a number for each machine. Where somebody names an
        # endpoint and no number, the backend that hands out numbers is what was meant.
        return bool(self.rdzv_endpoint) and self.rdzv_backend is None and self.node_rank is None


def torchrun_command(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    machines: Machines,
    ranks: int,
    module: bool = False,
    max_restarts: int = 0,
    grace: float | None = None,
) -> list[str]:
    """Return the command line of torchrun that does the same on several machines."""
    python, *target = python_command(script, args, module=module)
    options = [*machines.options(), f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"]
    if grace is not None:
        options.append(f"--shutdown-timeout={round(grace)}")
    # A module is "-m name" to torchrun too, so what Python would be given can follow as it is.
    return [python, "-m", "torch.distributed.run", *options, *target]


def hand_over(
    script: str | os.PathLike[str],
    args: Sequence[str],
    *,
    machines: Machines,
    ranks: Ranks,
    module: bool,
    max_restarts: int,
    grace: float | None,
) -> NoReturn:
    """Become torchrun."""
    count = count_ranks(ranks)
    command = torchrun_command(
        script,
        args,
        machines=machines,
        ranks=count,
        module=module,
        max_restarts=max_restarts,
        grace=grace,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, {**thread_env(count), **os.environ})
