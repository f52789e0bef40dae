"""Drop-in: programs written for torch run on phalanx unchanged.

`install` runs at the end of ``import torch`` if ``PHALANX_DROP_IN=1`` (see `phalanx_autoload`), so
before any other module can import names of torch. Three names change:

- ``init_process_group`` replaces the backends ``gloo``, ``mpi`` and none by ``auto``;
- ``get_backend`` returns the backend that the program asked for, since programs compare it;
- ``torch.nn.parallel.DistributedDataParallel`` is ours. It is looked up on first use, so that
  ``import torch`` stays cheap. torch's own modules and ours keep torch's class, from which ours
  derives: `isinstance` checks in torch work as before. So do picklers, which find it by name.

``new_group(backend="gloo")`` is unchanged: it makes a Gloo group beside the default group.

On a machine with an accelerator nothing is replaced. All ranks must make the same decision, so it
depends only on the machine, the installation and the arguments. What was replaced, or why nothing
was, is printed once, on rank 0.
"""

from __future__ import annotations

import copyreg
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial, wraps
from importlib import import_module
from opcode import opname
from operator import getitem
from types import FrameType, ModuleType
from typing import Any

from .env import find_accelerator, is_drop_in
from .errors import InvalidArgument

BACKEND = "auto"
REPLACED_BACKENDS = ("gloo", "mpi")
DDP = "DistributedDataParallel"
_REGISTRY = "torch.distributed.distributed_c10d"
_DDP_HOME = "torch.nn.parallel.distributed"
_DDP_MODULES = ("torch.nn.parallel", _DDP_HOME)
_PICKLERS = ("pickle", "torch.serialization")
_UNDEFINED = "undefined"  # torch's name of an omitted backend


class Unreplaceable(Exception):
    """Says why something is not replaced; never reaches the program."""


def replace_backend(backend: str | None) -> str:
    """Return the backend to use instead; raise `Unreplaceable` if there is none.

    Of ``cpu:gloo,cuda:nccl``, only the part for the CPU is replaced.
    """
    name = _UNDEFINED if backend is None else str(backend).lower()
    if name in (_UNDEFINED, *REPLACED_BACKENDS):
        return BACKEND
    replaced = {f"cpu:{each}": f"cpu:{BACKEND}" for each in REPLACED_BACKENDS}
    parts = name.split(",")
    if replaced.keys() & {*parts}:
        return ",".join(replaced.get(part, part) for part in parts)
    raise Unreplaceable(f"backend {name!r} is not gloo, mpi or omitted")


def replace_arguments(given: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> str:
    """Return the backend for a call of ``init_process_group``, or raise `Unreplaceable`."""
    replaced = replace_backend(given.get("backend"))
    if given.get("pg_options") is not None:
        raise Unreplaceable("pg_options is given, which only torch's backends take")
    if given.get("device_id") is not None:
        raise Unreplaceable("device_id is given, which binds the group to a device")
    is_mpi = str(given.get("backend")).lower() == "mpi"
    if is_mpi and not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environ.keys():
        raise Unreplaceable("backend 'mpi' without RANK, WORLD_SIZE and MASTER_ADDR")
    return replaced


def install() -> None:
    """Replace torch's names in this process. torch is imported."""
    c10d = sys.modules.get(_REGISTRY)
    if c10d is None:
        raise Unreplaceable("this build of torch has no torch.distributed")
    try:
        is_drop_in()
    except InvalidArgument as error:
        # Raised where the program can see it: an error here would be swallowed.
        _rebind(c10d, "init_process_group", partial(_fail, error))
        return
    _DropIn(c10d).install()


def _fail(error: Exception, original: Callable[..., Any], *_: Any, **__: Any) -> None:
    del original
    raise error


class _DropIn:
    """The replacements in this process."""

    def __init__(self, c10d: Any) -> None:
        self._c10d = c10d
        self._signature = inspect.signature(c10d.init_process_group)
        self._asked: dict[str, str] = {}
        """By the name of a backend in torch's tables: what the program asked for."""
        self._ddp: type | None = None
        self._ddp_failure = ""
        self._has_reported = False

    def install(self) -> None:
        _rebind(self._c10d, "init_process_group", self._init_process_group)
        _rebind(self._c10d, "get_backend", self._get_backend)
        name = _ReplacedName(DDP, self._find_ddp)
        for module in (sys.modules[each] for each in _DDP_MODULES):
            # A data descriptor of the class precedes the module's own names.
            module.__class__ = type("DropInModule", (type(module),), {DDP: name})
        copyreg.pickle(vars(sys.modules[_DDP_HOME])[DDP], _reduce_kept)

    def _init_process_group(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        try:
            call = self._signature.bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)  # which raises its own error
        asked = call.arguments.get("backend")
        try:
            _require_cpu()
            replaced = replace_arguments(call.arguments)
            self._register_backend()
        except Unreplaceable as reason:
            original(*args, **kwargs)
            self._asked = {}
            self._report(f"backend {asked or 'of the default group'} kept ({reason})")
            return None
        call.arguments["backend"] = replaced
        # Before the call, in which torch reads it.
        previous, self._asked = self._asked, {replaced: asked or _UNDEFINED}
        try:
            original(*call.args, **call.kwargs)
        except BaseException:
            self._asked = previous  # there may be a default group already
            raise
        engine = getattr(self._c10d._get_default_group(), "backend", "unknown")
        self._report(f"backend {asked or '(omitted)'} -> {replaced} ({engine})")
        return None

    def _get_backend(self, original: Callable[..., str], *args: Any, **kwargs: Any) -> str:
        name = original(*args, **kwargs)
        return self._c10d.Backend(self._asked[name]) if name in self._asked else name

    def _register_backend(self) -> None:
        if self._c10d._use_torchcomms_enabled():
            raise Unreplaceable("torchcomms is on, which makes all backends")
        try:
            from .groups._factory import make_for_torch
        except Exception as error:
            raise Unreplaceable(f"phalanx.groups: {_first_line(error)}") from error
        backends = self._c10d.Backend
        if BACKEND not in backends.backend_list:
            make = partial(make_for_torch, BACKEND)
            backends.register_backend(BACKEND, make, extended_api=True, devices=["cpu"])

    def _find_ddp(self) -> type | None:
        """Return our class; None if this process keeps torch's."""
        if self._ddp is None and not self._ddp_failure:
            try:
                _require_cpu()
                from .ddp import DistributedDataParallel

                self._ddp = DistributedDataParallel
            except Unreplaceable as reason:
                self._ddp_failure = str(reason)
            except Exception as error:  # noqa: BLE001 - the program runs as before
                self._ddp_failure = f"phalanx.ddp: {_first_line(error)}"
        return self._ddp

    def _report(self, backend: str) -> None:
        if self._has_reported or self._c10d.get_rank() != 0 or sys.stderr is None:
            return
        self._has_reported = True
        is_ours = self._find_ddp() is not None
        ddp = f"{DDP} -> phalanx.DDP" if is_ours else f"{DDP} kept ({self._ddp_failure})"
        with suppress(OSError, ValueError):  # stderr is closed
            print(f"phalanx drop-in: {backend}; {ddp}", file=sys.stderr, flush=True)


class _ReplacedName:
    """A name of a module that others see replaced; torch's modules and ours do not."""

    def __init__(self, name: str, find: Callable[[], object | None]) -> None:
        self._name = name
        self._find = find
        self._originals: dict[str, object] = {}
        """By module in which the program has assigned or deleted the name: torch's value."""
        self._assigned: set[str] = set()

    def __get__(self, module: ModuleType | None, owner: type) -> object:
        if module is None:
            return self
        found = None
        if module.__name__ not in self._assigned and _sees_replaced(sys._getframe(1)):
            found = self._find()
        try:
            return vars(module)[self._name] if found is None else found
        except KeyError:
            message = f"module {module.__name__!r} has no attribute {self._name!r}"
            raise AttributeError(message) from None

    def __set__(self, module: ModuleType, value: object) -> None:
        original = self._keep_original(module)
        if value is original or value is self._find():
            # The program restores what it replaced for a while, as `mock.patch` does.
            self._assigned.discard(module.__name__)
            value = original
        vars(module)[self._name] = value

    def __delete__(self, module: ModuleType) -> None:
        self._keep_original(module)
        del vars(module)[self._name]

    def _keep_original(self, module: ModuleType) -> object:
        self._assigned.add(module.__name__)
        return self._originals.setdefault(module.__name__, vars(module).get(self._name))


def _sees_replaced(frame: FrameType) -> bool:
    """Return whether the code that reads the name gets ours.

    torch and phalanx do not where they import or read it themselves. A frame of torch that is in a
    call reads for somebody else: the guards of compiled code are in C++ and have no frame, and
    must find the same class whoever calls that code. Nor do picklers, which find torch's class
    by its name.
    """
    # `from package import name` reads the name in importlib first.
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    reader = str(frame.f_globals.get("__name__", ""))
    if reader in _PICKLERS:
        return False
    if reader.partition(".")[0] not in ("torch", "phalanx"):
        return True
    return "CALL" in opname[frame.f_code.co_code[frame.f_lasti]]


class _DeferredCall:
    """Pickles as the result of a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def _reduce_kept(module: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Pickle an instance of torch's class, such as ``torch.load`` returns.

    pickle refers to a class by its name, which is ours here. The module's own names have torch's,
    here and in a process without phalanx.
    """
    names = _DeferredCall(vars, _DeferredCall(import_module, _DDP_HOME))
    return object.__new__, (_DeferredCall(getitem, names, DDP),), module.__getstate__()


def _rebind(c10d: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Wrap a function of torch in every module of torch that has imported it."""
    original = getattr(c10d, name)

    @wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    for module in [each for key, each in sys.modules.items() if key.partition(".")[0] == "torch"]:
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, replaced)


def _require_cpu() -> None:
    accelerator = find_accelerator()
    if accelerator is not None:
        raise Unreplaceable(f"this machine has an accelerator: {accelerator}")


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
