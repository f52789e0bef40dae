"""The parameters of other tests: no value and no pair of values is forgotten."""

from collections import Counter
from itertools import combinations, product

from cases import in_turn, pairwise, take_turns


def pairs(row):
    return set(combinations(enumerate(row), 2))


def test_every_pair_of_values_has_a_row():
    factors = [(0, 1, 3), (False, True), ("a", "b"), (None, 0)]
    rows = pairwise(factors)
    assert set().union(*map(pairs, rows)) == set().union(*map(pairs, product(*factors)))
    assert len(rows) < 10 < len(list(product(*factors)))


def test_two_factors_are_multiplied_and_one_is_listed():
    assert set(pairwise(["abc", "xy"])) == set(product("abc", "xy"))
    assert pairwise(["abc"]) == [("a",), ("b",), ("c",)]


def test_rows_take_groups_in_turn():
    assert [group for _, group in take_turns(pairwise(["abcde"]), [1, 2])] == [1, 2, 1, 2, 1]
    rows = list(product("abcd", "wxyz"))
    turns = Counter((value, group) for row, group in take_turns(rows, [1, 2]) for value in row)
    assert set(turns.values()) == {2}, "each value is on each group"


def test_a_factor_may_have_names():
    @in_turn("local-2", "shm-4", way=["one"], keeps={"views": True, "own": False})
    def test_body(group, way, keeps):
        """Never run."""

    (mark,) = test_body.pytestmark
    names, parameters = mark.args
    assert names == ("way", "keeps", "group_case")
    assert [each.id for each in parameters] == ["one-views-local-2", "one-own-shm-4"]
    assert [each.values[:2] for each in parameters] == [("one", True), ("one", False)]
