"""The order of arithmetic, as data: leaves, fold trees, what a rank folds and sends, contract id.

Standard library only. The GPU kernels, the CPU path and the collectives all read this file, and
nothing else decides in which order an output element is added up. `docs/numerics.md` states the
same rules in words.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from typing import Final, TypeAlias, TypeVar

NUMERICS_VERSION = 3

K_GROUP = 16  # a chain adds groups of 16 products in ascending K
PAGE_TOKENS = 256  # a KV page, and an attention split, holds these absolute positions
TILE_TOKENS = 64  # a split is four tiles of online softmax
CHUNK_TOKENS = 64  # linear attention: a state stands at absolute multiples of it
CONVOLUTION_TAPS = 4  # rows that its short convolution reads, the row's own among them
MASKED = -1e30  # score of a masked key: finite, so no NaN can come of it
MASS_BITS = 40  # fixed point of softmax mass and sums of squares
_SUM_BITS = 62  # of a fixed-point sum of several terms
TOP_P_BITS = 30
DEFAULT_LEAVES = 8
FOLD_ORDERS = ("sequential", "pairs", "tree")
DEFAULT_FOLD_ORDER: Final = "tree"  # a rank sends one partial at every size
ROW_LAYERS = ("fold", "gather")
KV_CACHE_DTYPES = ("auto", "fp8")

# SHA-256 of the vectors in kernels/known/golden.py; a change of either is a new contract.
GOLDEN_SHA256 = "0c237a1a421fbdc1913ddf32b16163fc0121e97198876a2c5c64c5908d5681d0"
# And of those in kernels/known/linear_golden.py, named by models with linear attention alone.
LINEAR_GOLDEN_SHA256 = "1e52e9fd4b217c3a3aac7d7266f81c1483cb53b3d3ef7a0da71f13c093fd0244"
# And of those in kernels/known/kv_golden.py, named where the KV cache is in fp8.
KV_GOLDEN_SHA256 = "0bb06448e729773328bb913138d910f6d4f981914a073d8e60374965118d7709"

Value = TypeVar("Value")
Operand = TypeVar("Operand")
Replaced = TypeVar("Replaced")

Tree: TypeAlias = Operand | tuple["Tree[Operand]", "Tree[Operand]"]
"""An operand, which is no tuple, or the sum of two trees (left operand first)."""

Expression: TypeAlias = Tree[int]
"""A fold over leaves, by their index."""


@dataclass(frozen=True)
class Slot:
    """One partial sum on the wire: `index` counts what `rank` sends, in ascending leaf order."""

    rank: int
    index: int


FinalExpression: TypeAlias = Tree[Slot]
"""What is left to fold after the exchange, over everyone's slots."""


@dataclass(frozen=True)
class Leaves:
    """The leaves of one row product, cut by the model alone: see `cut_leaves`.

    Leaf i sums the inputs [edges[i], edges[i + 1]); it is empty where the two are equal.
    """

    edges: tuple[int, ...]

    @property
    def equal(self) -> bool:
        """Whether all leaves have one width."""
        return len({last - first for first, last in pairwise(self.edges)}) == 1

    @property
    def empty(self) -> tuple[int, ...]:
        """The leaves without inputs, which the fold leaves out."""
        return tuple(i for i, (first, last) in enumerate(pairwise(self.edges)) if first == last)

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """First input and end of every leaf."""
        return tuple(pairwise(self.edges))

    def inputs(self, leaves: range) -> range:
        """The inputs of neighbouring leaves."""
        return range(self.edges[leaves.start], self.edges[leaves.stop])

    def widths(self, leaves: range) -> tuple[int, ...]:
        """The widths of those of `leaves` that are not empty, in order."""
        found = (self.edges[i + 1] - self.edges[i] for i in leaves)
        return tuple(width for width in found if width)

    @property
    def alike(self) -> bool:
        """Whether all leaves but the empty ones have one width: one kernel's loop fits them all."""
        return len({*self.widths(range(len(self.edges) - 1))}) == 1


@dataclass(frozen=True)
class FoldPlan:
    """How `ranks` ranks evaluate one fold tree together.

    `roots[r]` are the largest subtrees wholly inside rank r's leaves, which it folds and sends in
    this order; `final` is what every rank then evaluates over the slots. `slots` is the most any
    rank sends. Empty leaves are in none of them.
    """

    leaves: int
    roots: tuple[tuple[Expression, ...], ...]
    final: FinalExpression

    @property
    def slots(self) -> int:
        """Rows of the exchange: the largest number of partials any rank sends."""
        return max(len(roots) for roots in self.roots)


@dataclass(frozen=True)
class Contract:
    """Everything that fixes the bits for one checkpoint on one architecture.

    device: "cpu" or "cuda"; dtype: of weights and activations, such as "bfloat16"; row_layers: one
    of ROW_LAYERS. Without a fold neither leaves nor fold order reach a bit: they are not named.
    edges: of each row product's leaves, by its name; named where not all of them are equal.
    experts: of a layer, whose groups are the lanes; named where there are any. linear: whether a
    layer has linear attention, whose chunks and golden vectors are named then. kv_cache_dtype: one
    of KV_CACHE_DTYPES; fp8 is named, with its golden vectors.
    """

    device: str
    dtype: str
    leaves: int
    fold_order: str
    numerics: int = NUMERICS_VERSION
    row_layers: str = "fold"
    edges: tuple[tuple[str, tuple[int, ...]], ...] = ()
    experts: int = 0
    linear: bool = False
    kv_cache_dtype: str = "auto"

    @property
    def identifier(self) -> str:
        """SHA-256 (hex) over the canonical JSON of these fields, the constants and the goldens."""
        constants = {
            "k_group": K_GROUP,
            "page_tokens": PAGE_TOKENS,
            "tile_tokens": TILE_TOKENS,
            "masked": MASKED,
            "mass_bits": MASS_BITS,
            "top_p_bits": TOP_P_BITS,
            "golden": GOLDEN_SHA256,
        }
        fields = asdict(self)
        if self.row_layers == "gather" or all(Leaves(cut).equal for _, cut in self.edges):
            del fields["edges"]  # the ids of equal leaves are older than this field
        if not self.experts:
            del fields["experts"]  # and those of dense models
        if self.linear:
            constants["linear"] = [CHUNK_TOKENS, LINEAR_GOLDEN_SHA256]
        del fields["linear"]
        if self.kv_cache_dtype != "auto":
            constants["kv_cache"] = [self.kv_cache_dtype, KV_GOLDEN_SHA256]
        del fields["kv_cache_dtype"]
        if self.row_layers == "fold":
            constants["fold"] = describe(fold_tree(self.fold_order, self.leaves))
            del fields["row_layers"]  # the ids of folded contracts are older than this field
        elif self.row_layers == "gather":
            del fields["leaves"], fields["fold_order"]
        else:
            raise ValueError(f"row layers {self.row_layers!r}: use one of {', '.join(ROW_LAYERS)}")
        body = json.dumps(fields | constants, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(body.encode()).hexdigest()


def fraction_bits(terms: int) -> int:
    """Bits behind the point in a fixed-point sum of so many terms, whose int64 cannot overflow."""
    return min(MASS_BITS, _SUM_BITS - terms.bit_length())


def cut_leaves(units: int, size: int, leaves: int) -> Leaves:
    """Cut `units` neighbouring units of `size` inputs each into leaves as equal as possible.

    Leaf i holds the units [i * units // leaves, (i + 1) * units // leaves): a function of the model
    and the number of leaves, never of the TP size. Some are empty where there are fewer units.
    """
    return Leaves(tuple(i * units // leaves * size for i in range(leaves + 1)))


def fold_tree(order: str, leaves: int) -> Expression:
    """The fixed expression over leaf 0 .. leaves-1 (a power of two). Raises ValueError."""
    if leaves < 1 or leaves & (leaves - 1):
        raise ValueError(f"{leaves} leaves: use a power of two")
    if order == "sequential":
        return _chain(range(leaves))
    if order == "pairs":
        return _chain([(i, i + 1) for i in range(0, leaves, 2)]) if leaves > 1 else 0
    if order == "tree":
        return _balanced(0, leaves)
    raise ValueError(f"fold order {order!r}: use one of {', '.join(FOLD_ORDERS)}")


@cache
def fold_plan(order: str, leaves: int, ranks: int, empty: tuple[int, ...] = ()) -> FoldPlan:
    """The plan by which `ranks` ranks evaluate `fold_tree(order, leaves)` without `empty` leaves.

    Raises ValueError, naming the sizes that fit, when `ranks` does not divide `leaves`, and when
    all leaves of a rank are empty.
    """
    if ranks < 1 or leaves % ranks:
        fit = ", ".join(str(n) for n in range(1, leaves + 1) if leaves % n == 0)
        raise ValueError(
            f"tensor-parallel size {ranks} does not divide {leaves} leaves: use one of {fit}"
        )
    share = leaves // ranks
    sent: list[list[Expression]] = [[] for _ in range(ranks)]

    def cut(node: Expression) -> FinalExpression:
        first, last = _span(node)
        rank = first // share
        if rank == last // share:
            sent[rank].append(node)
            return Slot(rank, len(sent[rank]) - 1)
        assert not isinstance(node, int)  # a single leaf never spans two ranks
        return cut(node[0]), cut(node[1])

    tree = _without(fold_tree(order, leaves), empty)
    final = None if tree is None else cut(tree)
    if final is None or not all(sent):
        raise ValueError(f"a rank of {ranks} holds none of the leaves that are not empty")
    return FoldPlan(leaves, tuple(tuple(roots) for roots in sent), final)


def evaluate(
    node: Tree[Operand], read: Callable[[Operand], Value], add: Callable[[Value, Value], Value]
) -> Value:
    """Evaluate an expression: left operand first, one `add` a node, beginning with leaf 0."""
    if not isinstance(node, tuple):
        return read(node)
    left = evaluate(node[0], read, add)
    return add(left, evaluate(node[1], read, add))


def substitute(
    node: Tree[Operand], replacement: Callable[[Operand], Tree[Replaced]]
) -> Tree[Replaced]:
    """The same expression with another operand, or a whole tree, for each of its operands."""
    if not isinstance(node, tuple):
        return replacement(node)
    return substitute(node[0], replacement), substitute(node[1], replacement)


def operands(node: Tree[Operand]) -> list[Operand]:
    """The operands that an expression reads, in order."""
    return evaluate(node, lambda operand: [operand], lambda left, right: left + right)


def describe(node: Expression) -> str:
    """An expression in words, such as `((l0+l1)+(l2+l3))`."""
    return evaluate(node, lambda i: f"l{i}", lambda a, b: f"({a}+{b})")


def _without(node: Expression, empty: tuple[int, ...]) -> Expression | None:
    """The expression without empty leaves: of a sum with one empty side, the other stays."""
    if isinstance(node, int):
        return None if node in empty else node
    left, right = (_without(side, empty) for side in node)
    if left is None or right is None:
        return right if left is None else left
    return left, right


def _chain(parts: Sequence[Expression]) -> Expression:
    total = parts[0]
    for part in parts[1:]:
        total = (total, part)
    return total


def _balanced(first: int, count: int) -> Expression:
    if count == 1:
        return first
    half = count // 2
    return _balanced(first, half), _balanced(first + half, half)


def _span(node: Expression) -> tuple[int, int]:
    """First and last leaf of a subtree; leaves stand in ascending order in every fold tree."""
    if isinstance(node, int):
        return node, node
    return _span(node[0])[0], _span(node[1])[1]
