"""A Hugging Face tokenizer: text to ids and back, and conversations through the chat template.

`tokenizer.json` is authoritative, also for the tokens before and after a text: as in transformers
5, `add_bos_token` of `tokenizer_config.json` is ignored. Truncation, padding and the clean-up of
spaces are never applied.
"""

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from tpdet.checkpoint.gguf.header import is_gguf
from tpdet.checkpoint.model_config.json_file import (
    parse_json_object,
    read_json_object,
    read_text_file,
)
from tpdet.errors import CheckpointError, NotFoundError, RequestError
from tpdet.text.chat_template import ChatTemplate, Segment
from tpdet.text.declared_tokens import NAMED, DeclaredTokens, check_settings
from tpdet.text.template_date import check_date_setting
from tpdet.text.template_language import MOST_BYTES
from tpdet.text.token_bound import bytes_per_token
from tpdet.text.token_bytes import DecoderRules, join_tokens, read_rules
from tpdet.text.token_guard import Guard, checked, ids_of
from tpdet.text.token_names import TokenNames
from tpdet.text.tokenizer_file import check_description

_MAX_TOKENIZER_BYTES = 512 << 20
_MAX_CONFIG_BYTES = 64 << 20  # it repeats every added token
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class TokenizerFiles:
    """The contents of a tokenizer's files.

    `text` is `tokenizer.json`, whose name in messages is `source`; `config` is the object of
    `tokenizer_config.json`, `special_map` and `added` those of `special_tokens_map.json` and
    `added_tokens.json`; `template` is the chat template, `date` what it prints where a request has
    none.
    """

    source: str
    text: str
    config: dict[str, Any]
    template: str | None
    date: str | None = None
    special_map: dict[str, Any] = field(default_factory=dict)
    added: dict[str, Any] = field(default_factory=dict)

    def declared(self) -> DeclaredTokens:
        """The tokens of the files beside `tokenizer.json`. Raises CheckpointError."""
        return DeclaredTokens.read(self.config, self.special_map, self.added)


class Tokenizer:
    """Immutable once loaded; usable from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        template: str | None,
        counted: bool = False,
        date: str | None = None,
        declared: DeclaredTokens | None = None,
    ) -> None:
        """config: the object in tokenizer_config.json; counted, date: as for `ChatTemplate`.

        declared: what all files declare, else what `config` does. Raises CheckpointError for files
        that are not supported.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        declared = declared or DeclaredTokens.read(config)
        declared.add_to(backend)
        self._named = {name: str(token) for name, token in declared.named.items()}
        decoder = backend.decoder
        self.decoder_rules: DecoderRules = read_rules(decoder and decoder.__getstate__())
        # Kept by detokenizers, where special tokens are shown and where they are skipped.
        self.texts: dict[bool, dict[int, str]] = {False: {}, True: {}}
        added = backend.get_added_tokens_decoder()
        self._special = {id_: token.content for id_, token in added.items() if token.special}
        self.added_tokens = {token.content: id_ for id_, token in added.items()}
        # Those that a conversation's texts cannot have: also named ones that answers show.
        named = (*self._named.values(), *map(str, declared.extra))
        self._kept_apart = frozenset((*self._special.values(), *named))
        self.declared_special = tuple(dict.fromkeys(named))  # what transformers calls special
        self._class = str(config.get("tokenizer_class") or "PreTrainedTokenizerFast")
        self.model_vocab_size = backend.get_vocab_size(with_added_tokens=False)
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.chat_template = (
            ChatTemplate(template, self._named, sorted(self._kept_apart), counted, date)
            if template
            else None
        )
        # At load, not at a request: it can fail.
        self.around = _sound(self._added_around)
        self._bytes_per_token = bytes_per_token(json.loads(backend.to_str()))

    @classmethod
    def load(
        cls, directory: str | Path, chat_template: str | Path | None = None, date: str | None = None
    ) -> "Tokenizer":
        """Read `tokenizer.json`, `tokenizer_config.json` and the template of a model directory.

        chat_template: a file that replaces the checkpoint's. date: what templates that call
        `strftime_now` print where a request has no `current_date`, such as 2026-01-31. Raises
        NotFoundError for a missing `tokenizer.json` or template file, CheckpointError for one that
        is damaged or unsupported, UsageError for a date that the template never reads.
        """
        return cls.from_files(read_files(directory, chat_template, date))

    @classmethod
    def from_files(cls, files: TokenizerFiles, counted: bool = False) -> "Tokenizer":
        """The tokenizer of files that were read before. Raises CheckpointError as `load`.

        counted: chat templates may do only a little work, and raise BeyondCount for more.
        """
        description = parse_json_object(files.text, files.source)
        check_description(description, files.source)
        check_settings(files.config, description.get("pre_tokenizer"))
        backend = _sound(lambda: tokenizers.Tokenizer.from_str(files.text), files.source)
        declared = files.declared()
        return _sound(
            lambda: cls(backend, files.config, files.template, counted, files.date, declared),
            files.source,
        )

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, if the tokenizer names one."""
        return self._id_of("bos_token")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The id that ends a text, if the tokenizer names one."""
        found = self._id_of("eos_token")
        return () if found is None else (found,)

    def prepare_chats(self) -> None:
        """Make what conversations and log-probabilities need: else the first waits a second more.

        Raises CheckpointError where that cannot be.
        """
        _ = self._guard
        _ = self.names

    @cached_property
    def _guard(self) -> Guard:
        description = json.loads(self._backend.to_str())
        return _sound(lambda: Guard(self._backend, description, self._kept_apart))

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        most: int | None = None,
        field: str = "prompt",
    ) -> list[int]:
        """Ids of a text; special-token text in it becomes special ids, as in a template's output.

        field: what the text is, for messages. Raises RequestError for text with a lone surrogate,
        and, without encoding it, for text that must have more than `most` tokens.
        """
        self._refuse_too_long([checked(text)], most, field)
        return ids_of(self._backend, text, add_special_tokens)

    def encode_pair(
        self, text: str, other: str, most: int | None = None, field: str = "prompt"
    ) -> list[int]:
        """Ids of two texts, as the post-processor joins them. Arguments and errors as `encode`."""
        self._refuse_too_long([checked(text), checked(other)], most, field)
        pair = self._backend.encode(checked(text), checked(other), add_special_tokens=True)
        return [*pair.ids]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        most: int | None = None,
        *,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Ids of a conversation; special-token text inside messages stays plain text.

        continue_final_message: end with the last message's content, for the answer to go on with
        it. chat_template_kwargs: JSON values of the template's variables, by name. tools:
        declarations of tools that the template shows (`ToolUse.declared`).

        Raises RequestError without a template, for messages that it refuses, for lone surrogates,
        and, without encoding it, for text that must have more than `most` tokens.
        """
        segments = self._render(
            messages, add_generation_prompt, continue_final_message, chat_template_kwargs, tools
        )
        self._refuse_too_long((checked(s.text) for s in segments if not s.special), most)
        return self._encode_segments(segments, add_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """A conversation as text; arguments and RequestError as of `apply_chat_template`."""
        segments = self._render(
            messages, add_generation_prompt, continue_final_message, chat_template_kwargs, tools
        )
        return "".join(segment.text for segment in segments)

    def with_chat_template(self, source: str) -> "Tokenizer":
        """This tokenizer with another template. Raises CheckpointError as `ChatTemplate`."""
        other = copy.copy(self)
        date = self.chat_template.date if self.chat_template else None
        special = sorted(self._kept_apart)
        other.chat_template = ChatTemplate(source, self._named, special, date=date)
        return other

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; ids without a token (in a padded vocabulary) add no text."""
        tokens = (self.token(id_, skip_special_tokens) for id_ in ids)
        return join_tokens(self.decoder_rules, (token for token in tokens if token is not None))

    def token(self, token_id: int, skip_special_tokens: bool = False) -> str | None:
        """A token in the vocabulary's spelling; None if there is none, or if it is skipped."""
        if not 0 <= token_id < self.vocab_size or (
            skip_special_tokens and token_id in self._special
        ):
            return None
        return self._backend.id_to_token(token_id)

    def token_text(self, token_id: int) -> str:
        """One token decoded by itself, special or not; parts of a character are U+FFFD."""
        return self.decode([token_id], skip_special_tokens=False)

    @cached_property
    def names(self) -> TokenNames:
        """What tokens are called where people read them; made in a tenth of a second."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return TokenNames(self.decoder_rules, vocabulary, self.token)

    def info(self) -> dict[str, Any]:
        """The answer of `/tokenizer_info`: names, ids and the chat template, but no paths."""
        return {
            "tokenizer_class": self._class,
            "vocab_size": self.vocab_size,
            **{name: self._named.get(name) for name in NAMED},
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self._id_of("eos_token"),
            "add_bos_token": self.around[0][:1] == [self.bos_token_id],
            "additional_special_tokens": [self._special[id_] for id_ in sorted(self._special)],
            "chat_template": self.chat_template.source if self.chat_template else None,
            "chat_template_date": self.chat_template.date if self.chat_template else None,
        }

    def _id_of(self, name: str) -> int | None:
        text = self._named.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _added_around(self) -> tuple[list[int], list[int]]:
        """Ids that `add_special_tokens` puts before and after a text."""
        bare = self._backend.encode("a", add_special_tokens=False).ids
        full = self._backend.encode("a", add_special_tokens=True).ids
        for first in range(len(full) - len(bare) + 1):
            if full[first : first + len(bare)] == bare:
                return full[:first], full[first + len(bare) :]
        raise CheckpointError("tokenizer.json: the post-processor changes a text's own tokens")

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Segment]:
        if self.chat_template is None:
            raise RequestError(
                "this model has no chat template: use completions, or start with --chat-template",
                "messages",
            )
        return self.chat_template.render(
            messages, add_generation_prompt, continue_final_message, variables, tools
        )

    def _refuse_too_long(
        self, texts: Iterable[str], most: int | None, field: str = "prompt"
    ) -> None:
        """Raise RequestError if the texts, end to end, must have more than `most` tokens."""
        if most is None or self._bytes_per_token is None:
            return
        least = -(-sum(len(text.encode()) for text in texts) // self._bytes_per_token)
        if least > most:
            raise RequestError(
                f"the {field} has at least {least} tokens, over the model's context of {most}: "
                "shorten it",
                field,
            )

    def _encode_segments(self, segments: Sequence[Segment], add_special_tokens: bool) -> list[int]:
        ids = self._guard.encode(segments)
        before, after = self.around if add_special_tokens else ([], [])
        return [*before, *ids, *after]


def read_files(
    directory: str | Path, chat_template: str | Path | None = None, date: str | None = None
) -> TokenizerFiles:
    """The files of a model directory, or what a GGUF file has of them; arguments as of `load`.

    Raises UsageError for a date that the template never reads.
    """
    found = _read_files(directory, chat_template)
    check_date_setting(date, found.template)
    return replace(found, date=date)


def _read_files(directory: str | Path, chat_template: str | Path | None) -> TokenizerFiles:
    directory = Path(directory)
    if is_gguf(directory):
        from tpdet.checkpoint.gguf.tokenizer import read_gguf_tokenizer

        text, config, template = read_gguf_tokenizer(directory)
        chosen = _chosen_template(chat_template)
        return TokenizerFiles(str(directory), text, config, chosen or template)
    path = directory / "tokenizer.json"
    text = read_text_file(path, _MAX_TOKENIZER_BYTES)
    config, special_map, added = (
        _optional_object(directory / f"{name}.json")
        for name in ("tokenizer_config", "special_tokens_map", "added_tokens")
    )
    template = _template(directory, config, chat_template)
    return TokenizerFiles(str(path), text, config, template, None, special_map, added)


def _sound(make: Callable[[], _Made], file: str = "tokenizer.json") -> _Made:
    """The result of `make`. Raises CheckpointError for whatever the library raises."""
    try:
        return make()
    except CheckpointError:
        raise
    # The library raises bare Exception, and a panic of Rust is not even an Exception.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(
            f"{file} cannot be read ({str(error)[:200]}): download it again, or install a newer "
            "tokenizers package"
        ) from error


def _optional_object(path: Path) -> dict[str, Any]:
    return read_json_object(path, _MAX_CONFIG_BYTES) if path.exists() else {}


def _template(directory: Path, config: Mapping[str, Any], chosen: str | Path | None) -> str | None:
    """The template: the chosen file, else the directory's own, else tokenizer_config.json's.

    Its own is chat_template.jinja, or chat_template.json, where older image models keep it.
    """
    if chosen is not None:
        return _chosen_template(chosen)
    path = directory / "chat_template.jinja"
    if path.exists():
        return read_text_file(path, MOST_BYTES)
    older = directory / "chat_template.json"
    source = "chat_template.json" if older.exists() else "tokenizer_config.json"
    described = read_json_object(older, _MAX_CONFIG_BYTES) if older.exists() else config
    template = described.get("chat_template")
    if isinstance(template, list):
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[-1].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{source}: chat_template is a {type(template).__name__}: it must be text"
        )
    return template


def _chosen_template(chosen: str | Path | None) -> str | None:
    if chosen is None:
        return None
    if not Path(chosen).exists():
        raise NotFoundError(f"chat template {chosen} does not exist: name a file with one")
    return read_text_file(Path(chosen), MOST_BYTES)


def ending_ids(of_model: Iterable[int], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids that end a text: the model's and the tokenizer's, ascending."""
    return tuple(sorted({*of_model, *(() if tokenizer is None else tokenizer.eos_token_ids)}))
