"""Train, stop at any moment, and resume with identical results.

    phalanx run -n 2 examples/resume.py run     # press Ctrl-C, send SIGTERM, or kill it
    phalanx run -n 2 examples/resume.py run     # resumes

The final weights are bitwise equal to those of an uninterrupted run: the checkpoint also has the
state of the optimizer, the position in the data, and the random number generators of all ranks.
"""

import argparse
import hashlib
from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from phalanx import DDP
from phalanx.checkpoint import CheckpointManager, PreemptionGuard, RNGState
from phalanx.groups import ProcessGroup, new_group

BATCH = 32  # images per rank and step


def main(path: str, *, epochs: int, every: int) -> None:
    """Train from the newest checkpoint, if any, and print a hash of the weights."""
    group = new_group()
    torch.set_num_threads(1)
    torch.manual_seed(group.rank())  # ranks drop out different units; the weights are rank 0's
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    layers = (nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    model = DDP(nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = Batches(len(images), group, epochs=epochs)

    state = {"model": model, "optimizer": optimizer, "batches": batches, "rng": RNGState()}
    with (
        CheckpointManager(path, keep_last=2, group=group) as manager,
        PreemptionGuard(group) as guard,
    ):
        if manager.latest() is not None:
            manager.load(state=state)
        for batch in batches:
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            stopping = guard.should_stop()
            if stopping or batches.step % every == 0:
                manager.save(batches.step, state)
            if stopping:
                guard.exit(batches.step)

    if group.rank() == 0:
        print(f"weights after step {batches.step}: {digest(model)}")
    group.shutdown()


class Batches:
    """The batches of one rank over all epochs, with a position that can be saved."""

    def __init__(self, count: int, group: ProcessGroup, *, epochs: int) -> None:
        self.count, self.rank, self.ranks = count, group.rank(), group.size()
        self.epochs, self.step = epochs, 0

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the remaining batches, in an order that depends only on the epoch."""
        share = self.count // self.ranks
        per_epoch = -(-share // BATCH)
        while self.step < self.epochs * per_epoch:
            epoch, index = divmod(self.step, per_epoch)
            order = torch.randperm(self.count, generator=torch.Generator().manual_seed(epoch))
            self.step += 1
            yield order[self.rank * share :][:share].split(BATCH)[index]

    def state_dict(self) -> dict[str, int]:
        """Return the number of batches taken."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after that many batches."""
        self.step = state["step"]


def digest(model: nn.Module) -> str:
    """Return a short hash of all weights."""
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    return hashlib.sha256(weights).hexdigest()[:16]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", help="the folder of checkpoints")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--every", type=int, default=100, help="steps between two checkpoints")
    options = parser.parse_args()
    main(options.path, epochs=options.epochs, every=options.every)
