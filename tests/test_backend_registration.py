"""Registration of our backend with torch, before or after torch is imported."""

import importlib
import importlib.util
import os
import sys
import textwrap
from importlib.machinery import PathFinder

import pytest

import phalanx

REGISTRY = """
    import os
    if os.environ.get("REGISTRY_FAILS"):
        raise ImportError("not today")
    class Backend:
        backend_list = {known}
        registered = []
        @classmethod
        def register_backend(cls, name, func, *, extended_api, devices):
            cls.backend_list.append(name)
            cls.registered.append((name, devices))
"""


@pytest.fixture
def write_registry(tmp_path, monkeypatch):
    """Write a module that stands in for torch's, under an unused name."""
    name = f"registry_{os.getpid()}"
    monkeypatch.setattr(phalanx, "_REGISTRY_MODULE", name)
    monkeypatch.syspath_prepend(tmp_path)
    others = [each for each in sys.meta_path if not isinstance(each, phalanx._RegistryFinder)]
    monkeypatch.setattr(sys, "meta_path", others)

    def write(known="[]"):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(REGISTRY).format(known=known))
        importlib.invalidate_caches()
        return name

    yield write
    sys.modules.pop(name, None)


def test_the_import_hook_registers_once_and_removes_itself(write_registry):
    before = list(sys.meta_path)
    name = write_registry()
    phalanx._register_with_torch()
    phalanx._register_with_torch()  # as a second import of the package would
    assert len(sys.meta_path) == len(before) + 1
    module = importlib.import_module(name)
    assert module.Backend.registered == [("shm", ["cpu"])]
    assert sys.meta_path == before
    assert type(module.__loader__).__module__ == "_frozen_importlib_external"
    assert module.__spec__.loader is module.__loader__
    phalanx._register_with_torch()
    assert module.Backend.registered == [("shm", ["cpu"])]


def test_the_import_hook_survives_a_failed_import(write_registry, monkeypatch):
    before = list(sys.meta_path)
    name = write_registry()
    phalanx._register_with_torch()
    monkeypatch.setenv("REGISTRY_FAILS", "yes")
    with pytest.raises(ImportError, match="not today"):
        importlib.import_module(name)
    monkeypatch.delenv("REGISTRY_FAILS")
    assert importlib.import_module(name).Backend.registered
    assert sys.meta_path == before


def test_a_missing_torch_raises_module_not_found_error(write_registry):
    phalanx._register_with_torch()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(phalanx._REGISTRY_MODULE)


def test_an_existing_backend_of_that_name_is_kept(write_registry):
    name = write_registry(known="['shm']")
    phalanx._register_with_torch()
    assert importlib.import_module(name).Backend.registered == []


class SharedLoader:
    """A finder and loader of many modules that takes no attributes, as one written in C."""

    __slots__ = ("found",)

    def find_spec(self, name, path=None, target=None):
        self.found = PathFinder.find_spec(name, path, target)
        return self.found and importlib.util.spec_from_loader(name, self, origin=self.found.origin)

    def create_module(self, _spec):
        return None

    def exec_module(self, module):
        self.found.loader.exec_module(module)


@pytest.mark.parametrize("loader", [SharedLoader, type("Mutable", (SharedLoader,), {})])
def test_a_module_may_be_found_before_and_by_any_loader(write_registry, loader):
    shared = loader()
    sys.meta_path.insert(0, shared)
    before = list(sys.meta_path)
    name = write_registry()
    phalanx._register_with_torch()
    assert sys.meta_path[0].find_spec(name, None, None).name == name  # as an analysis tool does
    module = importlib.import_module(name)
    assert module.Backend.registered == [("shm", ["cpu"])]
    assert module.__loader__ is module.__spec__.loader is shared
    assert sys.meta_path == before
