"""Hooks on autograd: when a backward pass begins, and when gradients are ready.

`on_backward` puts a hook on the module's outputs. `AutogradHooks` puts hooks on the parameters:

- In a recording pass every parameter has a hook, and the order of arrival is written down.
- In later passes only the parameter that arrived last in each bucket piece reports: a model of
  400 tensors in 13 pieces costs 13 calls, not 400. If the graph changes, a report comes too early
  or never. Both are harmless (see `_backward_pass`) and cause another recording pass.
- Every parameter also has a hook that runs before its gradient is accumulated and checks whether
  a pass is in progress. A loss need not depend on the outputs that were found, so a pass can
  begin at any parameter, and what is in `.grad` must be set aside before anything is added to it.

Users' hooks may change `.grad`, and a report takes the gradients of a piece away, so it must
come after all hooks of the reporting parameter. Autograd runs the post-accumulate hooks of the
tensor and then the post-hooks of its AccumulateGrad node, each in the order of registration.
Reports are therefore post-hooks of nodes, and every pass starts by moving them behind newer
ones. In a recording pass the hook is a post-accumulate hook, and a piece is gathered when a
gradient of another one comes.

Hooks reference the reducer weakly: a parameter may outlive it and must not keep it alive.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import BuiltinFunctionType, FrameType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn import Parameter

from ._dtensor import original_parameter

_MAX_VISITED = 10_000
"""How many more values to visit after the first object that is not a container: it can reach
anything, a tokenizer's vocabulary for example. A pass whose outputs were not found begins at its
first parameter."""
_ATOMS = (str, bytes, int, float, complex, type(None), type, ModuleType)
_OPAQUE = (FunctionType, BuiltinFunctionType, nn.Module)
"""What is no output, although it may lead to tensors."""


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, mappings, dataclasses and plain objects."""
    seen: dict[int, Any] = {}  # kept alive: what is made on the fly must not share an identity
    pending = [value]
    left: float = math.inf
    while pending and left > 0:
        left -= 1
        item = pending.pop()
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, _ATOMS) or id(item) in seen:
            continue
        else:
            seen[id(item)] = item
            parts = _parts(item)
            if parts is None:
                left = min(left, _MAX_VISITED)
                parts = _attributes(item)
            pending.extend(reversed(parts))


def _parts(item: Any) -> list[Any] | None:
    """List what a container holds; None of what is not one."""
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset, deque)):
        return [*item, *vars(item).values()] if hasattr(item, "__dict__") else list(item)
    if dataclasses.is_dataclass(item):
        return [getattr(item, field.name, None) for field in dataclasses.fields(item)]
    if is_remote_reference(item):
        return [item.local_value()] if item.is_owner() else []
    return None


def _attributes(item: Any) -> list[Any]:
    """List the values of an object's attributes, without running code of its class."""
    if isinstance(item, _OPAQUE):
        return []
    try:
        found = list(object.__getattribute__(item, "__dict__").values())
    except AttributeError:
        found = []
    for kind in type(item).__mro__:
        if "__slots__" not in vars(kind):
            continue
        for slot in vars(kind).values():
            if isinstance(slot, MemberDescriptorType):
                try:
                    found.append(slot.__get__(item))
                except AttributeError:  # not set
                    continue
    return found


def is_remote_reference(item: Any) -> bool:
    """Tell whether something is an ``RRef``, without importing what makes one."""
    return type(item).__module__.startswith("torch.distributed.rpc") and hasattr(item, "is_owner")


def on_backward(value: Any, notice: Callable[[], None]) -> None:
    """Call `notice` when autograd comes to any of the tensors in `value`."""
    nodes = {tensor.grad_fn for tensor in find_tensors(value) if tensor.grad_fn is not None}
    for node in nodes:
        node.register_prehook(lambda _: notice())


class AccumulateGradNodes:
    """The nodes of autograd that fill ``.grad`` of some parameters."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters

    def may_run(self) -> bool:
        """Tell whether the run of autograd that is under way may end in ``.grad`` of ours."""
        if Variable._execution_engine.is_checkpoint_valid():
            # A plain ``backward()``. Where it ends is not known, for checkpoints of the reentrant
            # kind hide parameters; and peers may reach some although this rank reaches none.
            return any(p.requires_grad for p in self._parameters)
        try:
            return any(map(torch._C._will_engine_execute_node, self._all()))
        except RuntimeError:  # what it says where ``autograd.grad`` asks for a leaf
            return False

    def runs(self, i: int) -> bool:
        """Tell whether the run of autograd that has come to a parameter ends in its ``.grad``."""
        try:
            return bool(torch._C._will_engine_execute_node(self._node(i)))
        except RuntimeError:  # as above
            return False

    def _all(self) -> Iterator[Any]:
        """Yield the nodes; most often the first is all it takes."""
        for i, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                yield self._node(i)

    def _node(self, i: int) -> Any:
        return accumulate_grad_node(self._parameters[i])


def accumulate_grad_node(parameter: Parameter) -> Any:
    """Return the node that fills ``.grad`` now; a change of type makes autograd use another."""
    return torch.autograd.graph.get_gradient_edge(original_parameter(parameter)).node


def current_graph_task() -> int | None:
    """Tell the number of the run of autograd that calls us; None outside of one."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


class OuterGraphTask:
    """The outermost of several runs of autograd within each other.

    A checkpoint of the reentrant kind runs autograd in its backward. A pass that is first seen in
    there is part of the outer run, and ends with it. The function is on the stack then, and what it
    passes gradients to is what the outer run comes to next. Where the stack does not tell (threads
    that autograd starts for deep recursion), the inner run is all that is known.
    """

    def __init__(self, next_node: Any, frame: FrameType) -> None:
        self.next_node = next_node
        """A node that runs next in it."""
        self._frame = frame

    @staticmethod
    def find() -> OuterGraphTask | None:
        """Find the run around the one that calls us; None if that is in no other."""
        function, outermost = None, None
        for frame in _stack():
            if frame.f_code is _PYTHON_BACKWARD:
                function, outermost = frame.f_locals["self"], frame
            elif function is not None and frame.f_code is _RUN_BACKWARD:
                outermost = frame
        if function is None or outermost is None:
            return None
        if not Variable._execution_engine.is_checkpoint_valid():
            return None  # it may end in some nodes only, and not come to the next
        following = (node for node, _ in function.next_functions if node is not None)
        node = next(following, None)
        return None if node is None else OuterGraphTask(node, outermost)

    def is_running(self) -> bool | None:
        """Tell whether it has not ended; None if it has, for whatever reason."""
        return True if self._frame in _stack() else None


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


_PYTHON_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__
"""What autograd calls for a function that is written in Python."""
_RUN_BACKWARD = getattr(
    getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None
)
"""What runs autograd, in the thread that asks for it."""


def without_graph() -> AbstractContextManager[object]:
    """Have autograd record nothing in the body; in a plain backward pass it does not anyway."""
    return torch.no_grad() if torch.is_grad_enabled() else _NULL_CONTEXT


_NULL_CONTEXT = nullcontext()


ArrivalCallback = Callable[[int], None]
PassLifetime = list[Callable[[], object]]
"""One function, in a place where it may be replaced: returns None when no pass is under way."""


class AutogradHooks:
    """The hooks on parameters, and what they have seen."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self._nodes = [accumulate_grad_node(parameter) for parameter in parameters]
        """Keeps the ``AccumulateGrad`` nodes and users' hooks on them: parameters do so weakly."""
        self._handles: list[Any] = []
        self._callers: list[_LastArrivalHook] = []
        self._announcing: list[Any] = []
        self._seen: list[int] = []
        self._before: list[Any] = []
        """What puts gradients from before a pass back when more comes; none if there are none."""
        self.is_recording = False

    def learn(self, notice: ArrivalCallback) -> None:
        """Have every arrival written down and told to `notice`, by the parameter's place.

        Users' hooks on the same parameter may be still to run.
        """
        self.remove()
        self.is_recording = True
        told = weakref.WeakMethod(notice)
        for i, parameter in enumerate(self._parameters):
            self._hook(parameter, partial(_report_arrival, told, self._seen, i))

    def announce(self, notice: ArrivalCallback, under_way: PassLifetime) -> None:
        """Call `notice` with a parameter, before it has a gradient, while no pass is under way."""
        if self._announcing:
            return
        told = weakref.WeakMethod(notice)
        for i, parameter in enumerate(self._parameters):
            hook = _make_begin_hook(told, under_way, self._before, i)
            with _hookable(parameter):
                handle = parameter.register_hook(hook)  # type: ignore[no-untyped-call]
            self._announcing.append(handle)

    @property
    def order(self) -> list[int]:
        """List the parameters that came, by their latest arrival."""
        latest = {i: turn for turn, i in enumerate(self._seen)}
        return sorted(latest, key=latest.__getitem__)

    def follow(self, pieces: Iterable[Sequence[int]], notice: ArrivalCallback) -> None:
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
                    _LastArrivalHook(
                        self._find_node(last), counts[last], partial(_report_ready, told, number)
                    )
                )

    def restore_previous(self, notice: ArrivalCallback) -> None:
        """Call `notice` with a parameter before its gradient is accumulated, in this pass only."""
        self._before.append(weakref.WeakMethod(notice))

    def restart(self) -> None:
        """Forget what was seen: a new pass begins."""
        self._seen.clear()
        for caller in self._callers:
            caller.run_last()
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
        self.is_recording = False

    def _find_node(self, i: int) -> Any:
        if self._parameters[i].requires_grad:  # autograd makes another when the type changes
            self._nodes[i] = accumulate_grad_node(self._parameters[i])
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


class _LastArrivalHook:
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

    def run_last(self) -> None:
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


def _make_begin_hook(
    told: Any, under_way: PassLifetime, before: list[Any], i: int
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


def _report_arrival(told: Any, seen: list[int], i: int, _: Parameter) -> None:
    notice = told()
    if notice is not None:
        notice(i)
        seen.append(i)


def _report_ready(told: Any, number: int) -> None:
    notice = told()
    if notice is not None:
        notice(number)
