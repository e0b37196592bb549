"""The pause of a server: what becomes of running and of new requests, until it is resumed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpdet.engine import Engine


class Pause:
    """Whether a server is paused: `mode` is None, or that of the pause.

    In "abort" and "wait" new requests are refused. In "keep" the engine makes no step: requests,
    running and new, stay where they are.
    """

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self.mode: str | None = None

    @property
    def refuses(self) -> bool:
        """Whether new requests are refused."""
        return self.mode in ("abort", "wait")

    @property
    def keeps(self) -> bool:
        """Whether requests are kept, so that none makes progress."""
        return self.mode == "keep"

    def begin(self, mode: str, keep_keys: bool = False) -> None:
        """Pause, or go on to pause, in this mode; keep_keys: as in `Interventions.freeze`."""
        self.mode = mode
        self._engine.interventions.freeze(mode == "keep", keep_keys)

    def end(self) -> None:
        """Resume; nothing changes where there is no pause."""
        self.mode = None
        self._engine.interventions.freeze(False)
