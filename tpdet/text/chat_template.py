"""Chat templates: render a conversation, and tell the template's special tokens from users' text.

The template is Jinja, run in an immutable sandbox without a clock and without randomness.
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
# tojson escapes these two, but would not escape their twins.
_NEVER_REPLACED = frozenset('"\\')


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
    ) -> None:
        """named_tokens: texts by name, such as `bos_token`, for templates to print.

        special_tokens: the texts of all special tokens. counted: do only work whose time and memory
        are counted, and raise BeyondCount for more. Raises CheckpointError for a syntax error and
        for a template that reads the clock.
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
        """The conversation as segments of text, each special token a segment.

        A message has a role and content (text, or a list of text parts), and may have name,
        tool_call_id, reasoning_content and tool_calls. Raises RequestError for other fields, for
        messages that the template refuses, and where users' text cannot be told from special
        tokens. Raises BeyondCount where work is counted and this conversation needs too much.
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
        # A template is code of the checkpoint: any error concerns this conversation only.
        except Exception as error:
            reason = _ADDRESS.sub("0x", str(error)[:500])
            raise RequestError(
                f"the chat template refuses these messages: {reason}", "messages"
            ) from error

    def _twins(self, messages: list[Message]) -> dict[str, str]:
        """Each character of a special token, with a private-use character that occurs nowhere."""
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
    """The plain template, and the one whose work is counted. Raises CheckpointError."""
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
