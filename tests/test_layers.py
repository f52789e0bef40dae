"""The structure of the package: layers, imports of torch, and repeated names."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import phalanx

ROOT = Path(phalanx.__file__).parent
PICTURE = Path(__file__).parents[1] / "docs" / "layers.svg"

LAYERS = [
    {"errors", "_faultpoints", "_signals", "_formatting", "_processes", "_control_client"},
    {"env"},
    {"native"},
    {"groups"},
    {"join", "mesh"},
    {"ddp", "checkpoint"},
    {"elastic"},
    {"_drop_in"},
    {"testing"},
    {"launch"},
    {"__init__", "__main__"},
]
"""From the bottom up; parts of one layer do not import each other."""

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
TORCH_FREE = {
    "errors",
    "env",
    "_faultpoints",
    "_signals",
    "_formatting",
    "_processes",
    "_control_client",
    "_drop_in",
    "launch",
    "__init__",
    "__main__",
}
"""Parts that must not import torch at import time."""

REPEATED_FILES = {"__init__.py": "every package has one"}
REPEATED_CLASSES: dict[str, str] = {}
"""Names that occur in more than one package, each with the reason."""


def modules():
    return sorted(ROOT.rglob("*.py"))


def part_of(path):
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def imports(path, *, everywhere):
    """Yield the absolute names of all imports of a module, or only of those at import time."""
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
    """Yield the statements that run on import, not those in functions or for type checkers."""
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


def upward_imports(path):
    mine = part_of(path)
    # The launcher may use any part in a command, but not at import time.
    for name in imports(path, everywhere=mine != "launch"):
        first, *rest = name.split(".")
        if first != "phalanx" or not rest or name == "phalanx.__version__":
            continue
        theirs = rest[0] if rest[0] in LEVEL else "__init__"
        if theirs != mine and LEVEL[theirs] >= LEVEL[mine]:
            yield name


def torch_imports(path):
    if part_of(path) in TORCH_FREE:
        names = imports(path, everywhere=False)
        yield from (name for name in names if name.split(".")[0] == "torch")


def test_imports_point_down_and_the_launcher_does_not_import_torch():
    unknown = {part_of(path) for path in modules()} - LEVEL.keys()
    assert not unknown, "add these parts to LAYERS"
    offending = {
        str(path.relative_to(ROOT)): found
        for path in modules()
        if (found := [*upward_imports(path), *torch_imports(path)])
    }
    assert offending == {}


def test_the_docstring_and_the_picture_match_the_layers():
    public = [{name for name in names if name[0] != "_"} for names in LAYERS]
    expected = [names for names in reversed(public) if names]
    merged = [*expected[:-2], expected[-2] | expected[-1]]  # errors and env share a line
    rows = re.findall(r"^    (\w+(?:, \w+)*)  ", phalanx.__doc__, flags=re.MULTILINE)
    assert [set(row.split(", ")) for row in rows] == merged
    boxes = re.findall(r'<text class="name" x="\d+" y="(\d+)">([\w, ]+?) ?<', PICTURE.read_text())
    drawn = defaultdict(set)
    for y, names in boxes:
        drawn[int(y)] |= set(names.split(", "))
    assert [drawn[y] for y in sorted(drawn)] == merged


def test_names_do_not_repeat_across_packages_without_a_reason():
    files, classes = defaultdict(set), defaultdict(set)
    for path in modules():
        files[path.name if path.stem == "__init__" else path.name.lstrip("_")].add(part_of(path))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")].add(part_of(path))
    for found, allowed in ((files, REPEATED_FILES), (classes, REPEATED_CLASSES)):
        repeated = {name for name, places in found.items() if len(places) > 1}
        assert repeated <= allowed.keys(), "rename one, or add a reason to the list"
