"""The verbs of weight updates, by vLLM's names and SGLang's; long ones report as they go on."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tpdet.control.weight_orders import CarrierInfo, TensorsInfo
from tpdet.errors import WeightUpdateError
from tpdet.requests.body.problems import ApiError, bad_request
from tpdet.server.leader.bridge import Bridge
from tpdet.server.leader.canary import Canary
from tpdet.server.leader.control import ControlAnswer, ControlCall, ControlPlane, Handler
from tpdet.server.wire import weight_fields as fields

if TYPE_CHECKING:
    from tpdet.engine import Engine

_log = logging.getLogger("tpdet.server")


class WeightSources:
    """Where weights may come from: directories below `root`, senders at one of `peers`."""

    def __init__(self, root: str | None, peers: tuple[str, ...]) -> None:
        self._root = None if root is None else Path(root).resolve()
        self._peers = peers

    def check_directory(self, name: str) -> str:
        """The directory's real path. Raises ApiError: 403 outside the root, 400 if there is none.

        Neither it nor a file in it may be a link that leads out.
        """
        if self._root is None:
            raise _forbidden(
                "no directory of weights is open: start the server with --weights-root DIR"
            )
        try:
            return self._resolve(self._root, name)
        except (OSError, RuntimeError, ValueError) as error:  # too long, links in a circle, NUL
            raise bad_request(
                f"{name!r} cannot be read as a directory below --weights-root", "weight_dir"
            ) from error

    def without_root(self, message: str) -> str:
        """A message for clients: directories as below the root."""
        return message if self._root is None else message.replace(f"{self._root}/", "")

    @staticmethod
    def _resolve(root: Path, name: str) -> str:
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise _forbidden(f"{name!r} is not below --weights-root")
        if not path.is_dir():
            raise bad_request(f"{name!r} is no directory below --weights-root", "weight_dir")
        for entry in path.iterdir():
            if not entry.resolve().is_relative_to(root):
                raise _forbidden(f"{entry.name!r} in {name!r} is a link out of --weights-root")
        return str(path)

    def check_peer(self, info: CarrierInfo) -> None:
        """Refuse (ApiError, 403) a sender that is not among the peers."""
        if not self._peers:
            raise _forbidden("no sender is let in: start the server with --weights-peers ADDRESS")
        if info.master_address and info.master_address not in self._peers:
            raise _forbidden(f"{info.master_address!r} is none of --weights-peers")


class WeightVerbs:
    """Handlers of the verbs, which begin, fill and finish an update of the engine's weights."""

    def __init__(
        self,
        engine: "Engine",
        control: ControlPlane,
        bridge: Bridge,
        canary: Canary,
        sources: WeightSources,
        look: Callable[[], None],
    ) -> None:
        """look: called all the while an update waits; raises what ends this process."""
        self._engine, self._control, self._bridge = engine, control, bridge
        self._canary, self._sources, self._look = canary, sources, look

    @property
    def handlers(self) -> dict[str, Handler]:
        """By verb."""
        return {
            "init_weight_transfer_engine": self._with_problems(self._init),
            "start_weight_update": self._with_problems(self._start),
            "update_weights": self._with_problems(self._update),
            "finish_weight_update": self._with_problems(self._finish),
            "shutdown_weight_transfer_engine": self._with_problems(self._shutdown),
            "update_weights_from_disk": self._with_problems(self._from_disk),
            "init_weights_update_group": self._with_problems(self._init_group),
            "update_weights_from_distributed": self._with_problems(self._from_group),
            "destroy_weights_update_group": self._with_problems(self._destroy_group),
        }

    def _with_problems(self, handler: Callable[[ControlCall], ControlAnswer]) -> Handler:
        """The handler with its errors as those that clients get."""

        def handle(call: ControlCall) -> ControlAnswer:
            try:
                return handler(call)
            except WeightUpdateError as error:
                message = self._sources.without_root(str(error))
                code = {409: "conflict", 502: "sender_lost"}.get(error.status)
                raise ApiError(error.status, message, code=code) from error

        return handle

    def _init(self, call: ControlCall) -> ControlAnswer:
        self._open(cast(fields.InitFields, call.fields).init_info)
        return ControlAnswer({"message": "Weight transfer initialized"})

    def _start(self, call: ControlCall) -> ControlAnswer:
        if not cast(fields.StartFields, call.fields).is_checkpoint_format:
            raise bad_request(
                "is_checkpoint_format must be true: tensors are sent whole, by their names in "
                "checkpoints",
                "is_checkpoint_format",
            )
        self._engine.weights.start_update()
        return ControlAnswer({"message": "Weight update started"})

    def _update(self, call: ControlCall) -> ControlAnswer:
        values = cast(fields.UpdateFields, call.fields)
        infos = values.update_info
        if values.weight_dir is not None:  # a whole update in one call
            if infos is not None:
                raise bad_request(
                    "weight_dir is a whole update: leave update_info out", "update_info"
                )
            self._load(values.weight_dir, values.weight_version)
        elif values.weight_version is not None:
            raise bad_request(
                "weight_version is for weight_dir: name the weights when you finish the update",
                "weight_version",
            )
        else:
            for info in infos if isinstance(infos, list) else [infos or TensorsInfo()]:
                self._receive(info)
        return ControlAnswer({"message": "Weights updated"})

    def _finish(self, call: ControlCall) -> ControlAnswer:
        self._commit(cast(fields.FinishFields, call.fields).weight_version)
        return ControlAnswer({"message": "Weight update finished", **self._named})

    def _shutdown(self, call: ControlCall) -> ControlAnswer:
        self._engine.weights.close_carrier()
        return ControlAnswer({"message": "Weight transfer shut down"})

    def _from_disk(self, call: ControlCall) -> ControlAnswer:
        values = cast(fields.FromDiskFields, call.fields)
        self._sources.check_directory(values.model_path)
        if values.abort_all_requests:
            self._control.abort_all()
        kept = len(self._engine.interventions.request_ids())
        self._load(values.model_path, values.weight_version)
        content = {"success": True, "message": "Succeeded to update model weights."}
        return ControlAnswer({**content, "num_paused_requests": kept, **self._named})

    def _init_group(self, call: ControlCall) -> ControlAnswer:
        values = cast(fields.GroupFields, call.fields)
        self._open(
            CarrierInfo(
                backend=values.backend,
                master_address=values.master_address,
                master_port=int(values.master_port),
                rank_offset=values.rank_offset,
                world_size=values.world_size,
                group_name=values.group_name,
            )
        )
        return _succeeded("Succeeded to initialize custom process group.")

    def _from_group(self, call: ControlCall) -> ControlAnswer:
        """Tensors of an update that begins with the first call, and ends once all are here."""
        values = cast(fields.FromGroupFields, call.fields)
        weights = self._engine.weights
        self._check_group(values.group_name)
        if values.abort_all_requests:
            self._control.abort_all()
        if weights.state != "open":
            weights.start_update()
        self._receive(
            TensorsInfo(names=values.names, dtype_names=values.dtypes, shapes=values.shapes)
        )
        missing = len(weights.missing)
        if missing:
            return _succeeded(f"Succeeded to update parameter online, {missing} are missing.")
        self._commit(values.weight_version)
        return _succeeded("Succeeded to update parameter online.")

    def _destroy_group(self, call: ControlCall) -> ControlAnswer:
        self._check_group(cast(fields.DestroyFields, call.fields).group_name)
        self._engine.weights.close_carrier()
        return _succeeded("Succeeded to destroy custom process group.")

    def _check_group(self, name: str) -> None:
        """Refuse (ApiError, 400) another name than that of the sender's group, if there is one."""
        joined = self._engine.weights.group_name
        if joined not in ("", name):
            raise bad_request(
                f"group_name is {name!r}, the sender's group is {joined!r}", "group_name"
            )

    def _open(self, info: CarrierInfo) -> None:
        if info.backend != "ipc":
            self._sources.check_peer(info)
        self._engine.weights.open_carrier(info, self._tick)
        _log.info("joined a sender's %s group as %d ranks", info.backend, info.world_size)

    def _load(self, directory: str, version: str | None) -> None:
        """A whole update from a directory: nothing has changed where it is refused."""
        weights = self._engine.weights
        info = TensorsInfo(weight_dir=self._sources.check_directory(directory))
        weights.start_update()
        try:
            self._receive(info)
        except BaseException:
            if weights.state == "open":
                weights.abandon_update()
            raise
        self._commit(version)

    def _receive(self, info: TensorsInfo) -> None:
        info = self._checked(info)
        self._canary.abandon()
        self._control.settle()
        self._engine.weights.update(info, self._tick)

    def _checked(self, info: TensorsInfo) -> TensorsInfo:
        if not info.weight_dir:
            return info
        if info.names or info.ipc_handles:
            raise bad_request("weight_dir stands for all tensors: leave names out", "update_info")
        return TensorsInfo(weight_dir=self._sources.check_directory(info.weight_dir))

    def _commit(self, version: str | None) -> None:
        self._canary.abandon()
        self._control.settle()
        self._engine.weights.finish_update(version)
        self._canary.forget()
        self._control.publish()

    @property
    def _named(self) -> dict[str, str]:
        weights = self._engine.weights
        return {"weight_version": weights.version, "weights": weights.digest}

    def _tick(self) -> None:
        self._bridge.report(self._engine)
        self._look()


def _succeeded(message: str) -> ControlAnswer:
    return ControlAnswer({"success": True, "message": message})


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, code="not_permitted")
