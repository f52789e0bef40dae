"""The fingerprint of a run: what the bits of its results depend on, besides code and data.

It is saved with every checkpoint and compared on a restore, so that a run that cannot continue to
the same bits says so, and why.
"""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

Fingerprint = dict[str, Any]


def current_fingerprint(device: torch.device) -> Fingerprint:
    """Return the items of this process."""
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
