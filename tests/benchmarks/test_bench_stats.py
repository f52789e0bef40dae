"""The statistics, on inputs with known results."""

import itertools
import math

import pytest
from benchmarks.stats import Compare, compare_pairs, quartiles, sure_median


def test_quartiles_of_five_values():
    spread = quartiles([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (spread.least, spread.low, spread.median, spread.high, spread.most) == (1, 2, 3, 4, 5)
    assert spread.count == 5


def test_quartiles_of_one_value_are_that_value():
    spread = quartiles([7.0])
    assert {spread.least, spread.low, spread.median, spread.high, spread.most} == {7.0}
    assert spread.count == 1


@pytest.mark.parametrize(
    ("how", "expected"), [(Compare.ADDED, 2.0), (Compare.COST, 3.0), (Compare.SPEED, 1 / 3)]
)
def test_each_kind_of_comparison(how, expected):
    assert compare_pairs(how, [3.0], [1.0]).median == pytest.approx(expected)


def test_pairs_are_compared_before_the_median_is_taken():
    # A burst of noise hits both in the same round; the medians of each alone are 15 and 12.
    peer = [10.0, 12.0, 100.0]
    own = [15.0, 14.0, 103.0]
    spread = compare_pairs(Compare.ADDED, own, peer)
    assert (spread.median, spread.least, spread.most) == (3.0, 2.0, 5.0)


def test_pairs_must_have_equal_lengths():
    with pytest.raises(ValueError, match="zip"):
        compare_pairs(Compare.ADDED, [1.0, 2.0], [1.0])


# The 1-based positions in published tables of the sign test for 95%.
@pytest.mark.parametrize(("n", "position"), [(6, 1), (8, 1), (9, 2), (15, 4), (50, 18), (100, 40)])
def test_the_interval_matches_published_tables(n, position):
    spread = sure_median([float(value) for value in range(n, 0, -1)])
    assert (spread.low, spread.high) == (position, n + 1 - position)
    assert spread.median == (n + 1) / 2


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_interval_of_few_values_is_their_range(n):
    values = [float(value) for value in range(n)]
    spread = sure_median(values)
    assert (spread.low, spread.high) == (0, n - 1) == (spread.least, spread.most)


@pytest.mark.parametrize("n", [6, 9, 12])
def test_the_interval_has_95_percent_coverage(n):
    # Every value is equally likely above and below the true median: enumerate all sign patterns.
    held = 0
    for signs in itertools.product((-1.0, 1.0), repeat=n):
        spread = sure_median([sign * (i + 1) for i, sign in enumerate(signs)])
        held += spread.low <= 0 <= spread.high
    assert held / 2**n >= 0.95
    assert math.isclose(held / 2**n, 0.97, abs_tol=0.02)
