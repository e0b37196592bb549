"""Opens what a sender's group asks for, after checking what can be checked before a byte comes."""

import torch

from tpdet.checkpoint.transfer.carriers import Tick, WeightCarrier
from tpdet.checkpoint.transfer.cuda_ipc import IpcCarrier
from tpdet.checkpoint.transfer.gloo import GlooCarrier
from tpdet.checkpoint.transfer.nccl import NcclCarrier
from tpdet.control.weight_orders import CarrierInfo
from tpdet.errors import WeightUpdateError

_MOST_PORT = (1 << 16) - 1
MOST_CHUNK_BYTES = 8 << 30


def check_carrier(info: CarrierInfo, ranks: int, device: torch.device) -> None:
    """Refuse (WeightUpdateError, 400) a group that this server's ranks cannot join."""
    if info.backend == "ipc":
        if device.type != "cuda":
            raise WeightUpdateError("backend ipc needs a GPU: use gloo or a directory")
        return
    if not 1 <= info.packed_buffer_size_bytes <= MOST_CHUNK_BYTES:
        raise WeightUpdateError(
            f"packed_buffer_size_bytes is {info.packed_buffer_size_bytes}: 1 to "
            f"{MOST_CHUNK_BYTES} are possible"
        )
    if info.rank_offset < 1 or info.rank_offset + ranks > info.world_size:
        raise WeightUpdateError(
            f"rank_offset {info.rank_offset} and {ranks} ranks of this server do not fit into a "
            f"world_size of {info.world_size}: it takes {info.rank_offset + ranks}"
        )
    address = bool(info.master_address) and 1 <= info.master_port <= _MOST_PORT
    if info.backend == "nccl":
        if device.type != "cuda":
            raise WeightUpdateError("backend nccl needs a GPU: use gloo or a directory")
        if address == bool(info.nccl_unique_id_b64):
            raise WeightUpdateError(
                "give master_address and master_port, or nccl_unique_id_b64: one of the two"
            )
    elif not address:
        raise WeightUpdateError("backend gloo needs master_address and master_port")


def open_carrier(
    info: CarrierInfo, rank: int, device: torch.device, timeout: float, tick: Tick
) -> WeightCarrier:
    """The connection of rank `rank` of the server to a sender. Raises WeightUpdateError."""
    if info.backend == "ipc":
        return IpcCarrier(device)
    if info.backend == "gloo":
        return GlooCarrier(info, rank, timeout, tick)
    return NcclCarrier(info, rank, device, timeout, tick)
