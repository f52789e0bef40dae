"""The state of a run: what it is, in checkpoints and for workers that join.

`RunState` packs what a run needs to continue, and unpacks it again. A checkpoint and a transfer
differ only in what no checkpoint has: values of gradients, all buffers, what is frozen, and the
place among sections and requests.

A transfer has the form of a checkpoint: a tree of JSON and tensors. Rank 0 sends the tree as text
and the tensors in pieces of bounded size, through ordinary memory, so that a transfer needs no
shared memory of its own. Nothing is pickled, and nothing is on disk.

The fingerprint is what the bits of results depend on, besides code and data. It is saved with every
checkpoint and compared on a restore, so that a run that cannot continue to the same bits says so,
and why.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import _faultpoints as faultpoints
from ..checkpoint import CheckpointManager, Replicated
from ..checkpoint._state_encoding import decode, encode
from ..checkpoint._state_tree import Node, TensorLeaf, leaves, parse_state, rebuild_state
from ..checkpoint._tensor_file import DTYPES
from ..ddp import ShardedOptimizer
from ..ddp._communicator import Communicator, chunk_tensors
from ..errors import MissingKeys, UnsupportedState
from ._buffers import BufferAverage, is_expanded
from ._loader import ElasticLoader
from ._randomness import derive_seed, seed_generators

PIECE_BYTES = 32 << 20
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Fingerprint = dict[str, Any]


class RunPosition(NamedTuple):
    """Where a run is between two loops."""

    steps: int  # that it has made
    loops: int  # of the last of them


class StatePlace(NamedTuple):
    """Where in the script a state was taken."""

    steps: int  # that the run had made
    total: int | None
    """The argument of the call of `run.steps` that was active, or had ended; None if tensors have
    changed since it ended."""
    at_end: str
    """The values of the state when that call ended (`RunState.describe_values`); tensors are those
    of the state. Empty if it had not ended."""


class Modes(NamedTuple):
    """What a script sets on a module, and no state dict has."""

    trainable: list[str]  # parameters
    training: list[str]  # modules in training mode


class LoadableOptimizer:
    """An optimizer that is loaded in place, with the bits that its state was saved with.

    A script may hold on to a parameter group, to set its learning rate, so the groups stay the same
    dicts; torch's `load_state_dict` replaces them. It also casts floating-point state to the dtype
    of its parameter, which changes, say, the products that NAdam keeps in float32. That cast is
    wanted only for parameters that now have another dtype: if not `exact`.
    """

    def __init__(self, optimizer: Optimizer, *, exact: bool) -> None:
        self._optimizer = optimizer
        self._exact = exact

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        groups = [*self._optimizer.param_groups]
        self._optimizer.load_state_dict(state)
        loaded = self._optimizer.param_groups
        for i, own in enumerate(groups if len(groups) == len(loaded) else ()):
            values = dict(loaded[i])  # it may be the same dict
            own.clear()
            own.update(values)
            loaded[i] = own
        if state.get("state"):
            # It has made steps, in another process: torch's schedulers would warn if it had not.
            vars(self._optimizer)["_opt_called"] = True
        if self._exact:
            self._restore_dtypes(state)

    def _restore_dtypes(self, state: dict[str, Any]) -> None:
        # An optimizer may have a format of its own.
        numbers = [i for group in state.get("param_groups", ()) for i in group["params"]]
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        saved = state.get("state", {}) if len(numbers) == len(parameters) else {}
        for i, parameter in zip(numbers, parameters, strict=False):
            own = self._optimizer.state[parameter] if i in saved else {}
            for key, value in saved.get(i, {}).items():
                dtype = getattr(own.get(key), "dtype", None)
                if isinstance(value, Tensor) and dtype not in (None, value.dtype):
                    own[key] = value.to(own[key].device, copy=True)


class RunState:
    """What a run continues with: the user's objects, and where it is.

    All ranks have the same, between two loops.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        others: dict[str, Any],
        loaders: Sequence[ElasticLoader],
        *,
        named: Sequence[tuple[str, nn.Parameter]],
        buffers: BufferAverage,
        seed: int,
        micro_batches: int,
    ) -> None:
        self._model, self._optimizers, self._others = model, optimizers, others
        self._loaders = loaders  # grows while the run makes them
        self._named = named
        self._buffers = buffers
        self._seed, self._micro_batches = seed, micro_batches
        self._device = named[0][1].device
        self.position = RunPosition(0, 0)
        """At the end of the last step that is over."""
        self.active_total: int | None = None
        """The argument of the `run.steps` call that the script is in; None between calls."""
        self._call_end: _CallEnd | None = None
        """Of the last call, until the next one begins."""
        self._modes: Modes | None = None
        """Those of a member that has sent its state."""
        self.place: StatePlace | None = None
        """Where the state was taken that this process started from, until the script gets there."""
        self.section = 0
        """How many loops and evaluations this worker has taken part in, or was told of."""
        self.agreed_requests = 0
        """How many requests to join or leave all members know of."""
        self._has_saved_dtypes = True
        """Whether the parameters have the dtypes that the state to load was saved with."""
        self.evaluations: dict[str, Any] = {}
        """The results of evaluations outside of steps, for processes that run the script later. By
        the argument of the last call of `run.steps` and their number since then."""
        self.has_live_evaluations = False
        """Whether a member has sent them, which does not wait for this worker to repeat them."""
        self._last_total = 0
        self._evaluation_counts: Counter[int] = Counter()  # by argument of the last call
        self.loader_states: list[dict[str, Any]] = []
        """States of loaders that were restored and may not be made yet."""

    # -- checkpoints -------------------------------------------------------------------------

    def objects(self) -> dict[str, Any]:
        """Return the objects to save, for every rank the same."""
        optimizers = {str(i): self._loadable(each) for i, each in enumerate(self._optimizers)}
        return {
            "model": Replicated(self._model),
            "optimizers": Replicated(optimizers),
            "state": Replicated(
                {name: self._loadable(each) for name, each in self._others.items()}
            ),
        }

    def _loadable(self, each: Any) -> Any:
        if not isinstance(each, Optimizer) or isinstance(each, ShardedOptimizer):
            return each
        return LoadableOptimizer(each, exact=self._has_saved_dtypes)

    def _dtypes(self) -> dict[str, str]:
        return {name: str(parameter.dtype) for name, parameter in self._named}

    def to_save(self, now: RunPosition) -> dict[str, Any]:
        """Return what a checkpoint has."""
        loaders = [loader.state_dict() for loader in self._loaders]
        return {
            **self.objects(),
            "buffers": Replicated(dict(self._buffers.changed_unsaved)),
            "elastic": {
                "step": now.steps,
                "phase": now.loops,
                **dict(zip(("total", "at_end"), self._place(), strict=True)),
                "seed": self._seed,
                "micro_batches": self._micro_batches,
                "loaders": loaders + self.loader_states[len(loaders) :],
                "gradients": [n for n, p in self._named if p.grad is not None],
                "parameter_groups": self._parameter_groups(),
                "parameter_dtypes": self._dtypes(),
                "fingerprint": current_fingerprint(self._device),
            },
            "evaluations": Replicated(dict(self.evaluations)),
        }

    def _place(self) -> tuple[int | None, str]:
        """Return the last two fields of the `StatePlace` of a state that is taken now."""
        if self.place is not None:
            return self.place[1:]
        if self.active_total is None and self._call_end is not None:
            end, tensors = self._call_end, self._tensors()
            has_same = _versions(tensors) == end.versions
            return (end.total, end.values) if has_same else (None, "")
        return self.active_total, ""

    def count_evaluation(self) -> str:
        """Count an evaluation outside of steps; return its key in `evaluations`."""
        total = self._last_total
        self._evaluation_counts[total] += 1
        return f"{total}.{self._evaluation_counts[total]}"

    def begin_call(self, total: int) -> None:
        """Note that the script calls `run.steps`."""
        self.active_total, self._call_end = total, None

    def end_call(self, *, may_save: bool) -> None:
        """Note that a call of `run.steps` has ended.

        `may_save`: whether the script may save before the next one.
        """
        total, self.active_total = self.active_total, None
        self._last_total = self._last_total if total is None else total
        if total is None or not may_save or self._is_sharded:
            return
        with suppress(UnsupportedState):  # the save raises it
            tensors = self._tensors()
            self._call_end = _CallEnd(total, self.describe_values(), tensors, _versions(tensors))

    @property
    def _is_sharded(self) -> bool:
        """Whether the state dict of an optimizer is a collective."""
        return any(isinstance(each, ShardedOptimizer) for each in self._optimizers)

    def initial_values(self) -> str:
        """Return those before a state is loaded; "" if they cannot be stored."""
        with suppress(UnsupportedState):
            return "" if self._is_sharded else self.describe_values()
        return ""

    def describe_values(self) -> str:
        """Return what is not in tensors, of the optimizers and the registered state."""
        objects = self.objects()
        return json.dumps(_describe(parse_state({n: objects[n] for n in ("optimizers", "state")})))

    def _tensors(self) -> dict[str, Tensor]:
        tree = parse_state({**self.objects(), "buffers": dict(self._buffers.named())})
        return {each.name: each.data for each in leaves(tree)}

    def _parameter_groups(self) -> list[list[list[str]]]:
        """Return the names of the parameters of each group of each optimizer."""
        names = {id(parameter): name for name, parameter in self._named}
        return [
            [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]

    def prepare_load(self, saved: dict[str, Any]) -> None:
        """Add the groups that a script had added to its optimizers when a state was taken."""
        self._has_saved_dtypes = saved.get("parameter_dtypes") == self._dtypes()
        parameters = dict(self._named)
        for optimizer, groups in zip(
            self._optimizers, saved.get("parameter_groups", ()), strict=False
        ):
            has_names = "param_names" in optimizer.param_groups[0]
            for names in groups[len(optimizer.param_groups) :]:
                added = [(n, parameters[n]) if has_names else parameters[n] for n in names]
                optimizer.add_param_group({"params": added})

    def load_checkpoint(
        self, checkpoints: CheckpointManager, step: int, report: Callable[[list[str]], None]
    ) -> None:
        """Continue from a checkpoint; `report` may raise for what differs from the saved run."""
        saved = checkpoints.load(step, {"elastic": None})["elastic"]
        report(self.differences(saved))  # first, so that nothing has changed if it raises
        self.prepare_load(saved)
        with self._buffers.loadable():
            loaded = checkpoints.load(step, {**self.objects(), "buffers": None})
        with suppress(MissingKeys):  # of an earlier version
            loaded |= checkpoints.load(step, {"evaluations": None})
        self.resume(saved, loaded)

    def values(self, now: RunPosition) -> dict[str, Any]:
        """Return what a checkpoint has, without what tells ranks how to save it."""
        return {name: getattr(each, "value", each) for name, each in self.to_save(now).items()}

    def differences(self, saved: dict[str, Any]) -> list[str]:
        """List why a run that continues from a state would not have the bits of that run."""
        names = {"micro_batches": self._micro_batches, "seed": self._seed}
        found = [
            f"{name}: {saved[name]} saved, {value} now"
            for name, value in names.items()
            if saved[name] != value
        ]
        fingerprint = current_fingerprint(self._device)
        found += fingerprint_differences(saved["fingerprint"], fingerprint)
        for loader, state in zip(self._loaders, saved["loaders"], strict=False):
            found += loader._differences(state)
        return found

    def resume(self, saved: dict[str, Any], loaded: dict[str, Any]) -> None:
        """Continue where a state was taken, after the objects in it were loaded."""
        self._restore_tensors(loaded["buffers"], saved["gradients"])
        self.evaluations = dict(loaded.get("evaluations", {}))
        self.position = RunPosition(saved["step"], saved["phase"])
        # Checkpoints of earlier versions do not have it.
        has_place = "at_end" in saved
        place = StatePlace(saved["step"], saved["total"], saved["at_end"]) if has_place else None
        self.place, self._call_end, self._modes = place, None, None
        self.has_live_evaluations = False
        self.loader_states = list(saved["loaders"])
        for loader in self._loaders:  # those that were made later start again
            loader.load_state_dict({"loop": 0})
        for loader, state in zip(self._loaders, self.loader_states, strict=False):
            loader.load_state_dict(state)
        seed_generators(derive_seed(self._seed, "after", *self.position))

    def _restore_tensors(self, buffers: dict[str, Tensor], gradients: list[str]) -> None:
        """Set what is in no state dict: temporary buffers, and which gradients there are."""
        own = dict(self._buffers.named())
        with torch.no_grad():
            for name, value in buffers.items():
                own[name].data.copy_(value)
                self._buffers.changed_unsaved[name] = own[name]
            for name, parameter in self._named:
                # Zeros, and not None, for users of zero_grad(set_to_none=False).
                parameter.grad = torch.zeros_like(parameter) if name in gradients else None

    # -- transfers ---------------------------------------------------------------------------

    def to_transfer(self, now: RunPosition) -> dict[str, Any]:
        """Return what a worker that joins needs; it calls `load_transferred`."""
        return {
            **self.values(now),
            "all_buffers": dict(self._buffers.named()),
            "all_gradients": {n: p.grad for n, p in self._named if p.grad is not None},
            # Before it gets to its place, a script has not set them as it had there.
            "modes": None if self.place is not None else [*self._current_modes()],
            "section": self.section,
            "agreed_requests": self.agreed_requests,
        }

    def check_transferable(self, now: RunPosition) -> None:
        """Raise if a worker that joins could not get the state."""
        try:
            _describe(parse_state(self.to_transfer(now)))
        except UnsupportedState as error:
            error.add_note("A worker that joins an elastic run gets this state from a member.")
            raise

    def _current_modes(self) -> Modes:
        modules = self._model.named_modules()
        return Modes(
            [name for name, parameter in self._named if parameter.requires_grad],
            [name for name, module in modules if module.training],
        )

    def _set_modes(self, modes: Modes) -> None:
        for name, parameter in self._named:
            if parameter.requires_grad != (name in modes.trainable):
                parameter.requires_grad_(name in modes.trainable)
        for name, module in self._model.named_modules():
            module.training = name in modes.training

    def load_transferred(self, state: dict[str, Any]) -> None:
        self._load_objects(state)
        self.section, self.agreed_requests = state["section"], state["agreed_requests"]
        self.resume(state["elastic"], state)
        self._load_gradients(state["all_gradients"])
        if state["modes"] is not None:  # from a member that is at its place
            self.has_live_evaluations = True
            self._modes = Modes(*state["modes"])
            self._set_modes(self._modes)

    def _load_objects(self, state: dict[str, Any]) -> None:
        """Load the user's objects, and all buffers."""
        with self._buffers.loadable():
            self._model.load_state_dict(state["model"])
        self.prepare_load(state["elastic"])
        for i, optimizer in enumerate(self._optimizers):
            self._loadable(optimizer).load_state_dict(state["optimizers"][str(i)])
        for name, each in self._others.items():
            self._loadable(each).load_state_dict(state["state"][name])
        own = dict(self._buffers.named())
        with torch.no_grad():
            for name, value in state["all_buffers"].items():
                if not is_expanded(own[name]):
                    own[name].data.copy_(value)

    def _load_gradients(self, gradients: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._named:
                if parameter.grad is not None:
                    parameter.grad.copy_(gradients[name])

    # -- what a script does again ------------------------------------------------------------

    def copy_objects(self) -> dict[str, Any]:
        """Return copies of the user's objects, for `put_back`."""
        return _clone(self.to_transfer(self.position))

    def put_back(self, state: dict[str, Any], values: str = "") -> None:
        """Undo changes of the user's objects; the position in the run stays.

        `values`: those to load instead of the state's, as `describe_values` returns them.
        """
        # Some objects keep what they load, or change it.
        state = _clone(state)
        if values and (found := _with_tensors(json.loads(values), state)) is not None:
            state |= found
            for i, optimizer in enumerate(self._optimizers):
                _trim_groups(optimizer, state["optimizers"][str(i)])
            state["elastic"]["parameter_groups"] = self._parameter_groups()
        self._load_objects(state)
        self._restore_tensors(state["buffers"], state["elastic"]["gradients"])
        self._load_gradients(state["all_gradients"])
        if self._modes is not None:
            self._set_modes(self._modes)

    def seed_after_step(self) -> None:
        """Seed what draws between this step and the next one."""
        seed_generators(derive_seed(self._seed, "after", *self.position))


class ScriptReplay:
    """What a script does again before it gets to where its state was taken.

    A script may call `run.steps` several times, say once per epoch, and in between evaluate, save
    or step a scheduler. A process that starts from a checkpoint, or joins a run, executes all of
    that from the top. Calls of `steps` that the run has passed yield nothing. The first of them
    copies the state and goes back to initial values: what schedulers and counters do next, they did
    before. Evaluations return what they did. Where the state was taken it is put back:

    - taken in a call of `steps`: at the beginning of that call, or of one with more steps;
    - saved after a call had ended: when the script makes that call, with the values of its end, so
      that the script goes on from there as it did then;
    - or if tensors had changed since that call: where the script saves after it, or else in the
      next call that has steps to make.

    A script that skips what is done, by starting with a later epoch, passes no call: the state
    stays as it was saved.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._initial = ""
        self._copy: dict[str, Any] | None = None
        self._passed = 0  # the argument of the last call of steps()

    def begin(self) -> None:
        """Note that a state is about to be loaded."""
        self._copy, self._passed = None, 0
        if self._state.place is None:
            self._initial = self._state.initial_values()

    @property
    def has_begun(self) -> bool:
        """Whether the script is doing what the run has done."""
        return self._copy is not None

    def enter(self, total: int) -> None:
        """Begin a call of `steps`."""
        place = self._state.place
        if place is None:
            return
        if total > place.steps:
            self._arrive()
            return
        self._passed = total
        if place.total is not None and total >= place.total:
            self._arrive(place.at_end)
        elif self._copy is None:
            self._copy = self._state.copy_objects()
            self._put_back("" if self._is_at_last_call(place) else self._initial)
        elif self._is_at_last_call(place):
            self._put_back()
        self._state.seed_after_step()

    def is_past_save(self) -> bool:
        """Begin a save; return whether the run has passed it, so that it must not be made."""
        place = self._state.place
        if place is None or self._copy is None:
            return False
        if self._is_at_last_call(place):
            self._arrive()
            return False
        return True

    def _is_at_last_call(self, place: StatePlace) -> bool:
        """Whether the state was saved between this call of `steps` and the next one."""
        return place.total is None and self._passed >= place.steps

    def _arrive(self, at_end: str = "") -> None:
        if self._copy is None and at_end:
            self._copy = self._state.copy_objects()
        self._put_back(at_end)
        self._state.place = self._copy = None

    def _put_back(self, values: str = "") -> None:
        if self._copy is not None:
            self._state.put_back(self._copy, values)


def send_state(state: Any, comm: Communicator) -> None:
    """Send a state from rank 0 to all others, which call `receive_state`."""
    tree = parse_state(state)
    tensors: dict[str, Tensor] = {}
    for leaf in leaves(tree):
        tensors.setdefault(leaf.name, leaf.data)
    described = {
        "tree": _describe(tree),
        "tensors": [
            [name, DTYPE_NAMES[each.dtype], list(each.shape)] for name, each in tensors.items()
        ],
    }
    comm.exchange(json.dumps(described))
    _broadcast([each.detach().contiguous() for each in tensors.values()], comm)


def _describe(tree: Node) -> Any:
    """Return a tree as JSON that has the names, dtypes and shapes of its tensors."""
    return encode(tree, lambda leaf: [leaf.name, DTYPE_NAMES[leaf.dtype], list(leaf.shape)])


class _CallEnd(NamedTuple):
    """The state at the end of a call of `run.steps`."""

    total: int  # its argument
    values: str
    """As in `StatePlace`."""
    tensors: dict[str, Tensor]
    """To keep their addresses from being used again."""
    versions: list[tuple[str, int, int]]


def _versions(tensors: dict[str, Tensor]) -> list[tuple[str, int, int]]:
    """Return what changes if one of some tensors is replaced or written to."""
    return [(name, each.data_ptr(), each._version) for name, each in tensors.items()]


def _trim_groups(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Drop the parameter groups that a state does not have."""
    count = len(state.get("param_groups", optimizer.param_groups))
    for group in optimizer.param_groups[count:]:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    del optimizer.param_groups[count:]


def _clone(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with tensors of its own, and without objects that have a state."""
    plain = rebuild_state(parse_state(state), lambda leaf: leaf.data.detach().clone())
    assert isinstance(plain, dict)
    return plain


def _with_tensors(described: Any, state: dict[str, Any]) -> Any:
    """Return a described part of a state with that state's tensors; None if it lacks one."""
    tensors = {leaf.name: leaf for leaf in leaves(parse_state(state))}
    try:
        tree = decode(described, tensor=lambda body, _: tensors[body[0]], rank=None)
    except KeyError:
        return None
    return rebuild_state(tree, lambda leaf: leaf.data)


def receive_state(comm: Communicator) -> Any:
    """Return the state that rank 0 sends; its tensors are on the CPU or the device of the group."""
    described = json.loads(comm.exchange("")[0])
    tensors = {
        name: torch.empty(shape, dtype=DTYPES[dtype], device=comm.device)
        for name, dtype, shape in described["tensors"]
    }
    _broadcast(list(tensors.values()), comm)

    def leaf_of(body: Any, _: object) -> Node:
        name, dtype, shape = body
        return TensorLeaf(name, DTYPES[dtype], tuple(shape), comm.device.type, tensors[name])

    tree = decode(described["tree"], tensor=leaf_of, rank=None)
    return rebuild_state(tree, lambda leaf: leaf.data)


def _broadcast(tensors: list[Tensor], comm: Communicator) -> None:
    """Give all ranks the values of rank 0, in pieces."""
    moved = [each.to(comm.device) for each in tensors if each.numel()]
    for chunk in chunk_tensors(moved, PIECE_BYTES):
        flats = [each.view(-1) for each in chunk]
        flat = torch.cat(flats) if len(flats) > 1 else flats[0].clone()
        step = max(1, PIECE_BYTES // flat.itemsize)
        for start in range(0, flat.numel(), step):
            comm.broadcast(flat[start : start + step].view(torch.uint8)).wait()
            if faultpoints.armed:
                faultpoints.reach("elastic:transfer")
        if comm.rank != 0:
            parts = torch.split(flat, [each.numel() for each in flats])
            for target, part in zip(flats, parts, strict=True):
                target.copy_(part)


# -- the fingerprint -------------------------------------------------------------------------------


def current_fingerprint(device: torch.device) -> Fingerprint:
    """Return the fingerprint of this process."""
    items: Fingerprint = {
        "torch": str(torch.__version__),
        "phalanx": version("phalanx"),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "oneDNN": bool(torch.backends.mkldnn.enabled),
        "MKL": bool(torch._C.has_mkl),
        "CPU": _cpu_model(),
        "library variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("MKL_", "ONEDNN_", "DNNL_", "ATEN_CPU_"))
            and not name.endswith("_NUM_THREADS")  # the run sets that
        },
        "attention kernels": [
            torch._C._get_flash_sdp_enabled(),
            torch._C._get_mem_efficient_sdp_enabled(),
            torch._C._get_math_sdp_enabled(),
        ],
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        # There is no getter: half of the least normal number is zero if it is flushed.
        "flush denormals": not bool(torch.tensor(torch.finfo(torch.float32).tiny) / 2),
    }
    with suppress(PackageNotFoundError):
        items["numpy"] = version("numpy")
    if device.type == "cuda":
        items["device"] = torch.cuda.get_device_name(device)
        items["CUDA"] = torch.version.cuda
        items["cuDNN"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        items["cuDNN benchmark"] = torch.backends.cudnn.benchmark
        items["TF32"] = [
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
        ]
    return items


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def fingerprint_differences(saved: Fingerprint, current: Fingerprint) -> list[str]:
    """List the items that differ, each with both values; an older phalanx may have fewer."""
    return [
        f"{name}: {saved[name]} saved, {value} now"
        for name, value in current.items()
        if name in saved and saved[name] != value
    ]
