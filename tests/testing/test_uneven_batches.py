"""uneven_batches: reproducible batches, and custom training loops tested with them."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import phalanx
from phalanx.errors import InvalidArgument
from phalanx.testing import over_groups, uneven_batches

arguments = st.fixed_dictionaries(
    {"lengths": st.lists(st.integers(0, 5), min_size=1, max_size=5)},
    optional={
        "batch_size": st.integers(0, 3) | st.lists(st.integers(0, 3), min_size=1, max_size=3),
        "shape": st.lists(st.integers(0, 3), max_size=3),
        "seed": st.integers(0, 9),
        "dtype": st.sampled_from([torch.float32, torch.float64]),
    },
)


@settings(deadline=None)
@given(arguments)
def test_loaders_of_all_ranks_match_the_single_process_steps(given_):
    batches = uneven_batches(**given_)
    lengths = given_["lengths"]
    loaders = [batches.loader(rank) for rank in range(len(lengths))]
    assert [len(loader) for loader in loaders] == lengths
    seen = []
    for number, step in enumerate(batches.steps):
        assert list(step) == [rank for rank, length in enumerate(lengths) if length > number]
        for rank, batch in step.items():
            for one, other in zip(batch, loaders[rank][number], strict=True):
                assert torch.equal(one, other)
            seen.append(batch)
    assert len(seen) == sum(lengths)
    ids = [number for batch in seen for number in batch.ids.tolist()]
    assert ids == list(range(len(ids)))
    for batch in seen:
        shape = tuple(given_.get("shape", (4,)))
        assert batch.inputs.shape == (len(batch.ids), *shape)
        sums = [[inputs.sum().item()] for inputs in batch.inputs]
        torch.testing.assert_close(batch.targets, torch.tensor(sums).view(-1, 1).to(batch.targets))
        assert batch.inputs.dtype == given_.get("dtype", torch.float32)


def test_batch_sizes_are_used_in_turn():
    batches = uneven_batches((2, 1), batch_size=(1, 0, 4))
    sizes = [[len(batch.ids) for batch in step.values()] for step in batches.steps]
    assert sizes == [[1, 0], [4]]


def test_batches_are_deterministic_and_picklable():
    batches = uneven_batches((3, 1), seed=5)
    assert pickle.loads(pickle.dumps(batches)) == batches == uneven_batches([3, 1], seed=5)
    (mine, *_), (other, *_) = batches.loader(0), uneven_batches((3, 1), seed=6).loader(0)
    assert not torch.equal(mine.inputs, other.inputs)
    assert batches.first_ranks(1).lengths == (3,)


def test_invalid_arguments_are_rejected():
    for lengths in ((), (-1, 2), (1.5,)):
        with pytest.raises(InvalidArgument, match="lengths must be"):
            uneven_batches(lengths)
    for sizes in (-1, (), (2, -3)):
        with pytest.raises(InvalidArgument, match="batch_size must be"):
            uneven_batches((1,), batch_size=sizes)
    with pytest.raises(InvalidArgument, match="rank must be 0 to 1, got 2"):
        uneven_batches((1, 2)).loader(2)
    with pytest.raises(InvalidArgument, match="size must be 1 to 2, got 3"):
        uneven_batches((1, 2)).first_ranks(3)


def step(weight, gradient):
    return weight - 0.1 * gradient


def slope(weight, batch):
    """Return the gradient of the mean squared error, computed by hand."""
    return 2 * batch.inputs.t() @ (batch.inputs @ weight - batch.targets) / len(batch.ids)


@over_groups(backends=("local", "shm"), sizes=(2, 4), reuse=True)
def test_a_custom_training_loop_matches_one_process(group, uneven_batches):
    batches = uneven_batches.first_ranks(group.size())
    mine = torch.zeros(4, 1)
    for batch in batches.loader(group.rank()):
        gradient = slope(mine, batch)
        group.allreduce(gradient, op=torch.distributed.ReduceOp.AVG).wait()
        mine = step(mine, gradient)
    group.rejoin()  # out of data: the others go on without this rank until they come here, too

    whole, weights = torch.zeros(4, 1), []
    for batch_of in batches.steps:
        whole = step(whole, sum(slope(whole, b) for b in batch_of.values()) / len(batch_of))
        weights.append(whole)
    steps = batches.lengths[group.rank()]
    torch.testing.assert_close(mine, weights[steps - 1] if steps else torch.zeros(4, 1))


@over_groups(backends=("local", "shm"), sizes=(2, 4), reuse=True)
def test_a_custom_evaluation_gathers_every_sample(group, uneven_batches):
    batches = uneven_batches.first_ranks(group.size())
    ids = [batch.ids for batch in batches.loader(group.rank())]
    seen = phalanx.gather_uneven(torch.cat(ids) if ids else None, group)
    everybodys = [batch.ids for step in batches.steps for batch in step.values()]
    assert sorted([] if seen is None else seen.tolist()) == [
        n for b in everybodys for n in b.tolist()
    ]
