"""Seeds derived from a position in the run, and the generators that are set from them.

Random numbers depend on (seed, step, loop of the step, micro-batch), never on a rank or a worker:
the rank that runs a micro-batch first sets all global generators from `derive_seed`.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(seed: int, *path: int | str) -> int:
    """Return a 64-bit seed for a position in the run, such as ``("data", loop, micro)``.

    Different paths give independent seeds. The result depends on nothing but the arguments: not
    on the process, the Python version or ``PYTHONHASHSEED``.
    """
    # ascii() of integers and strings is unambiguous; repr() would change with Unicode versions.
    # int() and str() make equal values of subclasses (NumPy integers, enums, bool) equal.
    parts = [str(part) if isinstance(part, str) else int(part) for part in (seed, *path)]
    digest = hashlib.blake2b(ascii(parts).encode("ascii"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def seed_generators(value: int) -> None:
    """Set torch's, Python's and NumPy's global generators from a 64-bit value.

    Accelerators are seeded if they are initialised in this process.
    """
    # torch.manual_seed would cost 200 us: for an accelerator that is not initialised it formats
    # the call stack, to seed later. Parameters on a device have initialised it, so there is no
    # "later" here. is_initialized() is false in a forked DataLoader worker.
    torch.default_generator.manual_seed(value)
    for accelerator in (torch.cuda, torch.xpu):
        if accelerator.is_initialized():
            accelerator.manual_seed_all(value)
    random.seed(value)
    if (numpy := sys.modules.get("numpy")) is not None:
        # NumPy takes 32 bits. torch's CPU generator uses the lower 32 only and is a Mersenne
        # Twister too: the upper ones keep the two from being the same sequence.
        numpy.random.seed(value >> 32 & 0xFFFFFFFF)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore torch's CPU generator, Python's and NumPy's on leaving the context.

    Generators of accelerators are not saved: reading their state would wait for the device.
    """
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
