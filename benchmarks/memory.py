"""How much memory training takes at its peak: ``python -m benchmarks.memory``.

Each way of training runs in processes of its own. What a process has is its proportional share
(``Pss``): a page that two ranks have mapped counts half for each, so that adding up over the ranks
gives what the machine has to provide. It is sampled while steps run; what the process had before
it made a model is taken off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import click
import torch
from torch._C._distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.entries.elastic import accumulation, elastic_step
from benchmarks.entries.group_overhead import torch_group
from benchmarks.models import MODELS, step_of
from phalanx.ddp import DDP
from phalanx.testing import RankContext, RankPool

STEPS = 8
MICRO_BATCHED = ("accumulation", "elastic")  # steps of several micro-batches, in shared memory
MIB = 1 << 20


def _wrap(ctx: RankContext, how: str) -> Callable[[torch.nn.Module], torch.nn.Module]:
    if how == "alone":
        return lambda module: module
    if how == "torch":
        theirs = torch_group(PrefixStore("torch", ctx.store), ctx.rank, ctx.size)
        return lambda module: TorchDDP(module, process_group=theirs, gradient_as_bucket_view=True)
    group = ctx.group(how)
    return lambda module: DDP(module, process_group=group)


def peak(ctx: RankContext, model: str, how: str, micro_batches: int) -> int:
    """Tell how many bytes a rank had at most while it trained."""
    torch.set_num_threads(1)
    make, make_batch = MODELS[model]
    wrap = _wrap(ctx, "shm" if how in MICRO_BATCHED else how)
    before = _share()
    with _Sampler() as sampler:
        if how == "accumulation":
            count = -(-micro_batches // ctx.size)
            step = accumulation(wrap(make()), make_batch(), count, micro_batches)
        elif how == "elastic":
            step = elastic_step(make(), make_batch(), ctx.group("shm"), micro_batches)
        else:
            step = step_of(wrap(make()), make_batch())
        for _ in range(STEPS):
            step()
    return sampler.most - before


class _Sampler:
    """Looks at the memory of this process, again and again, on a thread."""

    def __init__(self) -> None:
        self.most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> _Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, _share())


def _share() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10


@click.command()
@click.option("--model", type=click.Choice(list(MODELS)), default="MLP, 25 M")
@click.option("--ranks", default=2)
@click.option("--micro-batches", default=8, help="Of accumulation, plain and elastic.")
def main(model: str, ranks: int, micro_batches: int) -> None:
    """Print the peak of every way of training."""
    gradients = sum(p.nbytes for p in MODELS[model][0]().parameters()) / MIB
    click.echo(f"a copy of all gradients: {gradients:.0f} MiB")
    for how in ("alone", "torch", "gloo", "shm", *MICRO_BATCHED):
        with RankPool(ranks) as pool:
            peaks = pool.run(peak, ranks, args=(model, how, micro_batches), timeout=300)
        told = ", ".join(f"{most / MIB:.0f}" for most in peaks)
        click.echo(f"{how:12} {sum(peaks) / len(peaks) / MIB:6.0f} MiB per rank ({told})")


if __name__ == "__main__":
    main()
