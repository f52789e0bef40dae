"""What a program tells the runner: one line of JSON per case and rank."""

from __future__ import annotations

import hashlib
import json
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

MARK = "INTEROP "


class StepTimer:
    """The times between calls of `step_ended`."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = time.perf_counter()

    def restart(self) -> None:
        """Begin the next step now: what came before is not part of it."""
        self._last = time.perf_counter()

    def step_ended(self) -> None:
        """Record the step that ends now; the next one begins."""
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def digest(module: nn.Module) -> str:
    """Return a checksum of the bits of all parameters and buffers that this rank holds."""
    total = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        total.update(name.encode())
        total.update(local.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def report(
    case: str,
    *,
    loss: Tensor | float,
    module: nn.Module,
    times: StepTimer,
    wrapper: nn.Module | None = None,
    replicated: bool = True,
) -> None:
    """Print what this rank ended with. `wrapper` is the framework's DDP, where it has one."""
    group = dist.distributed_c10d._get_default_group()
    line = {
        "case": case,
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "loss": float(loss).hex(),
        "digest": digest(module),
        "replicated": replicated,
        "engine": getattr(group, "backend", None) or group.name(),
        "group": type(group).__module__.partition(".")[0],
        "ddp": type(wrapper).__module__.partition(".")[0] if wrapper is not None else None,
        "seconds": [round(each, 7) for each in times.seconds],
    }
    os.write(1, f"{MARK}{json.dumps(line)}\n".encode())  # one write: ranks share the pipe
