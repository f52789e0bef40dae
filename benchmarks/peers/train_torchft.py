"""Train with torchft on Gloo: one replica group of one worker, under a torchrun of its own.

Set up as in torchft's own DDP example. Samples are chosen by the step, not by a loader that each
replica has: so a step that was not committed is repeated with its samples, and a replacement does
not begin at the first. The shards are those of torchft's sampler, which are fixed.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from commit_log import CommitLog
from settings import BATCH, parse_arguments

OPTIONS = parse_arguments()
REPLICA, REPLICAS = int(os.environ["REPLICA"]), int(os.environ["REPLICAS"])
LOG = CommitLog(OPTIONS.log, slot=REPLICA)
import torch  # noqa: E402 - timed

LOG.imported()
from torch.nn.functional import cross_entropy  # noqa: E402
from torchft import (  # noqa: E402
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)
from workload import Samples, make_model, make_optimizer  # noqa: E402


def main() -> None:
    """Train for `--steps` steps."""
    torch.set_num_threads(1)
    share = BATCH // REPLICAS
    model = make_model(OPTIONS.model)
    inner = make_optimizer(model)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"replica_{REPLICA}",
        timeout=timedelta(seconds=10),
    )
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    samples = Samples.synthetic()
    sampler = DistributedSampler(
        samples,
        replica_rank=REPLICA,
        num_replica_groups=REPLICAS,
        group_rank=0,
        num_replicas=1,
        shuffle=False,
    )
    order = range(sampler.global_rank, len(samples), sampler.global_world_size)
    while manager.current_step() < OPTIONS.steps:
        step = manager.current_step()
        inputs, labels, ids = samples.__getitems__(order[step * share : (step + 1) * share])
        optimizer.zero_grad()
        loss = cross_entropy(wrapped(inputs), labels)
        loss.backward()
        # While it heals, a replica commits steps to which it adds nothing.
        takes_part, before = manager.is_participating(), manager.current_step()
        if takes_part:
            LOG.ran(before + 1, ids)
        optimizer.step()
        if manager.current_step() == before:
            LOG.abandon(before + 1)
        elif takes_part:
            LOG.commit(
                before + 1,
                generation=manager._quorum_id,
                world=manager.num_participants(),
                loss=loss.item(),
            )
    manager.shutdown()


if __name__ == "__main__":
    main()
