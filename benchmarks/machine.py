"""Where a measurement was made, and how busy it was there."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from phalanx.env import usable_cores

__all__ = ["Machine", "busy_seconds"]


@dataclass(frozen=True)
class Machine:
    """The facts that figures depend on."""

    date: str
    cpu: str
    cores: int
    load: float
    """The load average of the last minute, before the start."""
    system: str
    python: str
    torch: str

    @classmethod
    def here(cls) -> Machine:
        """Describe this machine, as it is now."""
        return cls(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            cpu=_cpu_model(),
            cores=usable_cores(),
            load=round(os.getloadavg()[0], 2),
            system=f"{platform.system()} {platform.release()}",
            python=sys.version.split()[0],
            torch=torch.__version__,
        )


def busy_seconds() -> float | None:
    """Tell how many seconds all cores together have been busy; None where nobody keeps count.

    The load average of a machine that measures is high because it measures. The growth of this,
    less what our own processes used, is what others used meanwhile.
    """
    try:
        fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _waiting, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
