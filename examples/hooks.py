"""Train the network of digits.py with compressed gradients.

    phalanx run -n 2 examples/hooks.py
    phalanx run -n 2 examples/hooks.py powersgd topk

For each hook, prints the accuracy and the bytes that a rank sends per step.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import digits
import torch
from sklearn.datasets import load_digits

from phalanx import DDP
from phalanx.ddp import hooks
from phalanx.groups import ProcessGroup, new_group

CHOICES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "allreduce": lambda: (None, hooks.allreduce_hook),
    "fp16": lambda: (None, hooks.fp16_compress_hook),
    "bytes": lambda: (None, hooks.quantization_perchannel_hook),
    "powersgd": lambda: (
        hooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10),
        hooks.powerSGD_hook,
    ),
    "topk": lambda: (hooks.TopKState(k=0.05), hooks.topk_hook),
    "randomk": lambda: (hooks.RandomKState(k=0.1), hooks.randomk_hook),
    "powersgd-fp16": lambda: (
        hooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10),
        hooks.chain(hooks.fp16_compress_wrapper, hooks.powerSGD_hook),
    ),
}


def main(names: list[str], epochs: int) -> None:
    """Train once with each hook."""
    group = new_group()
    torch.set_num_threads(1)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    for name in names:
        torch.manual_seed(0)
        test, training = torch.randperm(len(images)).tensor_split([digits.TEST_IMAGES])
        model = DDP(digits.make_network(), process_group=group)
        model.register_comm_hook(*CHOICES[name]())
        digits.train(model, images[training], labels[training], group, epochs=epochs)
        sent = bytes_of_last_step(group, model)
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
        if group.rank() == 0:
            print(f"{name:>14}: accuracy {accuracy:.1%}, {sent:,} bytes a step")
    group.shutdown()


def bytes_of_last_step(group: ProcessGroup, model: DDP) -> int:
    """Take one more step and return the bytes that this rank passed to the group."""
    before = group.records()[-1].sequence
    model(torch.zeros(1, 1, 8, 8)).sum().backward()
    return sum(
        math.prod(record.shape) * getattr(torch, record.dtype).itemsize
        for record in group.records()
        if record.sequence > before and record.dtype
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("hooks", nargs="*", metavar="hook", help=f"of {', '.join(CHOICES)}")
    parser.add_argument("--epochs", type=int, default=8)
    given = parser.parse_args()
    main(given.hooks or list(CHOICES), given.epochs)
