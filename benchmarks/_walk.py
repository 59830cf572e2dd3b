"""Follow a parameter through a project's calls, by its source.

The walk reads one function's body in source order. An event is a read of a followed name. If a followed name, or its
attribute (``spec.model.width``), is an argument in a call, the walk enters the called function and follows the
receiving parameter, each time anew; it never enters a function recursively. A name assigned from a followed name or its
attribute is followed, too.

A room is a file. A move is a change of room between two consecutive events. A climb is a move back to a function nearer
to the walk's start.

It resolves the module's names, imports (also those within functions), ``Class(...)``, ``self.method(...)`` and
inherited methods. It loses calls through dicts and registries, and on objects without a class name at the call, so its
counts are lower bounds.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """A function or class with its module, and a method's class."""

    module: str
    node: ast.AST
    owner: ast.ClassDef | None = None


def name_module(root: Path, path: Path) -> str:
    """Return the dotted name of a file's module."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


class Project:
    """The names of each module: its definitions and its imports."""

    def __init__(self, root: Path, packages: Sequence[str]):
        self.names: dict[str, dict[str, Definition | str]] = {}
        for path in (path for package in packages for path in sorted((root / package).rglob("*.py"))):
            module = name_module(root, path)
            tree = ast.parse(path.read_text())
            names: dict[str, Definition | str] = {}
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
                elif isinstance(node, ast.Import):
                    names |= {name.asname or name.name.partition(".")[0]: name.name for name in node.names}
            for node in tree.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    names[node.name] = Definition(module, node)
            self.names[module] = names

    def resolve(self, module: str, expression: ast.expr) -> Definition | str | None:
        """Return the definition, or the module's dotted name, of an expression in ``module``."""
        if isinstance(expression, ast.Name):
            return self._look_up(module, expression.id)
        if isinstance(expression, ast.Attribute):
            base = self.resolve(module, expression.value)
            if isinstance(base, str):
                return self._import(f"{base}.{expression.attr}")
            return self.method(base, expression.attr) if base is not None else None
        return None

    def method(self, owner: Definition, name: str) -> Definition | None:
        """Return a method of a class or of its bases."""
        if not isinstance(owner.node, ast.ClassDef):
            return None
        for node in owner.node.body:
            if isinstance(node, AnyFunction) and node.name == name:
                return Definition(owner.module, node, owner.node)
        inherited = (self.method(base, name) for base in self.bases(owner))
        return next((method for method in inherited if method is not None), None)

    def bases(self, owner: Definition) -> list[Definition]:
        """Return a class's bases that the project defines."""
        listed = owner.node.bases if isinstance(owner.node, ast.ClassDef) else []
        whole = [base.value if isinstance(base, ast.Subscript) else base for base in listed]
        found = [self.resolve(owner.module, base) for base in whole]
        return [base for base in found if isinstance(base, Definition)]

    def _look_up(self, module: str, name: str) -> Definition | str | None:
        target = self.names.get(module, {}).get(name)
        return self._import(target) if isinstance(target, str) else target

    def _import(self, path: str) -> Definition | str | None:
        """Return the module of this dotted name, or a module's definition under it."""
        if path in self.names:
            return path
        module, _, name = path.rpartition(".")
        if module in self.names:
            return self._look_up(module, name)
        return path if any(known.startswith(f"{path}.") for known in self.names) else None


class Event(NamedTuple):
    room: str
    depth: int


class Walk(NamedTuple):
    """The counts of a walk; ``rooms`` counts different files."""

    events: int
    moves: int
    climbs: int
    rooms: int


class _Limit(Exception):
    """Raised when the walk has enough events."""


class _Scope(NamedTuple):
    function: Definition
    followed: set[str]


class _Walker(ast.NodeVisitor):
    def __init__(self, project: Project, limit: int):
        self.project, self.limit = project, limit
        self.events: list[Event] = []
        self.scopes: list[_Scope] = []

    def enter(self, function: Definition, followed: set[str]) -> None:
        if any(scope.function.node is function.node for scope in self.scopes):
            return
        self.scopes.append(_Scope(function, followed))
        for statement in getattr(function.node, "body", ()):
            self.visit(statement)
        self.scopes.pop()

    def is_followed(self, expression: ast.expr) -> bool:
        while isinstance(expression, ast.Attribute):
            expression = expression.value
        return isinstance(expression, ast.Name) and expression.id in self.scopes[-1].followed

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and self.is_followed(node):
            self.events.append(Event(self.scopes[-1].function.module, len(self.scopes)))
            if len(self.events) == self.limit:
                raise _Limit

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._assign(target, node.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        """Follow names assigned a followed value, and names derived from themselves: ``spec = completed(spec)``."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for name, part in zip(target.elts, value.elts, strict=True):
                self._assign(name, part)
        elif isinstance(target, ast.Name):
            followed = self.scopes[-1].followed
            if self.is_followed(value):
                followed.add(target.id)
            elif not any(self.is_followed(part) for part in ast.walk(value) if isinstance(part, ast.Name)):
                followed.discard(target.id)

    def visit_parts_in_order(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        for generator in node.generators:
            self.visit(generator.iter)
            for condition in generator.ifs:
                self.visit(condition)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(part)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_parts_in_order

    def visit_Call(self, node: ast.Call) -> None:
        """Follow a call into a function of the project that receives a followed value."""
        self.generic_visit(node)
        function = self._called(node.func)
        if function is None or not isinstance(function.node, AnyFunction):
            return
        arguments = function.node.args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        decorators = {name.id for name in function.node.decorator_list if isinstance(name, ast.Name)}
        if function.owner is not None and "staticmethod" not in decorators:
            names = names[1:]
        followed = {name for name, value in zip(names, node.args, strict=False) if self.is_followed(value)}
        known = {*names, *(argument.arg for argument in arguments.kwonlyargs)}
        followed |= {word.arg for word in node.keywords if word.arg in known and self.is_followed(word.value)}
        if followed:
            self.enter(function, followed)

    def _called(self, expression: ast.expr) -> Definition | None:
        """Return the function entered by a call, for a class its ``__init__``; None if the code is not explicit."""
        here = self.scopes[-1].function
        if isinstance(expression, ast.Attribute) and here.owner is not None and ast.unparse(expression.value) == "self":
            return self.project.method(Definition(here.module, here.owner), expression.attr)
        target = self.project.resolve(here.module, expression)
        if isinstance(target, Definition) and isinstance(target.node, ast.ClassDef):
            return self.project.method(target, "__init__")
        return target if isinstance(target, Definition) else None


def walk(project: Project, module: str, function: str, parameter: str, limit: int) -> Walk:
    """Follow a parameter from a module's function.

    Args:
        project: the modules to resolve calls in.
        module: dotted name of the first module.
        function: the function's name, or ``Class.method``.
        parameter: the function's parameter.
        limit: largest event count.

    Returns:
        Events, moves, climbs and rooms; fewer events than ``limit`` if the walk ends before.

    Raises:
        ValueError: unknown function or parameter.
    """
    owner, _, name = function.rpartition(".")
    holder = project.names.get(module, {}).get(owner or name)
    start = project.method(holder, name) if owner and isinstance(holder, Definition) else holder
    if not isinstance(start, Definition) or not isinstance(start.node, AnyFunction):
        raise ValueError(f"no function {function} in {module}")
    if parameter not in {argument.arg for argument in ast.walk(start.node.args) if isinstance(argument, ast.arg)}:
        raise ValueError(f"{module}.{function} has no parameter {parameter}")
    walker = _Walker(project, limit)
    with contextlib.suppress(_Limit):
        walker.enter(start, {parameter})
    events = walker.events
    moves = [(before, after) for before, after in zip(events, events[1:], strict=False) if before.room != after.room]
    climbs = sum(after.depth < before.depth for before, after in moves)
    return Walk(len(events), len(moves), climbs, len({event.room for event in events}))
