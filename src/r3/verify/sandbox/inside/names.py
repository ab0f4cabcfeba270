"""Which names of a test are the answer's, decided from the tests alone: no answer can put its own `abs` there."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterable

GOT = "__r3_got__"


class Names(ast.NodeVisitor):
    """Names that a source reads, binds, and uses as `name.attribute` only."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.bound: set[str] = set()
        self.plain: set[str] = set()
        """Read other than for an attribute."""

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.read.add(node.id)
            self.plain.add(node.id)
        else:
            self.bound.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name):
            self.read.add(node.value.id)
        else:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        self.bound.add(node.arg)
        self.generic_visit(node)

    def visit_alias(self, node: ast.alias) -> None:
        self.bound.add((node.asname or node.name).split(".")[0])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.bound.add(node.name)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.bound.add(node.name)
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self.bound.add(node.name or "")
        self.generic_visit(node)


def resolve(trees: Iterable[ast.Module], known: Iterable[str]) -> tuple[set[str], set[str]]:
    """The names that only the answer can have defined, and the modules that tests use without importing them.

    A name of Python's own is the answer's only where a test asks for nothing else: `assert sum(10, 15) == 6`.
    """
    names, trees = Names(), list(trees)
    for tree in trees:
        names.visit(tree)
    missing = names.read - names.bound - set(known)
    missing = {name for name in missing if not name.startswith("__")}
    modules = {name for name in missing - names.plain if name in sys.stdlib_module_names}
    theirs = {name for name in missing - modules if not hasattr(builtins, name)}
    if not theirs and not known:
        theirs = {name for tree in trees for name in _asked(tree) if hasattr(builtins, name)}
    return theirs, modules


def _asked(tree: ast.Module) -> Iterable[str]:
    """The functions that asserts call on their left."""
    for node in tree.body:
        if isinstance(node, ast.Assert):
            left = node.test.left if isinstance(node.test, ast.Compare) else node.test
            if isinstance(left, ast.Call) and isinstance(left.func, ast.Name):
                yield left.func.id


class KeepLeft(ast.NodeTransformer):
    """Have `assert left == right` keep what was on the left, so that a failing test can say what it got."""

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        if isinstance(node.test, ast.Compare):
            node.test.left = ast.NamedExpr(ast.Name(GOT, ast.Store()), node.test.left)
        elif isinstance(node.test, ast.Call):
            node.test = ast.NamedExpr(ast.Name(GOT, ast.Store()), node.test)
        return ast.fix_missing_locations(node)
