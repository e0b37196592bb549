"""Names in the product: one class a name, sentences with a subject, the field's words."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from tests.policy.test_policy import ROOT, nodes_of, sources

PRIVATE = {
    "trust": "acceptance rate", "luck": "acceptance rate", "told": "predicted output",
    "hoped": "expected", "took": "seconds", "credit": "budget", "awaited": "synchronous",
    "guess": "prediction", "offers": "candidates", "trades": "specialised",
    "weigh": "softmax sum",
}  # fmt: skip
"""Words of our own for what the field has a word for, and that word."""
ELSEWHERE = {"kernels/cuda/exchange/words.py"}
"""Files in which one of them says what it says in English: a word in memory is awaited."""
VAGUE = {"found", "given", "wanted", "mine", "at", "each", "held", "place"}
MOST_VAGUE = 681
"""How often a name is one of `VAGUE`, where the thing has a name. The number may only shrink."""


def bound_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """The names that a file gives to variables, parameters, attributes, functions and classes."""
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.arg(arg=name):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.ClassDef(name=name):
                yield name, node.lineno


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", name)}


def test_no_two_classes_have_one_name():
    files = defaultdict(list)
    for path in sources():
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(str(path.relative_to(ROOT)))
    twice = {name: where for name, where in files.items() if len(where) > 1}
    assert not twice, "name a class by its room"


def test_every_sentence_has_a_subject():
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    wrong = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in sources()
        for node in nodes_of(path)
        if isinstance(node, described)
        and (text := ast.get_docstring(node))
        and text.split()[0] in ("Of", "That")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_fields_words_are_used():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}: the field says {PRIVATE[word]}"
        for path in sources()
        if path.relative_to(ROOT).as_posix() not in ELSEWHERE
        for name, line in bound_names(nodes_of(path))
        for word in words_of(name) & PRIVATE.keys()
    ]
    assert not wrong, "\n".join(wrong)


def test_vague_names_do_not_spread():
    vague = Counter(
        name for path in sources() for name, _ in bound_names(nodes_of(path)) if name in VAGUE
    )
    assert vague.total() <= MOST_VAGUE, f"{vague.total()}: {vague}; name the thing"
