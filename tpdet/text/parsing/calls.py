"""Which family's form a model's calls of tools have: a setting, and a tokenizer's tokens."""

from collections.abc import Sequence

from tpdet.errors import UsageError
from tpdet.text.parsing.bodies import Tools
from tpdet.text.parsing.call_reader import CallReader
from tpdet.text.parsing.family import FAMILIES, TOOL_PARSERS, CallFamily
from tpdet.text.parsing.parser import OutputParser
from tpdet.text.parsing.reasoning import ReasoningParser, check_marks
from tpdet.text.parsing.terminals import Terminals
from tpdet.text.tokenizer import Tokenizer, TokenizerFiles

_FLAG = "--tool-call-parser"
_NEEDS_TOKENIZER = "needs a tokenizer: leave --skip-tokenizer-init out"


class CallParser:
    """What the calls of answers are read by."""

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        """name: of a family or its parser, as vLLM or SGLang spell it.

        Raises UsageError for other names, and where harmony's marks are no tokens.
        """
        family = TOOL_PARSERS.get(name)
        if family is None:
            raise UsageError(f"{_FLAG} {name}: use off, auto, {', '.join(sorted(TOOL_PARSERS))}")
        self.harmony = None
        if family.form == "harmony":
            self.harmony = ReasoningParser.of("harmony", tokenizer, _FLAG)
        self.family, self.tokenizer = family, tokenizer
        names = [*family.begin, *family.end, family.call_id, family.arguments]
        if family.tags is not None and not family.tags.call_end:
            tags = family.tags
            names += [tags.key_begin, tags.key_end, tags.value_begin, tags.value_end]
        self._terminals = Terminals(filter(None, names), family.text, tokenizer.added_tokens)
        self._hidden = {
            id_: text
            for text, id_ in tokenizer.added_tokens.items()
            if id_ not in self._terminals.ids
        }

    @classmethod
    def of(cls, setting: str, tokenizer: Tokenizer | None) -> "CallParser | None":
        """The parser that a setting asks for; None where calls are not read.

        "auto" takes the first family whose marks the chat template has. Raises UsageError.
        """
        if setting == "off" or (setting == "auto" and tokenizer is None):
            return None
        if tokenizer is None:
            raise UsageError(f"{_FLAG} {setting} {_NEEDS_TOKENIZER}")
        if setting != "auto":
            return cls(setting, tokenizer)
        template = tokenizer.chat_template
        family = None if template is None else family_of(template.source)
        return None if family is None else cls(family.name, tokenizer)

    def reader(self, tools: Tools) -> CallReader:
        """What reads one answer, given the schemas of the tools that it may call."""
        return CallReader(self.family, self._terminals, tools, self._hidden)


def check_call_parser(setting: str, files: TokenizerFiles | None) -> None:
    """Refuse a named parser of calls (UsageError) whose tokenizer or marks are missing."""
    if setting in ("off", "auto"):
        return
    if files is None:
        raise UsageError(f"{_FLAG} {setting} {_NEEDS_TOKENIZER}")
    if TOOL_PARSERS[setting].form == "harmony":
        check_marks("harmony", files, _FLAG)


def family_of(template: str) -> CallFamily | None:
    """The family whose chat template a source is; None if it shows no calls of any."""
    return next((f for f in FAMILIES if all(mark in template for mark in f.template)), None)


def output_parser(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    reasoning: ReasoningParser | None,
    calls: CallParser | None,
    tools: Tools | None,
    keep: bool = True,
) -> OutputParser:
    """What reads one choice of a prompt.

    reasoning: None where it is not split off, but for harmony, whose calls stand beside it. calls,
    tools: None where no tools may be called; the schema of each tool's arguments by its name. keep:
    tell the reasoning, or drop it.
    """
    if calls is not None and tools and calls.harmony is not None:
        reasoning = calls.harmony
    marks = None if reasoning is None else reasoning.state(prompt)
    reader = None if calls is None or not tools else calls.reader(tools)
    return OutputParser(tokenizer, marks, reader, keep)
