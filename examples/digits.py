"""Train a small network on handwritten digits, on several ranks.

    phalanx run -n 2 examples/digits.py
    torchrun --nproc-per-node 2 examples/digits.py

Every rank has a replica of the network and its shard of the images. Each backward pass averages the
gradients of all ranks, so the replicas stay bitwise equal; the last line checks it.
"""

import argparse
import hashlib
import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from phalanx import DDP
from phalanx.groups import ProcessGroup, new_group

BATCH = 32  # images per rank and step
TEST_IMAGES = 360


def main(epochs: int) -> None:
    """Train, test, and compare the weights of all ranks."""
    group = new_group()
    torch.set_num_threads(1)  # the network is too small to gain from more
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    test, training = torch.randperm(len(images)).tensor_split([TEST_IMAGES])

    model = DDP(make_network(), process_group=group)
    speed = train(model, images[training], labels[training], group, epochs=epochs)

    mine = test[group.rank() :: group.size()]
    correct = (model(images[mine]).argmax(1) == labels[mine]).sum()
    group.allreduce(correct).wait()
    digests = gather_digests(model, group)
    identical = len(set(digests)) == 1
    if group.rank() == 0:
        print(f"test accuracy: {correct.item() / TEST_IMAGES:.1%} of {TEST_IMAGES} images")
        print(f"speed: {speed:,.0f} samples per second")
        verdict = "identical" if identical else "DIFFERENT"
        print(f"weights: {verdict} on {len(digests)} ranks: {' '.join(sorted(set(digests)))}")
    group.shutdown()
    if not identical:
        raise SystemExit(1)


def make_network() -> nn.Module:
    """Build a network for images of 8 x 8 pixels."""
    first = (nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(64 * 2 * 2, 10))


def train(
    model: nn.Module, images: Tensor, labels: Tensor, group: ProcessGroup, *, epochs: int
) -> float:
    """Train on this rank's shard and return the samples per second of all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    share = len(images) // group.size()  # equal, so that every rank takes the same number of steps
    start = time.perf_counter()
    for _ in tqdm(range(epochs), unit="epoch", ncols=80, disable=group.rank() != 0):
        order = torch.randperm(len(images))  # same seed on every rank
        for batch in order[group.rank() * share :][:share].split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return epochs * share * group.size() / (time.perf_counter() - start)


def gather_digests(model: nn.Module, group: ProcessGroup) -> list[str]:
    """Return a short hash of every rank's weights."""
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    mine = torch.frombuffer(bytearray(hashlib.sha256(weights).digest()[:4]), dtype=torch.uint8)
    everyones = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather(everyones, mine).wait()
    return [bytes(digest.tolist()).hex() for digest in everyones]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    main(parser.parse_args().epochs)
