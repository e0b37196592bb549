"""Turns prompts (text, token ids, conversations) into the token ids that the model reads."""

from dataclasses import dataclass
from typing import Any

from tpdet.errors import RequestError
from tpdet.requests.body import limits
from tpdet.requests.body.problems import bad_request
from tpdet.requests.body.schema import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    Prediction,
    TokenizeBody,
)
from tpdet.requests.tools import check_calls
from tpdet.text.chat_template import ChatTemplate
from tpdet.text.tokenizer import Tokenizer

EFFORT = "reasoning_effort"
"""A field of OpenAI's chats, and the variable of chat templates that vLLM gives it to."""
_THINKING = "enable_thinking"  # what other templates read


@dataclass(frozen=True)
class BodyPrompt:
    """Token ids, and the text they were made from if the client sent text.

    `hidden`: how many ids at the beginning stand for nothing in that text, such as an added BOS.
    """

    token_ids: list[int]
    text: str | None = None
    hidden: int = 0


@dataclass(frozen=True)
class BodyPrompts:
    """Makes prompts. Every method raises ApiError or RequestError for a value that is no prompt."""

    tokenizer: Tokenizer | None
    max_model_len: int

    def of_completion(self, body: CompletionBody) -> list[BodyPrompt]:
        """The prompts of `POST /v1/completions`: text, token ids, or a list of either."""
        value = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if not isinstance(value, list) or not value:
            raise _not_a_prompt()
        if type(value[0]) is int:
            value = [value]
        if len(value) > limits.MAX_BATCH_PROMPTS:
            raise bad_request(
                f"{len(value)} prompts; the limit is {limits.MAX_BATCH_PROMPTS}", "prompt"
            )
        kind = type(value[0])
        if kind not in (str, list) or any(type(entry) is not kind for entry in value):
            raise _not_a_prompt()
        special = True if body.add_special_tokens is None else body.add_special_tokens
        found = []
        most = self._most(body.truncate_prompt_tokens)
        for entry in value:
            ids = (
                self.text_tokens(entry, special, "prompt", most)
                if isinstance(entry, str)
                else entry
            )
            kept = self._fitted(ids, body.truncate_prompt_tokens)
            if kind is str and len(kept) == len(ids):
                hidden = len(self.tokenizer.around[0]) if self.tokenizer and special else 0
                found.append(BodyPrompt(kept, entry, hidden))
            else:
                found.append(BodyPrompt(kept))
        return found

    def of_chat(self, body: ChatBody) -> BodyPrompt:
        """The prompt of `POST /v1/chat/completions`."""
        ids = self.chat_tokens(body, self._most(body.truncate_prompt_tokens))
        return BodyPrompt(self._fitted(ids, body.truncate_prompt_tokens))

    def of_prediction(self, prediction: Prediction | None) -> tuple[int, ...]:
        """The token ids of a text that the answer may be; none without one."""
        if prediction is None:
            return ()
        content = prediction.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        tokenizer = self.need_tokenizer("prediction")
        try:
            return tuple(tokenizer.encode(text, False, self.max_model_len, field="prediction"))
        except RequestError as error:
            raise bad_request(str(error), "prediction") from None

    def text(self, prompt: BodyPrompt) -> str:
        """A prompt as text, for `echo`."""
        if prompt.text is not None or self.tokenizer is None:
            return prompt.text or ""
        return self.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    def text_tokens(
        self, text: str, add_special_tokens: bool, field: str, most: int | None = None
    ) -> list[int]:
        """Token ids of a text. Raises RequestError, at once if they must be more than `most`."""
        tokenizer = self.need_tokenizer(field)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens, most=most)

    def chat_tokens(self, body: ChatBody | TokenizeBody, most: int | None = None) -> list[int]:
        """Token ids of a body's conversation, through the chat template."""
        tokenizer = self.need_tokenizer("messages")
        variables = _variables(body, tokenizer.chat_template)
        use = body.tool_use()
        messages = [_plain(message) for message in body.messages or ()]
        if _fitted_chat(body) and tokenizer.chat_template is not None:
            messages = with_system_first(messages, tokenizer.chat_template, use is not None)
        return tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            add_special_tokens=bool(body.add_special_tokens),
            most=most,
            continue_final_message=bool(body.continue_final_message),
            chat_template_kwargs=variables,
            tools=None if use is None else use.declared(),
        )

    def need_tokenizer(self, field: str) -> Tokenizer:
        """The tokenizer. Raises ApiError when the server runs without one."""
        if self.tokenizer is None:
            raise bad_request(
                "this server runs without a tokenizer: send prompts as lists of token ids", field
            )
        return self.tokenizer

    def _most(self, keep: int | None) -> int | None:
        """The tokens of a prompt before it is cut, at most; None for any number."""
        return self.max_model_len if keep is None else None

    def _fitted(self, ids: list[int], keep: int | None) -> list[int]:
        """The last `keep` ids (-1: as many as the context holds); longer prompts are refused."""
        if keep == 0:
            raise bad_request("truncate_prompt_tokens 0 keeps nothing", "truncate_prompt_tokens")
        if keep is not None:
            ids = ids[-(self.max_model_len if keep < 0 else keep) :]
        # Before the ids are looked at one by one: there may be millions.
        if len(ids) > self.max_model_len:
            raise bad_request(
                f"the prompt has {len(ids)} tokens, over the model's context of "
                f"{self.max_model_len}: shorten it",
                "prompt",
            )
        return ids


def _variables(
    body: ChatBody | TokenizeBody, template: ChatTemplate | None
) -> dict[str, Any] | None:
    """The variables of a body's chat template; OpenAI's name for one is a field beside them."""
    effort = body.reasoning_effort if isinstance(body, ChatBody) else None
    if effort is None or template is None:
        return body.chat_template_kwargs
    given = body.chat_template_kwargs or {}
    if _fitted_chat(body) and not template.reads(EFFORT):
        if not template.reads(_THINKING):
            return given
        return {_THINKING: effort != "none", **given}
    if not template.reads(EFFORT):
        raise bad_request(
            f"{EFFORT} {effort!r} is not supported: the chat template does not read it: leave it "
            "out",
            EFFORT,
            "not_supported",
        )
    if given.get(EFFORT, effort) != effort:
        raise bad_request(
            f"{EFFORT} {effort!r} and that of chat_template_kwargs differ: send one", EFFORT
        )
    return {**given, EFFORT: effort}


def _fitted_chat(body: ChatBody | TokenizeBody) -> bool:
    """Whether what the model does not have is done without."""
    return isinstance(body, ChatBody) and body.tpdet is not None and bool(body.tpdet.fitted)


def with_system_first(
    messages: list[dict[str, Any]], template: ChatTemplate, has_tools: bool
) -> list[dict[str, Any]]:
    """The messages, those of the system as one before all others if the template asks for it.

    It does if it refuses, or leaves out, one that stands elsewhere. Raises RequestError for calls
    without results, which are named by their places in `messages`.
    """
    roles = [message["role"] for message in messages]
    elsewhere = "system" in roles[1:]
    if not elsewhere or template.shows_each(_later(roles)):
        return messages
    if has_tools:
        check_calls(messages)
    said = [message for message in messages if message["role"] == "system"]
    first = {"role": "system", "content": "\n\n".join(map(_text_of, said))}
    return [first, *(message for message in messages if message["role"] != "system")]


def _later(roles: list[str]) -> tuple[str, ...]:
    """The roles of a short conversation whose system messages stand as in one of these roles."""
    leading = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    begin = ("system",) * min(leading, 2)
    if "system" not in roles[leading:]:
        return (*begin, "user")
    return (*begin, "user", "system", "user", "assistant", "system")


def _text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _plain(message: ChatMessage) -> dict[str, Any]:
    """A message as the chat template takes it; it checks what only it can know."""
    fields = message.model_dump(exclude_none=True, exclude={"type", "tool_calls"})
    if message.tool_calls:
        calls = (call.model_dump(exclude_none=True) for call in message.tool_calls)
        fields["tool_calls"] = list(calls)
    return fields


def _not_a_prompt() -> Exception:
    return bad_request("prompt must be text, token ids, or a list of either", "prompt")
