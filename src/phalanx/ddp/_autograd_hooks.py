"""Hooks on autograd: when a backward pass begins, and when gradients are ready.

`on_backward` puts a hook on the module's outputs. `AutogradHooks` puts hooks on the parameters:

- In a recording pass every parameter has a hook, and the order of arrival is written down.
- In later passes only the parameter that arrived last in each bucket piece reports. If the graph
  changes, a report comes too early or never; both are harmless (see `_backward_pass`).
- Every parameter also has a hook that runs before its gradient is accumulated. A loss need not
  depend on the outputs that were found, so a pass can begin at any parameter.

A report takes gradients away, so it must come after all of users' hooks, which may change `.grad`.
Autograd runs the post-accumulate hooks of the tensor and then the post-hooks of its AccumulateGrad
node, each in the order of registration. Reports are therefore post-hooks of nodes, and every pass
starts by moving them behind newer ones.

Hooks reference the reducer weakly: a parameter may outlive it and must not keep it alive.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from types import BuiltinFunctionType, FrameType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn import Parameter

from ._dtensor import original_parameter

_MAX_VISITED = 10_000
"""How many values to visit after the first object that is not a container: it can reach anything,
a tokenizer's vocabulary for example. A pass whose outputs were not found begins at its first
parameter."""
_ATOMS = (str, bytes, int, float, complex, type(None), type, ModuleType)
_OPAQUE = (FunctionType, BuiltinFunctionType, nn.Module)
"""Never part of an output, although they may refer to tensors."""


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, mappings, dataclasses and plain objects."""
    seen: dict[int, Any] = {}  # keeps temporary objects alive, so that no two have the same id
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
                parts = [] if isinstance(item, _OPAQUE) else _attributes(item)
            pending.extend(reversed(parts))


def _parts(item: Any) -> list[Any] | None:
    """List the items of a container; None for anything else."""
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
    """List the values of attributes without running code of the class."""
    found: list[Any] = []
    with suppress(AttributeError):
        found.extend(object.__getattribute__(item, "__dict__").values())
    for kind in type(item).__mro__:
        for slot in vars(kind).values() if "__slots__" in vars(kind) else ():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # not set
                    found.append(slot.__get__(item))
    return found


def is_remote_reference(item: Any) -> bool:
    """Whether an object is an ``RRef``, without importing torch's RPC."""
    return type(item).__module__.startswith("torch.distributed.rpc") and hasattr(item, "is_owner")


def on_backward(value: Any, callback: Callable[[], None]) -> None:
    """Call `callback` when autograd reaches any of the tensors in `value`."""
    nodes = {tensor.grad_fn for tensor in find_tensors(value) if tensor.grad_fn is not None}
    for node in nodes:
        node.register_prehook(lambda _: callback())


def accumulate_grad_node(parameter: Parameter) -> Any:
    """Return the node that accumulates into ``.grad``; a change of dtype replaces it."""
    return torch.autograd.graph.get_gradient_edge(original_parameter(parameter)).node


def find_outer_graph_task() -> tuple[Any, Callable[[], object]] | None:
    """Find the outermost of several nested graph tasks; None if the current one is not nested.

    A reentrant checkpoint runs autograd in its backward. A pass that is first seen there is part of
    the outer graph task and ends with it. The checkpoint function is on the stack, and the nodes
    that it passes gradients to run next in the outer task. On threads that autograd starts for deep
    recursion the stack ends early, and only the inner task is known.

    Return a node that runs next in the outer task, and the `PassLifetime.holder` of that task: a
    frame that is on the stack while it runs.
    """
    function: Any = None
    outermost: Any = None
    for frame in _stack():
        if frame.f_code is _PYTHON_BACKWARD:
            function, outermost = frame.f_locals["self"], frame
        elif function is not None and frame.f_code is _RUN_BACKWARD:
            outermost = frame
    if function is None or not Variable._execution_engine.is_checkpoint_valid():
        return None  # without a valid checkpoint, the task may not reach the next node
    node = next((node for node, _ in function.next_functions if node is not None), None)
    return None if node is None else (node, lambda: outermost if outermost in _stack() else None)


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


_PYTHON_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__
"""Autograd calls this for a function written in Python."""
_RUN_BACKWARD = getattr(
    getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None
)
"""Runs autograd, on the thread that calls backward()."""


def without_graph() -> AbstractContextManager[object]:
    """Disable gradients in this block."""
    # Free in a plain backward pass, where they are already disabled.
    return torch.no_grad() if torch.is_grad_enabled() else _NULL_CONTEXT


_NULL_CONTEXT = nullcontext()


ArrivalCallback = Callable[[int], None]


class PassLifetime:
    """Whether autograd still runs the pass in flight; it may end by an error."""

    holder: Callable[[], object] = staticmethod(lambda: None)
    """Returns what lives as long as the pass does, or None when it is gone."""


class AutogradHooks:
    """The hooks on parameters, and the arrivals that they have recorded."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self._nodes = [_requiring_grad(p, partial(accumulate_grad_node, p)) for p in parameters]
        """Keeps the nodes and users' hooks on them alive; parameters hold them weakly."""
        self._arrival_handles: list[Any] = []
        self._last_arrival_hooks: list[_LastArrivalHook] = []
        self._begin_handles: list[Any] = []
        self.seen: list[int] = []  # the parameters that arrived in a recording pass
        self._restore: list[Any] = []
        """At most one callback, which puts a previous gradient back before autograd adds to it."""
        self.is_recording = False

    def may_run(self, i: int | None) -> bool:
        """Whether the current graph task may accumulate gradients: of parameter `i`, or of any."""
        parameters = self._parameters if i is None else [self._parameters[i]]
        if i is None and Variable._execution_engine.is_checkpoint_valid():
            # A plain ``backward()``. Reentrant checkpoints hide the parameters that it reaches, and
            # peers may reach some although this rank reaches none.
            return any(p.requires_grad for p in parameters)
        nodes = (accumulate_grad_node(p) for p in parameters if p.requires_grad)
        try:
            return any(map(torch._C._will_engine_execute_node, nodes))
        except RuntimeError:  # ``autograd.grad`` asks for a leaf
            return False

    def record(self, callback: ArrivalCallback) -> None:
        """Call `callback` with the index of every parameter that arrives.

        Users' hooks on the same parameter may not have run yet.
        """
        self.remove()
        self.is_recording = True
        arrived = _weakly(callback)
        for i, parameter in enumerate(self._parameters):
            register = parameter.register_post_accumulate_grad_hook
            self._arrival_handles.append(
                _requiring_grad(parameter, partial(register, partial(arrived, i)))
            )

    def detect_begin(self, callback: ArrivalCallback, lifetime: PassLifetime) -> None:
        """Call `callback` with a parameter before its gradient is accumulated outside a pass."""
        if self._begin_handles:
            return
        begin = _weakly(callback)
        for i, parameter in enumerate(self._parameters):
            hook = _make_begin_hook(begin, lifetime, self._restore, i)
            self._begin_handles.append(
                _requiring_grad(parameter, partial(parameter.register_hook, hook))
            )

    @property
    def order(self) -> list[int]:
        """The parameters that arrived, by their last arrival."""
        return [*dict.fromkeys(reversed(self.seen))][::-1]

    def report_pieces(self, pieces: Iterable[Sequence[int]], callback: ArrivalCallback) -> None:
        """Call `callback` with the index of a piece when the last of its parameters arrived."""
        turn = {i: position for position, i in enumerate(self.order)}
        counts = Counter(self.seen)
        self.remove()
        ready = _weakly(callback)
        for index, members in enumerate(pieces):
            last = max((i for i in members if i in turn), key=turn.__getitem__, default=None)
            if last is None:
                continue
            if self._parameters[last].requires_grad:  # a change of dtype replaces the node
                self._nodes[last] = accumulate_grad_node(self._parameters[last])
            hook = _LastArrivalHook(self._nodes[last], counts[last], partial(ready, index))
            self._last_arrival_hooks.append(hook)

    def restore_previous(self, callback: ArrivalCallback) -> None:
        """Call `callback` with a parameter before its gradient is accumulated, in this pass."""
        self._restore.append(weakref.WeakMethod(callback))

    def restart(self) -> None:
        self.seen.clear()
        for hook in self._last_arrival_hooks:
            hook.run_last()
        self.rearm()

    def rearm(self) -> None:
        """Count from the start again, since the next pass may begin unnoticed."""
        self._restore.clear()
        for hook in self._last_arrival_hooks:
            hook.left = hook.times

    def close(self) -> None:
        self.remove()
        for handle in self._begin_handles:
            handle.remove()

    def remove(self) -> None:
        """Remove the hooks that record arrivals or report pieces."""
        for handle in self._arrival_handles:
            handle.remove()
        for hook in self._last_arrival_hooks:
            hook.handle.remove()
        self._arrival_handles, self._last_arrival_hooks = [], []
        self.is_recording = False


class _LastArrivalHook:
    """A post-hook that reports when its node has run as often as in the recorded pass."""

    def __init__(self, node: Any, times: int, ready: Callable[[], None]) -> None:
        self.times = self.left = times
        self._ready = ready
        self.handle = node.register_hook(self)
        self._id: int = self.handle.id

    def __call__(self, *_: object) -> None:
        self.left -= 1
        # If users' hooks were registered behind this one during the pass, do not report: they have
        # yet to run. The piece is gathered at the end of the pass.
        if self.left == 0 and next(reversed(self.handle.hooks_dict_ref())) == self._id:
            self._ready()

    def run_last(self) -> None:
        hooks: OrderedDict[int, object] = self.handle.hooks_dict_ref()
        if next(reversed(hooks)) != self._id:
            hooks[self._id] = hooks.pop(self._id)


def _weakly(callback: ArrivalCallback) -> Callable[..., None]:
    """Return a function that calls a method, or does nothing if its object is gone."""
    weak = weakref.WeakMethod(callback)

    def call(index: int, *_: object) -> None:
        method = weak()
        if method is not None:
            method(index)

    return call


def _make_begin_hook(
    begin: ArrivalCallback, lifetime: PassLifetime, restore: list[Any], i: int
) -> Callable[[Tensor], None]:
    def begin_hook(_: Tensor) -> None:
        if lifetime.holder() is None:
            begin(i)
        if restore:
            put_back = restore[0]()
            if put_back is not None:
                put_back(i)

    return begin_hook


def _requiring_grad(parameter: Parameter, call: Callable[[], Any]) -> Any:
    """Make a call for which a parameter must not be frozen; it may be unfrozen at any time."""
    required = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return call()
    finally:
        parameter.requires_grad_(required)
