"""Configuration of the HTTP process: one line of JSON from rank 0 on standard input."""

import msgspec

from tpdet.requests.body import limits


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds. `socket` is the inherited descriptor of the bound HTTP socket, `tallies`
    that of the counters of all `processes`, of which this is number `index`;
    `key_digests` are SHA-256 in hex, so the process never holds a key. `channel_key` (hex)
    seals the messages to and from the engine process.
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
