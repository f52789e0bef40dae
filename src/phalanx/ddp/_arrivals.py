"""When a piece's gradients have all come, told from how it was the last time.

In a pass that is learnt from, every parameter has a hook that calls, and the order of arrivals is
written down. From then on only the parameter of a piece that was the last to arrive calls: a model
of 400 tensors in 13 pieces costs 13 calls, not 400. If the graph changes, it calls too early or
never. Neither does harm (see `_pass`): it only means to learn again.

Every parameter also has a hook that runs before its gradient is accumulated, and does next to
nothing: it looks whether a pass is under way. One may begin with any parameter, for a loss need not
come from the module's outputs alone, and not every output can be found. What is in ``.grad`` must
be put aside, or scaled, before anything is added to it.

Users hook gradients too, and may change ``.grad`` in a hook. A call takes the gradients of a piece
away, so it has to come after all hooks of the parameter that calls. Autograd runs post-accumulate
hooks of the tensor and then post-hooks of its ``AccumulateGrad`` node, each in the order of
registration. So in an ordinary pass the hooks that call are post-hooks of nodes, and every pass
begins with moving them behind those that were registered since. In a pass that is learnt from,
every parameter calls, with a post-accumulate hook, and gradients are taken when one of another
piece comes.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ._accumulators import node_of

__all__ = ["Arrivals", "UnderWay"]

Notice = Callable[[int], None]
UnderWay = list[Callable[[], object]]
"""One function, in a place where it may be replaced: returns None when no pass is under way."""


class Arrivals:
    """The hooks on parameters, and what they have seen."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self._nodes = [node_of(parameter) for parameter in parameters]
        """Keeps the ``AccumulateGrad`` nodes and users' hooks on them: parameters do so weakly."""
        self._handles: list[Any] = []
        self._callers: list[_Caller] = []
        self._announcing: list[Any] = []
        self._seen: list[int] = []
        self._before: list[Any] = []
        """What puts gradients from before a pass back when more comes; none if there are none."""
        self.is_learning = False

    def learn(self, notice: Notice) -> None:
        """Have every arrival written down and told to `notice`, by the parameter's place.

        Users' hooks on the same parameter may be still to run.
        """
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
            hook = _announce(told, under_way, self._before, i)
            with _hookable(parameter):
                handle = parameter.register_hook(hook)  # type: ignore[no-untyped-call]
            self._announcing.append(handle)

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
                self._callers.append(
                    _Caller(self._find_node(last), counts[last], partial(_ready, told, number))
                )

    def put_back(self, notice: Notice) -> None:
        """Call `notice` with a parameter before its gradient is accumulated, in this pass only."""
        self._before.append(weakref.WeakMethod(notice))

    def restart(self) -> None:
        """Forget what was seen: a new pass begins."""
        self._seen.clear()
        for caller in self._callers:
            caller.come_last()
        self.rearm()

    def rearm(self) -> None:
        """Count from the start again: the next arrival may be of a pass that nobody announces."""
        self._before.clear()
        for caller in self._callers:
            caller.restart()

    def close(self) -> None:
        """Take all hooks away."""
        self.remove()
        for handle in self._announcing:
            handle.remove()

    def remove(self) -> None:
        """Take away the hooks that learn or follow."""
        for handle in self._handles:
            handle.remove()
        for caller in self._callers:
            caller.remove()
        self._handles, self._callers = [], []
        self.is_learning = False

    def _find_node(self, i: int) -> Any:
        if self._parameters[i].requires_grad:  # autograd makes another when the type changes
            self._nodes[i] = node_of(self._parameters[i])
        return self._nodes[i]

    def _hook(self, parameter: Parameter, hook: Callable[[Parameter], None]) -> None:
        with _hookable(parameter):
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._handles.append(handle)


@contextmanager
def _hookable(parameter: Parameter) -> Generator[None, None, None]:
    """Have torch accept a hook in the body: it keeps those of a frozen parameter, but takes none.

    The parameter may be unfrozen at any time.
    """
    is_frozen = not parameter.requires_grad
    if is_frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        if is_frozen:
            parameter.requires_grad_(False)


class _Caller:
    """A post-hook that tells when its node has run for the last time in a pass.

    A graph may reach a parameter several times in a pass.
    """

    def __init__(self, node: Any, times: int, ready: Callable[[], None]) -> None:
        self._times = self._left = times
        self._ready = ready
        self._handle = node.register_hook(self)
        self._id: int = self._handle.id

    def __call__(self, *_: object) -> None:
        self._left -= 1
        # Hooks that this pass has put behind ours are still to run. Then nobody is told, and what
        # was not told is found at the end of the pass.
        if self._left == 0 and self._is_last(self._handle.hooks_dict_ref()):
            self._ready()

    def restart(self) -> None:
        """Count from the start again."""
        self._left = self._times

    def come_last(self) -> None:
        """Let hooks that were registered later run first."""
        hooks = self._handle.hooks_dict_ref()
        if not self._is_last(hooks):
            hooks[self._id] = hooks.pop(self._id)

    def _is_last(self, hooks: OrderedDict[int, object]) -> bool:
        return next(reversed(hooks)) == self._id

    def remove(self) -> None:
        """Take the hook away."""
        self._handle.remove()


# The hooks are functions that know the reducer weakly: a parameter, which they hang on, may live
# longer than the reducer, and must not keep it.


def _announce(
    told: Any, under_way: UnderWay, before: list[Any], i: int
) -> Callable[[Tensor], None]:
    """Make a hook that hardly ever has anything to tell."""

    def announce(_: Tensor) -> None:
        if under_way[0]() is None:
            notice = told()
            if notice is not None:
                notice(i)
        if before:
            put_back = before[0]()
            if put_back is not None:
                put_back(i)

    return announce


def _arrived(told: Any, seen: list[int], i: int, _: Parameter) -> None:
    notice = told()
    if notice is not None:
        notice(i)
        seen.append(i)


def _ready(told: Any, number: int) -> None:
    notice = told()
    if notice is not None:
        notice(number)
