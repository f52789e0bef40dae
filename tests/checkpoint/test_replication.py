"""Replicated state: detection and division among ranks."""

import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.checkpoint import PerRank, Replicated, register_codec
from phalanx.checkpoint.components import RankInfo
from phalanx.errors import StateMismatch

from .internals import (
    ShardBounds,
    TensorLeaf,
    divide_among_ranks,
    find_differences,
    map_leaves,
    parse_state,
    replicated_shards,
    sampled_digest,
    state_from_tree,
    tensor_digest,
)
from .states import ThreadExchange, load, mixed, plain, same, saved, together

SIZES = st.dictionaries(st.text("abcdef", max_size=4), st.integers(0, 500), max_size=12)


@settings(deadline=None, max_examples=300)
@given(SIZES, st.integers(1, 9), st.sampled_from([1, 16, 64]), st.sampled_from([1, 4, 16]))
def test_every_byte_belongs_to_one_rank_and_shards_are_balanced(sizes, ranks, grain, cut):
    grain = max(grain, cut)
    shares = divide_among_ranks(sizes, ranks, grain=grain, cut=cut)
    assert len(shares) == ranks
    for name, size in sizes.items():
        mine = sorted(part for share in shares for part in share if part.name == name)
        assert [part.start for part in mine] == [0, *(part.stop for part in mine[:-1])]
        assert mine[-1].stop == size
        assert all(part.start % cut == 0 for part in mine)
        assert len(mine) == 1 or size > grain
        assert all(part.start < part.stop for part in mine) or size == 0
    loads = [sum(part.stop - part.start for part in share) for share in shares]
    assert max(loads) - min(loads) < 2 * grain + 2
    # Each shard boundary splits at most one tensor.
    assert sum(map(len, shares)) <= len(sizes) + ranks - 1


@given(SIZES, st.integers(1, 5), st.randoms())
def test_division_does_not_depend_on_key_order(sizes, ranks, random):
    names = list(sizes)
    random.shuffle(names)
    shuffled = {name: sizes[name] for name in names}
    assert divide_among_ranks(shuffled, ranks, grain=16, cut=4) == divide_among_ranks(
        sizes, ranks, grain=16, cut=4
    )


def test_single_rank_gets_everything():
    assert divide_among_ranks({"b": 3, "a": 0}, 1) == [
        [ShardBounds("a", 0, 0), ShardBounds("b", 0, 3)]
    ]
    assert divide_among_ranks({}, 2) == [[], []]


def compare(states):
    """Compare the states of ranks; return each rank's result and the bytes exchanged."""
    barrier = ThreadExchange(len(states))
    said = []

    def run(rank):
        def exchange(find):
            said.append(json.dumps(find()))
            return [json.loads(text) for text in barrier.exchange(rank, said[-1])]

        return find_differences(parse_state(states[rank]), exchange)

    return together(len(states), run), sum(map(len, said))


def test_equal_states_exchange_one_digest():
    state = {"model": torch.nn.Linear(5, 7), "steps": [1, (2, None)]}
    found, said = compare([state] * 3)
    assert found == [{}] * 3
    assert said < 3 * 80


def test_find_differences_returns_exactly_the_differing_paths():
    def state(rank):
        return {
            "model": {f"layer {i}": torch.full((2,), i) for i in range(100)},
            "rng": {"torch": torch.tensor(rank), "seed": 7},
            "history": [1, rank],
            "log": [0] * rank,
            "step": 3,
            **({"only": 1} if rank == 2 else {}),
        }

    found, said = compare([state(rank) for rank in range(3)])
    assert found[0] == {
        ("history", 1): (0, 1, 2),
        ("log",): (0, 1, 2),
        ("only",): (2,),
        ("rng", "torch"): (0, 1, 2),
    }
    assert [list(each.items()) for each in found] == [list(found[0].items())] * 3
    assert said < 3 * 1500, "ranks do not exchange the layers of a replicated model"


def test_per_rank_state_is_not_compared():
    class Untouchable(torch.nn.Module):
        def state_dict(self):
            return {"w": torch.ones(2)}

    found, _ = compare([{"a": PerRank(Untouchable()), "b": 1}] * 2)
    assert found == [{("a",): (0, 1)}] * 2
    found, _ = compare([{"a": PerRank(1)}, {"a": PerRank(1), "b": 2}])
    assert found == [{("a",): (0, 1), ("b",): (1,)}] * 2


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([{"m": Replicated({"w": torch.tensor(r // 2)})} for r in range(3)], r"m\.w .* and rank 2"),
        ([{"m": Replicated([0] * r)} for r in (1, 2)], r"m is marked Replicated but differs"),
        ([{"m": Replicated({"w": 1})}, {"m": {"w": 1}}], "on some ranks only"),
        (
            [{"m": Replicated(1)}, {}],
            "m is marked Replicated but differs between rank 0 and rank 1",
        ),
    ],
)
def test_replicated_state_that_differs_is_named_on_every_rank(states, message):
    found, _ = compare(states)
    for error in found:
        assert isinstance(error, StateMismatch)
        assert re.search(message, str(error)), error


def test_sampled_digest_covers_ends_and_middle():
    tensor = torch.zeros(1 << 20)
    first = sampled_digest(tensor)
    for place in (0, -1, tensor.numel() // 16, tensor.numel() // 2):
        other = tensor.clone()
        other[place] = 1
        assert sampled_digest(other) != first
        assert tensor_digest(other) != tensor_digest(tensor)
    assert sampled_digest(tensor.reshape(2, -1)) != first
    assert sampled_digest(tensor.to(torch.int32)) != first
    assert sampled_digest(tensor.clone()) == first


def test_digests_do_not_depend_on_strides():
    tensor = torch.randn(300, 300)
    assert tensor_digest(tensor.t()) == tensor_digest(tensor.t().contiguous())
    assert sampled_digest(tensor.t()) == sampled_digest(tensor.t().contiguous())


def own_shards(state, rank_info):
    """Return the state with only this rank's shards of replicated tensors."""
    tree = parse_state(state)
    shards = replicated_shards(tree, rank_info)
    return state_from_tree(
        map_leaves(tree, lambda leaf: replace(leaf, data=shards.get(leaf.name, leaf.data)))
    )


def staged(state, rank, size):
    """Copy only what this rank writes, as a stager does."""
    kept = own_shards(state, RankInfo(rank, size))

    def copy(value):
        if isinstance(value, TensorLeaf):
            shard = value.data
            mine = None if shard.data is None else shard.data.clone()
            return replace(value, data=replace(shard, data=mine))
        if isinstance(value, dict):
            return {key: copy(each) for key, each in value.items()}
        if isinstance(value, Replicated):
            return Replicated(copy(value.value))
        return value

    return copy(kept)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_may_stage_only_their_shards(tmp_path, size):
    model = {"w": torch.randn(1 << 20), "v": torch.randn(3), "e": torch.empty(0)}
    model["tied"] = model["w"]
    states = [{"m": Replicated(model), "own": PerRank(torch.tensor(r))} for r in range(size)]
    stages = [staged(states[rank], rank, size) for rank in range(size)]
    held = [
        sum(p.data.data.nbytes for p in stage["m"].value.values() if p.data.data is not None)
        for stage in stages
    ]
    if size > 1:
        assert max(held) < 2 * (model["w"].nbytes / size + (1 << 20))
    saved(tmp_path / "c", stages)
    for rank in range(size):
        loaded, _ = load(tmp_path / "c", rank, size)
        assert same(loaded, {"m": model, "own": torch.tensor(rank)})


class Pair:
    def __init__(self, one, two):
        self.one, self.two = one, two


def test_codec_sees_full_tensors_when_shards_are_staged(tmp_path):
    register_codec(
        "test.pair",
        Pair,
        encode=lambda pair: [pair.one, pair.two],
        decode=lambda items: Pair(items[0] + 0, items[1]),
    )
    state = {"p": Replicated(Pair(torch.ones(3), 4)), "w": Replicated(torch.ones(2))}
    saved(tmp_path / "c", [own_shards(state, RankInfo(rank, 2)) for rank in range(2)])
    loaded, _ = load(tmp_path / "c")
    assert loaded["p"].one.tolist() == [1, 1, 1]
    assert loaded["w"].tolist() == [1, 1]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("readers", [1, 2, 8])
def test_checkpoint_loads_at_any_world_size(tmp_path, size, readers):
    saved(tmp_path / "c", [mixed(rank) for rank in range(size)])
    for rank in range(readers):
        loaded, missing = load(tmp_path / "c", rank, readers)
        wanted = plain(mixed(rank))
        if size > 1 and rank >= size:
            assert sorted(missing) == ["own", "position"]
            del wanted["own"], wanted["position"]
        elif rank >= size:
            assert missing == ["position"]
            wanted["own"] = mixed(0)["own"]
            del wanted["position"]
        assert same(wanted, loaded)
