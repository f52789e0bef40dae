"""Timings of the last steps. Raw numbers are always recorded; the rest is built on request.

`StepStats` are for users. `logging_data` has the keys and units of torch's DDP, for programs that
read those: text or integers, times in nanoseconds.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from ._buckets import Bucket

if TYPE_CHECKING:
    from ._data_parallel import DistributedDataParallel

HISTORY_STEPS = 128


@dataclass(frozen=True)
class StepStats:
    """The timings of one step, in seconds.

    Ranks end a step at nearly the same moment, so times since the end of a step are comparable
    between ranks.
    """

    forward: float
    """Time in forward since the previous step ended."""
    backward: float
    """From the start of the backward pass until `.grad` is reduced."""
    exposed: float
    """Communication that did not overlap with computation."""
    nbytes: int
    """Bytes of all buckets before any communication hook, including the pass header."""
    forwards: tuple[float, ...]
    """Every rank's time in forward."""
    backwards: tuple[float, ...]
    """Every rank's time in backward, before it waited for others."""
    arrivals: tuple[tuple[float, ...], ...]
    """By rank, then bucket: when it was ready, since the end of the last step."""

    @property
    def slowest(self) -> int:
        """The straggler: the rank whose last bucket was ready last."""
        lasts = [arrivals[-1] for arrivals in self.arrivals]
        return lasts.index(max(lasts))


@dataclass
class PassTiming:
    """The timings of one pass on this rank, in seconds of `time.perf_counter`."""

    since: float  # the end of the last pass: a moment that is nearly the same for all ranks
    forward: float  # the seconds spent in forward since then
    began: float = field(default_factory=time.perf_counter)
    arrivals: list[float] = field(default_factory=list)  # when each bucket was launched
    exposed: float = 0.0
    ended: float = 0.0

    def phases(self) -> dict[str, tuple[float, float]]:
        """Return when each phase began and ended. Communication begins with the first bucket."""
        first, last = (self.since + self.arrivals[i] for i in (0, -1))
        return {
            "forward_compute": (self.began - self.forward, self.began),
            "backward_compute": (self.began, last),
            "backward_comm": (first, self.ended),
            "backward_compute_comm_overlap": (first, last),
        }


class StatsHistory:
    """The timings of the last steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[PassTiming, int, list[list[float]]]] = deque(maxlen=HISTORY_STEPS)

    def add(self, timing: PassTiming, times: list[list[float]], buckets: Sequence[Bucket]) -> None:
        """Keep a step; `times` has a row per rank: forward, backward, arrivals of buckets."""
        self._steps.append((timing, sum(bucket.nbytes for bucket in buckets), times))

    def timings(self) -> list[PassTiming]:
        return [timing for timing, *_ in self._steps]

    def steps(self) -> list[StepStats]:
        return [
            StepStats(
                timing.forward,
                timing.ended - timing.began,
                timing.exposed,
                nbytes,
                forwards=tuple(row[0] for row in times),
                backwards=tuple(row[1] for row in times),
                arrivals=tuple(tuple(row[2:]) for row in times),
            )
            for timing, nbytes, times in self._steps
        ]


CPP_NAMES = {
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
ENV_KEYS = ("master_addr", "master_port", "cuda_visible_devices", "torch_distributed_debug")
GLOO_ENV_KEYS = ("gloo_device_transport", "gloo_socket_ifname")


def logging_data(ddp: DistributedDataParallel) -> dict[str, str | int]:
    """Describe a wrapped module and its last steps in the terms of torch's DDP."""
    reducer, group = ddp.reducer, ddp.process_group
    backend = group.name()
    parameters = reducer.parameters
    dtypes = sorted({CPP_NAMES.get(p.dtype, str(p.dtype)) for p in parameters})
    buckets = [bucket for bucket in reducer.buckets if bucket.members]
    sizes = ", ".join(str(sum(p.nbytes for p in bucket.parameters)) for bucket in buckets)
    data: dict[str, str | int] = {
        "module_name": type(ddp.module).__name__,
        "backend_name": backend,
        "world_size": group.size(),
        "rank": group.rank(),
        "iteration": reducer.reduced_passes,
        "has_error": int(reducer.error is not None),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.nbytes for p in parameters),
        "dtypes": ", ".join(dtypes),
        "device_ids": ", ".join(map(str, ddp.device_ids or ())),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "bucket_sizes": sizes,
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "has_sync_bn": int(bool(ddp._inventory.sync_norms)),
        "static_graph": int(ddp.static_graph),
        "can_set_static_graph": int(reducer._ddp_graph_static()),
        "join_uneven_inputs": int(reducer.may_lack_data),
    }
    names = ENV_KEYS + GLOO_ENV_KEYS * (backend == "gloo")
    data.update({name: os.environ.get(name.upper(), "N/A") for name in names})
    if reducer.error is not None:
        data["error"] = reducer.error
    if reducer.hook is not None:
        data["comm_hook"] = reducer.hook.name
    timings = reducer.stats.timings()
    if timings:
        data["num_buckets_reduced"] = len(buckets)
        data["has_rebuilt_buckets"] = int(reducer.has_rebuilt_buckets)
        data["rebuilt_bucket_sizes"] = sizes
        data["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(map(str, bucket.members)) for bucket in buckets
        )
        data["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, reducer.order))
        data["unused_parameter_size"] = sum(parameters[i].nbytes for i in reducer.unused)
        data |= _times(timings)
    return data


def _times(timings: Sequence[PassTiming]) -> dict[str, int]:
    """Return how long each phase of the last step took, when it was, and the means of all steps."""
    epoch = time.time() - time.perf_counter()
    phases = [timing.phases() for timing in timings]
    data: dict[str, int] = {}
    for name, (began, ended) in phases[-1].items():
        lasted = [step[name][1] - step[name][0] for step in phases]
        data[f"{name}_time"] = round(1e9 * lasted[-1])
        data[f"avg_{name}_time"] = round(1e9 * fmean(lasted))
        if name != "backward_compute_comm_overlap":
            data[f"{name}_time_start"] = round(1e9 * (epoch + began))
        if name.startswith("backward") and name != "backward_compute_comm_overlap":
            data[f"{name}_time_end"] = round(1e9 * (epoch + ended))
    return data
