"""Reads prompts in every form users give: text, ids, dictionaries, conversations, lists of them."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple, TypedDict, TypeVar

import msgspec

from tpdet.errors import RequestError, UsageError
from tpdet.requests.body.limits import MAX_CACHE_SALT_BYTES
from tpdet.requests.request import Request, SamplingParams, check_against_model, room_behind
from tpdet.requests.resumed import check_resumed_counts
from tpdet.requests.tools import read_tools
from tpdet.text.token_guard import checked
from tpdet.text.tokenizer import Tokenizer

_EXAMPLES = 'text, a list of token ids, {"prompt": TEXT} or {"prompt_token_ids": IDS}'


class TextPrompt(TypedDict, total=False):
    """A prompt's text as a dictionary with vLLM's keys."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as a dictionary with vLLM's keys; `prompt_token_ids` override `prompt`."""

    prompt: str
    prompt_token_ids: Sequence[int]
    cache_salt: str


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
Drafts = tuple[tuple[int, ...], ...]
"""The expected output of each choice of a request."""


class Predictions(NamedTuple):
    """What is known of an answer before it is made; the fields are those of `Request`."""

    drafts: Drafts = ()
    prediction: tuple[int, ...] = ()
    resumed: tuple[int, ...] = ()


NO_PREDICTIONS = Predictions()
AnyParams = TypeVar("AnyParams")
Message = Mapping[str, Any]
"""{"role": ..., "content": ...}, as in the chat API."""


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt's token ids, and its text if it was given as text."""

    token_ids: tuple[int, ...]
    text: str | None = None
    cache_salt: str = ""


Asked = tuple[ReadPrompt, SamplingParams, Predictions]
"""What becomes a request."""


@dataclass(frozen=True)
class PromptReader:
    """Makes requests of prompts. Its methods raise RequestError for a prompt that cannot be used.

    `eos_token_ids` end a sequence; token ids are below `vocab_size`; prompt and answer have
    `max_model_len` tokens together, at most.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    _templates: dict[str, Tokenizer] = field(default_factory=dict)

    def prompts(self, given: object, ids: object = None) -> list[ReadPrompt]:
        """The prompts of a call: one, or a list; ids: each one's, beside their texts."""
        given = listed(given)
        if ids is not None:
            given = _joined(given, listed(ids))
        if isinstance(given, str | Mapping) or are_ids(given):
            return [self.prompt(given)]
        if not isinstance(given, list | tuple):
            raise RequestError(
                f"prompts must be a list, not {type(given).__name__}: each is {_EXAMPLES}",
                "prompts",
            )
        return [self.prompt(prompt, f"prompts[{index}]") for index, prompt in enumerate(given)]

    def prompt(self, given: object, place: str = "the prompt") -> ReadPrompt:
        """One prompt; `place` names it in messages."""
        given = listed(given)
        if isinstance(given, Mapping):
            return self._of_dictionary(given, place)
        if isinstance(given, str):
            return ReadPrompt(self._encode(given), given)
        if not isinstance(given, list | tuple):
            raise RequestError(f"{place} is {shown(given)}: give {_EXAMPLES}", "prompts")
        return ReadPrompt(token_ids_of(given, place))

    def conversations(
        self,
        messages: object,
        template: str | None,
        generation_prompt: bool,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Any] | None = None,
    ) -> list[ReadPrompt]:
        """The prompts of one conversation or of a list of them; `template` is Jinja text.

        The other arguments are those of `Tokenizer.apply_chat_template`.
        """
        if not isinstance(messages, list | tuple):
            raise RequestError(
                f"messages is {shown(messages)}: give a list of dictionaries with role and "
                "content, or a list of such lists",
                "messages",
            )
        single = any(isinstance(message, Mapping) for message in messages)
        use = read_tools(tools)
        if use is not None and any(tool.strict for tool in use.tools):
            raise RequestError(
                "tools: strict is for a server, which reads calls: leave it out here", "tools"
            )
        tokenizer = self._with_template(template)
        found = []
        for conversation in [messages] if single else messages:
            ids = tokenizer.apply_chat_template(
                conversation,
                generation_prompt,
                most=self.max_model_len,
                continue_final_message=continue_final_message,
                chat_template_kwargs=variables,
                tools=None if use is None else use.declared(),
            )
            found.append(ReadPrompt(tuple(ids)))
        return found

    def request(
        self,
        prompt: ReadPrompt,
        params: SamplingParams,
        request_id: str,
        expected: Predictions = NO_PREDICTIONS,
    ) -> Request:
        """The checked request; `max_tokens` None becomes the rest of the context."""
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            params=self.resolved(params, len(prompt.token_ids)),
            eos_token_ids=self.eos_token_ids,
            cache_salt=prompt.cache_salt,
            **expected._asdict(),
        )
        check_against_model(request, self.vocab_size, self.max_model_len)
        check_resumed_counts(request, "resume")
        return request

    def prediction(self, given: object, place: str = "prediction") -> tuple[int, ...]:
        """The ids of a prediction, which is text or ids; `place` names it in messages."""
        given = listed(() if given is None else given)
        if isinstance(given, str):
            if self.tokenizer is None:
                raise RequestError(f"{place} is text, which needs a tokenizer: give ids", place)
            most = self.max_model_len
            return tuple(self.tokenizer.encode(given, False, most, field="prediction"))
        if not isinstance(given, list | tuple):
            raise RequestError(f"{place} is {shown(given)}: give text or token ids", place)
        return token_ids_of(given, place, "text or token ids", "prediction")

    def resolved(self, params: SamplingParams, length: int) -> SamplingParams:
        """The parameters of a prompt of `length` tokens, with the `max_tokens` that they mean."""
        if params.max_tokens is not None:
            return params
        return msgspec.structs.replace(params, max_tokens=room_behind(length, self.max_model_len))

    def _of_dictionary(self, given: Mapping[Any, Any], place: str) -> ReadPrompt:
        for name, value in given.items():
            if name not in TokensPrompt.__annotations__ and value not in (None, {}, []):
                raise RequestError(
                    f"{place} has {name!r}, which is not supported: give {_EXAMPLES}", "prompts"
                )
        text, ids = given.get("prompt"), listed(given.get("prompt_token_ids"))
        if text is None and ids is None:
            raise RequestError(
                f'{place} has neither "prompt" nor "prompt_token_ids": give {_EXAMPLES}', "prompts"
            )
        if text is not None and not isinstance(text, str):
            raise RequestError(f'{place}["prompt"] is {shown(text)}: give text', "prompts")
        if ids is not None and not isinstance(ids, list | tuple):
            raise RequestError(
                f'{place}["prompt_token_ids"] is {shown(ids)}: give a list of ids', "prompts"
            )
        checked(text or "")
        salt = given.get("cache_salt") or ""
        if not isinstance(salt, str) or len(salt.encode("utf-8", "replace")) > MAX_CACHE_SALT_BYTES:
            raise RequestError(f"cache_salt must be text of {MAX_CACHE_SALT_BYTES} bytes at most")
        if ids is not None:
            return ReadPrompt(token_ids_of(ids, place), text, salt)
        return ReadPrompt(self._encode(text or ""), text, salt)

    def _encode(self, text: str) -> tuple[int, ...]:
        if self.tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer: pass token ids", "prompt")
        return tuple(self.tokenizer.encode(text, most=self.max_model_len))

    def _with_template(self, template: str | None) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer: pass token ids to generate", "messages")
        if template is None:
            return self.tokenizer
        if not isinstance(template, str):
            raise RequestError(f"chat_template is {shown(template)}: give Jinja text", "messages")
        if template not in self._templates:
            self._templates.clear()  # keep only the last one: a loop uses the same each time
            self._templates[template] = self.tokenizer.with_chat_template(template)
        return self._templates[template]


def _joined(texts: Any, ids: Any) -> list[dict[str, Any]]:
    """Prompts with ids and, where `texts` is not None, a text each. Raises RequestError."""
    if are_ids(ids):
        texts, ids = None if texts is None else [texts], [ids]
    if not isinstance(ids, list | tuple):
        raise RequestError(f"prompt_token_ids is {shown(ids)}: give a list of ids", "prompts")
    if texts is None:
        texts = [None] * len(ids)
    if not isinstance(texts, list | tuple) or len(texts) != len(ids):
        raise RequestError(
            f"prompts is {shown(texts)}, with {len(ids)} prompt_token_ids: give each its text, or "
            "leave prompts out",
            "prompts",
        )
    return [
        {"prompt": text, "prompt_token_ids": each} for text, each in zip(texts, ids, strict=True)
    ]


def read_params(given: object, count: int) -> list[SamplingParams]:
    """Copies of the sampling parameters of each of `count` prompts. None: the defaults.

    Raises UsageError for other types, RequestError if there are not as many as prompts.
    """
    if isinstance(given, Mapping):
        raise UsageError(
            f"sampling_params is a dictionary: use SamplingParams(**{dict(given)!r:.200})"
        )
    every = params_of_each("sampling_params", SamplingParams, given, count)
    if not isinstance(given, list | tuple):
        return [every[0].clone()] * count if every else []
    return [params.clone() for params in every]


def params_of_each(name: str, kind: type[AnyParams], given: object, count: int) -> list[AnyParams]:
    """The parameters of each prompt: one for all, a list, or defaults. Raises as `read_params`."""
    if given is None or isinstance(given, kind):
        return [given or kind()] * count
    if not isinstance(given, list | tuple) or not all(isinstance(one, kind) for one in given):
        raise UsageError(
            f"{name} is {shown(given)}: give {kind.__name__}(...), or a list of them, one for each "
            "prompt"
        )
    if len(given) != count:
        raise RequestError(
            f"{count} prompts but {len(given)} {name}: give one for all, or one each", name
        )
    return [*given]


def listed(value: Any) -> Any:
    """A list of an array, a tensor or a range; anything else unchanged."""
    if isinstance(value, range):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "ndim") else value


def are_ids(value: object) -> bool:
    """Whether `value` is one prompt of token ids, not a list of prompts."""
    return isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], Integral)


def token_ids_of(
    values: Sequence[Any], place: str, examples: str = _EXAMPLES, field: str = "prompts"
) -> tuple[int, ...]:
    """`values` as plain integers. Raises RequestError naming the first that is no integer."""
    if type(values) in (list, tuple) and {*map(type, values)} == {int}:
        return tuple(values)  # thousands, looked at together
    found = []
    for index, value in enumerate(values):
        try:
            if isinstance(value, bool):
                raise TypeError
            found.append(operator.index(value))
        except TypeError:
            raise RequestError(
                f"{place}: token {index} is {shown(value)}, not a token id: give {examples}",
                field,
            ) from None
    return tuple(found)


def shown(value: object) -> str:
    """A value in a message: its text if that is short, else its type."""
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
