"""Loss curves by world size, plain DDP and elastic: ``python -m benchmarks.drift --docs docs``.

The same network is trained on the same batches of digits, on 1, 2 and 4 ranks. With plain DDP a
rank takes its part of every batch, and the number of ranks decides how the gradient is added up.
Nothing is random but the order of the data, so rounding is all that differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from benchmarks.style import BLUE, GREEN, ORANGE, SKY
from phalanx.ddp import DDP
from phalanx.elastic import ElasticRun
from phalanx.testing import RankContext, RankPool

BATCH = 64
MICRO_BATCHES = 8
SIZES = (1, 2, 4)
WINDOW = 25  # steps whose losses are averaged in the picture
RATE = 0.12  # high for SGD with momentum, so that small differences grow


def _digits() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    return images, torch.tensor(digits.target)


def _network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers)


def _orders(count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield from torch.randperm(count, generator=generator).split(BATCH)[:-1]


def plain(ctx: RankContext, steps: int) -> list[float]:
    """Train with DDP; return the mean loss of every step."""
    torch.set_num_threads(1)
    images, labels = _digits()
    group = ctx.group("shm")
    model = DDP(_network(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.95)
    losses = []
    for _, order in zip(range(steps), _orders(len(images)), strict=False):
        mine = order.tensor_split(ctx.size)[ctx.rank]
        loss = cross_entropy(model(images[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().double() / ctx.size
        group.allreduce(total).wait()
        losses.append(total.item())
    return losses


def elastic(ctx: RankContext, steps: int) -> list[float]:
    """Train with an elastic run; return the mean loss of every step."""
    images, labels = _digits()
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.95)
    run = ElasticRun(model, optimizer, micro_batches=MICRO_BATCHES, group=ctx.group("shm"))
    orders = list(zip(range(steps), _orders(len(images)), strict=False))
    indices = torch.cat([order for _, order in orders])
    loader = run.loader(
        TensorDataset(images, labels), BATCH // MICRO_BATCHES, order=lambda _: indices
    )
    losses = []
    for step in run.steps(steps):
        for micro in step.micro_batches(loader):
            micro.backward(cross_entropy(model(micro.inputs), micro.targets))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step.loss)
    return losses


def measure(steps: int) -> dict[str, dict[int, list[float]]]:
    """Return the loss curves, by way of training and world size."""
    with RankPool(max(SIZES), preload=("phalanx.elastic",)) as pool:
        return {
            body.__name__: {size: pool.run(body, size, args=(steps,))[0] for size in SIZES}
            for body in (plain, elastic)
        }


def _smooth(losses: list[float]) -> list[float]:
    windows = (losses[max(0, end - WINDOW) : end] for end in range(1, len(losses) + 1))
    return [sum(window) / len(window) for window in windows]


def draw(curves: dict[str, dict[int, list[float]]], stem: Path) -> None:
    """Draw the curves, and how far they are from that of one rank."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = dict(zip(SIZES, (ORANGE, GREEN, SKY), strict=True))
    steps = range(1, len(curves["plain"][1]) + 1)
    for size in SIZES:  # one line, since they are equal
        label = "elastic, 1, 2 and 4 ranks" if size == 1 else None
        losses = _smooth(curves["elastic"][size])
        left.plot(steps, losses, color=BLUE, linewidth=4.5, alpha=0.35, label=label)
    for size, losses in curves["plain"].items():
        label = f"DDP, {size} rank{'s' if size > 1 else ''}"
        left.plot(steps, _smooth(losses), color=colours[size], linewidth=1.3, label=label)
    left.set_yscale("log")
    left.set_title(
        f"Training loss, mean of {WINDOW} steps", loc="left", fontsize=11, fontweight="bold"
    )
    for size in SIZES[1:]:
        pairs = zip(curves["plain"][size], curves["plain"][1], strict=True)
        gaps = [abs(one - other) for one, other in pairs]
        right.plot(steps, gaps, color=colours[size], linewidth=0.9, label=f"DDP, {size} ranks")
    worst = max(
        abs(one - other)
        for size in SIZES[1:]
        for one, other in zip(curves["elastic"][size], curves["elastic"][1], strict=True)
    )
    right.set_yscale("log")
    label = "elastic, 2 and 4 ranks: no difference" if not worst else f"elastic: up to {worst:g}"
    right.plot([], [], color=BLUE, linewidth=4.5, alpha=0.35, label=label)
    right.set_title(
        "Difference from the loss on one rank", loc="left", fontsize=11, fontweight="bold"
    )
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.legend(frameon=False, fontsize=9, loc="best")
        axes.grid(axis="y", color="#dddddd", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
        figure.savefig(stem.with_suffix(suffix), dpi=160, metadata=metadata)


@click.command()
@click.option("--steps", default=600, help="How many steps to train.")
@click.option("--docs", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(*, steps: int, docs: Path | None) -> None:
    """Train on 1, 2 and 4 ranks in both ways, and draw the losses."""
    curves = measure(steps)
    for way, by_size in curves.items():
        for size, losses in by_size.items():
            gap = max(abs(a - b) for a, b in zip(losses, by_size[1], strict=True))
            click.echo(
                f"{way}, {size} ranks: last loss {losses[-1]:.6g}, largest difference {gap:.3g}"
            )
    if docs is not None:
        draw(curves, docs / "elastic")


if __name__ == "__main__":
    main()
