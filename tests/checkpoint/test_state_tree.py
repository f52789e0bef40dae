"""State trees: round trips, and errors that name unsupported values."""

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


def round_trip(state):
    """Encode a state to JSON and decode it."""
    tensors = {leaf.name: leaf.data for leaf in leaves(parse_state(state))}
    text = json.dumps(encode(parse_state(state), lambda leaf: leaf.name), allow_nan=False)

    def leaf(name, path):
        tensor = tensors[name]
        return TensorLeaf(name, tensor.dtype, tuple(tensor.shape), "cpu", tensor)

    return rebuild_state(decode(json.loads(text), tensor=leaf, rank=0), lambda leaf: leaf.data)


@settings(deadline=None, max_examples=100)
@given(STATES)
def test_any_state_round_trips_with_its_types(state):
    assert same(state, round_trip(state))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(KEYS, min_size=1, max_size=3).map(tuple), max_size=8))
def test_tensor_names_are_unique(paths):
    by_name = {}
    for path in paths:
        # 1, 1.0 and True are the same dict key, so they cannot collide.
        assert by_name.setdefault(tensor_name(path), path) == path


def test_json_values_are_stored_unchanged():
    state = {"a": [1, 2.5, None, True, "x"], "b": {"c": {}}}
    assert encode(parse_state(state), str) == state


def test_non_string_keys_keep_their_type():
    state = {"state": {0: {"step": 1}, 1: {"step": 2}}, "by flag": {True: 1, None: 2, 0.5: 3}}
    assert same(state, round_trip(state))


def test_dict_with_reserved_looking_keys_round_trips():
    for state in ({"$tensor": 1}, {"$dict": [], "x": 2}, {"": {"$": None}}):
        assert same(state, round_trip(state))


def test_ordered_dict_becomes_a_dict():
    assert round_trip(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}


class Colour(IntEnum):
    RED = 1


class Foo:
    pass


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "value", [np.float64(0.1), np.float32(0.1), np.float64("nan"), np.int64(-7), np.bool_(True)]
)
def test_numbers_of_numpy_become_those_of_python(value):
    node = parse_state({"best": value}).children["best"]
    assert type(node.value) in (float, int, bool)
    np.testing.assert_equal(node.value, value)


@pytest.mark.parametrize(
    "value",
    [Foo(), {1, 2}, b"x", Colour.RED, Pair(1, 2), np.ones(1), defaultdict(list), Foo, 1j, len],
    ids=lambda value: type(value).__name__,
)
def test_unsupported_value_is_named_by_its_path(value):
    with pytest.raises(
        UnsupportedState, match=r"^optimizer\.param_groups\[0\]\.foo has unsupported type "
    ):
        parse_state({"optimizer": {"param_groups": [{"foo": value}]}})


def test_unsupported_value_error_names_the_class():
    with pytest.raises(TypeError, match=r"x has unsupported type .*Foo. Save its parts"):
        parse_state({"x": Foo()})


@pytest.mark.parametrize("key", [(1, 2), b"x", math.nan, math.inf, Colour.RED])
def test_unsupported_key_is_rejected(key):
    with pytest.raises(UnsupportedState, match=r"^a has the key .*keys must be strings"):
        parse_state({"a": {key: 1}})


def test_huge_integer_is_rejected():
    for value in (10**5000, {10**5000: 1}):
        with pytest.raises(UnsupportedState, match="^a has an integer of 16610 bits"):
            parse_state({"a": value})


def test_invalid_unicode_is_rejected():
    with pytest.raises(UnsupportedState, match="^a has text"):
        parse_state({"a": "\ud800"})


def deeper(call, levels=200):
    """Call from deep in the stack, as a training framework might."""
    return call() if not levels else deeper(call, levels - 1)


@pytest.mark.parametrize(
    "wrap", [lambda v: {"a": v}, lambda v: {0: v}, lambda v: [v], lambda v: (v,)]
)
def test_state_of_maximum_depth_can_be_loaded(tmp_path, wrap):
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


def test_recursive_state_is_rejected():
    state = {}
    state["again"] = [state]
    with pytest.raises(UnsupportedState, match="nested deeper"):
        parse_state(state)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
def test_tensors_without_dense_storage_are_rejected():
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


def test_tied_tensors_have_one_name_in_any_order():
    shared = torch.ones(3)
    for state in ({"b": shared, "a": shared}, {"a": shared, "b": shared}):
        assert [leaf.name for leaf in leaves(parse_state(state))] == ["a", "a"]
    views = {"a": shared, "b": shared[:2], "c": shared.view(3, 1)}
    assert len({leaf.name for leaf in leaves(parse_state(views))}) == 3


def test_marks_apply_to_leaves_and_must_not_conflict():
    tree = parse_state({"a": Replicated({"w": torch.ones(1)}), "b": PerRank([1])})
    assert isinstance(tree, Branch)
    assert [leaf.mark for leaf in leaves(tree)] == ["replicated"]
    assert tree.children["b"].mark == "per rank"
    with pytest.raises(UnsupportedState, match=r"a\.b is marked per rank inside"):
        parse_state({"a": Replicated({"b": PerRank(1)})})


def test_object_with_a_state_dict_is_stored_as_its_state_dict():
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    assert same({"m": model.state_dict()}, round_trip({"m": model}))


class Money:
    def __init__(self, amount, currency):
        self.amount, self.currency = amount, currency


def test_codec_stores_an_unsupported_class():
    register_codec(
        "test.money",
        Money,
        encode=lambda money: {"amount": torch.tensor(money.amount), "in": money.currency},
        decode=lambda state: Money(int(state["amount"]), state["in"]),
    )
    money = round_trip({"m": [Money(3, "EUR")]})["m"][0]
    assert (money.amount, money.currency) == (3, "EUR")
    with pytest.raises(InvalidArgument, match="codec named 'test.money' is already"):
        register_codec("test.money", Foo, encode=vars, decode=dict)
    with pytest.raises(InvalidArgument, match="has only letters"):
        register_codec("a b", Foo, encode=vars, decode=dict)


def test_lr_schedulers_round_trip():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    kinds = torch.optim.lr_scheduler
    for scheduler in (
        kinds.MultiStepLR(optimizer, [2, 5]),
        kinds.OneCycleLR(optimizer, 0.1, total_steps=5),
        kinds.ReduceLROnPlateau(optimizer),
        kinds.CosineAnnealingLR(optimizer, 5),
    ):
        state = round_trip({"s": scheduler})["s"]
        assert same(scheduler.state_dict(), state)
        scheduler.load_state_dict(state)


def test_malformed_counter_is_rejected():
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
def test_malformed_tree_is_rejected(json_tree):
    with pytest.raises(MalformedManifest, match=r"^a\.b"):
        state = {"a": {"b": json_tree}}
        assert Manifest.make("0" * 16, 1, {}, state).entries
        decode(state, tensor=lambda *_: pytest.fail("no tensor"), rank=0)


def test_path_format():
    assert format_path(("optimizer", "param_groups", 0, "lr")) == "optimizer.param_groups[0].lr"
    assert tensor_name(("model", "layer.weight")) == "model/layer.weight"
    assert tensor_name(("0", 0, "a/b", "__metadata__")) == '"0"/0/a~1b/"__metadata__"'


def test_rng_state_round_trips():
    def draw():
        return [
            torch.rand(3).tolist(),
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.randn(),
        ]

    draw()
    state = round_trip({"rng": RNGState()})["rng"]
    first = draw()
    draw()
    RNGState().load_state_dict(state)
    assert draw() == first


def test_rng_state_is_loaded_all_or_nothing():
    state = RNGState().state_dict()
    random.random()
    before = RNGState().state_dict()
    for part in ("torch", "numpy", "python"):
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the generator says
            RNGState().load_state_dict({**state, part: torch.zeros(3)})
        assert same(RNGState().state_dict(), before)
