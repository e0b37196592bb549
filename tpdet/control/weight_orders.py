"""What ranks do about weights, as a step plan without rows says it: all of them, together."""

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
"""A port, a rank or a number of ranks."""
ByteCount = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


class CarrierInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="carrier"):
    """How a sender is met: fields as in vLLM's `init_info`, and SGLang's `backend`, `group_name`.

    Rank r of the server is rank `rank_offset + r` of the sender's group of `world_size`; the sender
    is its rank 0. `nccl_unique_id_b64` stands for an address. `packed`: tensors come joined, in
    chunks of about `packed_buffer_size_bytes`, unless the tensors' call says otherwise.
    """

    backend: Literal["nccl", "gloo", "ipc"] = "nccl"
    master_address: str = ""
    master_port: Count = 0
    nccl_unique_id_b64: str = ""
    rank_offset: Count = 1
    world_size: Count = 0
    group_name: str = ""
    packed: bool = False
    packed_buffer_size_bytes: ByteCount = 1 << 30
    packed_num_buffers: Count = 2


class TensorsInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tensors"):
    """Tensors that come next, in this order: fields as in vLLM's `update_info`.

    `packed` and its size: as in `CarrierInfo`, where given. `ipc_handles`: for each tensor, by the
    UUID of the GPU that holds it, what opens its memory (`transfer/cuda_ipc.py`). `weight_dir`: a
    directory on the server's disk instead of everything else.
    """

    names: list[str] = []
    dtype_names: list[str] = []
    shapes: list[list[int]] = []
    packed: bool | None = None
    packed_buffer_size_bytes: ByteCount | None = None
    packed_num_buffers: Count | None = None
    ipc_handles: list[dict[str, str]] = []
    weight_dir: str = ""


class LoadModel(msgspec.Struct, frozen=True, tag="reload"):
    """Load the weights of a model (directory or hub name) in place of the present ones."""

    model: str


class BeginUpdate(msgspec.Struct, frozen=True, tag="begin"):
    """Make ready for tensors."""


class FinishUpdate(msgspec.Struct, frozen=True, tag="finish"):
    """Take over what arrived, all of which is there; or give it up."""

    commit: bool


class CloseCarrier(msgspec.Struct, frozen=True, tag="close"):
    """Leave the sender's group."""


WeightOrder = LoadModel | CarrierInfo | BeginUpdate | TensorsInfo | FinishUpdate | CloseCarrier
