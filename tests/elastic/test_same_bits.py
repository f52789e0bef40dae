"""Weights, optimizer state, buffers and losses have equal bytes at every world size."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.testing import RankPool, ThreadRanks

from .training import DRAWS_NOTHING, MODELS, SAMPLES, combine, train_on_rank

STEPS = 6
RUNS = {
    "transformer": [(2, "shm"), (3, "gloo")],
    "conv net": [(4, "shm"), (2, "gloo")],
    "lstm": [(3, "shm"), (4, "gloo")],
    "vit": [(2, "shm"), (3, "shm")],
    "embeddings": [(4, "shm"), (2, "gloo")],
}
"""World sizes and backends by model, so that each occurs with several."""


def trained(pool, ranks, *args, **kwargs):
    return combine(pool.run(train_on_rank, ranks, args=args, kwargs=kwargs, timeout=90))


def assert_every_sample_once_per_epoch(samples):
    epochs = [samples[start : start + SAMPLES] for start in range(0, len(samples), SAMPLES)]
    for epoch in epochs:
        assert len({*epoch}) == len(epoch), "a sample was repeated before the epoch was over"


@pytest.mark.parametrize("model", MODELS)
def test_the_number_of_ranks_changes_no_bit(ranks, model):
    alone = trained(ranks, 1, model, STEPS, "shm")
    assert_every_sample_once_per_epoch(alone["samples"])
    for size, backend in RUNS[model]:
        assert trained(ranks, size, model, STEPS, backend) == alone, f"{size} ranks on {backend}"


@pytest.mark.parametrize("model", DRAWS_NOTHING)
def test_ranks_that_are_threads_give_the_same_bits(ranks, model):
    alone = trained(ranks, 1, model, STEPS, "shm", draws=False)
    assert trained(ThreadRanks(8), 3, model, STEPS, "local", draws=False) == alone


def test_a_run_resumed_at_another_world_size_ends_with_the_same_bits(ranks, tmp_path):
    whole = trained(ranks, 1, "conv net", 7, "shm")
    first = trained(ranks, 3, "conv net", 3, "shm", directory=tmp_path)
    then = trained(ranks, 2, "conv net", 7, "gloo", workers=2, directory=tmp_path)
    assert then["hash"] == whole["hash"]
    assert first["losses"] | then["losses"] == whole["losses"]
    assert first["samples"] + then["samples"] == whole["samples"]


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_division_and_any_stopping_points(ranks, tmp_path_factory, data):
    """Micro-batches, models, and where a run is stopped and continued, at which world size."""
    model = data.draw(st.sampled_from(sorted(MODELS)), label="model")
    count = data.draw(st.integers(1, 9), label="micro_batches")
    stops = sorted(data.draw(st.sets(st.integers(1, 5), max_size=2), label="stops"))
    directory = tmp_path_factory.mktemp("run")
    whole = trained(ranks, 1, model, 6, "shm", micro_batches=count)
    for stop in (*stops, 6):
        size = data.draw(st.integers(1, min(4, count)), label="ranks")
        last = trained(ranks, size, model, stop, "shm", micro_batches=count, directory=directory)
    assert last["hash"] == whole["hash"]


@pytest.fixture(scope="module")
def eight():
    with RankPool(8, preload=("phalanx.elastic",)) as pool:
        yield pool


LONG_RUNS = [
    # ranks, backend and workers up to step 17, then to step 50
    ((1, "shm", 2), (8, "shm", 0)),
    ((2, "shm", 0), (3, "gloo", 2)),
    ((3, "shm", 2), (1, "shm", 0)),
    ((4, "gloo", 0), (2, "gloo", 0)),
    ((8, "gloo", 2), (4, "shm", 0)),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", MODELS)
def test_fifty_steps_in_one_piece_and_resumed_in_the_middle_of_an_epoch(eight, model, tmp_path):
    """50 steps on 1 to 8 ranks, shm and Gloo, 0 and 2 workers, uninterrupted and resumed."""
    whole = trained(eight, 1, model, 50, "shm")
    assert_every_sample_once_per_epoch(whole["samples"])
    for size, backend, workers in ((2, "gloo", 2), (3, "shm", 0), (4, "shm", 2), (8, "gloo", 0)):
        assert trained(eight, size, model, 50, backend, workers=workers) == whole
    for number, (before, after) in enumerate(LONG_RUNS):
        directory = tmp_path / str(number)
        (size, backend, workers), (size_after, backend_after, workers_after) = before, after
        first = trained(eight, size, model, 17, backend, workers=workers, directory=directory)
        then = trained(
            eight, size_after, model, 50, backend_after, workers=workers_after, directory=directory
        )
        assert then["hash"] == whole["hash"], f"{before}, then {after}"
        assert first["losses"] | then["losses"] == whole["losses"]
        assert first["samples"] + then["samples"] == whole["samples"]


def test_the_loss_is_that_of_one_process(ranks):
    """Far from the definition: the mean gradient and loss of a plain loop, up to rounding."""
    alone = trained(ranks, 1, "lstm", 4, "shm")
    losses = [float.fromhex(each) for each in alone["losses"].values()]
    assert losses == pytest.approx(ranks.run(plain_losses, 1)[0], rel=1e-5)


def plain_losses(ctx):
    from .training import BATCH_SIZE, Samples, make_run

    run = make_run(ctx.group("shm"), "lstm")
    torch.use_deterministic_algorithms(False)
    loader = run.loader(Samples("lstm"), BATCH_SIZE)
    model = type(run.model)()
    model.load_state_dict(run.model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    losses = []
    for step in range(4):
        batches = [loader._fetch(step, micro) for micro in range(8)]
        inputs, labels = (torch.cat([batch[i] for batch in batches]) for i in (1, 2))
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses
