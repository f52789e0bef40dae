"""The communication hooks entry: counted bytes, and the picture."""

import math
import socket

import pytest
import torch
from benchmarks.entries.ddp_hooks import HOOKS, PLAIN, ddp_hooks
from benchmarks.entry import Case
from benchmarks.machine import Machine
from benchmarks.measure import Plan, measure
from benchmarks.picture import draw
from benchmarks.points import SCATTERS
from benchmarks.results import CaseResult, EntryResult, Results
from benchmarks.stats import Compare
from benchmarks.wire import counts, sent_since

from phalanx.ddp import DDP, hooks

MLP = "MLP, 8 tensors"
ELEMENTS = 4 * (256 * 256 + 256)
SLACK = 4096
"""Bytes for the header of a step, and for Gloo's overhead per message."""


@pytest.fixture
def connection():
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
        with there, here:
            yield there, here


needs_counts = pytest.mark.skipif(counts() is None, reason="the system keeps no count")


@needs_counts
def test_bytes_written_to_a_connection_are_counted(connection):
    there, here = connection
    before = counts()
    there.setblocking(False)
    # More than the other end buffers: bytes that wait to be sent count too.
    written = there.send(bytes(64 << 20))
    assert sent_since(before) == written
    here.recv(1000)
    assert sent_since(before) == written


@needs_counts
def test_closed_connections_are_not_subtracted(connection):
    there, here = connection
    there.send(b"a word")
    before = counts()
    there.close()
    here.send(b"an answer")
    assert sent_since(before) == len(b"an answer")


def test_counting_does_not_close_sockets():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        counts()
        ours.send(b"still open")
        assert theirs.recv(10) == b"still open"


def measured(ctx):
    return measure(ctx, ddp_hooks.module, Case(ctx.size, {"model": MLP}), Plan(1, 0.0))


def by_convention(ctx, hook):
    """Count a step's bytes, and compute how many its calls should send."""
    torch.manual_seed(0)
    group = ctx.group("gloo")
    model = DDP(torch.nn.Linear(300, 300), process_group=group)
    model.register_comm_hook(None, getattr(hooks, hook))
    for _ in range(3):
        last, before = group.records()[-1].sequence, counts()
        model(torch.ones(2, 300)).sum().backward()
        sent = sent_since(before)
    shares = {"allreduce": 2 * (ctx.size - 1) / ctx.size, "allgather": ctx.size - 1}
    expected = sum(
        shares[call.operation] * math.prod(call.shape) * getattr(torch, call.dtype).itemsize
        for call in group.records()
        if call.sequence > last
    )
    return sent, expected


@needs_counts
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("hook", ["allreduce_hook", "quantization_pertensor_hook", "noop_hook"])
def test_counted_bytes_match_the_expected_traffic(ranks, hook, size):
    for sent, expected in ranks.run(by_convention, size, args=(hook,)):
        assert abs(sent - expected) < SLACK


@needs_counts
def test_every_hook_is_measured_and_sends_the_expected_bytes(ranks):
    # An element of top-k is a value and an index.
    per_element = {PLAIN: 4, "allreduce": 4, "fp16": 2, "bf16": 2, "8 bits, tensor": 1}
    per_element |= {"top-k 1%": 0.08, "random-k 1%": 0.04, "post-local": 0, "noop": 0}
    for rank in ranks.run(measured, 2):
        assert list(rank.seconds) == list(rank.sent) == [PLAIN, *HOOKS]
        for name, count in per_element.items():
            assert 0 <= rank.sent[name] - count * ELEMENTS < SLACK, name
        two_more_columns = 2 * 4 * 4 * (256 + 256)
        four, two = rank.sent["PowerSGD 4"], rank.sent["PowerSGD 2"]
        assert abs(four - two - two_more_columns) < SLACK


@pytest.mark.slow
def test_the_picture_has_every_competitor_and_is_deterministic(tmp_path):
    pytest.importorskip("matplotlib")
    names = [PLAIN, *HOOKS]
    assert list(SCATTERS["ddp_hooks"].styles) == names
    case = CaseResult(
        case=Case(2, {"model": MLP}),
        samples={name: [0.1 + i % 4, 0.2 + i % 4] for i, name in enumerate(names)},
        calls=dict.fromkeys(names, 1),
        threads=1,
        others=1.0,
        sent={name: 10**7 >> i for i, name in enumerate(names[:-1])} | {names[-1]: 0},
    )
    machine = Machine("2026-01-01T00:00:00", "A processor", 2, 0.1, "Linux 6", "3.11", "2.13")
    found = Results(machine, [EntryResult("ddp_hooks", "Hooks", PLAIN, Compare.COST, (), [case])])
    (tmp_path / "again").mkdir()
    again = Results.from_json(found.to_json())
    first, second = draw(found, tmp_path), draw(again, tmp_path / "again")
    assert [path.name for path in first] == ["ddp_hooks.png", "ddp_hooks.svg"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_no_picture_is_drawn_without_counted_bytes(tmp_path):
    case = CaseResult(Case(2, {"model": MLP}), {PLAIN: [1.0]}, {PLAIN: 1}, 1, None)
    entry = EntryResult("ddp_hooks", "Hooks", PLAIN, Compare.COST, (), [case])
    pytest.importorskip("matplotlib")
    assert draw(Results(Machine.here(), [entry]), tmp_path) == []
