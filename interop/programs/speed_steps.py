"""Steps of training, a few at a time, when `interop.speed` says so: only one job runs at a time."""

import argparse
import json
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.models import MODELS, step_of

WIDTH = 1024
MODELS = {
    "MLP, 8 layers": (
        lambda: torch.nn.Sequential(
            *(part for _ in range(8) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()))
        ),
        lambda: torch.randn(32, WIDTH),
    ),
    **MODELS,
}


def wrap_as_torch_does(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module in torch's DDP."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(module)


def wrap_as_edited(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module in phalanx's."""
    from phalanx import DDP

    return DDP(module)


def main() -> None:
    """Obey until the other side closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("job")
    parser.add_argument("--edited", action="store_true")
    options = parser.parse_args()
    if options.edited:
        import phalanx  # noqa: F401 - an edited script imports it
    dist.init_process_group("shm" if options.edited else "gloo")
    wrap = wrap_as_edited if options.edited else wrap_as_torch_does

    link = socket.socket(socket.AF_UNIX)
    link.connect(options.address)
    with link, link.makefile("rw") as stream:

        def tell(**fields: Any) -> None:
            stream.write(json.dumps(fields) + "\n")
            stream.flush()

        tell(job=options.job, models=list(MODELS))
        step = None
        for line in stream:
            order = json.loads(line)
            if "model" in order:
                torch.manual_seed(0)
                make, batch = MODELS[order["model"]]
                wrapped = wrap(make())
                step = step_of(wrapped, batch())
                tell(ddp=type(wrapped).__module__.partition(".")[0])
            else:
                assert step is not None
                begin = time.perf_counter()
                for _ in range(order["steps"]):
                    step()
                tell(seconds=(time.perf_counter() - begin) / order["steps"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
