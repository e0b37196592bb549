"""The fields of the verbs of weight updates, as routes of vLLM, prime-rl and SGLang name them."""

from typing import Annotated, Literal

import msgspec

from tpdet.control.weight_orders import CarrierInfo, Count, TensorsInfo


class ControlFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """No fields; the base of those of a verb that has some."""


SGLANG_GROUP = "weight_update_group"
"""The name of a sender's group where SGLang's clients give none."""


class InitFields(ControlFields, frozen=True, kw_only=True):
    """How to meet the sender."""

    init_info: CarrierInfo


class StartFields(ControlFields, frozen=True, kw_only=True):
    """`is_checkpoint_format` must be true: tensors come whole and by their names in checkpoints."""

    is_checkpoint_format: bool = True


class UpdateFields(ControlFields, frozen=True, kw_only=True):
    """Tensors that come now, or a directory that is a whole update by itself."""

    update_info: TensorsInfo | list[TensorsInfo] | None = None
    weight_dir: str | None = None
    weight_version: str | None = None


class FinishFields(ControlFields, frozen=True, kw_only=True):
    """What the new weights are called; their number without it."""

    weight_version: str | None = None


class FromDiskFields(ControlFields, frozen=True, kw_only=True):
    """SGLang's fields; those that follow `flush_cache` change nothing: it holds always."""

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: bool = True
    keep_pause: bool = False
    is_async: bool = False
    torch_empty_cache: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0


class GroupFields(ControlFields, frozen=True, kw_only=True):
    """SGLang's fields of a sender's group; AReaL sends the port as text."""

    master_address: str
    master_port: Count | Annotated[str, msgspec.Meta(pattern="^[0-9]{1,5}$")]
    rank_offset: Count
    world_size: Count
    group_name: str = SGLANG_GROUP
    backend: Literal["nccl", "gloo"] = "nccl"


class FromGroupFields(ControlFields, frozen=True, kw_only=True):
    """SGLang's fields of tensors that come now; the cache is always flushed.

    No `load_format`: one says that tensors come joined in another way than `shapes` tell.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = SGLANG_GROUP
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: None = None
    torch_empty_cache: bool = False


class DestroyFields(ControlFields, frozen=True, kw_only=True):
    """SGLang's field of a sender's group."""

    group_name: str = SGLANG_GROUP


WEIGHT_FIELDS: dict[str, type[ControlFields]] = {
    "init_weight_transfer_engine": InitFields,
    "start_weight_update": StartFields,
    "update_weights": UpdateFields,
    "finish_weight_update": FinishFields,
    "shutdown_weight_transfer_engine": ControlFields,
    "update_weights_from_disk": FromDiskFields,
    "init_weights_update_group": GroupFields,
    "update_weights_from_distributed": FromGroupFields,
    "destroy_weights_update_group": DestroyFields,
}
