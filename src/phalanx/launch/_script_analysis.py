"""What drop-in would replace in a script, found in its source alone.

Reads the imports and calls of one file. It does not run the script, follow its imports, or know
values that are computed; what depends on those is decided at run time.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .._drop_in import DDP, Unreplaceable, replace_arguments
from ..errors import InvalidArgument

_DISTRIBUTED = ("torch.distributed", "torch.distributed.distributed_c10d")
_DDP_NAMES = (f"torch.nn.parallel.{DDP}", f"torch.nn.parallel.distributed.{DDP}")
_FRAMEWORKS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers")
_LAUNCHED = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR"), "")


@dataclass(frozen=True)
class ScriptUse:
    """A place where a script uses what drop-in may replace."""

    line: int
    text: str
    replaced_by: str = ""  # empty if it is kept or decided at run time
    reason: str = ""  # why it is kept; empty if it is decided at run time


def analyze_script(path: Path) -> list[ScriptUse]:
    """Return the places that concern drop-in, in the order of their lines."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise InvalidArgument(f"{path} is not a Python script: {error}") from error
    names = _imported_names(tree)
    uses = set(_framework_uses(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            uses |= {use for use in [_call(node, names)] if use is not None}
        elif isinstance(node, (ast.Name, ast.Attribute)) and _full_name(node, names) in _DDP_NAMES:
            uses.add(ScriptUse(node.lineno, ast.unparse(node), "phalanx.DDP"))
    return sorted(uses, key=lambda use: (use.line, use.text))


def _imported_names(tree: ast.AST) -> dict[str, str]:
    """Return by name in the script what it is called in the module that it comes from."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                top = each.name.partition(".")[0]
                names[each.asname or top] = each.name if each.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                names[each.asname or each.name] = f"{node.module}.{each.name}"
    return names


def _framework_uses(tree: ast.AST) -> Iterator[ScriptUse]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported = [node.module or ""]
        else:
            continue
        for top in {each.partition(".")[0] for each in imported} & {*_FRAMEWORKS}:
            text = f"import of {top}, which makes its own group and DDP"
            yield ScriptUse(node.lineno, text, "auto and phalanx.DDP")


def _full_name(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        base = _full_name(node.value, names)
        return f"{base}.{node.attr}" if base else ""
    return names.get(node.id, "") if isinstance(node, ast.Name) else ""


def _call(node: ast.Call, names: dict[str, str]) -> ScriptUse | None:
    module, _, function = _full_name(node.func, names).rpartition(".")
    if module == "torch.distributed.device_mesh" or module in _DISTRIBUTED:
        if function == "init_process_group":
            return _init_process_group(node, names)
        if function == "new_group":
            return _new_group(node, names)
        if function == "init_device_mesh":
            return ScriptUse(node.lineno, "init_device_mesh without a default group", "auto")
    return None


def _init_process_group(node: ast.Call, names: dict[str, str]) -> ScriptUse:
    positional = ("backend", "init_method", "timeout", "world_size", "rank", "store", "group_name",
                  "pg_options", "device_id")  # fmt: skip
    given = dict(zip(positional, node.args, strict=False))
    given |= {each.arg: each.value for each in node.keywords if each.arg}
    backend, is_known = _value(given.pop("backend", None), names)
    text = f"init_process_group, backend {backend or 'omitted'}"
    unpacks = any(isinstance(each, ast.Starred) for each in node.args)
    if not is_known or unpacks or any(each.arg is None for each in node.keywords):
        return ScriptUse(node.lineno, "init_process_group with computed arguments")
    # An argument that is an expression counts as given.
    arguments = {name: each for name, each in given.items() if _value(each, names) != (None, True)}
    try:
        replaced = replace_arguments({**arguments, "backend": backend}, _LAUNCHED)
    except Unreplaceable as reason:
        return ScriptUse(node.lineno, text, reason=str(reason))
    return ScriptUse(node.lineno, text, replaced)


def _new_group(node: ast.Call, names: dict[str, str]) -> ScriptUse:
    given = node.args[2] if len(node.args) > 2 else None  # after ranks and timeout
    given = next((each.value for each in node.keywords if each.arg == "backend"), given)
    backend, is_known = _value(given, names)
    if not is_known:
        return ScriptUse(node.lineno, "new_group with a computed backend")
    if backend is None:
        return ScriptUse(node.lineno, "new_group, backend of the default group", "auto")
    reason = "a group beside the default group keeps the backend that is asked for"
    return ScriptUse(node.lineno, f"new_group, backend {backend}", reason=reason)


def _value(node: ast.expr | None, names: dict[str, str]) -> tuple[str | None, bool]:
    """Return the text or None that an argument is, and whether it is known."""
    if node is None:
        return None, True
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str)):
        return node.value, True
    module, _, name = _full_name(node, names).rpartition(".Backend.")
    return (name.lower(), True) if module in _DISTRIBUTED else (None, False)
