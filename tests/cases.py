"""Parameters of tests: the cases that can differ, not their product."""

import itertools
from collections import Counter

import pytest

from phalanx.testing import over_groups


def over_cases(*cases, **options):
    """Parametrize a test body over pairs of backend and world size, such as ``"shm-2"``.

    Backend and world size are independent, so a few pairs cover as much as the product.
    """
    backends, sizes = zip(*(case.split("-") for case in cases), strict=True)
    options = {"reuse": True, "timeout": 30, **options}
    product = over_groups(
        backends=tuple(dict.fromkeys(backends)),
        sizes=tuple(dict.fromkeys(map(int, sizes))),
        **options,
    )

    def decorate(body):
        test = product(body)
        (mark,) = test.pytestmark[-1:]
        mark.args[1][:] = [over for over in mark.args[1] if str(over) in cases]
        return test

    return decorate


def pairwise(factors):
    """Return few rows, one value per factor, that have every pair of values of two factors."""
    every = list(itertools.product(*factors))

    def pairs(row):
        return set(itertools.combinations(enumerate(row), 2))

    missing = set().union(*map(pairs, every))
    rows = []
    while missing:
        rows.append(max(every, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(rows[-1])
    return rows or every  # a single factor has no pairs


def in_turn(*cases, timeout=30, **factors):
    """Parametrize a test body over pairs of values, each row on one of the groups in turn.

    For values and groups that are independent: each value is on some group and each group has some
    values. A factor is a list of values, or a dict of names to values.
    """

    def decorate(body):
        test = over_cases(*cases, timeout=timeout)(body)
        groups = test.pytestmark.pop().args[1]
        made = []
        for row, group in take_turns(pairwise(list(factors.values())), groups):
            values = [
                factor[name] if isinstance(factor, dict) else name
                for factor, name in zip(factors.values(), row, strict=True)
            ]
            names = [getattr(name, "__name__", str(name)) for name in (*row, group)]
            made.append(pytest.param(*values, group, id="-".join(names)))
        return pytest.mark.parametrize((*factors, "group_case"), made)(test)

    return decorate


def take_turns(rows, groups):
    """Yield each row with the group that has had fewest of its values, then fewest rows."""
    seen = Counter()
    for row in rows:
        values = list(enumerate(row))
        group = min(groups, key=lambda g: (sum(seen[g, each] for each in values), seen[g]))
        seen.update([group, *((group, each) for each in values)])
        yield row, group


def in_two_suites(count):
    """Return the numbers of shares of random inputs; the second half is marked slow."""
    half = [pytest.param(share, marks=pytest.mark.slow) for share in range(count // 2, count)]
    return [*range(count // 2), *half]
