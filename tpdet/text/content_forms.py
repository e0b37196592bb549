"""Whether a chat template reads the content of a message as a text or as a list of parts.

Templates of image models walk through parts, `[{"type": "text", "text": ...}]`: of a plain text
they print nothing, or fail. So a sentence is rendered once for each role, as text and, where that
does not come out, as two parts, then as one; each message then has the form in which its words
reach the prompt. What a user says is looked for in each prompt, too.
"""

import re
from collections.abc import Callable, Sequence

from tpdet.errors import RequestError
from tpdet.text.chat_messages import Message, parts_of

_HALVES = ("Seven grey herons", "wait here")
_PRINTED_PART = re.compile(rf"""['"]text['"]: ?['"]{_HALVES[0]}""")  # an object, not its text
_CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {}}}
_USER: Message = {"role": "user", "content": "Look"}
_AROUND: dict[str, tuple[list[Message], list[Message]]] = {
    "user": ([], []),
    "system": ([], [_USER]),
    "developer": ([], [_USER]),
    "assistant": ([_USER], [_USER]),
    "tool": ([_USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]}], []),
}
"""By role: the messages before and behind the one with the sentence."""


class ContentForms:
    """The forms of one template, found where they are needed first."""

    def __init__(self, render: Callable[[list[Message]], str]) -> None:
        """render: raises RequestError for messages that the template refuses."""
        self._render = render
        self._forms: dict[str, Callable[[Message], Message]] = {}

    def applied(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with their contents in the template's form.

        Raises RequestError for a message whose words the template prints in neither form.
        """
        return [self._formed(f"messages[{i}]", message) for i, message in enumerate(messages)]

    def _formed(self, place: str, message: Message) -> Message:
        if "content" not in message:
            return message
        formed, role = self._in_form(message), message["role"]
        if self._forms[role] is _lost and formed["content"].strip():
            raise RequestError(
                f"{place}.content: the chat template leaves out what {role} messages say: send "
                "the text with another role, or start with a --chat-template that prints it",
                f"{place}.content",
            )
        return formed

    def _find(self, role: str) -> Callable[[Message], Message]:
        before, behind = _AROUND[role]
        asked: Message = {"role": role, "content": [_part(half) for half in _HALVES]}
        if role == "tool":
            asked |= {"tool_call_id": _CALL["id"], "name": "look"}
        before, behind = ([self._in_form(m) for m in messages] for messages in (before, behind))
        lost = False
        for form in (as_text, as_parts, as_one_part):
            try:
                text = self._render([*before, form(asked), *behind])
                if all(half in text for half in _HALVES) and not _PRINTED_PART.search(text):
                    return form
                lost = lost or form is as_text
            except RequestError:
                continue  # it says itself, to a request, what it refuses
        return _lost if lost else as_text

    def _in_form(self, message: Message) -> Message:
        role = message["role"]
        if role not in self._forms:
            self._forms[role] = self._find(role)
        return self._forms[role](message)


def check_words(messages: Sequence[Message], text: str) -> None:
    """Refuse (RequestError) a user's message of which some words are not in the rendered text.

    Only users': some templates of Mistral print a system message only beside a last user message.
    """
    place = 0
    for index, message in enumerate(messages):
        for part in parts_of(message) if message["role"] == "user" else ():
            words = part["text"].strip()
            found = text.find(words, place)
            if found < 0 and words not in text:
                raise RequestError(
                    f"messages[{index}].content: the chat template leaves out this text here: "
                    "start with a --chat-template that prints it",
                    f"messages[{index}].content",
                )
            place = max(place, found)


def as_text(message: Message) -> Message:
    """The message with its parts, if there are any, joined to one text."""
    return {**message, "content": "".join(part["text"] for part in parts_of(message))}


def as_parts(message: Message) -> Message:
    """The message with a list of text parts."""
    return {**message, "content": parts_of(message)}


def as_one_part(message: Message) -> Message:
    """The message with its text as a list of one part, of which some templates print the first."""
    return {**message, "content": [_part(as_text(message)["content"])]}


def _part(text: str) -> Message:
    return {"type": "text", "text": text}


def _lost(message: Message) -> Message:
    return as_text(message)
