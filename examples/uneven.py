"""Train on ranks with different amounts of data, and use all of it.

    phalanx run -n 3 examples/uneven.py

Rank 0 has the fewest handwritten digits and the last rank the most. A rank that runs out of data
leaves the group, and the others continue without it; no sample is dropped or repeated. At the end
all ranks have the same weights and print how the work was divided.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx import DDP
from phalanx.groups import ProcessGroup, new_group
from phalanx.join import JoinReport

BATCH = 32  # images per rank and step
TEST_IMAGES = 360


def main(epochs: int) -> None:
    """Train on this rank's data and test on its shard of the test images."""
    group = new_group()
    torch.set_num_threads(1)  # the network is too small to gain from more
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    test, training = torch.randperm(len(images)).tensor_split([TEST_IMAGES])

    mine = share(training, group)
    loader = DataLoader(TensorDataset(images[mine], labels[mine]), BATCH, shuffle=True)
    model = DDP(
        nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)),
        process_group=group,
    )
    report = train(model, loader, epochs=epochs)

    mine = share(test, group)
    model.eval()
    guesses = phalanx.gather_uneven(model(images[mine]).argmax(1), group)
    answers = phalanx.gather_uneven(labels[mine], group)
    model.assert_in_sync()
    if group.rank() == 0:
        print(f"the last epoch:\n{report}")
        accuracy = (guesses == answers).float().mean()
        print(f"test accuracy: {accuracy:.1%} of {len(answers)} images")
    group.shutdown()


def share(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Give rank r a share of r + 1 parts."""
    parts = group.size() * (group.size() + 1) // 2
    ends = [len(rows) * (rank + 1) * (rank + 2) // 2 // parts for rank in range(group.size())]
    return rows.tensor_split(ends[:-1])[group.rank()]


def train(model: DDP, loader: DataLoader[tuple[Tensor, ...]], *, epochs: int) -> JoinReport | None:
    """Train as on one rank and return the report of the last epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loop = phalanx.uneven(loader, model, optimizers=[optimizer])
    for _ in range(epochs):
        for images, labels in loop:
            model.weight = len(labels)  # every image counts the same, wherever it is
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
    return loop.report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    main(parser.parse_args().epochs)
