"""What a sampling parameter may be: limits, and a RequestError naming parameter and value."""

import math

from tpdet.errors import RequestError

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_LOGIT_BIAS = 1024
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MIN_TEMPERATURE = 1e-3
MAX_TEMPERATURE = 2.0
MAX_SCHEMA_BYTES = 64 << 10


def check_seed(seed: object) -> None:
    """A seed, or None."""
    if isinstance(seed, int) and seed < 0:
        raise RequestError(
            f"seed {seed} is out of range [0, {MAX_SEED}]: leave it out and one is drawn, which "
            "the answer names",
            "seed",
        )
    if seed is not None:
        check_integer("seed", seed, 0, MAX_SEED)


def check_lengths(min_tokens: int, max_tokens: int | None) -> None:
    """What bounds the number of tokens; `max_tokens` may be None."""
    check_integer("min_tokens", min_tokens, 0, 2**31 - 1)
    if max_tokens is None:
        return
    check_integer("max_tokens", max_tokens, 0, 2**31 - 1)
    if min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens {min_tokens} is larger than max_tokens {max_tokens}: "
            "lower min_tokens or raise max_tokens",
            "min_tokens",
        )


def check_logprobs(name: str, count: object) -> None:
    """How many alternatives are told, or None."""
    if count == -1:
        raise RequestError(
            f"{name} -1 (the whole vocabulary) is not supported: the limit is {MAX_LOGPROBS}", name
        )
    if count is not None:
        check_integer(name, count, 0, MAX_LOGPROBS)


def check_bias(logit_bias: dict[int, float]) -> None:
    """Ids and what is added to their logits."""
    if not isinstance(logit_bias, dict):
        raise RequestError(
            f"logit_bias must be a dict of ids and numbers, not {logit_bias!r}", "logit_bias"
        )
    if len(logit_bias) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(logit_bias)} ids; the limit is {MAX_LOGIT_BIAS}", "logit_bias"
        )
    for token, bias in logit_bias.items():
        check_integer("logit_bias", token, 0, 2**31 - 1)
        check_number("logit_bias", bias, -100.0, 100.0)


def check_ids(name: str, ids: tuple[int, ...]) -> None:
    """Token ids, as far as they can be judged without a model."""
    if not isinstance(ids, tuple):
        raise RequestError(f"{name} must be a list of token ids, not {ids!r}", name)
    for token in ids:
        check_integer(name, token, 0, 2**31 - 1)


def check_stops(stop: tuple[str, ...]) -> None:
    """Texts that end a choice."""
    if not isinstance(stop, tuple):
        raise RequestError(f"stop must be text or a list of texts, not {stop!r}", "stop")
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestError(f"{len(stop)} stop strings; the limit is {MAX_STOP_STRINGS}", "stop")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise RequestError("a stop string must be non-empty text", "stop")
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > MAX_STOP_BYTES:
            raise RequestError(
                f"a stop string of {size} bytes is over the limit of {MAX_STOP_BYTES}", "stop"
            )


def check_schema(schema: object) -> None:
    """Whether it is a schema that can be used is found where it is compiled."""
    if schema is None:
        return
    if not isinstance(schema, str):
        raise RequestError(
            f"json_schema must be JSON text, not {type(schema).__name__}: give json.dumps(schema)",
            "response_format",
        )
    size = len(schema.encode("utf-8", "surrogatepass"))
    if size > MAX_SCHEMA_BYTES:
        raise RequestError(
            f"a schema of {size} bytes is over the limit of {MAX_SCHEMA_BYTES}", "response_format"
        )


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """An integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {value!r}", name)
    if not low <= value <= high:
        raise RequestError(f"{name} {value} is out of range [{low}, {high}]", name)


def check_number(name: str, value: object, low: float, high: float) -> None:
    """A finite number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, not {value!r}", name)
    if not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name} {value} is out of range [{low}, {high}]", name)
