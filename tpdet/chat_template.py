"""Chat templates: a conversation to text, with what the template wrote told from what users wrote.

The template is Jinja, run in an immutable sandbox without a clock and without chance. Special-token
text inside a message must stay plain text, but a rendered string does not show who wrote what, and
templates trim, split and compare contents, so wrapping contents in markers changes the result.
Instead the conversation is rendered a second time with every character of the user's text that
occurs in any special token replaced by a private-use twin that occurs nowhere else. Whitespace
stays, so trimming does the same. A special token in that rendering holds no user character: the
template wrote it. The twins are then mapped back, and the result must equal the plain rendering.

A template that looks into contents (Qwen3 searches for "</think>") may take another branch there.
Then only complete special tokens in the user's text get twins; the result must again equal the
plain rendering, and hold the same special tokens as the first. If not, the request is refused.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tpdet.chat_messages import Message, check_messages, each_text, texts_of
from tpdet.errors import CheckpointError, RequestError

_CLOCK = "strftime_now"
_TWINS = range(0xF0000, 0xFFFFE)  # the private-use characters of plane 15
# tojson escapes these two, which it would not do to their twins.
_NEVER_REPLACED = frozenset('"\\')


@dataclass(frozen=True)
class Segment:
    """A stretch of a rendered conversation; `special`: a special token the template wrote."""

    text: str
    special: bool


class ChatTemplate:
    """One compiled template with the special tokens of its tokenizer."""

    def __init__(
        self, source: str, named_tokens: Mapping[str, str], special_tokens: Sequence[str]
    ) -> None:
        """named_tokens: what templates may print, such as `bos_token`; special_tokens: all texts.

        Raises CheckpointError for a syntax error and for a template that needs the time.
        """
        self.source = source
        self._named = dict(named_tokens)
        longest_first = sorted({*special_tokens}, key=lambda token: (-len(token), token))
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        characters = sorted({*"".join(longest_first)} - _NEVER_REPLACED)
        self._characters = [c for c in characters if not c.isspace()]
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(
                f"chat template: {error}: correct it or give another with --chat-template"
            ) from error
        if _needs_clock(tree):
            raise CheckpointError(
                f"chat template: it calls {_CLOCK}, and an answer must not depend on the time: "
                "give a template without it with --chat-template"
            )

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> list[Segment]:
        """The conversation as text, its special tokens apart.

        A message has a role and content (text, or a list of text parts), and may have name,
        tool_call_id, reasoning_content and tool_calls. Raises RequestError for anything else, for
        what the template itself refuses, and where user text cannot be kept apart from special
        tokens.
        """
        plain = check_messages(messages)
        expected = self._render(plain, add_generation_prompt)
        twins = self._twins(plain)
        back = {ord(twin): character for character, twin in twins.items()}
        table = str.maketrans(twins)
        marked = self._render(
            each_text(plain, lambda text: text.translate(table)), add_generation_prompt
        )
        written = self._special.findall(marked)
        if marked.translate(back) != expected:
            marked = self._render(
                each_text(
                    plain, lambda text: self._special.sub(lambda m: m[0].translate(table), text)
                ),
                add_generation_prompt,
            )
            if marked.translate(back) != expected or self._special.findall(marked) != written:
                raise RequestError(
                    "the chat template treats special-token text in a message in its own way: "
                    "remove such text from the messages",
                    "messages",
                )
        return self._segments(marked, back)

    def _render(self, messages: list[Message], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._named,
            )
        # A template is the checkpoint's code: whatever it raises is about this conversation.
        except Exception as error:
            raise RequestError(
                f"the chat template refuses these messages: {str(error)[:500]}", "messages"
            ) from error

    def _twins(self, messages: list[Message]) -> dict[str, str]:
        """Each character of a special token -> a private-use character that occurs nowhere."""
        taken = {*self.source}.union(*texts_of(messages), *self._named.values())
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


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tag and its end."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers sets it up, less the clock and whatever draws at random."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    del environment.filters["random"], environment.globals["lipsum"]
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _needs_clock(tree: nodes.Template) -> bool:
    """Whether a template calls the clock without asking first whether there is one."""
    if _CLOCK not in meta.find_undeclared_variables(tree):
        return False
    return not any(
        test.name == "defined" and isinstance(test.node, nodes.Name) and test.node.name == _CLOCK
        for test in tree.find_all(nodes.Test)
    )
