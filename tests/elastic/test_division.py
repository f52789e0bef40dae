"""How micro-batches are divided among ranks."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx.elastic._division import Rebalancing, divide_by_speed, share_of


def test_shares_of_a_list_are_ranges_in_order():
    shares = [share_of([1, 2, 3, 7, 8, 11], rank, 2) for rank in range(2)]
    assert shares == [[range(1, 4)], [range(7, 9), range(11, 12)]]


@given(st.integers(1, 8), st.lists(st.floats(1e-3, 10), min_size=1, max_size=8))
def test_shares_by_speed_cover_all_and_are_never_empty(extra, seconds):
    leaves = len(seconds) + extra
    shares = divide_by_speed(leaves, seconds)
    assert sum(shares) == leaves
    assert min(shares) >= 1
    for slow, few in zip(seconds, shares, strict=True):
        assert all(few <= many for fast, many in zip(seconds, shares, strict=True) if fast < slow)


def test_shares_change_only_for_a_gain():
    even = Rebalancing(8, [4, 4])
    assert not any(even.update([1.0, 1.02]) for _ in range(50))
    uneven = Rebalancing(8, [4, 4])
    assert any(uneven.update([3.0, 1.0]) for _ in range(50))
    assert uneven.shares == [2, 6]
