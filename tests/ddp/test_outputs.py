"""Module outputs of any structure, used in part or in full."""

import collections
import dataclasses

import torch
from torch import nn

from cases import in_turn

from .whole import TINY, everywhere, train


@dataclasses.dataclass
class Result:
    first: torch.Tensor
    rest: dict
    note: str = "a note"


class ModelOutput(collections.OrderedDict):
    """Like ModelOutput of Hugging Face transformers: a mapping with attribute access."""

    def __getattr__(self, name):
        return self[name]


Pair = collections.namedtuple("Pair", "first second")


class Plain:
    """An opaque object."""

    def __init__(self, first, second):
        self.first, self.second = first, second

    def __iter__(self):
        return iter((self.first, self.second))


SHAPES = {
    "tuple": (lambda a, b: (a, [b, None]), lambda out: (out[0], out[1][0])),
    "dict": (lambda a, b: {"a": a, "b": [{"c": b}]}, lambda out: (out["a"], out["b"][0]["c"])),
    "dataclass": (lambda a, b: Result(a, {"b": (b,)}), lambda out: (out.first, out.rest["b"][0])),
    "namedtuple": (Pair, tuple),
    "mapping": (lambda a, b: ModelOutput(a=a, b=(b,)), lambda out: (out.a, out.b[0])),
    "object": (Plain, tuple),
    "lambda": (lambda a, b: lambda: (a, b), lambda out: out()),
}


class Outputs(nn.Module):
    """Returns two tensors in the given structure."""

    def __init__(self, shape):
        super().__init__()
        self.pack = SHAPES[shape][0]
        self.trunk, self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, rows):
        hidden = self.trunk(rows).tanh()
        return self.pack(self.a(hidden), self.b(hidden))


@in_turn("shm-2", "local-4", shape=list(SHAPES))
def test_outputs_of_any_structure_used_in_part_or_in_full(group, shape):
    def loss(module, rows, step, rank):
        a, b = SHAPES[shape][1](module(rows))
        parts = [a.square().mean(), b.mean()]
        return sum([parts[:1], parts[1:], parts][(step // 2 + rank) % 3])

    train(lambda: Outputs(shape), group, loss, steps=7, bucket_cap_mb=TINY)


@everywhere
def test_ignored_and_modified_outputs(group):
    def loss(module, rows, step, rank):
        module(rows)  # output unused
        output = module(rows).view(-1)
        output += 1
        output[:2] *= 3
        return output.square().mean()

    train(lambda: nn.Sequential(nn.Linear(5, 4), nn.Flatten(0)), group, loss, steps=5,
          bucket_cap_mb=TINY)  # fmt: skip


@everywhere
def test_output_that_is_a_parameter(group):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.other = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(5))

        def forward(self, rows):
            return self.weight, rows * self.other

    def loss(module, rows, step, rank):
        weight, rows = module(rows)
        return (weight.square().sum() * (rank + 1)) + rows.sum() * (step % 2)

    train(Bare, group, loss, steps=6, bucket_cap_mb=TINY)
