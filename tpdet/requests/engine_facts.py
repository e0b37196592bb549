"""Facts of a running engine that requests are read, named and resumed by."""

import msgspec


class EngineFacts(msgspec.Struct, frozen=True, tag="start"):
    """Engine to HTTP: facts of the engine; requests may come from now on.

    Sent again after a reload: what is accepted after it is answered by the new weights.
    `contract` and `model_digest` (64 hex digits each) go into replay digests.
    `approximate_fingerprint` is that of answers with a token marked approximate; where all are,
    it is the `system_fingerprint` too.
    """

    system_fingerprint: str
    contract: str
    model_digest: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tp: int
    approximate_fingerprint: str
