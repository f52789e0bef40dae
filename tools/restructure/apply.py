"""Apply a restructure map: merge modules and rename what they define, everywhere at once.

    python -m pip install libcst
    python tools/restructure/apply.py --check tools/restructure/groups.toml    # collisions, shadowing, import cycles
    python tools/restructure/apply.py tools/restructure/groups.toml            # rewrite the tree

A map lists new modules with the old ones they consist of, new names of top-level symbols, members (methods and
fields, by name) and test files. It is kept so that a branch that started before can be carried over: apply the same maps, in the
order of the commits, to the branch.
"""

from __future__ import annotations

import argparse
import builtins
import re
import subprocess
import sys
import textwrap
import tomllib
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import libcst as cst
from libcst.metadata import (
    Assignment,
    GlobalScope,
    ImportAssignment,
    MetadataWrapper,
    ParentNodeProvider,
    ScopeProvider,
)

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
OTHERS = ("docs", "tests", "benchmarks", "examples", "native/tests", "tools/mutants")
PACKAGE = "phalanx"


@dataclass
class Map:
    new_module: dict[str, str] = field(default_factory=dict)  # old -> new, absolute
    parts: dict[str, list[str]] = field(default_factory=dict)  # new -> olds
    docs: dict[str, str] = field(default_factory=dict)
    names: dict[tuple[str, str], str] = field(default_factory=dict)  # (old module, name) -> name
    members: dict[str, str] = field(default_factory=dict)
    tests: dict[str, str] = field(default_factory=dict)
    evaluated: set[str] = field(default_factory=set)  # new modules whose annotations are objects

    @classmethod
    def read(cls, paths: list[Path]) -> Map:
        result = cls()
        for path in paths:
            data = tomllib.loads(path.read_text())
            for entry in data.get("module", []):
                new = f"{PACKAGE}.{entry['new']}"
                olds = [f"{PACKAGE}.{old}" for old in entry["parts"]]
                result.parts[new] = olds
                if "doc" in entry:
                    result.docs[new] = entry["doc"].strip()
                if not entry.get("future_annotations", True):
                    result.evaluated.add(new)
                for old in olds:
                    if old in result.new_module:
                        problem(f"{old} is part of two modules")
                    result.new_module[old] = new
            for key, name in data.get("names", {}).items():
                module, _, old = f"{PACKAGE}.{key}".rpartition(".")
                result.names[module, old] = name
            result.members |= data.get("members", {})
            result.tests |= data.get("tests", {})
        return result

    def moved(self, module: str) -> str:
        return self.new_module.get(module, module)


PROBLEMS: list[str] = []


def problem(text: str) -> None:
    if text not in PROBLEMS:
        PROBLEMS.append(text)


def module_name(path: Path) -> str:
    base = SRC if path.is_relative_to(SRC) else ROOT
    parts = list(path.relative_to(base).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@dataclass(eq=False)
class Import:
    """One alias of one import statement."""

    statement: cst.ImportFrom | cst.Import
    base: str  # the module after `from`, absolute; "" for `import x`
    name: str  # "*" too
    asname: str | None
    level: int
    is_module: bool  # whether base.name is a module of ours
    typing_only: bool = False
    at_top: bool = False

    @property
    def local(self) -> str:
        return self.asname or self.name.split(".")[0]


class Source:
    """A parsed file, its imports and what they mean."""

    def __init__(self, path: Path, known: set[str]) -> None:
        self.path = path
        self.name = module_name(path)
        self.is_package = path.name == "__init__.py"
        self.text = path.read_text()
        self.wrapper = MetadataWrapper(cst.parse_module(self.text), unsafe_skip_copy=True)
        self.tree = self.wrapper.module
        self.imports = list(self._find_imports(known))
        self.by_statement: dict[cst.CSTNode, list[Import]] = defaultdict(list)
        for each in self.imports:
            self.by_statement[each.statement].append(each)

    @cached_property
    def scopes(self):  # type: ignore[no-untyped-def]
        return self.wrapper.resolve(ScopeProvider)

    @cached_property
    def parents(self):  # type: ignore[no-untyped-def]
        return self.wrapper.resolve(ParentNodeProvider)

    @cached_property
    def defined(self) -> set[str]:
        lines = [inner for line in self.tree.body for inner in flat(line)]
        return {name for line in lines for name in defined_names(line)}

    def _find_imports(self, known: set[str]):
        top, typing_only = set(), set()
        for line in self.tree.body:
            if isinstance(line, cst.SimpleStatementLine):
                top.update(line.body)
            elif is_typing_block(line):
                for inner in line.body.body:
                    typing_only.update(
                        getattr(inner, "body", ())
                        if isinstance(inner, cst.SimpleStatementLine)
                        else ()
                    )
        for node in all_nodes(self.tree):
            if isinstance(node, cst.Import):
                for alias in node.names:
                    name = dotted(alias.name)
                    asname = alias.asname.name.value if alias.asname else None
                    yield Import(
                        node,
                        "",
                        name,
                        asname,
                        0,
                        name in known,
                        node in typing_only,
                        node in top or node in typing_only,
                    )
            elif isinstance(node, cst.ImportFrom):
                level = len(node.relative)
                base = dotted(node.module) if node.module else ""
                if level:
                    package = self.name.split(".")
                    package = package[: len(package) - level + (1 if self.is_package else 0)]
                    base = ".".join([*package, *([base] if base else [])])
                aliases = (
                    [("*", None)]
                    if isinstance(node.names, cst.ImportStar)
                    else [
                        (a.name.value, a.asname.name.value if a.asname else None)
                        for a in node.names
                    ]
                )
                for name, asname in aliases:
                    yield Import(
                        node,
                        base,
                        name,
                        asname,
                        level,
                        f"{base}.{name}" in known,
                        node in typing_only,
                        node in top or node in typing_only,
                    )

    def accesses(self, each: Import):
        scope = self.scopes.get(each.statement)
        if scope is None:
            return
        for assignment in scope.assignments[each.local]:
            if isinstance(assignment, ImportAssignment) and assignment.node is each.statement:
                yield from assignment.references

    def definitions(self) -> dict[str, list[Assignment]]:
        found: dict[str, list[Assignment]] = defaultdict(list)
        outermost = next(s for s in self.scopes.values() if isinstance(s, GlobalScope))
        for assignment in outermost.assignments:
            if type(assignment) is Assignment:
                found[assignment.name].append(assignment)
        return found


def flat(line: cst.CSTNode):
    yield line
    if isinstance(line, (cst.If, cst.Try, cst.With)):
        for inner in line.body.body:
            yield from flat(inner)
        for handler in getattr(line, "handlers", ()):
            for inner in handler.body.body:
                yield from flat(inner)
        if isinstance(getattr(line, "orelse", None), cst.Else):
            for inner in line.orelse.body.body:
                yield from flat(inner)


def is_typing_block(node: cst.CSTNode) -> bool:
    return (
        isinstance(node, cst.If)
        and isinstance(node.test, cst.Name)
        and node.test.value == "TYPE_CHECKING"
    )


def all_nodes(tree: cst.CSTNode):
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        pending += reversed(node.children)


def dotted(node: cst.BaseExpression) -> str:
    if isinstance(node, cst.Attribute):
        return f"{dotted(node.value)}.{node.attr.value}"
    return node.value


class Tree:
    """All files and the map."""

    def __init__(self, plan: Map) -> None:
        self.plan = plan
        paths = sorted(SRC.rglob("*.py"))
        known = {module_name(path) for path in paths}
        known |= {name.rpartition(".")[0] for name in known}
        self.sources = {module_name(path): Source(path, known) for path in paths}
        for old in plan.new_module:
            if old not in self.sources:
                problem(f"no such module: {old}")
        for module, name in plan.names:
            if module in self.sources and name not in self.sources[module].defined:
                problem(f"[names] {module} defines no {name}")
        covered = {m.split(".")[1] for m in plan.new_module}
        for name, source in self.sources.items():
            in_package = (
                not source.is_package and name.count(".") >= 2 and name.split(".")[1] in covered
            )
            if in_package and name not in plan.new_module:
                problem(f"{name} is in no module of the map")
        words = {old.rpartition(".")[2] for old in plan.new_module} | set(plan.members)
        words |= {name for _, name in plan.names}
        self.affected = re.compile(rf"\b({'|'.join(map(re.escape, words))})\b")
        others = [p for folder in OTHERS for p in sorted((ROOT / folder).rglob("*.py"))]
        self.others = [Source(p, known) for p in others if self.affected.search(p.read_text())]
        self.fields = {
            target.value
            for source in self.sources.values()
            for node in all_nodes(source.tree)
            if isinstance(node, cst.ClassDef)
            for line in node.body.body
            if isinstance(line, cst.SimpleStatementLine)
            for statement in line.body
            if isinstance(statement, cst.AnnAssign)
            and isinstance(target := statement.target, cst.Name)
        }

    @cached_property
    def words(self) -> dict[str, str]:
        """What a bare word in backticks becomes, where that is clear."""
        found: dict[str, set[str]] = defaultdict(set)
        for old, new in self.plan.new_module.items():
            if old.rpartition(".")[2].startswith("_"):
                found[old.rpartition(".")[2]].add(new.rpartition(".")[2])
        named: dict[str, set[str]] = defaultdict(set)
        for (_, old), new in self.plan.names.items():
            named[old].add(new)
        result = {old: news.pop() for old, news in found.items() if len(news) == 1}
        result |= {old: news.pop() for old, news in named.items() if len(news) == 1}
        return result | self.plan.members

    def home(
        self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()
    ) -> tuple[str, str]:
        """Find the module that defines a name, through re-exports."""
        source = self.sources.get(module)
        if source is None or (module, name) in seen:
            return module, name
        if name in source.defined and name != "__all__":
            return module, name
        for each in source.imports:
            if each.at_top and each.base and not each.is_module:
                if each.local == name:
                    return self.home(each.base, each.name, seen | {(module, name)})
                if each.name == "*" and name in self.public(each.base):
                    return self.home(each.base, name, seen | {(module, name)})
        return module, name

    def public(self, module: str) -> set[str]:
        source = self.sources[module]
        return source.defined | {each.local for each in source.imports if each.at_top}

    def new_name(self, module: str, name: str) -> str:
        return self.plan.names.get(self.home(module, name), name)


class Rewriter(cst.CSTTransformer):
    """Replace nodes by identity; rename members by name; rewrite mentions in text."""

    def __init__(self, tree: Tree, source: Source, replaced: dict[cst.CSTNode, object]) -> None:
        super().__init__()
        self.tree, self.source, self.replaced = tree, source, replaced
        self.members = tree.plan.members

    def on_leave(self, original, updated):  # type: ignore[no-untyped-def]
        updated = super().on_leave(original, updated)
        if original not in self.replaced:
            return updated
        new = self.replaced[original]
        return new(updated) if callable(new) else new

    def leave_Attribute(self, original, updated):  # type: ignore[no-untyped-def]
        attr = updated.attr.value
        if attr in self.members:
            return updated.with_changes(attr=cst.Name(self.members[attr]))
        return updated

    def leave_ClassDef(self, original, updated):  # type: ignore[no-untyped-def]
        lines = []
        for line in updated.body.body:
            if isinstance(line, cst.FunctionDef) and line.name.value in self.members:
                line = line.with_changes(name=cst.Name(self.members[line.name.value]))
            elif isinstance(line, cst.SimpleStatementLine):
                line = line.with_changes(body=[self._field(s) for s in line.body])
            lines.append(line)
        return updated.with_changes(body=updated.body.with_changes(body=lines))

    def _field(self, statement):  # type: ignore[no-untyped-def]
        if (
            isinstance(statement, cst.AnnAssign)
            and isinstance(statement.target, cst.Name)
            and statement.target.value in self.members
        ):
            return statement.with_changes(target=cst.Name(self.members[statement.target.value]))
        if isinstance(statement, cst.Assign):
            targets = [
                t.with_changes(target=cst.Name(self.members[t.target.value]))
                if isinstance(t.target, cst.Name) and t.target.value in self.members
                else t
                for t in statement.targets
            ]
            return statement.with_changes(targets=targets)
        return statement

    def leave_Arg(self, original, updated):  # type: ignore[no-untyped-def]
        if (
            updated.keyword
            and updated.keyword.value in self.members
            and updated.keyword.value in self.tree.fields
        ):
            return updated.with_changes(keyword=cst.Name(self.members[updated.keyword.value]))
        return updated

    def leave_SimpleString(self, original, updated):  # type: ignore[no-untyped-def]
        text = mentions(self.tree, updated.value)
        bare = updated.raw_value
        if self.source.is_package and f"{self.source.name}.{bare}" in self.tree.plan.new_module:
            new = self.tree.plan.new_module[f"{self.source.name}.{bare}"]
            text = f'"{new.removeprefix(self.source.name + ".")}"'
        elif (
            self.source.is_package
            and self.source.name in self.tree.sources
            and (self.tree.new_name(self.source.name, bare) != bare)
        ):
            text = f'"{self.tree.new_name(self.source.name, bare)}"'
        elif bare in self.members:
            problem_note(f"{self.source.path}: string {updated.value} equals a renamed member")
        return updated.with_changes(value=text)

    def leave_FormattedStringText(self, original, updated):  # type: ignore[no-untyped-def]
        return updated.with_changes(value=mentions(self.tree, updated.value))

    def leave_Comment(self, original, updated):  # type: ignore[no-untyped-def]
        return updated.with_changes(value=mentions(self.tree, updated.value))


NOTES: list[str] = []


def problem_note(text: str) -> None:
    if text not in NOTES:
        NOTES.append(text)


_DOTTED = re.compile(rf"\b{PACKAGE}(?:\.\w+)+")
_TICKED = re.compile(r"`[^`\n]+`")


def mentions(tree: Tree, text: str) -> str:
    """Rewrite dotted names of modules anywhere, and bare names inside backticks."""

    def dotted_name(match: re.Match[str]) -> str:
        whole = match.group(0).split(".")
        for length in range(len(whole), 1, -1):
            old = ".".join(whole[:length])
            if old in tree.plan.new_module or old in tree.sources:
                rest = whole[length:]
                if rest:
                    rest[0] = tree.new_name(old, rest[0])
                    rest[1:] = [tree.plan.members.get(r, r) for r in rest[1:]]
                return ".".join([tree.plan.moved(old), *rest])
        return match.group(0)

    def ticked(match: re.Match[str]) -> str:
        return re.sub(r"[A-Za-z_]\w*", lambda m: word(m.group(0)), match.group(0))

    def word(token: str) -> str:
        return tree.words.get(token, token)

    return _TICKED.sub(ticked, _DOTTED.sub(dotted_name, text))


def edits(tree: Tree, source: Source) -> tuple[dict[cst.CSTNode, object], list[Import]]:
    """Return the replacements for one file, and its top-level imports of ours that are to be made anew."""
    plan = tree.plan
    here = plan.moved(source.name)
    in_src = source.name in tree.sources
    replaced: dict[cst.CSTNode, object] = {}
    top: list[Import] = []

    def rename(access, new: str) -> None:  # type: ignore[no-untyped-def]
        scope = access.scope
        while not isinstance(scope, GlobalScope):
            if any(a.name == new for a in scope.assignments):
                problem(
                    f"{source.path.relative_to(ROOT)}: {new} is shadowed by a local of {getattr(scope, 'name', scope)}"
                )
            scope = scope.parent
        node = access.node
        while isinstance(node, cst.Attribute):
            node = node.value
        replaced[node] = cst.Name(new) if isinstance(node, cst.Name) else node

    for name, assignments in source.definitions().items():
        new = plan.names.get((source.name, name))
        if new is None:
            continue
        for assignment in assignments:
            node = assignment.node
            if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
                replaced[node] = lambda u, new=new: u.with_changes(name=cst.Name(new))
            else:
                target = node
                if not isinstance(target, cst.Name):
                    target = next(
                        n for n in all_nodes(node) if isinstance(n, cst.Name) and n.value == name
                    )
                replaced[target] = cst.Name(new)
            for access in assignment.references:
                rename(access, new)
    for node in all_nodes(source.tree):
        if isinstance(node, cst.NameItem) and (source.name, node.name.value) in plan.names:
            replaced[node.name] = cst.Name(plan.names[source.name, node.name.value])

    for statement, group in source.by_statement.items():
        ours = [
            each
            for each in group
            if each.base.startswith(PACKAGE) or each.name.startswith(PACKAGE + ".")
        ]
        if not ours:
            continue
        lines: list[cst.BaseSmallStatement] = []
        for each in group:
            text = one_import(tree, source, each, here, in_src, rename, replaced)
            if text is not None and text not in [cst.Module([]).code_for_node(x) for x in lines]:
                lines.append(cst.parse_statement(text).body[0])
        parent = source.parents[statement]
        if each.at_top and in_src and not source.is_package:
            top += group
            continue
        unchanged = [cst.Module([]).code_for_node(l) for l in lines]
        if len(group) > 1 and len({u.split(" import ")[0] for u in unchanged}) == 1:
            names = ", ".join(u.split(" import ")[1] for u in unchanged)
            lines = [
                cst.parse_statement(f"{unchanged[0].split(' import ')[0]} import {names}").body[0]
            ]
        if not lines:
            replaced[parent] = cst.RemoveFromParent()
        else:
            first = lambda u, lines=lines: cst.FlattenSentinel(
                [u.with_changes(body=[lines[0]])]
                + [
                    cst.SimpleStatementLine(body=[l], trailing_whitespace=u.trailing_whitespace)
                    for l in lines[1:]
                ]
            )
            replaced[parent] = first
    return replaced, top


def one_import(tree, source, each, here, in_src, rename, replaced) -> str | None:  # type: ignore[no-untyped-def]
    """Say what an import becomes; rename what refers to it. None: it is defined in the same module now."""
    plan = tree.plan
    if each.base == "" and each.name.startswith(PACKAGE + "."):
        return f"import {plan.moved(each.name)}" + (f" as {each.asname}" if each.asname else "")
    if not each.base.startswith(PACKAGE):
        return f"from {each.base} import {each.name}" + (
            f" as {each.asname}" if each.asname else ""
        )
    if each.is_module:
        old = f"{each.base}.{each.name}"
        new = plan.moved(old)
        gone = new == here and in_src
        base, _, bare = new.rpartition(".")
        asname = each.asname
        if asname and asname == each.name.lstrip("_") and bare != each.name:
            asname = None
        local = asname or bare
        for access in source.accesses(each):
            name = access.node
            while isinstance(name, cst.Attribute):
                name = name.value
            parent = source.parents[name]
            if isinstance(parent, cst.Attribute) and parent.value is name:
                attr = tree.new_name(old, parent.attr.value)
                if gone:
                    check_shadow(source, access, attr)
                    replaced[parent] = cst.Name(attr)
                else:
                    replaced[parent] = cst.Attribute(value=cst.Name(local), attr=cst.Name(attr))
            else:
                if gone:
                    problem(
                        f"{source.path.relative_to(ROOT)}: module {each.name} is used as an object"
                    )
                replaced[name] = cst.Name(local)
                call = parent
                while isinstance(call, (cst.Arg,)):
                    call = source.parents[call]
                if (
                    isinstance(call, cst.Call)
                    and len(call.args) > 1
                    and isinstance(call.args[1].value, cst.SimpleString)
                ):
                    string = call.args[1].value
                    renamed = tree.new_name(old, string.raw_value)
                    replaced[string] = cst.SimpleString(f'"{renamed}"')
        if gone:
            return None
        return f"from {relative(here, base, source, each.level)} import {bare}" + (
            f" as {asname}" if asname else ""
        )
    if each.name == "*":
        return f"from {relative(here, plan.moved(each.base), source, each.level)} import *"
    new_name = tree.new_name(each.base, each.name)
    origin = each.base
    if each.base in tree.sources and not tree.sources[each.base].is_package:
        origin = tree.home(each.base, each.name)[0]
        origin = origin if origin in tree.sources else each.base
    new_base = plan.moved(origin)
    gone = new_base == here and in_src and origin in plan.new_module
    local = new_name if gone or not each.asname else each.asname
    asname = each.asname
    if asname == each.name and asname:  # a re-export, `X as X`
        asname = local = new_name
    if local != each.local:
        for access in source.accesses(each):
            rename(access, local)
    if gone:
        return None
    return f"from {relative(here, new_base, source, each.level)} import {new_name}" + (
        f" as {asname}" if asname else ""
    )


def check_shadow(source: Source, access, new: str) -> None:  # type: ignore[no-untyped-def]
    scope = access.scope
    while not isinstance(scope, GlobalScope):
        if any(a.name == new for a in scope.assignments):
            problem(
                f"{source.path.relative_to(ROOT)}: {new} is shadowed by a local of {getattr(scope, 'name', scope)}"
            )
        scope = scope.parent


def relative(here: str, target: str, source: Source, level: int) -> str:
    if not level:
        return target
    package = here.split(".") if source.is_package else here.split(".")[:-1]
    goal = target.split(".")
    common = 0
    while common < min(len(package), len(goal)) and package[common] == goal[common]:
        common += 1
    return "." * (len(package) - common + 1) + ".".join(goal[common:])


@dataclass
class Merged:
    runtime: set[str] = field(default_factory=set)
    typing_only: set[str] = field(default_factory=set)
    bodies: list[str] = field(default_factory=list)
    docs: list[str] = field(default_factory=list)
    defined: dict[str, str] = field(default_factory=dict)  # name -> part
    bound: dict[str, str] = field(default_factory=dict)  # name -> import text
    uses: set[str] = field(default_factory=set)  # modules of ours, at import time
    exported: list[str] = field(default_factory=list)


def merge(tree: Tree, new: str, olds: list[str]) -> Merged:
    result = Merged()
    seen_text: dict[str, str] = {}
    for old in ordered(tree, olds):
        source = tree.sources[old]
        replaced, _ = edits(tree, source)
        for each in source.imports:
            if not each.at_top:
                continue
            text = one_import(tree, source, each, new, True, lambda *_: None, {})
            if each.base == "" and not each.name.startswith(PACKAGE):
                text = f"import {each.name}" + (f" as {each.asname}" if each.asname else "")
            elif not each.base.startswith(PACKAGE) and each.base:
                text = f"from {each.base} import {each.name}" + (
                    f" as {each.asname}" if each.asname else ""
                )
            if text is None or text == "from __future__ import annotations":
                continue
            (result.typing_only if each.typing_only else result.runtime).add(text)
            local = (
                text.rpartition(" as ")[2]
                if " as " in text
                else text.rpartition("import ")[2].split(".")[0]
            )
            if text == f"import {text.rpartition(' ')[2]}":
                text = f"import {local}"  # `import a.b` binds `a`
            if result.bound.setdefault(local, text) != text:
                problem(f"{new}: {local} is imported twice: {result.bound[local]!r} and {text!r}")
            if not each.typing_only and each.base.startswith(PACKAGE):
                result.uses.add(
                    tree.plan.moved(f"{each.base}.{each.name}" if each.is_module else each.base)
                )
        body = []
        for index, line in enumerate(source.tree.body):
            if index == 0 and is_docstring(line):
                result.docs.append(line.body[0].value.evaluated_value)
                continue
            if isinstance(line, cst.SimpleStatementLine) and all(
                isinstance(s, (cst.Import, cst.ImportFrom)) for s in line.body
            ):
                if line.trailing_whitespace.comment or any(l.comment for l in line.leading_lines):
                    problem_note(
                        f"{old}: comment at an import: {cst.Module([]).code_for_node(line).strip()}"
                    )
                continue
            if isinstance(line, cst.SimpleStatementLine) and is_all(line):
                for node in all_nodes(line) if old == new or new not in olds else ():
                    if isinstance(node, cst.SimpleString):
                        result.exported.append(tree.new_name(old, node.raw_value))
                continue
            if is_typing_block(line):
                rest = [
                    s
                    for s in line.body.body
                    if not (
                        isinstance(s, cst.SimpleStatementLine)
                        and all(isinstance(x, (cst.Import, cst.ImportFrom)) for x in s.body)
                    )
                ]
                if rest:
                    problem_note(f"{old}: more than imports under TYPE_CHECKING")
                    line = line.with_changes(body=line.body.with_changes(body=rest))
                else:
                    continue
            body.append(line)
        module = cst.Module(body=body)
        wrapped = Rewriter(tree, source, replaced)
        text = module.visit(wrapped)
        kept = []
        for line in text.body:
            code = cst.Module([line]).code.strip()
            if code in seen_text and not isinstance(line, cst.If):
                if not code.startswith(('"""', 'r"""')):
                    continue
            seen_text[code] = old
            names = defined_names(line)
            for name in names:
                if result.defined.setdefault(name, old) != old:
                    problem(f"{new}: {name} is defined in {result.defined[name]} and {old}")
                if hasattr(builtins, name):
                    problem(f"{new}: {name} (from {old}) hides a builtin")
            kept.append(line)
        result.bodies.append(cst.Module(body=kept).code)
    for name, part in result.defined.items():
        if name in result.bound:
            problem(f"{new}: {name} is defined in {part} and imported: {result.bound[name]!r}")
    result.typing_only -= result.runtime
    return result


def defined_names(line: cst.CSTNode) -> set[str]:
    if isinstance(line, (cst.FunctionDef, cst.ClassDef)):
        return {line.name.value}
    found = set()
    if isinstance(line, cst.SimpleStatementLine):
        for statement in line.body:
            if isinstance(statement, cst.Assign):
                found |= {
                    t.target.value for t in statement.targets if isinstance(t.target, cst.Name)
                }
            elif isinstance(statement, cst.AnnAssign) and isinstance(statement.target, cst.Name):
                found.add(statement.target.value)
            elif isinstance(statement, cst.TypeAlias):
                found.add(statement.name.value)
    return found


def is_docstring(line: cst.CSTNode) -> bool:
    return (
        isinstance(line, cst.SimpleStatementLine)
        and isinstance(line.body[0], cst.Expr)
        and isinstance(line.body[0].value, (cst.SimpleString, cst.ConcatenatedString))
    )


def is_all(line: cst.SimpleStatementLine) -> bool:
    return any(
        isinstance(s, cst.Assign)
        and any(isinstance(t.target, cst.Name) and t.target.value == "__all__" for t in s.targets)
        for s in line.body
    )


def ordered(tree: Tree, olds: list[str]) -> list[str]:
    """Order the parts so that what a part needs at import time comes before it."""
    needs = {
        old: {
            target
            for each in tree.sources[old].imports
            if each.at_top and not each.typing_only
            for target in [f"{each.base}.{each.name}" if each.is_module else each.base]
            if target in olds and target != old
        }
        for old in olds
    }
    result: list[str] = []
    while len(result) < len(olds):
        result.append(next(old for old in olds if old not in result and needs[old] <= set(result)))
    return result


def assemble(tree: Tree, new: str, merged: Merged) -> str:
    doc = tree.plan.docs.get(new) or "\n\n".join(d.strip() for d in merged.docs)
    doc = "\n\n".join(map(wrapped, doc.split("\n\n")))
    quotes = 'r"""' if "\\" in doc else '"""'
    end = "\n" if "\n" in doc else ""
    text = [f'{quotes}{doc}{end}"""', ""]
    if new not in tree.plan.evaluated:
        text += ["from __future__ import annotations", ""]
    text += sorted(merged.runtime)
    if merged.typing_only:
        text += ["", "if TYPE_CHECKING:", *(f"    {line}" for line in sorted(merged.typing_only))]
    bare = new.rpartition(".")[2]
    if merged.exported and (not bare.startswith("_") or bare == "_public"):
        text += ["", "__all__ = [", *(f'    "{name}",' for name in sorted(merged.exported)), "]"]
    return (
        "\n".join(text) + "\n\n\n" + "\n\n".join(body.strip("\n") + "\n" for body in merged.bodies)
    )


def wrapped(paragraph: str) -> str:
    """Wrap running text at 100 columns; leave lists, tables and code alone."""
    lines = paragraph.split("\n")
    if max(map(len, lines)) <= 96 or any(line[:1] in " =-`*" for line in lines):
        return paragraph
    return textwrap.fill(" ".join(lines), 96, break_long_words=False, break_on_hyphens=False)


def check_cycles(merged: dict[str, Merged]) -> None:
    graph = {name: set(each.uses) & set(merged) - {name} for name, each in merged.items()}
    while True:
        try:
            TopologicalSorter(graph).prepare()
            return
        except CycleError as error:
            cycle = error.args[1]
            problem("import cycle: " + " -> ".join(reversed(cycle)))
            graph[cycle[1]].discard(cycle[0])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("maps", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    plan = Map.read(options.maps)
    tree = Tree(plan)
    if PROBLEMS:
        print("\n".join(PROBLEMS))
        return 1
    merged = {new: merge(tree, new, olds) for new, olds in plan.parts.items()}
    check_cycles(merged)
    rewritten: dict[Path, str] = {}
    for source in [*tree.sources.values(), *tree.others]:
        if source.name in plan.new_module or not tree.affected.search(source.text):
            continue
        replaced, _ = edits(tree, source)
        text = rewrite_in_place(tree, source, replaced)
        rewritten[source.path] = text
    for note in NOTES:
        print("note:", note)
    print("\n".join(PROBLEMS))
    if options.check or PROBLEMS:
        for new, each in merged.items():
            print(f"{sum(b.count(chr(10)) for b in each.bodies) + 20:5} {new}")
        return bool(PROBLEMS)
    for old in plan.new_module:
        tree.sources[old].path.unlink()
    for new, each in merged.items():
        path = (SRC / new.replace(".", "/")).with_suffix(".py")
        path.write_text(assemble(tree, new, each))
    for path, text in rewritten.items():
        path.write_text(text)
    rewrite_texts(tree)
    for old, new in plan.tests.items():
        subprocess.run(["git", "mv", f"tests/{old}", f"tests/{new}"], cwd=ROOT, check=True)
    rewrite_test_names(tree)
    ruff = [sys.executable, "-m", "ruff"]
    subprocess.run([*ruff, "check", "-q", "--fix", "--select", "I,F401,TC", "."], cwd=ROOT)
    subprocess.run([*ruff, "format", "-q", "."], cwd=ROOT)
    return 0


def rewrite_in_place(tree: Tree, source: Source, replaced: dict[cst.CSTNode, object]) -> str:
    here = source.name
    for statement, group in source.by_statement.items():
        if not all(each.at_top for each in group) or source.parents[statement] in replaced:
            continue
        if not any(each.base.startswith(PACKAGE) for each in group):
            continue
        texts = []
        for each in group:
            text = one_import(tree, source, each, here, True, lambda *_: None, {})
            if text and text not in texts:
                texts.append(text)
        lines = [cst.parse_statement(text) for text in texts]
        replaced[source.parents[statement]] = lambda u, lines=lines: cst.FlattenSentinel(
            [
                lines[0].with_changes(
                    leading_lines=u.leading_lines, trailing_whitespace=u.trailing_whitespace
                ),
                *lines[1:],
            ]
        )
    return source.tree.visit(Rewriter(tree, source, replaced)).code


def rewrite_texts(tree: Tree) -> None:
    """Rewrite documentation and configuration: dotted names, backticks, members after a dot, public class names."""
    public = {
        old: new
        for (_, old), new in tree.plan.names.items()
        if old[:1].isupper() and old not in ("Line",)
    }
    exported = {name for s in tree.sources.values() if s.is_package for name in tree.public(s.name)}
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        ROOT / "pyproject.toml",
        ROOT / "Makefile",
    ]:
        text = mentions(tree, path.read_text())
        for old, new in public.items():
            if old in exported or old == "FolderInUse":
                text = re.sub(rf"\b{old}\b", new, text)
        for old, new in tree.plan.members.items():
            text = re.sub(rf"(?<=\.){old}\b", new, text)
        for old, new in tree.plan.tests.items():
            text = text.replace(f"tests/{old}", f"tests/{new}")
        path.write_text(text)


def rewrite_test_names(tree: Tree) -> None:
    """Rewrite what names a test file that was renamed: imports from it, and its path."""
    for path in [*ROOT.glob("tests/**/*.py"), ROOT / "Makefile", *ROOT.glob("tools/mutants/*")]:
        if not path.is_file():
            continue
        text = before = path.read_text()
        for old, new in tree.plan.tests.items():
            was, now = Path(old), Path(new)
            text = text.replace(old, new)
            package = was.parts[-2] if len(was.parts) > 1 else ""
            if path.parent.name == package or f"{package}.{was.stem}" in text:
                text = re.sub(rf"(from [\w.]*\.){was.stem}(?= import)", rf"\g<1>{now.stem}", text)
                text = re.sub(rf"(from \. import .*\b){was.stem}\b", rf"\g<1>{now.stem}", text)
                text = text.replace(f"{was.stem}.py", f"{now.stem}.py")
        if text != before:
            path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
