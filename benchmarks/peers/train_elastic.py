"""Train with ElasticRun: under ``phalanx run --elastic``, or from checkpoints under a plain one."""

from __future__ import annotations

from commit_log import CommitLog
from settings import BATCH, MICRO_BATCHES, SAVE_INTERVAL, parse_arguments

OPTIONS = parse_arguments()
LOG = CommitLog.of_rank(OPTIONS.log)
import torch  # noqa: E402, F401 - timed

LOG.imported()
from torch.nn.functional import cross_entropy  # noqa: E402
from workload import Samples, as_is, make_model, make_optimizer  # noqa: E402

from phalanx.elastic import ElasticRun, MembershipChange  # noqa: E402


class Generation:
    """Counts the changes that this worker has seen."""

    number = 0

    def note(self, _: MembershipChange) -> None:
        """Count one."""
        self.number += 1


def main() -> None:
    """Train, and log the hash of the result."""
    generation = Generation()
    model = make_model(OPTIONS.model)
    optimizer = make_optimizer(model)
    run = ElasticRun(model, optimizer, micro_batches=MICRO_BATCHES, on_change=generation.note)
    samples = Samples.digits() if OPTIONS.digits else Samples.synthetic()
    loader = run.loader(samples, BATCH // MICRO_BATCHES, shuffle=False, collate_fn=as_is)
    if OPTIONS.checkpoints is not None:
        run.restore(OPTIONS.checkpoints)
    for step in run.steps(OPTIONS.steps):
        for micro in step.micro_batches(loader):
            inputs, labels, ids = micro.batch
            LOG.ran(step.number, ids)
            micro.backward(cross_entropy(model(inputs), labels))
        optimizer.step()
        LOG.commit(
            step.number,
            generation=generation.number,
            world=run.world_size,
            loss=step.loss,
            # Those of a worker that was lost after it had published its sums are among them.
            samples=len(step.losses) * BATCH // MICRO_BATCHES,
        )
        optimizer.zero_grad()
        if OPTIONS.checkpoints is not None:
            run.save_every(SAVE_INTERVAL)
    LOG.end(run.hash())


if __name__ == "__main__":
    main()
