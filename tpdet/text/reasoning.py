"""Splits an answer's text into reasoning and content, where the model's own tokens divide it.

A mark is a token id: the same letters made of other tokens are text. The text itself is that of an
answer without a parser; every character of it is content, reasoning, or neither (the marks, and
the headers between harmony's). So stop strings, ids and log-probabilities know nothing of this.
"""

from collections import deque
from collections.abc import Collection, Sequence
from typing import Protocol

from tpdet.checkpoint.model_config.json_file import parse_json_object
from tpdet.errors import UsageError
from tpdet.text.tokenizer import Tokenizer, TokenizerFiles
from tpdet.text.tokenizer_file import check_description, token_texts

CONTENT, REASONING, NEITHER = range(3)
BLOCKS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("[THINK]", "[/THINK]"),  # Mistral's
)
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_MARKS = {"harmony": ((START, CHANNEL, MESSAGE, END),), "think": BLOCKS}
_MORE_ENDS = ("<|return|>", "<|call|>")
_FLAG = "--reasoning-parser"


class _State(Protocol):
    """Where one answer is among its marks."""

    @property
    def schema_after(self) -> tuple[int, ...]:
        """The ids behind which a schema holds, before any token of the answer."""
        ...

    def step(self, token_id: int, text: str) -> int:
        """The part that the next token is in; `text` is what it completed."""
        ...


class _Think:
    """One block of reasoning, opened at the beginning of the answer or at the end of its prompt.

    Behind other content, and behind the block, both marks are text: an answer may be about them.
    """

    def __init__(self, marks: Sequence[str], added: dict[str, int], last: int | None) -> None:
        """last: the prompt's last added token.

        Not its last mark: a message may hold one, and tokens of roles stand behind it.
        """
        self._opening, self._closing = (added[mark] for mark in marks)
        self._opening_text = marks[0]
        self._part = REASONING if last == self._opening else CONTENT
        self._may_open = last != self._closing

    @property
    def schema_after(self) -> tuple[int, ...]:
        """The ids behind which the answer to the prompt is content; () if all of it is."""
        if self._part == REASONING:
            return (self._closing,)
        return (self._opening, self._closing) if self._may_open else ()

    def step(self, token_id: int, text: str) -> int:
        if token_id == self._closing and self._part == REASONING:
            self._part, self._may_open = CONTENT, False
            return NEITHER
        if self._may_open:
            opens = token_id == self._opening
            self._may_open = not (text.removesuffix(self._opening_text) if opens else text).strip()
            if opens and self._may_open:
                self._part = REASONING
                return NEITHER
        return self._part


class _Harmony:
    """Messages with headers: `<|channel|>analysis<|message|>...<|end|><|start|>assistant...`.

    The channel `analysis`, and what is addressed to a tool, is reasoning; any other is content, as
    is text outside of messages.
    """

    def __init__(self, marks: Sequence[str], tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        added = tokenizer.added_tokens
        self._start, self._channel, self._message, end = (added[mark] for mark in marks)
        self._ends = {end, *(added[mark] for mark in _MORE_ENDS if mark in added)}
        self._tokenizer = tokenizer
        self._part = CONTENT
        self._header: list[int] | None = None  # None outside of one
        begin = len(prompt) - 1
        while begin > 0 and prompt[begin] != self._start:
            begin -= 1
        for token in prompt[begin:]:
            self.step(token, "")
        if self._header is not None and self._channel not in self._header:
            self._header = None  # the role is complete: what comes may be text without a header
        breaks = {self._start, self._message, *self._ends}
        last = next((token for token in reversed(prompt) if token in breaks), None)
        self._begun = last == self._message or self._header is not None

    @property
    def schema_after(self) -> tuple[int, ...]:
        """The ids behind which the answer is final; () if the prompt has begun a message of it."""
        if self._begun:
            return ()
        final = self._tokenizer.encode("final", add_special_tokens=False)
        return (self._channel, *final, self._message)

    def step(self, token_id: int, text: str) -> int:
        if token_id == self._message:
            self._part, self._header = self._part_of(self._header or []), None
        elif token_id in (self._start, self._channel):
            fresh = self._header is None or token_id == self._start
            self._header = [token_id] if fresh else [*(self._header or []), token_id]
        elif token_id in self._ends:
            self._part, self._header = CONTENT, None
        elif self._header is None:
            return self._part
        else:
            self._header.append(token_id)
        return NEITHER

    def _part_of(self, header: list[int]) -> int:
        words = self._tokenizer.decode(header, skip_special_tokens=False)
        channel = words.partition(CHANNEL)[2].strip()
        to_tool = " to=" in words
        return REASONING if channel.startswith("analysis") or to_tool else CONTENT


class ReasoningSplitter:
    """Splits the text of one choice.

    Each token is pushed with the text that it completed; `take` gives that text out again, in
    pieces of any length, as far as stop strings have let it go.
    """

    def __init__(self, state: _State, tokenizer: Tokenizer, keep: bool) -> None:
        self.reasoning_tokens = 0
        self._state, self._tokenizer, self._keep = state, tokenizer, keep
        self._last = CONTENT  # the part of the last token that was in one
        self._held: deque[tuple[int, int]] = deque()  # parts and lengths of text to be taken

    def push(self, token_id: int, text: str) -> None:
        """The next token, and what the detokenizer gave for it."""
        part = self._state.step(token_id, text)
        if part == REASONING:
            self.reasoning_tokens += 1
        if text and (part == NEITHER or "\ufffd" in text):
            # Bytes of earlier tokens may come with this one, as U+FFFD: they are of their part.
            own = self._tokenizer.token_text(token_id)
            size = len(own) if text.endswith(own) else len(text) if part != NEITHER else 0
            if size < len(text):
                self._held.append((self._last, len(text) - size))
            self._held.append((part, size))
        elif text:
            self._held.append((part, len(text)))
        if part != NEITHER:
            self._last = part

    def take(self, text: str) -> tuple[str, str]:
        """The content and the reasoning in the next characters of the text."""
        found = ["", "", ""]
        while text:
            part, length = self._held.popleft()
            if length > len(text):
                self._held.appendleft((part, length - len(text)))
            found[part] += text[:length]
            text = text[length:]
        return found[CONTENT], found[REASONING] if self._keep else ""


class ReasoningParser:
    """What answers are split by: `name` is "think" or "harmony", `marks` are tokens of it."""

    def __init__(self, name: str, marks: tuple[str, ...], tokenizer: Tokenizer) -> None:
        self.name, self.marks = name, marks
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.added_tokens.values())

    @classmethod
    def of(cls, setting: str, tokenizer: Tokenizer | None) -> "ReasoningParser | None":
        """The parser that a setting asks for; None where answers are not split.

        "auto" looks for the marks in the tokenizer. Raises UsageError where a named parser's marks
        are no tokens.
        """
        found = _find(setting, None if tokenizer is None else tokenizer.added_tokens.keys())
        return None if found is None or tokenizer is None else cls(*found, tokenizer)

    def splitter(self, prompt: Sequence[int], keep: bool = True) -> ReasoningSplitter:
        """For one choice of a prompt, which may have begun the reasoning; keep: or drop it."""
        return ReasoningSplitter(self._state(prompt), self._tokenizer, keep)

    def schema_after(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Behind which ids of its answer a schema holds (`SamplingParams.json_schema_after`)."""
        return self._state(prompt).schema_after

    def _state(self, prompt: Sequence[int]) -> _State:
        if self.name == "think":
            last = next((token for token in reversed(prompt) if token in self._added), None)
            return _Think(self.marks, self._tokenizer.added_tokens, last)
        return _Harmony(self.marks, self._tokenizer, prompt)


def check_marks(setting: str, files: TokenizerFiles | None) -> None:
    """Refuse a named parser (UsageError) whose marks are no tokens of these files, before a start.

    Not every token is an added one: `ReasoningParser.of` has the last word. Raises CheckpointError
    for a damaged file.
    """
    if setting not in _MARKS:
        return
    tokens = None
    if files is not None:
        description = parse_json_object(files.text, files.source)
        check_description(description, files.source)
        tokens = token_texts(description) | {*files.declared().texts}
    _find(setting, tokens)


def _find(setting: str, tokens: Collection[str] | None) -> tuple[str, tuple[str, ...]] | None:
    """A parser's name, and its marks among `tokens` (None: there is no tokenizer)."""
    if setting == "off" or (setting == "auto" and tokens is None):
        return None
    if tokens is None:
        raise UsageError(f"{_FLAG} {setting} needs a tokenizer: leave --skip-tokenizer-init out")
    for name in _MARKS if setting == "auto" else [setting]:
        for marks in _MARKS[name]:
            if all(mark in tokens for mark in marks):
                return name, marks
    if setting == "auto":
        return None
    wanted = ", or ".join(" and ".join(marks) for marks in _MARKS[setting])
    raise UsageError(
        f"{_FLAG} {setting}: this tokenizer has no added tokens {wanted}: use auto or off"
    )
