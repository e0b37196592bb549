"""Configuration of the HTTP process: one line of JSON from rank 0 on standard input."""

import msgspec

from tpdet.requests.body import limits


class AuditConfig(msgspec.Struct, frozen=True):
    """Where receipts go, the key that signs them (a file or URI), whether answers need them.

    `writer`: the socket to the HTTP process that writes the receipts of all, -1 in that one, which
    has the `others`' sockets.
    """

    directory: str
    key: str
    required: bool
    writer: int = -1
    others: tuple[int, ...] = ()

    @property
    def sockets(self) -> tuple[int, ...]:
        """The descriptors that a process inherits."""
        return self.others if self.writer < 0 else (self.writer,)


class BatchConfig(msgspec.Struct, frozen=True):
    """Where files and batches lie, the bytes of all files, and the sequences of a step at most.

    Of several HTTP processes the first one has them, and `socket`, which listens at the path
    `address`; in the others `socket` is -1. Of one process `address` is "".
    """

    directory: str
    most_bytes: int
    seats: int
    address: str = ""
    socket: int = -1

    @property
    def elsewhere(self) -> bool:
        """Whether another process has them."""
        return bool(self.address) and self.socket < 0


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds. `socket` is the inherited descriptor of the bound HTTP socket, `tallies`
    that of the counters of all `processes`, of which this is number `index`;
    `key_digests` are SHA-256 in hex, so the process never holds a key. `channel_key` (hex)
    seals the messages to and from the engine process. `admin_socket` is the bound socket of the
    admin listener on `admin_host`, -1 where there is none; `admin_asks` says whether it asks for
    the admin keys, of which `admin_digests` are the digests. `audit`: None for no receipts.
    """

    parent_pid: int
    socket: int
    tallies: int
    index: int
    processes: int
    run_dir: str
    session: str
    engine_address: str
    channel_key: str
    tokenizer_directory: str | None
    chat_template: str | None
    chat_template_date: str | None
    served_name: str
    max_queue: int
    step_timeout: float
    created: int
    key_digests: tuple[str, ...] = ()
    admin_digests: tuple[str, ...] = ()
    admin_socket: int = -1
    admin_host: str = ""
    admin_asks: bool = False
    header_timeout: float = limits.HEADER_TIMEOUT
    body_timeout: float = limits.BODY_TIMEOUT
    keep_alive_timeout: float = limits.KEEP_ALIVE_TIMEOUT
    slow_reader_timeout: float = limits.SLOW_READER_TIMEOUT
    held_bytes: int = limits.MAX_HELD_BYTES
    log_access: bool = True
    log_statistics: bool = True
    statistics_seconds: float = limits.STATISTICS_SECONDS
    batch_swing_alarm: float = 0.0
    reasoning_parser: str = "off"
    tool_call_parser: str = "off"
    weight_senders: bool = False
    audit: AuditConfig | None = None
    answer_cache: str | None = None
    answer_cache_bytes: int = 0
    batches: BatchConfig | None = None
