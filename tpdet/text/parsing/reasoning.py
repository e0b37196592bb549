"""Which marks divide a model's answers into reasoning and content: a setting, and a tokenizer's."""

from collections.abc import Collection, Sequence

from tpdet.checkpoint.model_config.json_file import parse_json_object
from tpdet.errors import UsageError
from tpdet.text.parsing.marks import (
    CHANNEL,
    END,
    MESSAGE,
    START,
    TEXT_BLOCK,
    Harmony,
    State,
    TextThink,
    Think,
)
from tpdet.text.parsing.parser import OutputParser
from tpdet.text.tokenizer import Tokenizer, TokenizerFiles
from tpdet.text.tokenizer_file import check_description, token_texts

BLOCKS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("[THINK]", "[/THINK]"),  # Mistral's
)
_MARKS = {"harmony": ((START, CHANNEL, MESSAGE, END),), "think": BLOCKS, "text_think": BLOCKS}
_OF_TOKENS = ("harmony", "think")
_END_OF_PROMPT = 16  # tokens that may spell a mark
_FLAG = "--reasoning-parser"


class ReasoningParser:
    """What splits answers, by `name`; its `marks` are tokens, those of "text_think" may be text."""

    def __init__(self, name: str, marks: tuple[str, ...], tokenizer: Tokenizer) -> None:
        self.name, self.marks = name, marks
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.added_tokens.values())

    @classmethod
    def of(
        cls, setting: str, tokenizer: Tokenizer | None, flag: str = _FLAG
    ) -> "ReasoningParser | None":
        """The parser that a setting asks for; None where answers are not split.

        "auto" looks for the marks in the tokenizer. Raises UsageError, which names the flag, where
        a named parser's marks are no tokens.
        """
        added = None if tokenizer is None else tokenizer.added_tokens.keys()
        found = _find(setting, added, flag)
        return None if found is None or tokenizer is None else cls(*found, tokenizer)

    def splitter(self, prompt: Sequence[int], keep: bool = True) -> OutputParser:
        """For one choice of a prompt, which may have begun the reasoning; keep: or drop it."""
        return OutputParser(self._tokenizer, self.state(prompt), keep=keep)

    def schema_after(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Behind which ids of its answer a schema holds (`SamplingParams.json_schema_after`)."""
        return self.state(prompt).schema_after

    def state(self, prompt: Sequence[int]) -> State:
        """What follows the marks of an answer to a prompt."""
        if self.name == "text_think" and self.marks[0] not in self._tokenizer.added_tokens:
            end = self._tokenizer.decode(prompt[-_END_OF_PROMPT:], skip_special_tokens=False)
            return TextThink(self._added, end)
        if self.name != "harmony":
            last = next((token for token in reversed(prompt) if token in self._added), None)
            return Think(self.marks, self._tokenizer.added_tokens, last)
        return Harmony(self.marks, self._tokenizer, prompt)


def check_marks(setting: str, files: TokenizerFiles | None, flag: str = _FLAG) -> None:
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
    _find(setting, tokens, flag)


def _find(
    setting: str, tokens: Collection[str] | None, flag: str
) -> tuple[str, tuple[str, ...]] | None:
    """A parser's name, and its marks among `tokens` (None: there is no tokenizer)."""
    if setting == "off" or (setting == "auto" and tokens is None):
        return None
    if tokens is None:
        raise UsageError(f"{flag} {setting} needs a tokenizer: leave --skip-tokenizer-init out")
    for name in _OF_TOKENS if setting == "auto" else [setting]:
        for marks in _MARKS[name]:
            if all(mark in tokens for mark in marks):
                return "think" if name == "text_think" else name, marks
    if setting == "auto":
        return None
    if setting == "text_think":
        return setting, TEXT_BLOCK
    wanted = ", or ".join(" and ".join(marks) for marks in _MARKS[setting])
    raise UsageError(
        f"{flag} {setting}: this tokenizer has no added tokens {wanted}: use auto or off"
    )
