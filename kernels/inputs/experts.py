"""How rows choose experts, and which of a layer's experts and lanes a rank holds."""

from dataclasses import dataclass
from typing import NamedTuple

from tpdet.kernels.order import Expression


@dataclass(frozen=True)
class Routing:
    """How a row chooses `chosen` of `experts`.

    sigmoid: by scores 1 / (1 + exp(-l)), to which a bias may be added for the choice alone; else by
    the logits l themselves. over_chosen: the weights of the chosen sum to `scale`; else those of
    all experts would.
    """

    experts: int
    chosen: int
    sigmoid: bool = False
    over_chosen: bool = True
    scale: float = 1.0


class Lanes(NamedTuple):
    """This rank's `experts`, by id, of `total` in the model; its `held` lanes are equal groups of
    them, and `roots` are expressions over these lanes, counted from 0."""

    experts: range
    total: int
    held: int
    roots: tuple[Expression, ...]


class SharedForm(NamedTuple):
    """Leaves of a shared expert on a rank: of so many inputs each, for these lanes, beside
    `chosen` experts of a row; gated: times a row's gate."""

    lanes: Lanes
    leaf: int
    chosen: int
    gated: bool


@dataclass(frozen=True, order=True)
class ExpertLayer:
    """Whole experts of a layer on one rank: `held` of `total`, of which a row chooses `chosen`.

    Weights gate_up [held, 2 * width, hidden], interleaved, and down [held, hidden, width].
    """

    hidden: int
    width: int
    held: int
    total: int
    chosen: int

    def mean_rows(self, tokens: int) -> float:
        """Rows of an expert in a step of `tokens`, where every expert is as likely."""
        return tokens * self.chosen / self.total

    def __str__(self) -> str:
        experts = f"{self.held} of {self.total} experts, {self.chosen} chosen"
        return f"experts {self.width}x{self.hidden} ({experts})"
