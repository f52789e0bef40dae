"""Find what installed packages do with torch's DDP and device mesh, and compare with a table.

    python tools/upstream_uses.py torch accelerate lightning transformers
    python tools/upstream_uses.py --write torch

The table, tests/upstream_uses.txt, has a line for every function that touches one of the classes:

    torch.distributed.pipelining.stage:_PipelineStageBase.forward_maybe_with_nosync DDP isinstance no_sync

The scan reads source and imports nothing of the packages. It follows names, not types: a variable
is taken for a mesh or a wrapped module if it is annotated as one, is made by its constructor, is
tested with `isinstance`, has a usual name (`mesh`, `device_mesh`, `ddp`), or is asked for an
attribute that hardly anything else has. So a line may contain attributes of something else; the
test that reads the table says of each attribute what it is.
Exit status 1 means that a package has a use that is not in the table, or lacks one that is.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TABLE = Path(__file__).parents[1] / "tests" / "upstream_uses.txt"
CLASSES = {"DistributedDataParallel": "DDP", "DDP": "DDP", "DeviceMesh": "DeviceMesh"}
MAKERS = {"init_device_mesh": "DeviceMesh", "_get_device_mesh": "DeviceMesh"}
USUAL_NAMES = {
    "DDP": re.compile(r"_?ddp(_(model|module|inst|weakref|wrapped))?|(model|module)_ddp"),
    "DeviceMesh": re.compile(r"_?((\w+_)?(device_)?(sub)?mesh|(sub)?mesh_\d)"),
    "Reducer": re.compile(r"_?reducer"),
}
TELLING_NAMES = {
    "DDP": {
        "_get_active_ddp_module", "_get_ddp_logging_data", "_set_static_graph", "join_hook", "no_sync",
        "register_comm_hook", "require_backward_grad_sync", "require_forward_param_sync",
        "will_sync_module_buffers", "_set_params_and_buffers_to_ignore_for_model", "_ddp_sink_clone",
        "bucket_bytes_cap", "parameters_to_ignore",
    },
    "DeviceMesh": {
        "mesh_dim_names", "_get_root_mesh", "_flatten_mapping", "_dim_group_names", "_rank_map",
        "_flatten_rank_map", "_coordinate_on_dim", "_pg_registry", "_stable_hash", "get_all_groups",
        "_is_current_rank_part_of_mesh", "_sym_get_coordinate", "_get_all_submeshes",
    },
    "Reducer": {"prepare_for_backward", "prepare_for_forward", "_rebuild_buckets", "_delay_all_reduce"},
}  # fmt: skip
"""Attributes that hardly anything else has, whatever the variable is called."""
NOT_MESHES = {"prev_mesh", "full_mesh", "remapped_mesh"}
MENTIONS = (b"DDP", b"ddp", b"DistributedDataParallel", b"mesh", b"Mesh", b"no_sync", b"_grad_sync")
OWN_MODULES = {"torch.nn.parallel.distributed", "torch.distributed.device_mesh"}
SKIPPED = ("torch.testing.", "torch._vendor.", "torch.utils.benchmark.")
PROBES = {"getattr", "hasattr", "setattr", "delattr"}
Uses = dict[tuple[str, str], set[str]]  # (module:function, class) -> attributes


def module_files(package: str) -> Iterator[tuple[str, Path]]:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed in {sys.prefix}")
    for root in spec.submodule_search_locations:
        for path in sorted(Path(root).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            yield ".".join((package, *parts)), path


def scan(package: str) -> Uses:
    """Return every use of the classes in an installed package."""
    uses: Uses = defaultdict(set)
    for module, path in module_files(package):
        if module in OWN_MODULES or module.startswith(SKIPPED):
            continue
        text = path.read_bytes()
        if any(mention in text for mention in MENTIONS):
            ModuleScan(module, uses).visit(ast.parse(text))
    return dict(uses)


def class_in(node: ast.AST | None) -> str | None:
    """Return the class that an annotation or the second argument of isinstance names."""
    for each in ast.walk(node) if node is not None else ():
        if isinstance(each, ast.Name | ast.Attribute):
            name = each.id if isinstance(each, ast.Name) else each.attr
            if name in CLASSES:
                return CLASSES[name]
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            for name in re.findall(r"\w+", each.value):
                if name in CLASSES:
                    return CLASSES[name]
    return None


class ModuleScan(ast.NodeVisitor):
    """Collects the uses in one module, function by function."""

    def __init__(self, module: str, uses: Uses) -> None:
        self._module = module
        self._uses = uses
        self._names: list[str] = []
        self._known: list[dict[str, str]] = [{}]  # by expression, in the functions around
        self._tuples: dict[str, str] = {}

    def visit_ClassDef(self, node: ast.ClassDef) -> None:  # noqa: N802
        bases = [class_in(base) for base in node.bases]
        for kind in filter(None, bases):
            self._add(kind, "subclass")
        self._names.append(node.name)
        kinds = [kind for kind in bases if kind]
        self._known.append({"self": kinds[0], "cls": kinds[0]} if kinds else {})
        self.generic_visit(node)
        self._known.pop()
        self._names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:  # noqa: N802
        self._names.append(node.name)
        known: dict[str, str] = {}
        arguments = node.args
        for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            kind = class_in(each.annotation)
            if kind:
                known[each.arg] = kind
            elif each.annotation is not None and "Tensor" in ast.unparse(each.annotation):
                known[each.arg] = ""
        self._known.append(known)
        for each in ast.walk(node):
            self._learn(each)
        self.generic_visit(node)
        self._known.pop()
        self._names.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def _learn(self, node: ast.AST) -> None:
        known = self._known[-1]
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, kind = _text(node.targets[0]), self._made_by(node.value)
            if kind:
                known[target] = kind
            elif isinstance(node.value, ast.Tuple) and class_in(node.value):
                self._tuples[target] = class_in(node.value) or ""  # of classes, for isinstance
        elif isinstance(node, ast.AnnAssign) and class_in(node.annotation):
            known[_text(node.target)] = class_in(node.annotation) or ""
        elif (
            isinstance(node, ast.Call) and _name(node.func) == "isinstance" and len(node.args) == 2
        ):
            kind = self._class_in(node.args[1])
            if kind:
                known[_text(node.args[0])] = kind

    def _class_in(self, node: ast.AST) -> str | None:
        return class_in(node) or self._tuples.get(_text(node))

    def _made_by(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Call):
            name = _name(node.func)
            return CLASSES.get(name) or MAKERS.get(name)
        return None

    def _kind(self, node: ast.AST) -> str | None:
        """Return the class of the object that an expression probably is."""
        text = _text(node)
        for known in reversed(self._known) if text else ():
            if text in known:
                return known[text] or None
        if isinstance(node, ast.Call):
            name = _name(node.func)
            if name in CLASSES or name in MAKERS:
                return self._made_by(node)
            return self._kind(node.func) if name.endswith("weakref") else None
        if isinstance(node, ast.Subscript):
            return "DeviceMesh" if self._kind(node.value) == "DeviceMesh" else None
        if isinstance(node, ast.Name):
            if node.id in CLASSES:
                return CLASSES[node.id]
            return _usual(node.id)
        if isinstance(node, ast.Attribute):
            if node.attr in CLASSES:
                return CLASSES[node.attr]
            kind, owner = _usual(node.attr), self._kind(node.value)
            if kind == "Reducer":
                return kind if owner == "DDP" else None
            # The ranks of a mesh are a tensor.
            return None if kind == owner == "DeviceMesh" and node.attr == "mesh" else kind
        return None

    def visit_Attribute(self, node: ast.Attribute) -> None:  # noqa: N802
        kind = self._kind(node.value) or _telling(node.attr)
        if kind:
            self._add(kind, node.attr)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:  # noqa: N802
        if self._kind(node.value) == "DeviceMesh" and not _is_annotation(node):
            self._add("DeviceMesh", "__getitem__")
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:  # noqa: N802
        for item in node.items:
            kind = self._kind(item.context_expr)
            if kind == "DeviceMesh":
                self._add(kind, "__enter__")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        name = _name(node.func)
        if name in ("isinstance", "issubclass") and len(node.args) == 2:
            kind = self._class_in(node.args[1])
            if kind:
                self._add(kind, name)
        elif name in PROBES and len(node.args) >= 2 and isinstance(node.args[1], ast.Constant):
            kind = self._kind(node.args[0]) or _telling(str(node.args[1].value))
            if kind:
                self._add(kind, str(node.args[1].value))
        elif name in CLASSES:
            self._add(CLASSES[name], "__init__")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:  # noqa: N802
        # type(x) is DDP, and x.__class__ in (DDP, ...)
        if any(isinstance(op, ast.Is | ast.IsNot | ast.Eq | ast.NotEq | ast.In) for op in node.ops):
            sides = [node.left, *node.comparators]
            is_type = any(
                (isinstance(side, ast.Call) and _name(side.func) == "type")
                or (isinstance(side, ast.Attribute) and side.attr == "__class__")
                for side in sides
            )
            for side in sides if is_type else ():
                kind = class_in(side)
                if kind:
                    self._add(kind, "exact_type")
        self.generic_visit(node)

    def _add(self, kind: str, attribute: str) -> None:
        place = ".".join(self._names) or "<module>"
        self._uses[f"{self._module}:{place}", kind].add(attribute)


def _name(function: ast.AST) -> str:
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def _text(node: ast.AST) -> str:
    """Return a dotted name as text, and nothing for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _text(node.value)
        return owner and f"{owner}.{node.attr}"
    return ""


def _telling(attribute: str) -> str | None:
    return next((kind for kind, names in TELLING_NAMES.items() if attribute in names), None)


def _usual(name: str) -> str | None:
    if name in NOT_MESHES:
        return None
    return next((kind for kind, names in USUAL_NAMES.items() if names.fullmatch(name)), None)


def _is_annotation(node: ast.Subscript) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in CLASSES


def read_table(path: Path = TABLE) -> Uses:
    uses: Uses = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            place, kind, *attributes = line.split(" ")
            uses[place, kind] = set(attributes)
    return uses


def of_package(uses: Uses, package: str) -> Uses:
    return {key: found for key, found in uses.items() if re.match(rf"{package}[.:]", key[0])}


def differences(package: str) -> list[str]:
    """Describe the uses that are in the package or in the table only."""
    found, listed = scan(package), of_package(read_table(), package)
    lines = []
    for key in sorted(found.keys() | listed.keys()):
        place, kind = key
        new, gone = (
            a.get(key, set()) - b.get(key, set()) for a, b in ((found, listed), (listed, found))
        )
        lines += [f"{place} {kind} {' '.join(sorted(new))}: not in the table"] if new else []
        lines += [f"{place} {kind} {' '.join(sorted(gone))}: no longer there"] if gone else []
    return lines


def write_table(packages: list[str]) -> None:
    """Replace the lines of some packages."""
    uses = read_table() if TABLE.exists() else {}
    for package in packages:
        for key in of_package(uses, package):
            del uses[key]
        uses |= scan(package)
    lines = [" ".join((*key, *sorted(found))) for key, found in sorted(uses.items())]
    heading = (
        "# Written by tools/upstream_uses.py; tests/test_upstream_uses.py checks every attribute."
    )
    TABLE.write_text("\n".join((heading, *lines, "")), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the table, compare nothing")
    parser.add_argument("packages", nargs="+")
    arguments = parser.parse_args()
    if arguments.write:
        write_table(arguments.packages)
        return 0
    lines = [line for package in arguments.packages for line in differences(package)]
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
