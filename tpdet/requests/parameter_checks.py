"""Checks of single sampling parameters; a RequestError names the parameter and its value."""

import logging
import sys
from collections.abc import Sequence
from functools import lru_cache

from tpdet.errors import RequestError
from tpdet.requests.answer_form import AnswerForm
from tpdet.requests.field_ranges import (
    ALTERNATIVES,
    LOGIT_BIAS,
    MAX_LOGIT_BIAS_IDS,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MIN_TEMPERATURE,
    TOKEN_ID,
    FieldRange,
)

_log = logging.getLogger("tpdet.arguments")


@lru_cache(maxsize=16)
def note_small_temperature(temperature: float) -> None:
    """Say in the log, once for each value, that a temperature below the smallest counts as 0."""
    _log.warning(
        "temperature %g is below %g and counts as 0: the likeliest token is taken, nothing drawn",
        temperature,
        MIN_TEMPERATURE,
    )


def check_lengths(min_tokens: int, max_tokens: int | None) -> None:
    """The least and the largest number of tokens; `max_tokens` may be None."""
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens {min_tokens} is larger than max_tokens {max_tokens}: "
            "lower min_tokens or raise max_tokens",
            "min_tokens",
        )


def check_bias(logit_bias: dict[int, float]) -> None:
    """Token ids and the numbers added to their logits."""
    if not isinstance(logit_bias, dict):
        raise RequestError(
            f"logit_bias must be a dict of ids and numbers, not {logit_bias!r}", "logit_bias"
        )
    if len(logit_bias) > MAX_LOGIT_BIAS_IDS:
        raise RequestError(
            f"logit_bias has {len(logit_bias)} ids; the limit is {MAX_LOGIT_BIAS_IDS}", "logit_bias"
        )
    for token, bias in logit_bias.items():
        check_range("logit_bias", token, TOKEN_ID)
        check_range("logit_bias", bias, LOGIT_BIAS)


def check_ids(name: str, ids: tuple[int, ...]) -> None:
    """Token ids; only a model knows its vocabulary, so the range is that of every model."""
    if not isinstance(ids, tuple):
        raise RequestError(f"{name} must be a list of token ids, not {ids!r}", name)
    for token in ids:
        check_range(name, token, TOKEN_ID)


def beside_given_ids(ids: Sequence[int], counts: dict[str, int | None]) -> dict[str, int | None]:
    """How many ids stand beside a token where `logprob_token_ids` names them: by parameter.

    counts: what was asked for by each parameter; a prompt that is not to be scored is not.
    Raises RequestError for too many ids, ids that stand twice, and a number of the likeliest.
    """
    different = len({*ids})
    if different < len(ids) or different > ALTERNATIVES.high:
        raise RequestError(
            f"logprob_token_ids has {len(ids)} ids, {different} of them different: give up to "
            f"{ALTERNATIVES.high}, each once",
            "logprob_token_ids",
        )
    for name, count in counts.items():
        if count not in (None, 0, len(ids)):
            raise RequestError(
                f"{name} {count} and {len(ids)} logprob_token_ids: the ids stand in place of the "
                f"likeliest: leave {name} at 0",
                name,
            )
    unscored = counts.get("prompt_logprobs", 0) is None
    return dict.fromkeys(counts, len(ids)) | ({"prompt_logprobs": None} if unscored else {})


def check_stops(stop: tuple[str, ...]) -> None:
    """Texts that end a choice."""
    if not isinstance(stop, tuple):
        raise RequestError(f"stop must be text or a list of texts, not {stop!r}", "stop")
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestError(f"{len(stop)} stop strings; the limit is {MAX_STOP_STRINGS}", "stop")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise RequestError("a stop string must be non-empty text", "stop")
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError:
            problem = f"the stop string {text!r:.80} holds a lone surrogate, which no text has"
            raise RequestError(f"{problem}: leave it out", "stop") from None
        if size > MAX_STOP_BYTES:
            raise RequestError(
                f"a stop string of {size} bytes is over the limit of {MAX_STOP_BYTES}", "stop"
            )


def check_schema_after(ids: tuple[int, ...] | None, form: AnswerForm | None) -> None:
    """Refuse parameters without a form where ids are named behind which it holds."""
    if ids is not None and form is None:
        raise RequestError(
            "json_schema_after is for answers with a schema or regex: leave it out",
            "json_schema_after",
        )


def check_number(name: str, value: object, allowed: FieldRange) -> None:
    """Check a parameter that is one number; some mistakes have a remedy of their own."""
    if name in ("logprobs", "prompt_logprobs") and value == -1:
        raise RequestError(
            f"{name} -1 (the whole vocabulary) is not supported: the limit is {allowed.high}", name
        )
    if name == "seed" and isinstance(value, int) and value < 0:
        raise RequestError(
            f"seed {value} is out of range [0, {allowed.high}]: leave it out and one is drawn, "
            "which the answer names",
            "seed",
        )
    check_range(name, value, allowed)
    if allowed.above_low and value == allowed.low:
        why = "keeps nothing: use a value in (0, 1]" if name == "top_p" else "is not above 0"
        raise RequestError(f"{name} 0 {why}", name)


def check_range(name: str, value: object, allowed: FieldRange) -> None:
    """A finite number of a range; an integer where the range is one of integers."""
    if isinstance(allowed.low, int):
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(f"{name} must be an integer, not {value!r}", name)
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, not {value!r}", name)
    if not allowed.low <= value <= allowed.high or abs(value) > sys.float_info.max:
        ends = f"[{allowed.low}, {allowed.high}]"
        raise RequestError(f"{name} {value} is out of range {ends}", name)
