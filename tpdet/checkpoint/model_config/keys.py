"""Every key of `config.json` that may occur, as data: parsed, inert, or allowed at one value.

A key that is not listed in `keys.json` is refused by name, because it could change the arithmetic.
The lists hold the keys that transformers 4 and 5 write for every family. None of the inert ones
changes what a model computes: notes about the checkpoint, settings of training, choices between
transformers' implementations, and generation settings that old checkpoints kept in config.json.
"""

import json
from pathlib import Path

Allowed = tuple[tuple[object, ...], str]
"""(values that are allowed beside null, what the refusal of any other value says)"""

_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
PARSED: frozenset[str] = frozenset(_TABLE["parsed"])
NEEDED: frozenset[str] = frozenset(_TABLE["needed"])
"""Keys that every checkpoint states."""
INERT: frozenset[str] = frozenset(key for keys in _TABLE["inert"].values() for key in keys)
NEUTRAL: dict[str, Allowed] = {
    key: ((*values,), why) for key, (why, *values) in _TABLE["neutral"].items()
}
"""Keys that are allowed at these values only; a `Family` may add keys or replace them."""

ALIASES = (
    ("num_experts", "num_local_experts", "n_routed_experts"),
    ("num_experts_per_tok", "experts_per_token"),
)
"""Names of one key: which of them a checkpoint has depends on who wrote it."""

DEFAULT_THETA = 10000.0
DEFAULT_MAX_WINDOW_LAYERS = 28
DEFAULT_WINDOW = 4096
DEFAULT_NO_ROPE_INTERVAL = 4
"""What transformers assumes where these keys are absent."""
