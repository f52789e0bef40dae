"""DiLoCo, compared with a single process that simulates all ranks."""

import pytest
import torch
from torch import nn

from phalanx.ddp.hooks import DiLoCo
from phalanx.errors import InvalidState

from .buckets import everywhere, gradients, on_threads

SHAPES = ((3, 2), (4,), (2,), (1, 5))
RATE = 0.1


def model():
    return [nn.Parameter(each) for each in gradients(99, shapes=SHAPES)]


def step(optimizer, parameters, rank, number):
    for parameter, gradient in zip(parameters, gradients(rank, number, shapes=SHAPES), strict=True):
        parameter.grad = gradient
    optimizer.step()


class Oracle:
    """All ranks and their outer optimizer by the papers' formulas, in float64."""

    def __init__(self, size, *, every, fragments=1, delay=0, alpha=0.0):
        self.ranks = [[p.detach().double() for p in model()] for _ in range(size)]
        self.anchors = [p.detach().double() for p in model()]
        self.velocity = [torch.zeros_like(p) for p in self.anchors]
        self.every, self.count, self.delay, self.alpha = every, fragments, delay, alpha
        self.sent = {}

    def step(self, number):
        """Take step `number`, counted from 1, on all ranks."""
        for rank, mine in enumerate(self.ranks):
            for p, g in zip(mine, gradients(rank, number - 1, shapes=SHAPES), strict=True):
                p.sub_(RATE * g.double())
        for i in range(len(self.anchors)):
            offset = (i % self.count) * self.every // self.count
            if (number - offset) % self.every == 0:
                moved = [self.anchors[i] - mine[i] for mine in self.ranks]
                self.sent[i, number + self.delay] = torch.stack(moved).mean(0)
            if (i, number) in self.sent:
                self.receive(i, self.sent.pop((i, number)))

    def receive(self, i, delta):
        """Apply Nesterov momentum and mix with the local parameters."""
        self.velocity[i] = 0.9 * self.velocity[i] + delta
        self.anchors[i] = self.anchors[i] - 0.7 * (delta + 0.9 * self.velocity[i])
        for mine in self.ranks:
            mine[i] = self.alpha * mine[i] + (1 - self.alpha) * self.anchors[i]


SETTINGS = (
    {"every": 3},
    {"every": 4, "fragments": 2},
    {"every": 5, "fragments": 4, "delay": 2, "alpha": 0.5},
)


def wrapped(parameters, group, every, **options):
    optimizer = torch.optim.SGD(parameters, lr=RATE)
    return DiLoCo(optimizer, sync_every=every, process_group=group, **options)


@everywhere
def test_matches_the_papers_algorithm(group):
    for options in SETTINGS:
        parameters, oracle = model(), Oracle(group.size(), **options)
        optimizer = wrapped(parameters, group, **options)
        for number in range(11):
            step(optimizer, parameters, group.rank(), number)
            oracle.step(number + 1)
            for mine, expected in zip(parameters, oracle.ranks[group.rank()], strict=True):
                torch.testing.assert_close(mine.detach(), expected.float(), rtol=1e-5, atol=1e-5)


@everywhere
def test_resume_from_a_checkpoint_is_bitwise_exact(group):
    for saved_after in (5, 6, 7):  # one of them has a fragment in flight
        options = SETTINGS[2]
        parameters = model()
        optimizer = wrapped(parameters, group, **options)
        for number in range(saved_after):
            step(optimizer, parameters, group.rank(), number)
        copies = [nn.Parameter(p.detach().clone()) for p in parameters]
        other = wrapped(copies, group, **options)
        other.load_state_dict(optimizer.state_dict())
        for number in range(saved_after, saved_after + 6):
            step(optimizer, parameters, group.rank(), number)
            step(other, copies, group.rank(), number)
            assert all(map(torch.equal, parameters, copies))


@on_threads
def test_custom_fragments_and_outer_optimizer(group):
    parameters = model()
    parts = [parameters[2:], parameters[:2]]
    optimizer = wrapped(
        parameters,
        group,
        2,
        fragments=parts,
        outer=lambda anchors: torch.optim.SGD(anchors, lr=1.0),
    )
    begun = [p.detach().clone() for p in parameters]
    step(optimizer, parameters, group.rank(), 0)
    moved = [g * RATE for g in gradients(0, 0, shapes=SHAPES)]
    others = [gradients(rank, 0, shapes=SHAPES) for rank in range(group.size())]
    for i in (0, 1):  # lr=1.0 yields the plain mean
        expected = begun[i] - RATE * torch.stack([each[i] for each in others]).mean(0)
        torch.testing.assert_close(parameters[i].detach(), expected)
    if group.rank() == 0:
        torch.testing.assert_close(parameters[2].detach(), begun[2] - moved[2])


@on_threads
def test_one_step_sends_one_fragment(group):
    parameters = model()
    optimizer = wrapped(parameters, group, 4, fragments=4)
    for number in range(8):
        before = len(group.records())
        step(optimizer, parameters, group.rank(), number)
        assert len(group.records()) == before + 1


@on_threads
def test_bad_settings_are_rejected(group):
    parameters = model()
    for options, told in (
        ({"every": 0}, "sync_every must be an integer of at least 1, got 0"),
        ({"every": 4, "delay": 4}, "less than sync_every .4., got 4"),
        ({"every": 4, "alpha": 1.0}, "alpha must be in .*, got 1.0"),
        ({"every": 4, "fragments": 0}, "fragments must be an integer of at least 1"),
        ({"every": 9, "fragments": 5}, "fragments must be 1 to 4"),
        ({"every": 2, "fragments": 3}, "fragments must be 1 to 2"),
        ({"every": 2, "fragments": [parameters[:3]]}, "each trainable parameter .* once"),
        ({"every": 2, "fragments": [parameters, parameters]}, "each trainable parameter"),
    ):
        with pytest.raises(ValueError, match=told):
            wrapped(parameters, group, **options)
    with pytest.raises(InvalidState, match="before DiLoCo wraps it"):
        wrapped(parameters, group, 2).add_param_group({"params": model()})
    saved = wrapped(parameters, group, 2).state_dict()
    with pytest.raises(ValueError, match="has 1 fragments, expected 2"):
        wrapped(parameters, group, 2, fragments=2).load_state_dict(saved)


@on_threads
def test_fragments_from_generators(group):
    parameters = model()
    parts = (iter(parameters[i::2]) for i in range(2))
    optimizer = DiLoCo(
        torch.optim.SGD(parameters, lr=RATE), sync_every=2, process_group=group, fragments=parts
    )
    assert [len(fragment.parameters) for fragment in optimizer.fragments] == [2, 2]


@on_threads
@pytest.mark.parametrize("name", ["param_groups", "state", "defaults"])
def test_what_belongs_to_the_wrapped_optimizer_cannot_be_replaced(group, name):
    plain = torch.optim.SGD(model(), lr=RATE)
    optimizer = DiLoCo(plain, sync_every=2, process_group=group)
    with pytest.raises(AttributeError, match=name):
        setattr(optimizer, name, [])
    assert getattr(optimizer, name) is getattr(plain, name)
