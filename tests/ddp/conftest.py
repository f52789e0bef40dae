"""What tests of training import sooner or later."""

import gc
import importlib

import pytest


@pytest.fixture(scope="session", autouse=True)
def optimizers():
    """Import what optimizers import, and have the garbage collector leave it alone from then on.

    It is most of the process's objects, and some tests collect garbage on four ranks.
    """
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()
