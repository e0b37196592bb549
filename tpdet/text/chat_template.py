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

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes

from tpdet.errors import CheckpointError, RequestError
from tpdet.text.chat_messages import Message, check_messages, each_text, texts_of
from tpdet.text.counted_template import CountedTemplate
from tpdet.text.template_language import TemplateLanguage, loads_name
from tpdet.text.template_meter import BeyondCount

_CLOCK = "strftime_now"
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
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
        self,
        source: str,
        named_tokens: Mapping[str, str],
        special_tokens: Sequence[str],
        counted: bool = False,
    ) -> None:
        """named_tokens: what templates may print, such as `bos_token`; special_tokens: all texts.

        counted: do only work whose time and memory are counted, and raise BeyondCount for more.
        Raises CheckpointError for a syntax error and for a template that needs the time.
        """
        self.source = source
        self._named = dict(named_tokens)
        longest_first = sorted({*special_tokens}, key=lambda token: (-len(token), token))
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        characters = sorted({*"".join(longest_first)} - _NEVER_REPLACED)
        self._characters = [c for c in characters if not c.isspace()]
        self._counted = counted
        self._template, self._counting = _compiled(source)

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> list[Segment]:
        """The conversation as text, its special tokens apart.

        A message has a role and content (text, or a list of text parts), and may have name,
        tool_call_id, reasoning_content and tool_calls. Raises RequestError for anything else, for
        what the template itself refuses, and where user text cannot be kept apart from special
        tokens; BeyondCount where work is counted and this conversation takes too much of it.
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
        template = self._counting if self._counted else self._template
        if template is None:
            raise BeyondCount
        try:
            return template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._named,
            )
        except (BeyondCount, MemoryError):
            raise
        # A template is the checkpoint's code: whatever it raises is about this conversation.
        except Exception as error:
            reason = _ADDRESS.sub("0x", str(error)[:500])
            raise RequestError(
                f"the chat template refuses these messages: {reason}", "messages"
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


def _compiled(source: str) -> tuple[jinja2.Template, CountedTemplate | None]:
    """The template as it is, and with its count. Raises CheckpointError."""
    language = TemplateLanguage()
    try:
        clock = _needs_clock(language.parse(source))
        made = language.make(source), CountedTemplate.make(source)
    except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
        reason = str(error)[:500] or type(error).__name__
        raise CheckpointError(
            f"chat template: {reason}: correct it or give another with --chat-template"
        ) from error
    if clock:
        raise CheckpointError(
            f"chat template: it calls {_CLOCK}, and an answer must not depend on the time: "
            "give a template without it with --chat-template"
        )
    return made


def _needs_clock(tree: nodes.Template) -> bool:
    """Whether a template calls the clock without asking first whether there is one."""
    return loads_name(tree, _CLOCK) and not any(
        test.name == "defined" and isinstance(test.node, nodes.Name) and test.node.name == _CLOCK
        for test in tree.find_all(nodes.Test)
    )
