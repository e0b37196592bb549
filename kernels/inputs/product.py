"""A matrix product of a model as one rank computes it: what tables, tuner and start-up call it."""

import re
from dataclasses import dataclass
from functools import cache

from tpdet.kernels.inputs.activations import GATED_KINDS
from tpdet.kernels.order import Expression

KINDS = ("column", *GATED_KINDS, "head", "row")
"""Output in the model's dtype; gate and up with an activation; output in fp32; leaves whose fp32
sums are folded over ranks."""

HEAD_ROWS = 256
"""Rows of a `head` product that are computed at once, at most; a longer step takes several."""


@dataclass(frozen=True, order=True)
class Product:
    """A shape: x [M, leaves * k] times weight [leaves, n, k]; only a `row` has several leaves.

    roots: of a `row`, what the rank sends, as `write_roots` writes it; empty for the others.
    widths: of a `row` with unequal leaves, the k of each; `k` is the largest then.
    """

    kind: str
    n: int
    k: int
    leaves: int = 1
    roots: str = ""
    widths: tuple[int, ...] = ()

    @property
    def chains(self) -> tuple[int, ...]:
        """The k of each leaf."""
        return self.widths or (self.k,) * self.leaves

    @property
    def gated(self) -> bool:
        """Whether its rows are gates and ups, interleaved."""
        return self.kind in GATED_KINDS

    @property
    def outputs(self) -> int:
        """Values of a row of the result; of a `row`, of each sum."""
        return self.n // 2 if self.gated else self.n

    def __str__(self) -> str:
        return f"{self.kind} {self.n}x{self.k}{self.roots and f' {self.roots}'}"


@cache
def write_roots(roots: tuple[Expression, ...]) -> str:
    """Such as "0+1 2+3", or "((0+1)+(2+3))+4": every root's sum, in order."""

    def text(node: Expression, outermost: bool) -> str:
        if isinstance(node, int):
            return str(node)
        inside = f"{text(node[0], False)}+{text(node[1], False)}"
        return inside if outermost else f"({inside})"

    return " ".join(text(root, True) for root in roots)


def read_roots(written: str) -> tuple[Expression, ...]:
    """The inverse of `write_roots`. Raises ValueError."""
    roots = tuple(_read_root(part) for part in written.split(" "))
    if write_roots(roots) != written:
        raise ValueError(f"{written!r} are no roots such as '0+1 2+3'")
    return roots


def _read_root(text: str) -> Expression:
    """By a stack: a sum ends at its closing parenthesis, the outermost at the end."""
    stack: list[Expression] = []
    for token in re.findall(r"\d+|\)", f"({text})" if "+" in text else text):
        if token != ")":
            stack.append(int(token))
        elif len(stack) < 2:
            raise ValueError(f"{text!r} is no sum such as '(0+1)+2'")
        else:
            right, left = stack.pop(), stack.pop()
            stack.append((left, right))
    if len(stack) != 1:
        raise ValueError(f"{text!r} is no sum such as '(0+1)+2'")
    return stack[0]
