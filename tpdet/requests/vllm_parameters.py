"""vLLM's sampling parameters that tpdet lacks, and their values that change nothing."""

from collections.abc import Iterable

from tpdet.arguments.suggestions import did_you_mean
from tpdet.errors import RequestError

_BEAMS = "there is no beam search: raise n"
PARAMETERS: dict[str, tuple[tuple[object, ...], str]] = {
    "allowed_token_ids": ((), "give structured_outputs, or logit_bias for up to 1024 ids"),
    "bad_words": (([], ()), "give logit_bias -100 for ids that must not come"),
    "best_of": ((1,), _BEAMS),
    "early_stopping": ((False,), _BEAMS),
    "extra_args": (({},), "leave it out"),
    "flat_logprobs": ((False,), "logprobs have one {token_id: Logprob} a position"),
    "length_penalty": ((1.0,), _BEAMS),
    "logits_processors": (([], ()), "give logit_bias"),
    "repetition_detection": ((), "give repetition_penalty or stop"),
    "skip_reading_prefix_cache": ((False,), "no answer depends on the cache"),
    "spaces_between_special_tokens": ((True,), "texts are as the tokenizer decodes them"),
    "truncate_prompt_tokens": ((), "give the ids that are to be read as the prompt"),
    "use_beam_search": ((False,), _BEAMS),
}
"""Parameters of vLLM's that are none here: values that ask for nothing, and the remedy."""


def asks_for_nothing(name: str, value: object, known: Iterable[str]) -> bool:
    """Whether `name` is a parameter of vLLM's and `value` changes nothing, as None always does.

    known: the parameters that there are. Raises RequestError for another value, with the remedy,
    and for a name that nobody knows, with the nearest.
    """
    if name not in PARAMETERS:
        hint = (
            did_you_mean(name, [*known, "structured_outputs"])
            or ": see help(SamplingParams) for those there are"
        )
        raise RequestError(f"SamplingParams has no parameter {name!r}{hint}", name)
    values, remedy = PARAMETERS[name]
    if value is None or any(type(value) is type(other) and value == other for other in values):
        return True
    raise RequestError(f"{name} {value!r} is not supported: {remedy}", name)
