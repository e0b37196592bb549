"""Chat templates: render a conversation, and tell the template's special tokens from users' text.

The template is Jinja, run in an immutable sandbox without a clock and without randomness; a date
that it prints is an input.
Special-token text inside a message must stay plain text, but a rendered string does not show who
wrote what. Markers around contents do not help: templates trim, split and compare contents.

So the conversation is rendered a second time, in which each character of the users' text that
occurs in any special token is replaced by its twin, a private-use character that occurs nowhere
else. Whitespace stays, so trimming works alike. A special token in this rendering has no character
of a user: the template wrote it. Then the twins are mapped back, and the result must equal the
plain rendering.

A template that looks into contents (Qwen3 searches for "</think>") may take another branch. Then
only complete special tokens in the users' text get twins. The result must again equal the plain
rendering, and have the same special tokens as the first. Otherwise the request is refused.

The variables of `chat_template_kwargs` are settings, which templates compare and test: they have no
twins, and may not hold a special token. Texts in the declarations of tools do, but for the names of
JSON's types, and keys as far as they are complete special tokens: templates look for both.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import meta

from tpdet.errors import CheckpointError, RequestError
from tpdet.requests.tools import check_calls
from tpdet.text.chat_messages import (
    Message,
    as_templates_read,
    changed_tool,
    check_messages,
    check_variables,
    each_text,
    parts_of,
    texts_in,
    texts_of,
)
from tpdet.text.content_forms import ContentForms, check_words
from tpdet.text.counted_template import CountedTemplate
from tpdet.text.template_date import DATE, ClockUse
from tpdet.text.template_language import TemplateLanguage
from tpdet.text.template_meter import BeyondCount

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_TWINS = range(0xF0000, 0xFFFFE)  # the private-use characters of plane 15
# tojson escapes these two, but would not escape their twins.
_NEVER_REPLACED = frozenset('"\\')
# As in transformers: where the end of the last message is, and whether the template trims it.
_END = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True)
class Segment:
    """A part of a rendered conversation; `special`: it is a special token of the template."""

    text: str
    special: bool


class ChatTemplate:
    """A compiled template with the special tokens of its tokenizer."""

    def __init__(
        self,
        source: str,
        named_tokens: Mapping[str, str],
        special_tokens: Sequence[str],
        counted: bool = False,
        date: str | None = None,
    ) -> None:
        """named_tokens: texts by name, such as `bos_token`, for templates to print.

        special_tokens: the texts of all special tokens. counted: do only work whose time and memory
        are counted, and raise BeyondCount for more. date: what `strftime_now` gives where a request
        has no `current_date`. Raises CheckpointError for a syntax error.
        """
        self.source, self.date = source, date
        self._named = dict(named_tokens)
        longest_first = sorted({*special_tokens}, key=lambda token: (-len(token), token))
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        characters = sorted({*"".join(longest_first)} - _NEVER_REPLACED)
        self._characters = [c for c in characters if not c.isspace()]
        self._counted = counted
        self._template, self._counting, self._clock, self._inputs = _compiled(source)
        self._forms = ContentForms(self._probe)
        self._shown: dict[tuple[str, ...], bool] = {}

    @property
    def lacks_date(self) -> bool:
        """Whether requests have to name the date."""
        return self._clock.needs and self.date is None

    def reads(self, variable: str) -> bool:
        """Whether a value that a request gives this variable can reach the text."""
        return variable in self._inputs

    def shows_each(self, roles: tuple[str, ...]) -> bool:
        """Whether the text of a conversation of these roles has all its messages, in order."""
        if roles not in self._shown:
            said = [f"sentence {index}" for index in range(len(roles))]
            messages = [{"role": r, "content": c} for r, c in zip(roles, said, strict=True)]
            try:
                text = self._probe(self._forms.applied(messages))
            except RequestError:
                text = ""
            places = [text.find(sentence) for sentence in said]
            self._shown[roles] = min(places) >= 0 and places == sorted(places)
        return self._shown[roles]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Segment]:
        """The conversation as segments of text, each special token a segment.

        A message has a role and content (text, or a list of text parts), and may have name,
        tool_call_id, reasoning_content and tool_calls. continue_final_message: end with the last
        message's content, without add_generation_prompt. variables: JSON values by name, for the
        template. tools: declarations of tools, JSON values; then the calls of the conversation
        must each have their result. Raises RequestError for other fields, for messages that the
        template refuses, and where users' text cannot be told from special tokens. Raises
        BeyondCount where work is counted and this conversation needs too much.
        """
        settings = self._settings(add_generation_prompt, continue_final_message, variables)
        checked = check_messages(messages)
        if tools is not None:
            self._check_tools(checked)
        plain = self._forms.applied(checked)

        def rendered(
            changed: list[Message], declared: Sequence[Mapping[str, Any]] | None = tools
        ) -> str:
            known = settings if declared is None else {**settings, "tools": declared}
            if continue_final_message:
                return self._up_to_final(changed, known)
            return self._render(changed, known)

        try:
            expected = rendered(plain)
        except RequestError as refusal:
            # `message.content + ...`, where an assistant's message only calls tools.
            filled = [{"content": "", **message} for message in plain]
            if continue_final_message and "content" not in plain[-1]:
                raise
            plain = self._forms.applied(filled)
            try:
                expected = rendered(plain)
            except RequestError:
                raise refusal from None
        twins = self._twins([*texts_of(plain), *texts_in(settings), *texts_in(tools)])
        marked, back = self._marked(rendered, expected, plain, tools, twins)
        check_words(plain, expected)
        return self._segments(marked, back)

    def _marked(
        self,
        rendered: Callable[..., str],
        expected: str,
        plain: list[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        twins: Mapping[str, str],
    ) -> tuple[str, dict[int, str]]:
        """The text with twins in the place of users' special tokens, and what twins stand for.

        rendered: gives the text of messages and tools, `expected` of these. Raises RequestError
        where users' text cannot be told from special tokens.
        """
        back = {ord(twin): character for character, twin in twins.items()}
        table = str.maketrans({**twins})

        def every(text: str) -> str:
            return text.translate(table)

        def complete(text: str) -> str:
            return self._special.sub(lambda m: m[0].translate(table), text)

        def changed(change: Callable[[str], str]) -> str:
            declared = tools and [changed_tool(tool, change, complete) for tool in tools]
            return rendered(each_text(plain, change), declared)

        marked = changed(every)
        written = self._special.findall(marked)
        if marked.translate(back) != expected:
            marked = changed(complete)
            if marked.translate(back) != expected or self._special.findall(marked) != written:
                raise RequestError(
                    "the chat template treats special-token text in a message or a tool in its own "
                    "way: remove such text",
                    "messages",
                )
        return marked, back

    def _check_tools(self, messages: list[Message]) -> None:
        """Refuse tools that the template would not show, and calls without a result."""
        if not self.reads("tools"):
            raise RequestError(
                "tools: the chat template does not read them: start with a --chat-template that "
                "does, or describe them in a message",
                "tools",
            )
        check_calls(messages)

    def _probe(self, messages: list[Message]) -> str:
        """The text of messages on some day."""
        day = self._clock.variables(None, self.date or "2026-01-31")
        return self._render(messages, {**day, "add_generation_prompt": False})

    def _settings(
        self,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """What a template reads beside the messages and the named tokens."""
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message goes on with the last message, and add_generation_prompt "
                "begins another: set add_generation_prompt to false",
                "continue_final_message",
            )
        found = check_variables(variables, self._named)
        for text in texts_in(found):
            if match := self._special.search(text):
                raise RequestError(
                    f"chat_template_kwargs holds the special token {match[0]!r}: send text in "
                    "messages",
                    "chat_template_kwargs",
                )
        date = self._clock.variables(found.get(DATE), self.date)
        return {**found, **date, "add_generation_prompt": add_generation_prompt}

    def _up_to_final(self, messages: list[Message], settings: Mapping[str, Any]) -> str:
        """The text up to the end of the last message's content."""
        final, text = None, ""
        parts = parts_of(messages[-1]) if "content" in messages[-1] else []
        if parts and "content" in self.source:
            *earlier, part = parts
            final = part["text"]
            tagged: Any = [*earlier, {**part, "text": final + _END}]
            if isinstance(messages[-1]["content"], str):
                tagged = final + _END
            text = self._render([*messages[:-1], {**messages[-1], "content": tagged}], settings)
        place = text.rfind(_END.strip())
        if final is None or place < 0 or final.strip() not in text:
            raise RequestError(
                "continue_final_message: the chat template does not give the last message's "
                "content as it is, or there is none: send the whole prompt to completions",
                "continue_final_message",
            )
        kept = text[:place]
        return kept if text.startswith(_END, place) else kept.rstrip()

    def _render(self, messages: list[Message], settings: Mapping[str, Any]) -> str:
        template = self._counting if self._counted else self._template
        if template is None:
            raise BeyondCount
        try:
            return template.render(
                messages=as_templates_read(messages),
                documents=None,
                **{"tools": None, **settings},
                **self._named,
            )
        except (BeyondCount, MemoryError):
            raise
        # A template is code of the checkpoint: any error concerns this conversation only.
        except Exception as error:
            reason = _ADDRESS.sub("0x", str(error)[:500])
            raise RequestError(
                f"the chat template refuses these messages: {reason}", "messages"
            ) from error

    def _twins(self, texts: Sequence[str]) -> dict[str, str]:
        """Each character of a special token, with a private-use character that occurs nowhere."""
        taken = {*self.source}.union(*texts, *self._named.values())
        free = (chr(code) for code in _TWINS if chr(code) not in taken)
        twins = dict(zip(self._characters, free, strict=False))
        if len(twins) < len(self._characters):
            raise RequestError("messages use all private-use characters: send fewer", "messages")
        return twins

    def _segments(self, marked: str, back: Mapping[int, str]) -> list[Segment]:
        segments, end = [], 0
        for match in self._special.finditer(marked):
            segments.append(Segment(marked[end : match.start()].translate(back), False))
            segments.append(Segment(match[0], True))
            end = match.end()
        segments.append(Segment(marked[end:].translate(back), False))
        return [segment for segment in segments if segment.text]


def _compiled(
    source: str,
) -> tuple[jinja2.Template, CountedTemplate | None, ClockUse, frozenset[str]]:
    """The template plain and counted, its use of the clock, its inputs. Raises CheckpointError."""
    language = TemplateLanguage()
    try:
        language.check_size(source)
        tree = language.parse(source)
        inputs = frozenset(meta.find_undeclared_variables(tree))
        return language.make(source), CountedTemplate.make(source), ClockUse.of(tree), inputs
    except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
        reason = str(error)[:500] or type(error).__name__
        raise CheckpointError(
            f"chat template: {reason}: correct it or give another with --chat-template"
        ) from error
