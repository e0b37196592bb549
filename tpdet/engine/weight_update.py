"""Updates of the weights on rank 0: begun, filled by calls, and finished whole or not at all.

    weights.open_carrier(info)      ranks join a sender's group, if tensors come through one
    weights.start_update()
    weights.update(info)            tensors arrive and are laid out in place, in any number of calls
    weights.finish_update("step-7") the digest is known, and the next step computes by these weights

From the first byte until the end no step is made. An update that ends without all tensors leaves
the state "torn": the weights are neither the old nor the new, and no step is made until another
update or a reload is complete.
"""

import logging
import time
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from tpdet.control import weight_orders
from tpdet.errors import (
    CheckpointError,
    IntegrityError,
    NotFoundError,
    ReloadError,
    WeightUpdateError,
)
from tpdet.requests.weight_versions import WeightVersions
from tpdet.runner.rank_weights import RankWeights
from tpdet.runner.start.loading import Tick

_STATUS = {
    CheckpointError.code: 400,
    NotFoundError.code: 400,
    WeightUpdateError.code: 400,
    IntegrityError.code: 409,
}
"""HTTP's for what a rank refuses, by its code; others are a sender's fault."""
SHOWN_NAMES = 20
"""The most names of missing tensors in a message; the error has all of them."""

_log = logging.getLogger("tpdet.engine")


class Lead(Protocol):
    """Has every rank obey an order; the model's digest where weights are whole then."""

    def __call__(self, order: weight_orders.WeightOrder, tick: Tick) -> str | None:
        """Raises ReloadError where a rank cannot."""


def _no_tick() -> None:
    """Do nothing between two tensors."""


class EngineWeights:
    """The weights that serve, as an engine's owner sees and changes them.

    torn: whether they are neither the old nor the new, which only a complete update ends.
    """

    torn = False
    _open = False
    _missing: tuple[str, ...] = ()

    def __init__(
        self,
        ranks: RankWeights,
        versions: WeightVersions,
        lead: Lead,
        pending: Callable[[], bool],
        adopt: Callable[[], None],
    ) -> None:
        """pending: whether a step was launched and not committed; adopt: serve by new weights."""
        self._ranks, self._versions, self._lead = ranks, versions, lead
        self._pending, self._adopt = pending, adopt
        self._began = 0.0
        self._last: weight_orders.TensorsInfo | None = None

    @property
    def state(self) -> Literal["whole", "open", "torn"]:
        """ "open" between the start and the finish of an update, whatever was before; else "torn",
        where one left the weights incomplete; else "whole".
        """
        if self._open:
            return "open"
        return "torn" if self.torn else "whole"

    @property
    def version(self) -> str:
        """What the present weights are called."""
        return self._versions.version

    @property
    def number(self) -> int:
        """How many updates came before the present weights."""
        return self._versions.number

    @property
    def digest(self) -> str:
        """The model digest of the present weights."""
        return self._versions.digest

    @property
    def usable(self) -> bool:
        """Whether a step may be made: the weights are those that `digest` names, all of them."""
        return not self.torn and not self._ranks.begun

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of tensors that the open update, or the one that tore, still waits for."""
        return self._missing if self._ranks.update is None else self._ranks.missing

    @property
    def group_name(self) -> str:
        """The name of the sender's group that was joined; "" for none, and without a sender."""
        info = self._ranks.carrier_info
        return "" if info is None else info.group_name

    def open_carrier(self, info: weight_orders.CarrierInfo, tick: Tick = _no_tick) -> None:
        """Join a sender's group, in place of one joined before. Raises WeightUpdateError."""
        self._refuse_begun("a sender's group is joined")
        self._ranks.check(info)
        self._order(info, tick)

    def close_carrier(self) -> None:
        """Leave the sender's group, and give up an update that is open."""
        self.abandon_update()
        self._order(weight_orders.CloseCarrier(), _no_tick)

    def start_update(self) -> None:
        """Begin an update; nothing changes before the first tensor. Raises WeightUpdateError."""
        if self._open:
            raise WeightUpdateError(
                "an update of the weights is open already: finish it, or give it up by "
                "/shutdown_weight_transfer_engine",
                409,
            )
        order = weight_orders.BeginUpdate()
        self._ranks.check(order)
        self._order(order, _no_tick)
        self._open, self._began = True, time.monotonic()

    def update(self, info: weight_orders.TensorsInfo, tick: Tick = _no_tick) -> None:
        """Receive tensors and lay them out over the old ones; `tick` is called meanwhile.

        Without names they are those of the call before, as vLLM has it.

        Raises WeightUpdateError: 400 and 409 before a byte is taken, 502 where a sender is gone;
        the state is torn then.
        """
        if not self._open:
            raise WeightUpdateError("no update of the weights is open: start one first", 409)
        info = self._named(info)
        if self._pending():
            raise WeightUpdateError("a step is pending: settle it first", 409)
        self._ranks.check(info)
        try:
            self._order(info, tick)
        except WeightUpdateError:
            if not info.weight_dir or self._ranks.begun:
                self._open, self.torn = False, True
            raise

    def _named(self, info: weight_orders.TensorsInfo) -> weight_orders.TensorsInfo:
        """The tensors of a call; where it names none, those that the last call named."""
        if info.names or info.weight_dir:
            self._last = info
            return info
        if self._last is None or self._last.weight_dir:
            raise WeightUpdateError("names no tensors, and none were named before: send names")
        last = self._last
        return msgspec.structs.replace(
            info, names=last.names, dtype_names=last.dtype_names, shapes=last.shapes
        )

    def finish_update(self, version: str | None = None) -> str:
        """Serve by the new weights from now on; their digest.

        Raises WeightUpdateError (409) where tensors are missing, naming them, and where the version
        names other weights: the state is torn then, unless nothing was received at all.
        """
        if self.state == "whole" or self._ranks.update is None:
            raise WeightUpdateError("no update of the weights is open: start one first", 409)
        missing = self._ranks.missing
        if missing or not self._open:
            self._give_up()
            names = ", ".join(missing[:SHOWN_NAMES])
            raise WeightUpdateError(
                f"the update is not complete, {len(missing)} tensors did not arrive: {names}",
                409,
                missing,
            )
        self._open, self.torn = False, True  # until all of the following has been done
        digest = self._order(weight_orders.FinishUpdate(commit=True), _no_tick)
        assert digest is not None
        try:
            self._versions.advance(digest, version)
        except ReloadError as error:
            raise WeightUpdateError(str(error), 409) from None
        self.torn, self._missing = False, ()
        self._adopt()
        seconds = time.monotonic() - self._began
        _log.warning("weights %s (%s) in place after %.1f s", self.version, digest[:12], seconds)
        return digest

    def abandon_update(self) -> None:
        """Give up an open update: torn if a tensor arrived, else as before it."""
        if self._open:
            self._give_up()

    def reloaded(self) -> None:
        """Take note that another checkpoint was loaded whole."""
        self.torn, self._missing = False, ()

    def refuse_reload(self) -> None:
        """Refuse (ReloadError) a reload while an update is open."""
        if self._open:
            raise ReloadError("an update of the weights is open: finish it first", 75, "busy")

    def _give_up(self) -> None:
        self._open, self.torn = False, not self.usable
        self._missing = self._ranks.missing if self._ranks.begun else self._missing
        self._order(weight_orders.FinishUpdate(commit=False), _no_tick)

    def _refuse_begun(self, what: str) -> None:
        if self._open and self._ranks.begun:
            raise WeightUpdateError(
                f"{what} between updates, and one has begun: finish it, or give it up by "
                "/shutdown_weight_transfer_engine",
                409,
            )

    def _order(self, order: weight_orders.WeightOrder, tick: Tick) -> str | None:
        try:
            return self._lead(order, tick)
        except ReloadError as error:
            raise WeightUpdateError(str(error), _STATUS.get(error.code, 502)) from error
