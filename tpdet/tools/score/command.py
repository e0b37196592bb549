"""`tpdet score`: the engine's own log-probabilities of a given text."""

import argparse
import os
from typing import NamedTuple

import msgspec

from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.model_config.fit import context_length
from tpdet.checkpoint.resolve import resolve_model, resolve_tokenizer
from tpdet.client.engine_settings import engine_config, ranks_asked
from tpdet.client.input_file import STDIN, read_by_each_rank
from tpdet.config import EngineConfig
from tpdet.errors import RequestError, UsageError
from tpdet.launch.host.standard_streams import print_utf8
from tpdet.llm.llm import LLM
from tpdet.llm.results import Logprob
from tpdet.requests.request import Request, check_against_model
from tpdet.requests.sampling_params import SamplingParams
from tpdet.text.tokenizer import Tokenizer
from tpdet.tools.score.report import (
    Score,
    ScoredText,
    Token,
    alternative,
    json_lines,
    table_lines,
    total,
)

_MAX_BYTES = 64 << 20
"""The most bytes of a text: far more than any context holds."""


class ScoredSource(NamedTuple):
    """A text, or else token ids; `name` is what messages call it."""

    name: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None


def score(options: argparse.Namespace) -> int:
    """Score one text and print it on rank 0; returns 0.

    What can be refused before weights are loaded is refused then. Raises UsageError, RequestError
    and NotFoundError for such a text, and whatever `LLM` and `LLM.generate` raise.
    """
    params = _params(options.top)
    source = read_source(options)
    config, ranks = engine_config(options, os.environ), ranks_asked(options)
    tokenizer = None
    if not config.skip_tokenizer_init:
        directory = resolve_tokenizer(config.tokenizer, config.model, config.revision)
        tokenizer = Tokenizer.load(directory)
    special = options.add_special_tokens is not False
    token_ids = _checked_ids(source, config, tokenizer, special, params)
    settings = config.model_dump(include=config.model_fields_set) | {"skip_tokenizer_init": True}
    with LLM(**settings, tensor_parallel_size=ranks) as llm:
        (answer,) = llm.generate([token_ids], params, use_tqdm=False)
        what = Score(
            llm.engine.arithmetic.contract,
            llm.engine.runner.model_digest,
            llm.system_fingerprint,
            llm.engine.model_config.dtype,
            len(token_ids),
        )
        rank = llm.rank
    if rank > 0:
        return 0
    assert answer.prompt_logprobs is not None
    scored = _scored(what, token_ids, answer.prompt_logprobs, options.top, tokenizer)
    if options.json:
        print_utf8(json_lines(scored))
    else:
        print("\n".join(table_lines(scored)))
    return 0


def _params(top: int) -> SamplingParams:
    """Prompt scores and no answer. Raises UsageError for a `top` out of range."""
    try:
        return SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=top, seed=0)
    except RequestError as error:
        raise UsageError(str(error).replace("prompt_logprobs", "--top")) from None


def _checked_ids(
    source: ScoredSource,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    special: bool,
    params: SamplingParams,
) -> tuple[int, ...]:
    """The token ids of the text. Raises RequestError if the model cannot read or score them."""
    model = load_model_config(resolve_model(config.model, config.revision), config.dtype)
    most = context_length(config.max_model_len, model)
    ids = source.token_ids
    if ids is None:
        if tokenizer is None:
            raise UsageError("a text needs the tokenizer: leave --skip-tokenizer-init out")
        ids = tuple(tokenizer.encode(source.text or "", special, most))
    if len(ids) < 2:
        raise RequestError(
            f"{source.name} has fewer than two tokens ({len(ids)}), and the first has no "
            "log-probability: give more"
        )
    if len(ids) > most:
        higher = most < model.max_position
        raise RequestError(
            f"{source.name} has {len(ids)} tokens, over the context of {most}: shorten it"
            + (f", or raise --max-model-len (at most {model.max_position})" if higher else "")
        )
    request = Request(request_id="score", prompt_token_ids=ids, params=params)
    check_against_model(request, model.vocab_size, most)
    return ids


def _scored(
    what: Score,
    token_ids: tuple[int, ...],
    positions: list[dict[int, Logprob] | None],
    top: int,
    tokenizer: Tokenizer | None,
) -> ScoredText:
    """The engine's answer as it is printed."""
    texts: dict[int, str | None] = {}

    def text(token_id: int) -> str | None:
        if token_id not in texts:
            texts[token_id] = None if tokenizer is None else tokenizer.names.name(token_id)
        return texts[token_id]

    tokens, logprobs = [], []
    for position, (token_id, entries) in enumerate(zip(token_ids, positions, strict=True)):
        if entries is None:
            tokens.append(Token(position, token_id, text(token_id)))
            continue
        entry = alternative(token_id, text(token_id), entries[token_id])
        logprobs.append(entries[token_id].logprob)
        likely = sorted(entries.items(), key=lambda pair: pair[1].rank or 0)[:top]
        others = tuple(alternative(other, text(other), chance) for other, chance in likely)
        tokens.append(
            Token(position, token_id, entry.text, entry.logprob, entry.bits, entry.rank, others)
        )
    return ScoredText(what, tuple(tokens), total(logprobs))


def read_source(options: argparse.Namespace) -> ScoredSource:
    """The one source that the flags name.

    Raises UsageError for none or several, for an empty text and for what is no UTF-8 or no list of
    ids; and what `read_by_each_rank` raises.
    """
    sources = [
        *(("FILE", path) for path in [options.file] if path is not None),
        *(("--prompt", text) for text in options.prompt or ()),
        *(("--tokens", path) for path in options.tokens or ()),
    ]
    if len(sources) != 1:
        said = " and ".join(flag for flag, _ in sources) or "none"
        raise UsageError(f"give one of FILE, --prompt and --tokens, not {said}")
    flag, value = sources[0]
    if flag == "--tokens":
        if options.add_special_tokens is not None:
            raise UsageError("--add-special-tokens is for texts: leave it out beside --tokens")
        name = f"--tokens {value}"
        return ScoredSource(name, token_ids=_ids(_read(value), name))
    name = flag if flag == "--prompt" else _shown(value)
    text = value if flag == "--prompt" else _decoded(_read(value), name)
    if not text:
        raise UsageError(f"{name} is empty: give a text")
    return ScoredSource(name, text=text)


def _read(path: str) -> bytes:
    return read_by_each_rank(path, "give a file, or --prompt TEXT", _MAX_BYTES)


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; convert it "
            "(iconv -t UTF-8)"
        ) from None


def _ids(data: bytes, name: str) -> tuple[int, ...]:
    try:
        return tuple(msgspec.json.decode(data, type=list[int]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{name}: {error}: give a JSON list of ids, such as [5, 6, 7]") from None


def _shown(path: str) -> str:
    return "standard input" if path == STDIN else path
