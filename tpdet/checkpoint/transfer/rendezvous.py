"""How a trainer's NCCL group is met: by a key of its store, or by the unique id itself.

The id comes over the store as a Python object that other receivers unpack with Python's own
unpacker, which runs what the sender names. Here the bytes of the one object that may come are
compared with a fixed form, and its 128 bytes taken; anything else is refused.
"""

import base64
import binascii
import re
import threading
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from tpdet.control.weight_orders import CarrierInfo
from tpdet.errors import WeightUpdateError

UNIQUE_ID_BYTES = 128
_ID_KEY, _BARRIER_KEY = "broadcast_from/0/0", "broadcast_from/0/1"
_UNIQUE_ID = re.compile(
    rb"\x80[\x04\x05]\x95.{8}\x8c\x07_ctypes\x94\x8c\t_unpickle\x94\x93\x94"
    rb"\x8c.[A-Za-z0-9_.]{1,255}\x94\x8c\x0cncclUniqueId\x94\x93\x94}\x94C\x80(.{128})\x94"
    rb"\x86\x94\x86\x94R\x94\.",
    re.DOTALL,
)
"""A ctypes structure of that name with 128 bytes, in protocols 4 and 5."""
_BARRIER = re.compile(rb"\x80[\x04\x05]\x95.{8}\x8c.(barrier_[0-9a-f-]{1,64})\x94\.", re.DOTALL)


def unique_id_of(info: CarrierInfo, rank: int, timeout: float) -> bytes:
    """The 128 bytes of a sender's group. rank: this rank's in the group.

    Raises WeightUpdateError: 400 for an id that is none, 502 where the sender cannot be met.
    """
    if info.nccl_unique_id_b64:
        return _decoded(info.nccl_unique_id_b64)
    try:
        store = TCPStore(
            info.master_address,
            info.master_port,
            info.world_size,
            False,
            timedelta(seconds=timeout),
            use_libuv=False,
        )
        data = store.get(_ID_KEY)
    except (DistNetworkError, DistStoreError, RuntimeError) as error:
        where = f"{info.master_address}:{info.master_port}"
        raise WeightUpdateError(f"the sender's store at {where}: {error}", 502) from error
    unique_id = parse_unique_id(data)
    _meet_beside(store, rank)
    return unique_id


def parse_unique_id(data: bytes) -> bytes:
    """The 128 bytes in a sender's message. Raises WeightUpdateError (400) for any other."""
    fixed = _UNIQUE_ID.fullmatch(data)
    if fixed is None:
        raise WeightUpdateError(
            f"the sender's store holds {len(data)} bytes under {_ID_KEY} that are no NCCL unique "
            "id: nothing else is read"
        )
    return fixed[1]


def _decoded(text: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise WeightUpdateError(f"nccl_unique_id_b64 is no base64: {error}") from None
    if len(data) != UNIQUE_ID_BYTES:
        raise WeightUpdateError(
            f"nccl_unique_id_b64 has {len(data)} bytes: an NCCL unique id has {UNIQUE_ID_BYTES}"
        )
    return data


def _meet_beside(store: TCPStore, rank: int) -> None:
    """Answer the sender's barrier over the store, if it has one, while NCCL connects."""

    def meet() -> None:
        try:
            barrier = _BARRIER.fullmatch(store.get(_BARRIER_KEY))
            if barrier is not None:
                name = barrier[1].decode()
                store.set(f"arrival_{name}_{rank}", "1")
                store.set(f"departure_{name}_{rank}", "1")
        except (DistNetworkError, DistStoreError, RuntimeError):
            return  # a sender without a barrier, or one that is gone: NCCL says so

    threading.Thread(target=meet, name="weights-barrier", daemon=True).start()
