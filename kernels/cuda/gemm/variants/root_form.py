"""The one form of all roots that a rank sends.

    y[r] = ((g_0 + g_1) + g_2) + ...         a root is a chain of groups
    g    = p_0  or  p_0 + p_1                a group is one part or two
    p    = l_i  or  l_i + l_(i+1)            a part is one leaf or two

In the orders `sequential`, `pairs` and `tree` (up to 8 leaves) all roots of a rank have one form,
and so has every cut below them.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from tpdet.kernels.order import Expression

_PARTS = ((1, 1), (2, 1), (2, 2))  # (pair, parts) of the orders


class RootShape(NamedTuple):
    """What a kernel that folds is compiled for: groups of a root, parts of a group, leaves of a
    part."""

    GROUPS: int
    PARTS: int
    PAIR: int


@dataclass(frozen=True)
class RootForm:
    """`roots` equal chains of `groups` groups of `parts` parts of `pair` leaves."""

    roots: int
    groups: int
    parts: int
    pair: int

    @property
    def leaves(self) -> int:
        """Leaves of one root."""
        return self.groups * self.parts * self.pair

    @property
    def shape(self) -> RootShape:
        """The form of each root."""
        return RootShape(self.groups, self.parts, self.pair)


@cache
def root_form(first_leaf: int, leaves: int, roots: tuple[Expression, ...]) -> RootForm | None:
    """The form whose roots are exactly these, over `leaves` leaves; None if there is none."""
    if not roots or leaves % len(roots):
        return None
    share = leaves // len(roots)
    for pair, parts in _PARTS:
        if share % (pair * parts) == 0:
            form = RootForm(len(roots), share // (pair * parts), parts, pair)
            if roots == tuple(_expression(form, first_leaf + r * share) for r in range(form.roots)):
                return form
    return None


def _expression(form: RootForm, first: int) -> Expression:
    def chain(terms: list[Expression]) -> Expression:
        total = terms[0]
        for term in terms[1:]:
            total = (total, term)
        return total

    def part(at: int) -> Expression:
        return at if form.pair == 1 else (at, at + 1)

    width = form.parts * form.pair
    groups = [first + group * width for group in range(form.groups)]
    return chain([chain([part(at + p * form.pair) for p in range(form.parts)]) for at in groups])
