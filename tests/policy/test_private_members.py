"""Tests look at behaviour: which of them still use a private member, and how often."""

import ast
from pathlib import Path

import pytest

from tests.lib.tree import ROOT

MOST = 147
"""Uses of private members in all tests, ours and other libraries'. The number may only shrink.

What has no public face stays: damage that a check must find, bugs put in on purpose, doubles in
place of a GPU or of a transport.
"""
PATCHES = ("setattr", "getattr", "delattr")
PUBLIC = {"_exit", "_replace", "_asdict", "_fields", "_make"}
"""Documented members of `os` and of named tuples."""


def is_private(name: str) -> bool:
    """Whether the last part of a dotted name begins with one underscore and is not documented."""
    last = name.split(".")[-1]
    return last.isidentifier() and last[0] == "_" and last[:2] != "__" and last not in PUBLIC


def private_uses(tree: ast.AST) -> list[str]:
    """`x._y` of anything but `self`, an import of `_y`, and a patch of the attribute named "_y"."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if is_private(name):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
            case ast.ImportFrom(names=names):
                found += [f"line {node.lineno}: {n.name}" for n in names if is_private(n.name)]
            case ast.Call(func=ast.Attribute(attr=called) | ast.Name(id=called), args=given):
                texts = [each.value for each in given if isinstance(each, ast.Constant)]
                names = [text for text in texts if isinstance(text, str) and is_private(text)]
                found += [f"line {node.lineno}: {name}" for name in names if called in PATCHES]
    return found


def uses_of(path: Path) -> list[str]:
    return private_uses(ast.parse(path.read_text()))


def test_private_members_are_used_no_more_than_they_were():
    used = {
        path.relative_to(ROOT / "tests").as_posix(): uses_of(path)
        for path in sorted((ROOT / "tests").rglob("*.py"))
    }
    total = sum(map(len, used.values()))
    shown = "\n".join(f"{name}: {uses}" for name, uses in used.items() if uses)
    assert total <= MOST, f"{total} uses, {MOST} are allowed: test what is public\n{shown}"


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("engine._pending.x._y", 2),
        ("self._mine = cls._ours = x.__dict__", 0),
        ("from a import _b, c", 1),
        ("patch.setattr(a, '_b', 1); patch.setattr('x.y._z', 2); patch.setattr(a, 'b', '_c d')", 2),
        ("os._exit(1); x.named('_y')", 0),
    ],
)
def test_a_use_is_counted(code, count):
    assert len(private_uses(ast.parse(code))) == count
