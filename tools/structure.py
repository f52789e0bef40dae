"""Measure the structure of the package: files, lines, small modules, repeated names, mixin bases.

python tools/structure.py                 # of this tree
python tools/structure.py before-restructure HEAD    # of two commits, side by side
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PREFIX = "src/phalanx/"


def read_tree(commit: str | None) -> dict[str, str]:
    """Return the source of every module, of a commit or of the working tree."""
    if commit is None:
        return {
            path.relative_to(ROOT).as_posix(): path.read_text()
            for path in (ROOT / PREFIX).rglob("*.py")
        }

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    names = git("ls-tree", "-r", "--name-only", commit, PREFIX).split("\n")
    return {name: git("show", f"{commit}:{name}") for name in names if name.endswith(".py")}


def imported_modules(path: str, tree: ast.AST) -> set[str]:
    """Return dotted names, relative to the package, of everything that a module imports."""
    package = list(PurePosixPath(path.removeprefix(PREFIX)).parent.parts)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            stem = [*base, *(node.module.split(".") if node.module else [])]
            found.add(".".join(stem))
            found |= {".".join([*stem, alias.name]) for alias in node.names}
    return found


def measure(sources: dict[str, str]) -> dict[str, object]:
    trees = {path: ast.parse(text) for path, text in sources.items()}
    importers: dict[str, set[str]] = defaultdict(set)
    classes: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        for name in imported_modules(path, tree):
            importers[name].add(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(path)
    modules = [path for path in sources if PurePosixPath(path).name != "__init__.py"]
    small = []
    for path in modules:
        dotted = path.removeprefix(PREFIX).removesuffix(".py").replace("/", ".")
        if sources[path].count("\n") < 100 and len(importers[dotted]) == 1:
            small.append(dotted)
    stems = Counter(PurePosixPath(path).stem for path in modules)
    return {
        "files": len(sources),
        "lines": sum(text.count("\n") for text in sources.values()),
        "modules under 100 lines with one importer": small,
        "repeated file names": sorted(name for name, count in stems.items() if count > 1),
        "repeated class names": sorted(name for name, paths in classes.items() if len(paths) > 1),
        "NotImplementedError": sum(text.count("NotImplementedError") for text in sources.values()),
    }


def main() -> None:
    commits: list[str | None] = [*sys.argv[1:]] or [None]
    for commit in commits:
        print(f"== {commit or 'working tree'}")
        for name, value in measure(read_tree(commit)).items():
            if isinstance(value, list):
                print(f"{name}: {len(value)}" + (f" ({', '.join(value)})" if value else ""))
            else:
                print(f"{name}: {value}")


if __name__ == "__main__":
    main()
