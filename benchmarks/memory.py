"""How much memory training takes at its peak: ``python -m benchmarks.memory``.

Each way of training runs in processes of its own. What a process has is its proportional share
(``Pss``): a page that two ranks have mapped counts half for each, so that adding up over the ranks
gives what the machine has to provide. It is sampled while steps run; what the process had before
it made a model is taken off.
"""

from __future__ import annotations

from collections.abc import Callable

import click
import torch
from torch._C._distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.elastic_jobs import ElasticJob
from benchmarks.entries.elastic import accumulation, elastic_step
from benchmarks.entries.group_overhead import torch_group
from benchmarks.memory_sampler import MemorySampler
from benchmarks.models import MODELS, step_of
from phalanx.ddp import DDP
from phalanx.testing import RankContext, RankPool

STEPS = 8
MICRO_BATCHED = ("accumulation", "elastic")  # steps of several micro-batches, in shared memory
LAUNCHED = "run --elastic"  # that, under `phalanx run --elastic`
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
    with MemorySampler() as sampler:
        if how == "accumulation":
            count = -(-micro_batches // ctx.size)
            step = accumulation(wrap(make()), make_batch(), count, micro_batches)
        elif how == "elastic":
            step = elastic_step(make(), make_batch(), ctx.group("shm"), micro_batches)
        else:
            step = step_of(wrap(make()), make_batch())
        for _ in range(STEPS):
            step()
    return sampler.peak


@click.command()
@click.option("--model", type=click.Choice(list(MODELS)), default="MLP, 25 M")
@click.option("--ranks", default=2)
@click.option("--micro-batches", default=8, help="Of accumulation, plain and elastic.")
def main(model: str, ranks: int, micro_batches: int) -> None:
    """Print the peak of every way of training."""
    gradients = sum(p.nbytes for p in MODELS[model][0]().parameters()) / MIB
    click.echo(f"a copy of all gradients: {gradients:.0f} MiB")
    means: dict[str, float] = {}
    for how in ("alone", "torch", "gloo", "shm", *MICRO_BATCHED, LAUNCHED):
        peaks = _peaks(model, how, ranks, micro_batches)
        told = ", ".join(f"{most / MIB:.0f}" for most in peaks)
        means[how] = sum(peaks) / len(peaks) / MIB
        click.echo(f"{how:14} {means[how]:6.0f} MiB per rank ({told})")
    for how, peer in (("elastic", "accumulation"), (LAUNCHED, "shm"), (LAUNCHED, "elastic")):
        copies = (means[how] - means[peer]) / gradients
        click.echo(f"{how}: {copies:+.1f} copies of all gradients against {peer}")


def _peaks(model: str, how: str, ranks: int, micro_batches: int) -> list[int]:
    """Measure one way of training, in processes of its own."""
    if how == LAUNCHED:
        with ElasticJob(ranks, ["--elastic"], model, micro_batches, samples_memory=True) as job:
            return job.peaks(STEPS)
    with RankPool(ranks) as pool:
        found: list[int] = pool.run(peak, ranks, args=(model, how, micro_batches), timeout=300)
    return found


if __name__ == "__main__":
    main()
