"""When a piece's gradients have all come, told from how it was the last time.

In a pass that is learnt from, every parameter has a hook that calls, and the order of arrivals is
written down. From then on only the parameter of a piece that was the last to arrive calls: a model
of 400 tensors in 13 pieces costs 13 calls, not 400. If the graph changes, it calls too early or
never. Neither does harm (see `_pass`): it only means to learn again.

Every parameter also has a hook that runs before its gradient is accumulated, and does next to
nothing: it looks whether a pass is under way. One may begin with any parameter, for a loss need not
come from the module's outputs alone, and not every output can be found. What is in ``.grad`` must
be put aside, or scaled, before anything is added to it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Parameter

__all__ = ["Arrivals", "UnderWay"]

Notice = Callable[[int], None]
UnderWay = list[Callable[[], object]]
"""One function, in a place where it may be replaced: returns None when no pass is under way."""


class Arrivals:
    """The hooks on parameters, and what they have seen."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self._handles: list[Any] = []
        self._announcing: list[Any] = []
        self._seen: list[int] = []
        self._countdowns: list[_Countdown] = []
        self.is_learning = False

    def learn(self, notice: Notice) -> None:
        """Have every arrival written down and told to `notice`, by the parameter's place."""
        self.remove()
        self.is_learning = True
        told = weakref.WeakMethod(notice)
        for i, parameter in enumerate(self._parameters):
            self._hook(parameter, partial(_arrived, told, self._seen, i))

    def announce(self, notice: Notice, under_way: UnderWay) -> None:
        """Call `notice` with a parameter, before it has a gradient, while no pass is under way."""
        if self._announcing:
            return
        told = weakref.WeakMethod(notice)
        for i, parameter in enumerate(self._parameters):
            hook = _announce(told, under_way, i)
            self._announcing.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    @property
    def order(self) -> list[int]:
        """List the parameters that came, by their latest arrival."""
        latest = {i: turn for turn, i in enumerate(self._seen)}
        return sorted(latest, key=latest.__getitem__)

    def follow(self, pieces: Iterable[Sequence[int]], notice: Notice) -> None:
        """Call `notice` with the number of a piece when the last of its parameters has come."""
        order, counts = self.order, Counter(self._seen)
        turn = {i: position for position, i in enumerate(order)}
        self.remove()
        told = weakref.WeakMethod(notice)
        for number, members in enumerate(pieces):
            came = [i for i in members if i in turn]
            if came:
                last = max(came, key=turn.__getitem__)
                self._countdowns.append(_Countdown(counts[last]))
                hook = partial(_ready, told, self._countdowns[-1], number)
                self._hook(self._parameters[last], hook)

    def restart(self) -> None:
        """Forget what was seen: a new pass begins."""
        self._seen.clear()
        self.rearm()

    def rearm(self) -> None:
        """Count from the start again: the next arrival may be of a pass that nobody announces."""
        for countdown in self._countdowns:
            countdown.restart()

    def close(self) -> None:
        """Take all hooks away."""
        self.remove()
        for handle in self._announcing:
            handle.remove()

    def remove(self) -> None:
        """Take away the hooks that learn or follow."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._countdowns = [], []
        self.is_learning = False

    def _hook(self, parameter: Parameter, hook: Callable[[Parameter], None]) -> None:
        is_frozen = not parameter.requires_grad
        if is_frozen:  # torch takes no hook then, but keeps one; it may be unfrozen at any time
            parameter.requires_grad_(True)
        handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        if is_frozen:
            parameter.requires_grad_(False)
        self._handles.append(handle)


class _Countdown:
    """Counts the arrivals of one parameter, which a graph may reach several times in a pass."""

    def __init__(self, times: int) -> None:
        self._times = times
        self.restart()

    def restart(self) -> None:
        self._left = self._times

    def is_over(self) -> bool:
        """Count one arrival, and tell whether it is the last that was expected."""
        self._left -= 1
        return self._left == 0


# The hooks are functions that know the reducer weakly: a parameter, which they hang on, may live
# longer than the reducer, and must not keep it.


def _announce(told: Any, under_way: UnderWay, i: int) -> Callable[[Tensor], None]:
    """Make a hook that hardly ever has anything to tell."""

    def announce(_: Tensor) -> None:
        if under_way[0]() is None:
            notice = told()
            if notice is not None:
                notice(i)

    return announce


def _arrived(told: Any, seen: list[int], i: int, _: Parameter) -> None:
    notice = told()
    if notice is not None:
        notice(i)
        seen.append(i)


def _ready(told: Any, countdown: _Countdown, number: int, _: Parameter) -> None:
    notice = told()
    if notice is not None and countdown.is_over():
        notice(number)
