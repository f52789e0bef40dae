"""Train with torch's DDP on Gloo under torchrun, from the newest checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from commit_log import CommitLog
from settings import BATCH, SAVE_INTERVAL, parse_arguments

OPTIONS = parse_arguments()
LOG = CommitLog.of_rank(OPTIONS.log)
import torch  # noqa: E402 - timed

LOG.imported()
import torch.distributed as dist  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from workload import Samples, make_model, make_optimizer  # noqa: E402


def main() -> None:
    """Train for `--steps` steps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    share = BATCH // size
    model = make_model(OPTIONS.model)
    optimizer = make_optimizer(model)
    first = restore(OPTIONS.checkpoints / "newest.pt", model, optimizer)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    samples = Samples.synthetic()
    for step in range(first + 1, OPTIONS.steps + 1):
        begin = (step - 1) * BATCH + rank * share
        inputs, labels, ids = samples.__getitems__(range(begin, begin + share))
        LOG.ran(step, ids)
        optimizer.zero_grad()
        loss = cross_entropy(wrapped(inputs), labels)
        loss.backward()
        optimizer.step()
        LOG.commit(step, generation=0, world=size, loss=loss.item())
        if rank == 0 and step % SAVE_INTERVAL == 0:
            save(OPTIONS.checkpoints / "newest.pt", step, model, optimizer)


def save(path: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replace the checkpoint in one operation."""
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    unfinished = path.with_suffix(".part")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def restore(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint, if there is one, and return its step."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


if __name__ == "__main__":
    main()
