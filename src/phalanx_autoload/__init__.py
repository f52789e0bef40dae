"""What ``import torch`` loads of phalanx, through the entry point group ``torch.backends``.

torch calls `load` at the end of its own import, in every program, and turns any exception into a
failed ``import torch``. So this module is outside the package, imports only the standard library,
and lets no error out. It registers the backend ``shm``; the package is imported when a group is
created, or at once if ``PHALANX_DROP_IN`` is set. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns it off.

In a worker of an elastic run, torch's rendezvous by environment variables raises what
`phalanx.groups.new_group` raises there.
"""

import os
import sys
from collections.abc import Callable

BACKEND = "shm"
REGISTRY_MODULE = "torch.distributed.distributed_c10d"
RENDEZVOUS_MODULE = "torch.distributed.rendezvous"
SWITCH = "PHALANX_DROP_IN"
ELASTIC = "PHALANX_ELASTIC"


def load() -> None:
    """Register the backend, and install the drop-in if the environment asks for it."""
    try:
        registry = sys.modules.get(REGISTRY_MODULE)
        if registry is not None:  # torch was built with torch.distributed
            register(registry)
        if _is_drop_in():
            from phalanx._drop_in import install

            install()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - must not break `import torch`
        _report(error)


def register(registry: object) -> None:
    """Add the backend to torch's registry; in an elastic worker, also refuse torch's rendezvous."""
    names = registry.Backend  # type: ignore[attr-defined]
    if BACKEND not in names.backend_list:
        names.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu"])
    if ELASTIC in os.environ:
        refuse_rendezvous()


def _make_group(request: object, options: object) -> object:
    from phalanx.groups._factory import make_for_torch

    return make_for_torch(BACKEND, request, options)


def refuse_rendezvous() -> None:
    """Let ``init_process_group`` raise if it would use the variables of an elastic worker."""
    rendezvous = sys.modules.get(RENDEZVOUS_MODULE)
    if rendezvous is None:  # torch was built without torch.distributed
        return
    handlers = rendezvous._rendezvous_handlers
    if not isinstance(handlers["env"], _ElasticRendezvous):
        handlers["env"] = _ElasticRendezvous(handlers["env"])


class _ElasticRendezvous:
    """torch's handler of ``env://`` in a worker of an elastic run."""

    def __init__(self, original: Callable[..., object]) -> None:
        self._original = original

    def __call__(self, *args: object, **kwargs: object) -> object:
        from phalanx.env import refuse_in_elastic_run

        refuse_in_elastic_run("init_process_group()")
        return self._original(*args, **kwargs)  # the script has removed the variable


def _is_drop_in() -> bool:
    return os.environ.get(SWITCH, "").strip() not in ("", "0")


def _report(error: BaseException) -> None:
    if not _is_drop_in() or os.environ.get("RANK") != "0" or sys.stderr is None:
        return
    try:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"phalanx drop-in: nothing replaced ({reason})", file=sys.stderr, flush=True)
    except Exception:  # noqa: BLE001 - stderr is closed, or full
        pass
