"""Which rows of a step belong to which sequence, and on which pages their keys and values lie."""

from dataclasses import dataclass

from tpdet.kernels.order import PAGE_TOKENS


@dataclass(frozen=True)
class PagedSequence:
    """One sequence's rows in a step.

    Its `count` rows begin at row `first_row` and stand at positions `start`, `start + 1`, ...;
    `pages[i]` holds positions 256 * i to 256 * i + 255.
    """

    first_row: int
    count: int
    start: int
    pages: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.pages) * PAGE_TOKENS < self.start + self.count:
            raise ValueError(
                f"{len(self.pages)} pages do not hold positions up to {self.start + self.count - 1}"
            )

    @property
    def length(self) -> int:
        """Positions that hold keys once this step's are stored."""
        return self.start + self.count
