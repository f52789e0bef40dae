"""The models and the data of the training scripts, the same for all systems."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from settings import EPOCH, WIDTHS
from torch import Tensor, nn
from torch.utils.data import Dataset

FEATURES, CLASSES, ROWS = 64, 10, 4096

Batch = tuple[Tensor, Tensor, list[int]]
"""Inputs, labels and ids."""


def make_model(name: str) -> nn.Module:
    """Return a model with the same initial weights in every process."""
    torch.manual_seed(0)
    width = WIDTHS[name]
    layers = [nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all scripts use."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


class Samples(Dataset[tuple[Tensor, Tensor, int]]):
    """Labelled points with an id each; few points, under many ids."""

    def __init__(self, inputs: Tensor, labels: Tensor, *, length: int = EPOCH) -> None:
        self._inputs, self._labels, self._length = inputs, labels, length

    @classmethod
    def synthetic(cls) -> Samples:
        """Make points whose labels a linear model knows, nearly."""
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(ROWS, FEATURES, generator=generator)
        teacher = torch.randn(FEATURES, CLASSES, generator=generator)
        noise = torch.randn(ROWS, CLASSES, generator=generator)
        return cls(inputs, (inputs @ teacher + 4 * noise).argmax(1))

    @classmethod
    def digits(cls) -> Samples:
        """Load images of 8 x 8 pixels."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
        return cls(images, torch.tensor(digits.target))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        row = index % len(self._inputs)
        return self._inputs[row], self._labels[row], index

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return a batch; there is nothing left to collate."""
        rows = torch.as_tensor(indices) % len(self._inputs)
        return self._inputs[rows], self._labels[rows], list(indices)


def as_is(batch: Batch) -> Batch:
    """Collate what `Samples.__getitems__` has made a batch of."""
    return batch
