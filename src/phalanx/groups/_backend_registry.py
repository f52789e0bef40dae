"""The registered backends, by name: ours, and those that other packages registered with torch."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch._C._distributed_c10d import Store

from ..errors import InvalidArgument
from ._engine import Engine, Traits
from .backends import auto, fake, gloo, local, nccl, plugin, shm


class ProcessGroupFactory(Protocol):
    """Creates the engine of one rank, after the rendezvous."""

    def __call__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        device: torch.device,
        **kwargs: object,
    ) -> Engine:
        """Return a torch process group or backend, or an object with the same methods."""


@dataclass(frozen=True)
class Backend:
    """A registered backend."""

    name: str
    factory: ProcessGroupFactory
    traits: Traits


_backends: dict[str, Backend] = {}


def register_backend(name: str, func: ProcessGroupFactory, *, traits: Traits | None = None) -> None:
    """Register a backend, so that `new_group` accepts its name."""
    if name in _backends:
        raise InvalidArgument(f"backend {name!r} is already registered; choose another name")
    _backends[name] = Backend(name, func, traits or Traits())


def is_registered(name: str) -> bool:
    return name in _backends or plugin.is_plugin(name)


def is_plugin(name: str) -> bool:
    """Whether only torch knows the backend."""
    return name not in _backends and plugin.is_plugin(name)


def find_backend(name: str) -> Backend:
    try:
        return _backends[name]
    except (KeyError, TypeError):
        if plugin.is_plugin(name):
            return Backend(name, plugin.factory(name), plugin.traits(name))
        known = ", ".join(sorted(_backends))
        raise InvalidArgument(
            f"unknown backend {name!r}. Use one of {known}, or add it with register_backend"
        ) from None


register_backend("auto", auto.make, traits=auto.TRAITS)
register_backend("gloo", gloo.make, traits=gloo.TRAITS)
register_backend("nccl", nccl.make, traits=nccl.TRAITS)
register_backend("local", local.make, traits=local.TRAITS)
register_backend("fake", fake.make, traits=fake.TRAITS)
register_backend("shm", shm.make, traits=shm.TRAITS)
