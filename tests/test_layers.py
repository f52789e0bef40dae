"""The layers: imports point down only."""

import ast
from pathlib import Path

import pytest

import phalanx

ROOT = Path(phalanx.__file__).parent

LAYERS = [
    {"errors", "_faultpoints", "_signals"},
    {"env"},
    {"native"},
    {"groups"},
    {"join", "mesh"},
    {"ddp", "checkpoint"},
    {"launch"},
    {"testing"},
    {"_backend_registration"},
    {"__init__", "__main__"},
]
"""From the bottom up; what shares a line knows nothing of its neighbours."""

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FREE_OF_TORCH = {
    "errors",
    "env",
    "_faultpoints",
    "_signals",
    "launch",
    "_backend_registration",
    "__init__",
    "__main__",
}
"""What may not import torch when it is imported itself."""


def modules():
    return sorted(ROOT.rglob("*.py"))


def part_of(path):
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def imports(path, *, everywhere):
    """Yield the absolute names of what a module imports, or only what it does at import time."""
    package = ["phalanx", *path.relative_to(ROOT).parent.parts]
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if everywhere else top_level(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = [*base, *([node.module] if node.module else [])]
            yield from (".".join([*stem, alias.name]) for alias in node.names)


def top_level(tree):
    """Walk the statements that run on import, not those inside functions or for type checkers."""
    pending = list(tree.body)
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            pending += [
                child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)
            ]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_imports_upwards(path):
    mine = part_of(path)
    assert mine in LEVEL, f"{mine} belongs to no layer: add it to LAYERS"
    # The doctor may look at anything, but not when it is imported.
    for name in imports(path, everywhere=mine != "launch"):
        parts = name.split(".")
        if parts[0] != "phalanx" or len(parts) == 1:
            continue
        theirs = parts[1] if parts[1] in LEVEL else "__init__"
        allowed = theirs == mine or LEVEL[theirs] < LEVEL[mine] or name == "phalanx.__version__"
        assert allowed, f"{path.relative_to(ROOT)} imports {name}, which lies above or beside it"


@pytest.mark.parametrize(
    "path",
    [path for path in modules() if part_of(path) in FREE_OF_TORCH],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_launcher_and_the_bottom_import_no_torch(path):
    offending = [name for name in imports(path, everywhere=False) if name.split(".")[0] == "torch"]
    assert not offending, f"{path.relative_to(ROOT)} imports {offending} at import"
