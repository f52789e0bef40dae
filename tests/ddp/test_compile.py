"""``torch.compile`` around and inside the DDP module."""

import importlib
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch._dynamo.compiled_autograd
from torch import nn

from phalanx.ddp import DDP
from phalanx.testing import over_groups

from .whole import assert_same_gradients, batch, compare, seeded, share, squares, whole_loss

pairs = over_groups(backends=("shm",), sizes=(2,), timeout=60, reuse=True)


class Normed(nn.Module):
    """A network with a buffer and an optional last layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, rows, whole=True):
        self.count += 1
        hidden = torch.tanh(self.first(rows))
        return self.last(hidden) if whole else hidden


def graph_counter(backend):
    testing = importlib.import_module("torch._dynamo.testing")  # takes a second
    return testing.CompileCounterWithBackend(backend)


@pytest.fixture(scope="module", autouse=True)
def graph_counters():
    """Import them before ranks on threads do so at the same time."""
    importlib.import_module("torch._dynamo.testing")


def compiled(way, make, group, backend, **options):
    """Wrap and compile a module; return the DDP module and the callable to train."""
    module = seeded(make, seed=group.rank())
    if way == "inside":
        ddp = DDP(torch.compile(module, backend=backend), process_group=group, **options)
        return ddp, ddp
    ddp = DDP(module, process_group=group, **options)
    if way == "outside":
        return ddp, torch.compile(ddp, backend=backend)
    return ddp, torch.compile(lambda *args, **kwargs: ddp(*args, **kwargs) * 1, backend=backend)


def loss(module, rows, step, rank):
    """Return a loss that skips the last layer in step 1."""
    return module(rows, whole=step != 1).square().mean()


def train_compiled(way, group, backend, *, steps=3):
    """Train a compiled module with no_sync() passes and compare it with the oracle."""
    torch._dynamo.reset()
    graphs = graph_counter(backend)
    ddp, run = compiled(way, Normed, group, graphs)
    whole = seeded(Normed)
    for step in range(steps):
        rows = batch(step, group.size())
        with ddp.no_sync():
            loss(run, share(rows, group), step, group.rank()).backward()
        whole_loss(whole, rows, group, loss, step).backward()
        loss(run, share(rows, group), step, group.rank()).backward()
        whole_loss(whole, rows, group, loss, step).backward()
        assert_same_gradients(ddp.module, whole, rtol=1e-5)
        ddp.zero_grad()
        whole.zero_grad()
    assert ddp.module.count == 2 * steps
    assert graphs.graphs


@pytest.mark.slow
@pairs
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of which the compiler asks
@pytest.mark.parametrize("way", ["inside", "outside", "function"])
def test_compiled_module_wrapper_and_function(group, way):
    train_compiled(way, group, "eager")


@pytest.mark.slow
@over_groups(backends=("local", "shm"), sizes=(4,), timeout=60, reuse=True)
def test_aot_eager_backend(group):
    train_compiled("outside", group, "aot_eager")


def small():
    """Return a network that compiles to one kernel."""
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh())


PLACE = "TORCHINDUCTOR_CACHE_DIR"
QUICK = {  # no worker processes, no ISA probing, no precompiled headers
    "compile_threads": 1,
    "cpp.vec_isa_ok": False,
    "cpp_cache_precompile_headers": False,
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Return an Inductor cache directory shared by the tests."""
    place = str(tmp_path_factory.mktemp("kernels"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLACE, place)
        yield place


@contextmanager
def compiling_into(kernels):
    import torch._inductor.config

    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(QUICK):
        if os.environ.get(PLACE) != kernels:  # already set where ranks are threads
            patch.setenv(PLACE, kernels)
        yield


@pytest.mark.slow
@over_groups(backends=("shm", "local"), sizes=(2, 4), timeout=150)  # a C++ compiler takes its time
def test_inductor_backend(group, kernels):
    with compiling_into(kernels):
        for way in ("inside", "outside"):
            torch._dynamo.reset()
            ddp, run = compiled(way, small, group, "inductor")
            whole = seeded(small)
            for step in range(3):
                rows = batch(step, group.size())
                squares(run, share(rows, group)).backward()
                squares(whole, rows).backward()
                compare(ddp, whole, rtol=1e-5)
    assert list(Path(kernels).rglob("*.so"))


def deep():
    """Return a network whose layers each fill the compiler's first bucket."""
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))


@pytest.mark.slow
@over_groups(backends=("shm",), sizes=(2, 4), timeout=60, reuse=True)
def test_graph_is_split_so_buckets_reduce_during_backward(group):
    torch._dynamo.reset()
    way = "inside" if group.size() == 2 else "outside"
    graphs = graph_counter("aot_eager")
    ddp, run = compiled(way, deep, group, graphs, bucket_cap_mb=1)
    rows, launched = torch.ones(2, 512), []
    weights = [p for p in ddp.module.parameters() if p.dim() == 2]

    def count(_):
        launched.append(len(ddp.reducer._in_flight._works))

    for weight in weights:
        weight.register_hook(count)
    for _ in range(3):
        launched.clear()
        run(rows).sum().backward()
    assert len(graphs.graphs) == 3
    assert launched == sorted(launched)
    assert launched[-1] > launched[0]
    assert nn.parallel.DistributedDataParallel._get_active_ddp_module() is None
    with torch._dynamo.config.patch(optimize_ddp=False):
        torch._dynamo.reset()
        graphs.graphs.clear()
        run(rows).sum().backward()
    assert len(graphs.graphs) == 1


@over_groups(backends=("local",), sizes=(2,), timeout=60)
def test_graph_is_not_split_when_ranks_are_threads(group):
    """Dynamo's active DDP module is one variable for all threads."""
    torch._dynamo.reset()
    graphs = graph_counter("eager")
    _, run = compiled("outside", deep, group, graphs, bucket_cap_mb=1)
    run(torch.ones(2, 512)).sum().backward()
    layers = [[n for n in g.graph.nodes if n.op == "call_function"] for g in graphs.graphs]
    assert {len(each) for each in layers} == {3}
    assert nn.parallel.DistributedDataParallel._get_active_ddp_module() is None


@pairs
def test_compiled_autograd_is_rejected(group):
    torch._dynamo.reset()
    ddp = DDP(seeded(Normed), process_group=group)
    output = ddp(torch.ones(2, 5))
    whole = torch.compile(backend="eager")
    with (
        torch._dynamo.compiled_autograd._enable(whole),
        pytest.raises(RuntimeError, match="compiled autograd"),
    ):
        output.sum().backward()
    ddp.zero_grad()
    train_compiled("inside", group, "eager", steps=1)  # the group still works
