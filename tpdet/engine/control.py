"""The control channel: rank 0 sends plans and other bytes, sealed under the run secret.

The channel begins with an agreement. Every rank shows a fresh nonce, then proves with a MAC over
all nonces that it knows the secret, which itself never travels if it was given. The channel's key
comes from secret and nonces, so nothing recorded in another run, or before a restart, passes.
"""

import hmac
import secrets

from tpdet.comm.world.world import World, rank_on_node
from tpdet.control.plan import StepPlan, decode_plan, encode_plan
from tpdet.control.seal import Opener, Sealer, derive
from tpdet.errors import DisagreementError, IntegrityError
from tpdet.launch.life.run_secret import SECRET_VARIABLE, new_secret

_NONCE_BYTES = 16
_NAME_BYTES = 4
_HAS_SECRET, _HAS_NONE = b"\1", b"\0"
"""The first byte that a rank shows: whether it was given a secret."""
_REMEDY = (
    "restart the server; if it comes again, another process reaches the ranks' ports: isolate "
    "their network (docs/cluster.md)"
)


class ControlChannel:
    """Rank 0 speaks, every rank (rank 0 too) checks; calls are collective and in one order.

    `secret`: 32 bytes, alike on all ranks, or None on all of them: then rank 0 makes one and hands
    it out over the world, for ranks that share nothing else. Raises DisagreementError.
    """

    def __init__(self, world: World, secret: bytes | None) -> None:
        self._world = world
        self._step = -1
        key = derive(*_agree(world, secret))
        self._sealer, self._opener = Sealer(key), Opener(key)

    def send_plan(self, plan: StepPlan) -> StepPlan:
        """On rank 0: the plan as every rank reads it. Raises IntegrityError past the cap."""
        return self._read(self.broadcast(encode_plan(plan)))

    def receive_plan(self) -> StepPlan:
        """On the other ranks: rank 0's next plan. Raises IntegrityError naming rank and step."""
        return self._read(self.broadcast(None))

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's `data` on every rank. Raises IntegrityError where it is not rank 0's next."""
        sealed = self._sealer.seal(data) if data is not None else None
        received = self._world.broadcast_bytes(sealed)
        try:
            return self._opener.open(received)
        except IntegrityError as error:
            raise IntegrityError(
                f"{rank_on_node(self._world)} refused a message in the name of "
                f"{rank_on_node(self._world, 0)} after step {self._step}: {error}; {_REMEDY}"
            ) from error

    @property
    def place(self) -> str:
        """Where the channel is, for a message: "step 7", the last that was planned."""
        return f"step {self._step}" if self._step >= 0 else "the start"

    def _read(self, data: bytes) -> StepPlan:
        plan = decode_plan(data)
        self._step = plan.step
        return plan


def _agree(world: World, secret: bytes | None) -> tuple[bytes, str, bytes]:
    """(secret, purpose, nonces) that all ranks share from now on. Raises DisagreementError."""
    own = _HAS_SECRET if secret is not None else _HAS_NONE
    shown = world.gather_bytes(own + secrets.token_bytes(_NONCE_BYTES))
    having = [rank for rank, data in enumerate(shown) if data[:1] == _HAS_SECRET]
    if not having:
        secret = world.broadcast_bytes(new_secret() if world.rank == 0 else None)
    elif len(having) < world.size:
        missing = next(rank for rank in range(world.size) if rank not in having)
        raise DisagreementError(
            f"run secret: {rank_on_node(world, having[0])} was given one, "
            f"{rank_on_node(world, missing)} was not: {_give_the_same()}"
        )
    assert secret is not None
    nonces = b"".join(shown)
    # A proof names its rank, so that none can be another's, sent back.
    expected = [derive(secret, f"tpdet rank {rank} knows", nonces) for rank in range(world.size)]
    # The name is another at each start: it tells secrets apart, and nothing about them.
    name = derive(secret, "tpdet name of the secret", nonces)[:_NAME_BYTES]
    proofs = world.gather_bytes(expected[world.rank] + name)
    for rank, data in enumerate(proofs):
        if not hmac.compare_digest(data[:-_NAME_BYTES], expected[rank]):
            raise DisagreementError(
                f"run secret: {rank_on_node(world)} and {rank_on_node(world, rank)} have different "
                f"run secrets ({name.hex()} and {data[-_NAME_BYTES:].hex()}, names that hold for "
                f"this start only): {_give_the_same()}"
            )
    return secret, "tpdet control channel", nonces


def _give_the_same() -> str:
    return f"give every rank the same --run-secret-file (or {SECRET_VARIABLE})"
