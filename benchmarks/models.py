"""Models to train in benchmarks: small ones, where overhead shows, and big ones, where bytes do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["MODELS", "step_of"]


def _mlp(layers: int, width: int) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts)


class _Encoder(nn.Module):
    """A transformer encoder over tokens."""

    def __init__(self, layers: int = 6, width: int = 256, words: int = 1000) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers)
        self.out = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(self.layers(self.embed(tokens)))
        return out


class _Residual(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(into, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        around = (nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.around = nn.Identity() if into == out and stride == 1 else nn.Sequential(*around)

    def forward(self, images: Tensor) -> Tensor:
        return (self.body(images) + self.around(images)).relu()


def _resnet18() -> nn.Module:
    parts = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    into = 64
    for out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        parts += [_Residual(into, out, stride), _Residual(out, out, 1)]
        into = out
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "MLP, 8 tensors": (lambda: _mlp(4, 256), lambda: torch.randn(32, 256)),
    "MLP, 25 M": (lambda: _mlp(6, 2048), lambda: torch.randn(32, 2048)),
    "MLP, 400 tensors": (lambda: _mlp(200, 64), lambda: torch.randn(32, 64)),
    "transformer": (_Encoder, lambda: torch.randint(1000, (8, 32))),
    "ResNet-18": (_resnet18, lambda: torch.randn(8, 3, 32, 32)),
}
"""By name: how to make a model, and a batch for it."""


def step_of(module: nn.Module, batch: Tensor) -> Callable[[], None]:
    """Prepare one step of training, with an optimizer that costs little."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-5, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        module(batch).square().mean().backward()
        optimizer.step()

    return step
