"""How one prompt is pooled: what a request for a vector, labels or a score asks for."""

import msgspec

from tpdet.errors import RequestError

NOT_POOLED = (
    "this model generates text: for vectors start it with --task embed, for scores with --task "
    "score, and for labels and rewards with a checkpoint that has a score head"
)

ONLY_POOLED = "this model pools (--task {}) and generates no text: start it with --task generate"


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a pooled answer, by vLLM's names.

    dimensions: of a vector, which is cut before it gets its length; None for all. use_activation:
    whether a vector gets the length 1, and labels their sigmoid or softmax; None as the model
    does. token_ids: of a score by tokens, those of "yes" and "no". row: which is pooled; the
    engine says it.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    token_ids: tuple[int, ...] = ()
    row: str = ""

    def __post_init__(self) -> None:
        cut = self.dimensions
        if cut is not None and (isinstance(cut, bool) or not isinstance(cut, int) or cut < 1):
            raise RequestError(f"dimensions {cut!r} must be a whole number from 1 on", "dimensions")
        if self.use_activation is not None and not isinstance(self.use_activation, bool):
            raise RequestError(
                f"use_activation {self.use_activation!r} must be True or False", "use_activation"
            )
