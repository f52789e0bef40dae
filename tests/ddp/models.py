"""Modules shared by several tests."""

import torch
from torch import nn

__all__ = ["Images", "Waves", "Words", "encoder"]


class Images(nn.Sequential):
    """A convolutional network with batch norm, on rows of 36 values."""

    def __init__(self):
        super().__init__(
            nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Flatten(), nn.Linear(64, 3),
        )  # fmt: skip


class Words(nn.Module):
    """An embedding and a linear head; every value of a row is a token."""

    def __init__(self, *, sparse=False):
        super().__init__()
        self.words, self.head = nn.Embedding(20, 6, sparse=sparse), nn.Linear(6, 2)

    def forward(self, rows):
        return self.head(self.words(rows.abs().mul(7).long() % 20).mean(dim=1))


class Waves(nn.Module):
    """A module with a complex parameter."""

    def __init__(self):
        super().__init__()
        self.wave = nn.Parameter(torch.zeros(5, 3, dtype=torch.complex64))
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, rows):
        return (rows.to(self.wave.dtype) @ self.wave).abs() + self.shift


def encoder():
    """Return a transformer encoder layer for rows of 24 values."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (3, 8)), layer)
