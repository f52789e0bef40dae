"""The peak memory of this process, sampled."""

from __future__ import annotations

import threading
from pathlib import Path

__all__ = ["MemorySampler"]

INTERVAL = 0.002


class MemorySampler:
    """Samples the proportional share of this process on a thread, from when it was made."""

    def __init__(self) -> None:
        self._before = _proportional_share()
        self._most = self._before
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    @property
    def peak(self) -> int:
        """The most bytes so far, less what there was before."""
        return self._most - self._before

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(INTERVAL):
            self._most = max(self._most, _proportional_share())


def _proportional_share() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10
