"""A state as a tree: what comes back is what was given, and what cannot be stored is named."""

import json
import math
import random
import string
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.checkpoint import (
    PerRank,
    Replicated,
    RNGState,
    make_sync_checkpointer,
    register_codec,
)
from phalanx.errors import DamagedCheckpoint, InvalidArgument, UnsupportedState

from .internals import (
    MAX_DEPTH,
    Branch,
    MalformedManifest,
    Manifest,
    TensorLeaf,
    decode,
    encode,
    format_path,
    leaves,
    parse_state,
    rebuild_state,
    tensor_name,
    verify,
)
from .states import same

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.sampled_from([torch.Size([2, 0]), torch.float8_e5m2, torch.device("cuda:3")])
)
KEYS = (
    st.text(string.ascii_letters + "0~/$.\"'é", max_size=4)
    | st.integers()
    | st.booleans()
    | st.none()
    | st.floats(allow_nan=False, allow_infinity=False)
)
STATES = st.recursive(
    SCALARS | st.builds(torch.arange, st.integers(0, 4)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


def there_and_back(state):
    """Through the tree, JSON text, and the tree again."""
    tensors = {leaf.name: leaf.data for leaf in leaves(parse_state(state))}
    text = json.dumps(encode(parse_state(state), lambda leaf: leaf.name), allow_nan=False)

    def leaf(name, path):
        tensor = tensors[name]
        return TensorLeaf(name, tensor.dtype, tuple(tensor.shape), "cpu", tensor)

    return rebuild_state(decode(json.loads(text), tensor=leaf, rank=0), lambda leaf: leaf.data)


@settings(deadline=None, max_examples=100)
@given(STATES)
def test_any_state_comes_back_with_its_types(state):
    assert same(state, there_and_back(state))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(KEYS, min_size=1, max_size=3).map(tuple), max_size=8))
def test_no_two_paths_share_a_name(paths):
    by_name = {}
    for path in paths:
        # 1, 1.0 and True are one key to a dict, so they never meet.
        assert by_name.setdefault(tensor_name(path), path) == path


def test_what_json_has_is_written_as_it_is():
    state = {"a": [1, 2.5, None, True, "x"], "b": {"c": {}}}
    assert encode(parse_state(state), str) == state


def test_keys_that_are_numbers_stay_numbers():
    state = {"state": {0: {"step": 1}, 1: {"step": 2}}, "by flag": {True: 1, None: 2, 0.5: 3}}
    assert same(state, there_and_back(state))


def test_a_dict_whose_keys_look_like_ours_is_a_dict():
    for state in ({"$tensor": 1}, {"$dict": [], "x": 2}, {"": {"$": None}}):
        assert same(state, there_and_back(state))


def test_an_ordered_dict_becomes_a_dict():
    assert there_and_back(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}


class Colour(IntEnum):
    RED = 1


class Foo:
    pass


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "value",
    [Foo(), {1, 2}, b"x", Colour.RED, Pair(1, 2), np.float64(1), defaultdict(list), Foo, 1j, len],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_json_like_is_refused_by_its_path(value):
    with pytest.raises(
        UnsupportedState, match=r"^optimizer\.param_groups\[0\]\.foo has unsupported type "
    ):
        parse_state({"optimizer": {"param_groups": [{"foo": value}]}})


def test_a_refusal_says_what_class_it_is():
    with pytest.raises(TypeError, match=r"x has unsupported type .*Foo. Save its parts"):
        parse_state({"x": Foo()})


@pytest.mark.parametrize("key", [(1, 2), b"x", math.nan, math.inf, Colour.RED])
def test_a_key_that_cannot_be_kept_is_refused(key):
    with pytest.raises(UnsupportedState, match=r"^a has the key .*keys must be strings"):
        parse_state({"a": {key: 1}})


def test_an_integer_that_nobody_could_read_is_refused():
    for value in (10**5000, {10**5000: 1}):
        with pytest.raises(UnsupportedState, match="^a has an integer of 16610 bits"):
            parse_state({"a": value})


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(UnsupportedState, match="^a has text"):
        parse_state({"a": "\ud800"})


def deeper(call, levels=200):
    """Call from far down, as a training framework might."""
    return call() if not levels else deeper(call, levels - 1)


@pytest.mark.parametrize(
    "wrap", [lambda v: {"a": v}, lambda v: {0: v}, lambda v: [v], lambda v: (v,)]
)
def test_what_is_not_too_deep_to_be_saved_can_be_loaded(tmp_path, wrap):
    state = torch.ones(1)
    for _ in range(MAX_DEPTH):
        state = wrap(state)
    path = tmp_path / "c"
    make_sync_checkpointer().save(path, state)
    loaded = deeper(lambda: make_sync_checkpointer().load(path))
    assert same(state, loaded)
    deeper(lambda: make_sync_checkpointer().save(path, loaded))
    assert deeper(lambda: verify(str(path))) == []
    with pytest.raises(UnsupportedState, match="nested deeper"):
        parse_state(wrap(state))


def test_a_state_that_holds_itself_is_refused():
    state = {}
    state["again"] = [state]
    with pytest.raises(UnsupportedState, match="nested deeper"):
        parse_state(state)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
def test_tensors_without_plain_memory_are_refused():
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    for tensor, why in [
        (torch.eye(3).to_sparse(), "layout"),
        (torch.empty(3, device="meta"), "meta device"),
        (torch.nn.UninitializedParameter(), "UninitializedParameter"),
        (freed, "storage was freed"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized .*int_repr"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested .*unbind"),
    ]:
        with pytest.raises(UnsupportedState, match=f"^w is .*{why}"):
            parse_state({"w": tensor})


def test_tensors_that_are_one_memory_have_one_name_whatever_the_order():
    shared = torch.ones(3)
    for state in ({"b": shared, "a": shared}, {"a": shared, "b": shared}):
        assert [leaf.name for leaf in leaves(parse_state(state))] == ["a", "a"]
    views = {"a": shared, "b": shared[:2], "c": shared.view(3, 1)}
    assert len({leaf.name for leaf in leaves(parse_state(views))}) == 3


def test_marks_reach_all_the_way_down_and_do_not_contradict():
    tree = parse_state({"a": Replicated({"w": torch.ones(1)}), "b": PerRank([1])})
    assert isinstance(tree, Branch)
    assert [leaf.mark for leaf in leaves(tree)] == ["replicated"]
    assert tree.children["b"].mark == "per rank"
    with pytest.raises(UnsupportedState, match=r"a\.b is marked per rank inside"):
        parse_state({"a": Replicated({"b": PerRank(1)})})


def test_what_has_a_state_dict_stands_for_it():
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    assert same({"m": model.state_dict()}, there_and_back({"m": model}))


class Money:
    def __init__(self, amount, currency):
        self.amount, self.currency = amount, currency


def test_a_codec_stores_what_is_refused_otherwise():
    register_codec(
        "test.money",
        Money,
        encode=lambda money: {"amount": torch.tensor(money.amount), "in": money.currency},
        decode=lambda state: Money(int(state["amount"]), state["in"]),
    )
    money = there_and_back({"m": [Money(3, "EUR")]})["m"][0]
    assert (money.amount, money.currency) == (3, "EUR")
    with pytest.raises(InvalidArgument, match="codec named 'test.money' is already"):
        register_codec("test.money", Foo, encode=vars, decode=dict)
    with pytest.raises(InvalidArgument, match="has only letters"):
        register_codec("a b", Foo, encode=vars, decode=dict)


def test_the_schedulers_of_torch_are_stored():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    kinds = torch.optim.lr_scheduler
    for scheduler in (
        kinds.MultiStepLR(optimizer, [2, 5]),
        kinds.OneCycleLR(optimizer, 0.1, total_steps=5),
        kinds.ReduceLROnPlateau(optimizer),
        kinds.CosineAnnealingLR(optimizer, 5),
    ):
        state = there_and_back({"s": scheduler})["s"]
        assert same(scheduler.state_dict(), state)
        scheduler.load_state_dict(state)


def test_a_counter_is_made_of_nothing_but_counts():
    for body in (3, [1, 1], {"$dict": [[1, 2]]}):
        tree = decode({"$codec": ["collections.Counter", body]}, tensor=lambda *_: None, rank=0)
        if isinstance(body, dict):
            assert rebuild_state(tree, lambda leaf: leaf) == Counter({1: 2})
        else:
            with pytest.raises(DamagedCheckpoint, match="a Counter was not stored as"):
                rebuild_state(tree, lambda leaf: leaf)


@pytest.mark.parametrize(
    "json_tree",
    [
        {"a": 1, "$tensor": 2},
        {"$tuple": 3},
        {"$dict": [[1, 2, 3]]},
        {"$dict": [[[1], 2]]},
        {"$dict": [[1, 2], [1, 3]]},
        {"$codec": ["unheard of", 1]},
        {"$codec": [1]},
        {"$per_rank": []},
        {"$per_rank": {"-1": 0}},
        {"$per_rank": {"x": 0}},
        {"$float": "1.5"},
        {"$int": "1x"},
        {"$int": "9" * 5000},
        {"$size": [-1]},
        {"$size": [2**70]},
        {"$size": ["3"]},
        {"$dtype": "float31"},
        {"$dtype": "nn"},
        {"$device": "toaster:0"},
        {"$what": 1},
        {"$tuple": [], "$dict": []},
    ],
    ids=str,
)
def test_a_tree_that_nobody_has_written_is_refused(json_tree):
    with pytest.raises(MalformedManifest, match=r"^a\.b"):
        state = {"a": {"b": json_tree}}
        assert Manifest.make("0" * 16, 1, {}, state).entries
        decode(state, tensor=lambda *_: pytest.fail("no tensor"), rank=0)


def test_a_path_reads_the_way_it_is_said():
    assert format_path(("optimizer", "param_groups", 0, "lr")) == "optimizer.param_groups[0].lr"
    assert tensor_name(("model", "layer.weight")) == "model/layer.weight"
    assert tensor_name(("0", 0, "a/b", "__metadata__")) == '"0"/0/a~1b/"__metadata__"'


def test_random_numbers_go_on_as_if_nothing_had_been():
    def draw():
        return [
            torch.rand(3).tolist(),
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.randn(),
        ]

    draw()
    state = there_and_back({"rng": RNGState()})["rng"]
    first = draw()
    draw()
    RNGState().load_state_dict(state)
    assert draw() == first


def test_random_numbers_are_set_all_or_not_at_all():
    state = RNGState().state_dict()
    random.random()
    before = RNGState().state_dict()
    for part in ("torch", "numpy", "python"):
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the generator says
            RNGState().load_state_dict({**state, part: torch.zeros(3)})
        assert same(RNGState().state_dict(), before)
