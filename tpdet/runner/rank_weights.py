"""One rank's part in an update of the weights while the engine stays as it is."""

from collections.abc import Callable, Sequence

import torch

from tpdet.checkpoint.transfer.announced import AnnouncedTensor, announced
from tpdet.checkpoint.transfer.arriving import ArrivingWeights
from tpdet.checkpoint.transfer.carriers import WeightCarrier
from tpdet.checkpoint.transfer.open import check_carrier, open_carrier
from tpdet.comm.world.world import World
from tpdet.control import weight_orders
from tpdet.errors import CheckpointError, ReloadError, WeightUpdateError
from tpdet.models.decoder import Decoder
from tpdet.runner.start.loading import Loader, Tick, compile_hash, refusing_together


class RankWeights:
    """Obeys orders about weights. `obey` is collective: all ranks call it together, in one order.

    carrier: the connection to a sender, if there is one; update: what has arrived of an update.
    """

    carrier: WeightCarrier | None = None
    carrier_info: weight_orders.CarrierInfo | None = None
    update: ArrivingWeights | None = None

    def __init__(
        self, loader: Loader, decoder: Decoder, world: World, device: torch.device, timeout: float
    ) -> None:
        """timeout: seconds that a sender may be silent."""
        self._loader, self._decoder, self._world = loader, decoder, world
        self._device, self._timeout = device, timeout
        self._overwrites, self._from_directory = False, ""

    def check(self, order: weight_orders.WeightOrder) -> None:
        """Refuse (WeightUpdateError, 400) an order before any rank hears of it."""
        if self._loader.packed and not isinstance(order, weight_orders.LoadModel):
            raise WeightUpdateError(
                "the weights are packed, and tensors that are sent are not: serve with --weights "
                "dense",
                409,
            )
        if isinstance(order, weight_orders.CarrierInfo):
            check_carrier(order, self._world.size, self._device)
        elif isinstance(order, weight_orders.TensorsInfo) and not order.weight_dir:
            assert self.update is not None
            if self._overwrites:
                raise WeightUpdateError(
                    "a directory was all of this update: finish it, and send tensors in the next",
                    409,
                )
            if self.carrier is None:
                raise WeightUpdateError("no sender is known: init its group first", 409)
            try:
                self.update.check(self._announced(order))
            except CheckpointError as error:
                raise WeightUpdateError(str(error)) from None

    def obey(self, order: weight_orders.WeightOrder, tick: Tick) -> str | None:
        """Do what an order says; the model's digest where weights are complete and in place.

        Raises ReloadError, on every rank, where one of them cannot.
        """
        match order:
            case weight_orders.LoadModel():
                digest = self._loader.reload(self._decoder, order.model, tick)
                self._give_up()
                return digest
            case weight_orders.CarrierInfo():
                self._open(order, tick)
            case weight_orders.CloseCarrier():
                self._close()
            case weight_orders.BeginUpdate():
                self._give_up()
                self.update = self._loader.arriving(self._decoder)
            case weight_orders.TensorsInfo():
                self._receive(order, tick)
            case weight_orders.FinishUpdate():
                return self._finish(order.commit)
        return None

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of tensors that an update still waits for."""
        return () if self.update is None or self._from_directory else self.update.missing

    @property
    def begun(self) -> bool:
        """Whether the weights are no longer those from before the update."""
        return self.update is not None and (self.update.begun or self._overwrites)

    def close(self) -> None:
        """Leave a sender, and let go of the weights; for good."""
        self._close()
        self._give_up()
        del self._decoder, self._loader

    def _open(self, info: weight_orders.CarrierInfo, tick: Tick) -> None:
        self._close()
        try:
            with refusing_together(self._world):
                compile_hash(self._device)
                rank = self._world.rank
                self.carrier = open_carrier(info, rank, self._device, self._timeout, tick)
                self.carrier_info = info
        except ReloadError:
            self._close()
            raise

    def _close(self) -> None:
        if self.carrier is not None:
            self.carrier.close()
        self.carrier = self.carrier_info = None

    def _receive(self, info: weight_orders.TensorsInfo, tick: Tick) -> None:
        """Lay out what a sender sends; on an error of one rank all of them leave the sender."""
        assert self.update is not None
        update = self.update
        if info.weight_dir:
            checked = self._loader.check(info.weight_dir, tick)
            self._overwrites, self._from_directory = True, ""
            with refusing_together(self._world):
                self._loader.overwrite(self._decoder, checked, tick)
            self._from_directory = self._loader.settle(checked)
            return
        tensors = self._announced(info)
        try:
            with refusing_together(self._world):
                if self.carrier is None:
                    raise WeightUpdateError("no sender is known: init its group first", 409)
                update.announce(tensors)
                self.carrier.receive(tensors, info, _ticking(update, tick), tick)
        except ReloadError:
            self._close()
            raise
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
                torch.cuda.empty_cache()

    @staticmethod
    def _announced(info: weight_orders.TensorsInfo) -> Sequence[AnnouncedTensor]:
        return announced(info.names, info.dtype_names, info.shapes)

    def _finish(self, commit: bool) -> str | None:
        digest = None
        try:
            if commit:
                assert self.update is not None
                digest = self._from_directory or self._loader.commit(self.update)
        finally:
            self._give_up()
        return digest

    def _give_up(self) -> None:
        """Forget an update that is over."""
        if self.update is not None:
            self.update.close()
        self.update, self._overwrites, self._from_directory = None, False, ""


def _ticking(update: ArrivingWeights, tick: Tick) -> Callable[[dict[str, torch.Tensor]], None]:
    def take(tensors: dict[str, torch.Tensor]) -> None:
        update.arrive(tensors)
        tick()

    return take
