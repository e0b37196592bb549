"""`SamplingParams`: how one request's tokens are sampled, and when it stops."""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import msgspec

from tpdet.errors import RequestError
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.requests import parameter_checks
from tpdet.requests.answer_form import AnswerForm, check_form
from tpdet.requests.field_ranges import (
    ALTERNATIVES,
    COUNT,
    MAX_INT32,
    MIN_TEMPERATURE,
    PENALTY,
    SEED,
    FieldRange,
)
from tpdet.requests.output_kind import RequestOutputKind, read_output_kind
from tpdet.requests.structured_outputs import FIELD, StructuredOutputsParams, form_of, take_form
from tpdet.requests.vllm_parameters import asks_for_nothing


class _Parameters(msgspec.StructMeta):
    """What `SamplingParams(...)` does before the struct is made: every keyword has to be known."""

    def __call__(cls, *values: Any, **given: Any) -> Any:
        if values:
            raise RequestError(
                f"SamplingParams takes keywords only, not {values[0]!r}: write "
                "SamplingParams(temperature=0.8, max_tokens=64)"
            )
        if FIELD in given or "guided_decoding" in given:
            given = take_form(given)
        known = cls.__struct_fields__
        if not given.keys() <= set(known):
            given = {
                k: v for k, v in given.items() if k in known or not asks_for_nothing(k, v, known)
            }
        return super().__call__(**given)


class SamplingParams(msgspec.Struct, kw_only=True, metaclass=_Parameters):
    """How tokens are sampled and when to stop. Names, meanings and defaults are vLLM's.

    n: choices of the prompt, 1 to 128. Choice i is the same whatever n is.
    temperature: 0 takes the likeliest token (of equals the lowest id); else up to 2. Below 0.001
        it counts as 0, which the log says once.
    top_p: sample from the likeliest tokens whose probabilities reach this sum, above 0, to 1.
    top_k: sample from this many of the likeliest tokens; -1 or 0 for all.
    min_p: sample from tokens with at least this share of the largest probability, 0 to 1.
    seed: 0 to 2**63 - 1. None: the engine chooses one, which the answer names.
    max_tokens: tokens to generate, at most. 0 scores the prompt only; None is as many as the
        model's context has room for.
    min_tokens: tokens before which nothing ends the choice.
    stop: a text, or up to 16 of them, that end the choice and are not part of its text.
    stop_token_ids: ids that end the choice, beside the model's own.
    ignore_eos: the model's own ids do not end it.
    include_stop_str_in_output: what ended the choice is part of its text.
    skip_special_tokens: special tokens are no part of the text.
    logprobs: how many of the likeliest, 0 to 100, are shown beside each sampled token. None: no
        log-probabilities.
    logprob_token_ids: ids that are shown beside each token in place of the likeliest, up to 100.
    prompt_logprobs: the same for the tokens of the prompt.
    prompt_logprobs_last_n: only for so many of its last tokens, so that what is before may be read
        from the prefix cache; the same numbers. None: for all.
    presence_penalty: taken from the logit of each token that was generated, -2 to 2.
    frequency_penalty: taken from it once for each time it was generated, -2 to 2.
    repetition_penalty: divides the logits of tokens of the prompt and the answer (of negative
        ones multiplies), above 0; 1 changes nothing.
    logit_bias: {token id: what is added to its logit, -100 to 100}, up to 1024 ids.
    json_schema: a JSON schema, as JSON text, that the answer follows to its end.
    regex: a regular expression (Rust's syntax) that the whole answer matches.
    tool_calls: which calls of tools an answer may hold; a chat with tools writes it.
    json_schema_after: ids behind which the answer follows any of them; what is before is free.
        (c,): behind the first token c. (o, ..., c): an answer that begins with o follows it behind
        the first c after o, ...; any other from its first token. () or None: each does so.
    detokenize: False makes no text of the answer: ids only.
    output_kind: which outputs `AsyncLLM` yields; `LLM` gives whole answers.

    A parameter may be set later (`params.max_tokens = 12`); it counts in calls that begin after.
    Requests have copies of their own.

    `structured_outputs`, a `StructuredOutputsParams` or an object with its names, is kept as
    `json_schema` or `regex`; and so is `guided_decoding`, an older name of it.

    Raises RequestError, naming the parameter, for a value out of range, for a parameter of vLLM's
    that is not supported and for one that nobody knows. Values that ask for nothing
    (`bad_words=[]`) are accepted.
    """

    n: Annotated[int, FieldRange(1, 128)] = 1
    temperature: Annotated[float, FieldRange(0.0, 2.0, flag="0 is greedy")] = 1.0
    top_p: Annotated[float, FieldRange(0.0, 1.0, True, flag="above 0, at most 1")] = 1.0
    top_k: Annotated[int, FieldRange(-1, MAX_INT32, flag="-1 for all tokens")] = -1
    min_p: Annotated[float, FieldRange(0.0, 1.0, flag="0 to 1")] = 0.0
    seed: Annotated[int | None, SEED] = None
    max_tokens: Annotated[int | None, COUNT] = 16
    min_tokens: Annotated[int, COUNT] = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: Annotated[int | None, ALTERNATIVES] = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: Annotated[int | None, ALTERNATIVES] = None
    prompt_logprobs_last_n: Annotated[int | None, FieldRange(1, MAX_INT32)] = None
    presence_penalty: Annotated[float, PENALTY] = 0.0
    frequency_penalty: Annotated[float, PENALTY] = 0.0
    repetition_penalty: Annotated[float, FieldRange(0.0, math.inf, True)] = 1.0
    logit_bias: dict[int, float] = {}
    json_schema: str | None = None
    regex: str | None = None
    tool_calls: str | None = None
    json_schema_after: tuple[int, ...] | None = None
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    if TYPE_CHECKING:
        # What may be given is more than what is kept: __post_init__ makes tuples.
        def __init__(
            self,
            *,
            n: int = 1,
            temperature: float = 1.0,
            top_p: float = 1.0,
            top_k: int = -1,
            min_p: float = 0.0,
            seed: int | None = None,
            max_tokens: int | None = 16,
            min_tokens: int = 0,
            stop: str | Sequence[str] | None = None,
            stop_token_ids: Iterable[int] | None = None,
            ignore_eos: bool = False,
            include_stop_str_in_output: bool = False,
            skip_special_tokens: bool = True,
            logprobs: int | None = None,
            logprob_token_ids: Iterable[int] | None = None,
            prompt_logprobs: int | None = None,
            prompt_logprobs_last_n: int | None = None,
            presence_penalty: float = 0.0,
            frequency_penalty: float = 0.0,
            repetition_penalty: float = 1.0,
            logit_bias: Mapping[int, float] | None = None,
            json_schema: str | None = None,
            regex: str | None = None,
            tool_calls: str | None = None,
            json_schema_after: Iterable[int] | None = None,
            detokenize: bool = True,
            output_kind: int = 0,
            **of_vllm: Any,
        ) -> None: ...

    @property
    def reads_tokens(self) -> bool:
        """Whether the next token depends on the tokens so far otherwise than by their K/V."""
        return self.penalises or self.form is not None

    @property
    def form(self) -> AnswerForm | None:
        """What the answer follows, if anything."""
        if self.json_schema is not None:
            return AnswerForm("json_schema", self.json_schema)
        if self.regex is not None:
            return AnswerForm("regex", self.regex)
        return None if self.tool_calls is None else AnswerForm("tool_calls", self.tool_calls)

    @property
    def structured_outputs(self) -> StructuredOutputsParams | None:
        """The form by vLLM's names; None where it is of tool calls."""
        if self.form is None or self.form.kind == "tool_calls":
            return None
        return StructuredOutputsParams(json=self.json_schema, regex=self.regex)

    @property
    def penalises(self) -> bool:
        """Whether a penalty counts tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    def clone(self) -> "SamplingParams":
        """A copy that shares nothing with this one. Raises RequestError as the first one did.

        It also compares parameters that were set one after the other, such as two lengths.
        """
        return msgspec.structs.replace(self)

    def __setattr__(self, name: str, value: Any) -> None:
        known = self.__struct_fields__
        if name in (FIELD, "guided_decoding"):
            form = None if value is None else form_of(value)
            given: dict[str, Any] = {"json_schema": None, "regex": None}
            given |= {} if form is None else {form.kind: form.text}
        elif name in known or not asks_for_nothing(name, value, known):
            given = {name: value}
        else:
            return
        before = msgspec.structs.asdict(self)
        try:
            for field, value in given.items():
                msgspec.structs.force_setattr(self, field, value)
            self._check_each()
        except RequestError:
            for field, kept in before.items():
                msgspec.structs.force_setattr(self, field, kept)
            raise

    def __post_init__(self) -> None:
        self._check_each()
        parameter_checks.check_lengths(self.min_tokens, self.max_tokens)
        if sum(one is not None for one in (self.json_schema, self.regex, self.tool_calls)) > 1:
            raise RequestError(
                "an answer has one form: give json_schema or regex, and no tools beside it", FIELD
            )
        parameter_checks.check_schema_after(self.json_schema_after, self.form)
        if self.logprob_token_ids:
            counts = {"logprobs": self.logprobs, "prompt_logprobs": self.prompt_logprobs}
            for name, count in parameter_checks.beside_given_ids(
                self.logprob_token_ids, counts
            ).items():
                msgspec.structs.force_setattr(self, name, count)
        if not self.detokenize and self.stop:
            raise RequestError("stop needs the text: leave detokenize out", "detokenize")

    def _check_each(self) -> None:
        """Check each parameter by itself, and keep it in its one form."""
        _take_what_users_write(self)
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if name == "top_p" and self.temperature == value == 0:
                value = 1.0  # greedy choice has no filter
                msgspec.structs.force_setattr(self, name, value)
            if value is not None or name not in _OPTIONAL:
                parameter_checks.check_number(name, value, allowed)
            if name == "temperature" and 0.0 < value < MIN_TEMPERATURE:
                parameter_checks.note_small_temperature(value)
                msgspec.structs.force_setattr(self, name, 0.0)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"{name} must be True or False, not {getattr(self, name)!r}", name
                )
        msgspec.structs.force_setattr(self, "output_kind", read_output_kind(self.output_kind))
        parameter_checks.check_stops(self.stop)
        parameter_checks.check_ids("stop_token_ids", self.stop_token_ids)
        parameter_checks.check_ids("logprob_token_ids", self.logprob_token_ids)
        parameter_checks.check_bias(self.logit_bias)
        check_form("json_schema", self.json_schema)
        check_form("regex", self.regex)
        check_form("tool_calls", self.tool_calls)
        if self.json_schema_after is not None:
            parameter_checks.check_ids("json_schema_after", self.json_schema_after)


_KINDS = get_type_hints(SamplingParams, include_extras=True)
RANGES: dict[str, FieldRange] = {
    name: kind.__metadata__[0] for name, kind in _KINDS.items() if hasattr(kind, "__metadata__")
}
"""The range of each parameter that is one number, by its name."""
_OPTIONAL = {name for name in RANGES if type(None) in get_args(get_args(_KINDS[name])[0])}
_SWITCHES = tuple(name for name, kind in _KINDS.items() if kind is bool)
ROW_PARAMETERS = tuple(
    name for name in SamplingParams.__struct_fields__ if name in {*RowParams._fields} - {"seed"}
)
"""The parameters that every sampled row has; a row's seed is never None."""


def _parameters() -> Any:
    """What `help(SamplingParams.__init__)` shows; msgspec makes the struct and has no method."""

    def __init__(self: SamplingParams, **parameters: Any) -> None:
        raise TypeError("a struct is made once: see SamplingParams")

    fields = inspect.signature(SamplingParams)
    me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    __init__.__signature__ = fields.replace(  # type: ignore[attr-defined]
        parameters=[me, *fields.parameters.values()], return_annotation=None
    )
    __init__.__doc__ = SamplingParams.__doc__
    return __init__


SamplingParams.__init__ = _parameters()  # type: ignore[method-assign]


def _take_what_users_write(params: SamplingParams) -> None:
    """Tuples of lists, and Python's numbers of numpy's."""
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if type(value) not in _PLAIN:
            msgspec.structs.force_setattr(params, name, _plain(value))
    for name in ("stop", "stop_token_ids", "logprob_token_ids", "logit_bias"):
        empty: Any = {} if name == "logit_bias" else ()
        value = getattr(params, name)
        if value is None:
            msgspec.structs.force_setattr(params, name, empty)
        elif isinstance(value, str):
            msgspec.structs.force_setattr(params, name, (value,))
        elif name != "logit_bias" and isinstance(value, list | set | frozenset):
            msgspec.structs.force_setattr(params, name, tuple(value))
    if isinstance(params.logit_bias, dict):
        msgspec.structs.force_setattr(params, "logit_bias", {**params.logit_bias})
    if isinstance(params.json_schema_after, list):
        msgspec.structs.force_setattr(params, "json_schema_after", tuple(params.json_schema_after))


_PLAIN = (int, float, str, bool, tuple, dict, type(None))


def _plain(value: Any) -> Any:
    """The numbers in an array or a scalar of numpy's or torch's; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
