"""Functions sent by reference: a module, a name in it, and how to import it elsewhere."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ..errors import InvalidArgument

__all__ = ["Reference"]


@dataclass(frozen=True)
class Reference:
    """Where to find a function, in this process or in another."""

    module: str
    qualname: str
    file: str | None
    rewritten: bool
    """Whether pytest has rewritten the module's assertions, so that they explain themselves."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Reference:
        """Refer to a function that can be reached by name from its module."""
        module = sys.modules.get(function.__module__)
        for name in (function.__qualname__, f"{function.__qualname__}.body"):
            if module is not None and _find(module, name) is function:
                file = getattr(module, "__file__", None)
                rewritten = "@pytest_ar" in vars(module)
                return cls(function.__module__, name, file, rewritten)
        raise InvalidArgument(
            f"ranks find their body by name, but {function.__module__}.{function.__qualname__} "
            "is not there; make it a function of the module, and pass what it needs as args"
        )

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname.removesuffix('.body')}"

    def load(self) -> Callable[..., Any]:
        """Find the function, importing its module if need be."""
        found = _find(self._module(), self.qualname)
        assert callable(found), f"{self} is not there any more"
        return found

    def _module(self) -> ModuleType:
        known = sys.modules.get(self.module)
        if known is not None and getattr(known, "__file__", None) == self.file:
            return known
        if self.file is None:
            return importlib.import_module(self.module)
        return self._from_file(self.file)

    def _from_file(self, file: str) -> ModuleType:
        # By file and not by search: with some of pytest's import modes no search would find it.
        # The packages above it, if they are any, must be there first, for its relative imports.
        package, _, _ = self.module.rpartition(".")
        if package:
            with suppress(ModuleNotFoundError):
                importlib.import_module(package)
        # A script's functions are wanted, not what it does when it is run.
        name = "__ranks_main__" if self.module == "__main__" else self.module
        loader = (_Rewriting if self.rewritten else SourceFileLoader)(name, file)
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[self.module]
            raise
        return module


def _find(module: ModuleType, qualname: str) -> object:
    try:
        return reduce(getattr, qualname.split("."), module)
    except AttributeError:
        return None


class _Rewriting(SourceFileLoader):
    """Load a test module the way that pytest does, with assertions that show their values."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the rewritten source, past the cache of the plain one."""
        from _pytest.assertion.rewrite import rewrite_asserts

        path = self.get_filename(fullname)
        source = Path(path).read_bytes()
        tree = ast.parse(source, path)
        rewrite_asserts(tree, source, path)
        code: CodeType = compile(tree, path, "exec", dont_inherit=True)
        return code
