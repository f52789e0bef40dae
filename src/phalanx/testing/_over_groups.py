"""`over_groups`: a test body, parametrized over backends, group sizes and split groups."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import native
from ..groups import ProcessGroup
from ..groups import _torch_integration as torch_tables
from ..groups._backend_registry import find_backend
from ._context import RankContext
from ._pool import RankPool
from ._results import RankFailures
from ._threads import ThreadRanks
from ._worker import FunctionReference

_SPLIT_WORLD_SIZE = 4  # ranks
_PROVIDED = ("group", "ctx")  # parameters that are not fixtures
_AVAILABLE_BACKENDS = ("local", "gloo", "shm") if native.engine is not None else ("local", "gloo")


@dataclass(frozen=True)
class GroupCase:
    """The group of one test case."""

    backend: str
    size: int
    split: bool = False

    def __str__(self) -> str:
        return f"{self.backend}-split" if self.split else f"{self.backend}-{self.size}"

    def form(self, context: RankContext, options: dict[str, Any]) -> ProcessGroup:
        """Form the group; a split has its even and its odd ranks as halves."""
        world = context.group(self.backend, **options)
        if not self.split:
            return world
        halves = [world.split_group(list(range(half, self.size, 2))) for half in (0, 1)]
        (mine,) = (half for half in halves if half is not None)
        return context.closing(mine)


def over_groups(
    *,
    backends: Sequence[str] = _AVAILABLE_BACKENDS,
    sizes: Sequence[int] = (1, 2, 3, 4),
    split: bool = False,
    reuse: bool = False,
    timeout: float = 30.0,
    **options: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a body ``(group, ...)`` into a pytest test for each backend and size.

    A parameter of the body named ``ctx`` is the rank's context. Other parameters are fixtures,
    parametrized, or drawn by hypothesis as in any test, and are sent to the ranks. The ranks come
    from the fixtures ``threads`` or ``ranks``, as the backend's traits require.

    Args:
        backends: the backends to test.
        sizes: the group sizes to test.
        split: also test both halves of a split world of four ranks.
        reuse: keep the group of process ranks for later tests with the same arguments. Saves most
            of the time, but the body must leave the group in its initial state.
        timeout: seconds for one run.
        options: arguments of ``new_group``.
    """
    import pytest

    cases = [GroupCase(backend, size) for backend in backends for size in sizes]
    if split:
        cases += [GroupCase(backend, _SPLIT_WORLD_SIZE, split=True) for backend in backends]

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(
            *, ranks: RankPool, threads: ThreadRanks, group_case: GroupCase, **given: Any
        ) -> None:
            has_threads = find_backend(group_case.backend).traits.ranks_are_threads
            runner = threads if has_threads else ranks
            reference = FunctionReference.of(body)
            args = (reference, group_case, options, given, reuse)
            try:
                name = str(reference)
                runner.run(_run_on_group, group_case.size, args=args, timeout=timeout, name=name)
                return
            except RankFailures as error:
                failures = str(error)
            # Show only the tracebacks of the ranks.
            pytest.fail(failures, pytrace=False)

        given = [name for name in inspect.signature(body).parameters if name not in _PROVIDED]
        fixtures = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
            for name in (*given, "ranks", "threads", "group_case")
        ]
        test.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
        test.body = body  # type: ignore[attr-defined] # where `FunctionReference` finds it
        parametrize = pytest.mark.parametrize("group_case", cases, ids=str)
        parametrized: Callable[..., None] = parametrize(test)
        return parametrized

    return decorate


def _run_on_group(
    context: RankContext,
    body: FunctionReference,
    case: GroupCase,
    options: dict[str, Any],
    given: dict[str, Any],
    reuse: bool,
) -> None:
    function = body.load()
    keeps_group = reuse and context.generation is not None
    group = _reuse_group(case, context, options) if keeps_group else case.form(context, options)
    extra = {"ctx": context} if "ctx" in inspect.signature(function).parameters else {}
    try:
        function(group, **given, **extra)
    finally:
        if keeps_group:
            # Destroying torch's default group would abort every group that torch knows.
            torch_tables.unregister_group(group)


_reusable_groups: dict[tuple[int | None, str], ProcessGroup] = {}


def _reuse_group(case: GroupCase, context: RankContext, options: dict[str, Any]) -> ProcessGroup:
    """Return the group that an earlier test left, or form one.

    All ranks find one or none does: they have run the same tests since a rank was replaced.
    """
    for key in [key for key in _reusable_groups if key[0] != context.generation]:
        _reusable_groups.pop(key).abort()
    key = (context.generation, f"{case} {options} {context.timeout}")
    if key in _reusable_groups:
        _reusable_groups[key]._torch_name = torch_tables.add_to_torch_tables(_reusable_groups[key])
    else:
        _reusable_groups[key] = case.form(context, options)
        context.leave_open()
    return _reusable_groups[key]
