"""What tests of training import sooner or later, and what they leave behind."""

import importlib

import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP


@pytest.fixture(scope="session", autouse=True)
def optimizers():
    """Import torch._dynamo, as optimizers do, before the garbage collector is frozen."""
    importlib.import_module("torch._dynamo")


@pytest.fixture(autouse=True)
def no_active_module():
    """Forget the module that torch takes for running: modules on threads restore each other's.

    The compiler would divide the graphs of this test by its buckets.
    """
    TorchDDP._active_ddp_module = None
