"""What tests of training import sooner or later."""

import importlib

import pytest


@pytest.fixture(scope="session", autouse=True)
def optimizers():
    """Import what optimizers import, before the garbage collector is told to leave it alone."""
    importlib.import_module("torch._dynamo")
