"""Train on handwritten digits to the same bits on any number of ranks.

    phalanx run -n 1 examples/elastic.py
    phalanx run -n 3 examples/elastic.py
    torchrun --nproc-per-node 2 examples/elastic.py

All three print the same hash. With --directory, a run that was stopped continues from its newest
checkpoint, on as many ranks as there are now, and still ends with that hash:

    phalanx run -n 2 examples/elastic.py --directory run --stop-after 70
    phalanx run -n 3 examples/elastic.py --directory run

With --chaos, it trains for about a minute on three ranks of which one is killed every few seconds,
and compares the hash with that of an undisturbed run:

    python examples/elastic.py --chaos
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from typing import NoReturn

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from phalanx.elastic import ElasticRun

BATCH_SIZE = 16  # images of one micro-batch
MICRO_BATCHES = 8
TEST_IMAGES = 360


def main(
    steps: int, directory: str | None, workers: int, stop_after: int | None, pace: float = 0.0
) -> None:
    """Train, test, and print the hash of the result."""
    torch.manual_seed(0)  # the initial weights
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    test, training = torch.randperm(len(images)).tensor_split([TEST_IMAGES])

    model = make_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    run = ElasticRun(
        model, optimizer, micro_batches=MICRO_BATCHES, seed=0, state={"scheduler": scheduler}
    )
    loader = run.loader(
        TensorDataset(images[training], labels[training]),
        batch_size=BATCH_SIZE,
        num_workers=workers,
        collate_fn=shift_images,
    )
    held_out = run.loader(TensorDataset(images[test], labels[test]), batch_size=60)
    if directory is not None and run.restore(directory) and run.is_leader:
        print(f"continuing after step {run.completed_steps}")

    for step in run.steps(stop_after or steps):
        for micro in step.micro_batches(loader):
            micro.backward(cross_entropy(model(micro.inputs), micro.targets))
            time.sleep(pace)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if run.is_leader and step.number % 50 == 0:
            print(f"step {step.number}: loss {step.loss:.6f}")
        if directory is not None:
            run.save_every(50)
    if directory is not None:
        run.save()

    accuracy = run.evaluate(partial(count_correct, model), held_out)
    digest = run.hash()
    if run.is_leader:
        print(f"test accuracy: {accuracy:.1%} of {TEST_IMAGES} images")
        print(f"hash after {run.completed_steps} steps, world size {run.world_size}: {digest}")
    run.close()


def make_network() -> nn.Module:
    """Build a network with dropout and batch norm for images of 8 x 8 pixels."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(64 * 2 * 2, 10)),
    )


def shift_images(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Collate a micro-batch, each image shifted at random by up to a pixel."""
    images, labels = (torch.stack(parts) for parts in zip(*samples, strict=True))
    shifts = torch.randint(-1, 2, (len(images), 2)).tolist()
    shifted = [image.roll(shift, (1, 2)) for image, shift in zip(images, shifts, strict=True)]
    return torch.stack(shifted), labels


def count_correct(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the share of images that the model recognises."""
    images, labels = batch
    return (model(images).argmax(1) == labels).double().mean()


def survive(steps: int, seconds_between_kills: float) -> NoReturn:
    """Train on three ranks, kill one every few seconds, and check the hash at the end."""
    phalanx = [sys.executable, "-m", "phalanx"]
    script = [__file__, f"--steps={steps}"]
    print("first, without kills:", flush=True)
    plain = subprocess.run([sys.executable, *script], check=True, text=True, stdout=subprocess.PIPE)
    expected = plain.stdout.split()[-1]
    print(f"hash {expected}\n\nnow on three ranks, with kill -9:", flush=True)
    command = [*phalanx, "run", "--elastic", "-n3", *script, "--pace=0.08"]
    kills: list[int] = []

    def kill_members() -> None:
        while run.poll() is None:
            time.sleep(random.uniform(1, 2 * seconds_between_kills - 1))
            shown = subprocess.check_output([*phalanx, "ps", "--json"])
            mine = next((each for each in json.loads(shown) if each.get("pid") == run.pid), None)
            members = (
                [each for each in mine["workers"] if each["state"] == "member"] if mine else []
            )
            # If the last one is lost, the run starts over; one that has finished is not replaced.
            if mine and len(members) > 1 and (mine["step"] or 0) < steps - 15:
                victim = random.choice(members)
                print(f"kill -9 {victim['pid']} (rank {victim['rank']})", flush=True)
                os.kill(victim["pid"], signal.SIGKILL)
                kills.append(victim["pid"])

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        threading.Thread(target=kill_members, daemon=True).start()
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
    if run.returncode:
        sys.exit(run.returncode)
    found = line.split()[-1]
    print(f"\n{len(kills)} kills; undisturbed {expected}, with kills {found}")
    if not kills:
        sys.exit("the run ended before a rank was killed: train for more --steps")
    sys.exit("the hashes differ" if found != expected else 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--directory", help="Save checkpoints here, and continue from them.")
    parser.add_argument("--workers", type=int, default=0, help="Processes that load data.")
    parser.add_argument("--stop-after", type=int, help="Stop after this step.")
    parser.add_argument("--pace", type=float, default=0.0, help="Seconds to wait per micro-batch.")
    parser.add_argument("--chaos", action="store_true", help="Survive kills for about a minute.")
    options = parser.parse_args()
    if options.chaos:
        survive(options.steps, seconds_between_kills=4.0)
    main(options.steps, options.directory, options.workers, options.stop_after, options.pace)
