"""Published tokenizers written as GGUF files, each with plain BPE over its vocabulary as oracle."""

import base64
import json
import re
import struct
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import gguf
import regex

from tests.lib.public_files import llama_3_ranks, mistral_file, qwen_ranks, smollm2
from tests.text.byte_bpe import (
    LETTERS,
    llama_3_words,
    merged,
    qwen_words,
    smollm_words,
    spelled,
)
from tpdet.checkpoint.gguf.header import read_header

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


class RealTokenizer(NamedTuple):
    """path: a GGUF file; normalized: a text as the tokenizer gives it back; plain: its tokens."""

    path: Path
    normalized: Callable[[str], str]
    plain: Callable[[str], list[str]]


def smollm2_tokenizer(folder: Path) -> RealTokenizer | None:
    """SmolLM2's GGUF file as published: each digit by itself, else GPT-2's words."""
    path = smollm2()
    if path is None:
        return None
    merges = read_header(path).metadata["tokenizer.ggml.merges"]
    ranks = {tuple(pair.split(" ")): index for index, pair in enumerate(merges)}

    def plain(text: str) -> list[str]:
        return list(byte_level(smollm_words(text), lambda a, b: ranks.get((a, b))))

    return RealTokenizer(path, str, plain)


def qwen_tokenizer(folder: Path) -> RealTokenizer | None:
    """Qwen's 151,643 tokens, and three of its control tokens."""
    lines = qwen_ranks()
    if lines is None:
        return None
    ranks = read_ranks(lines)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*map(spelled, ranks), *special]
    kinds = [NORMAL] * len(ranks) + [CONTROL] * len(special)
    path = folder / "qwen.gguf"
    write(path, "gpt2", tokens, kinds, "qwen2", merges(ranks), eos="<|im_end|>")
    by_text = {spelled(token): rank for token, rank in ranks.items()}

    def normalized(text: str) -> str:
        return unicodedata.normalize("NFC", text)

    def plain(text: str) -> list[str]:
        words = qwen_words(normalized(text))
        return list(byte_level(words, lambda a, b: by_text.get(a + b)))

    return RealTokenizer(path, normalized, plain)


def tekken_tokenizer(folder: Path) -> RealTokenizer | None:
    """Mistral's Tekken: 1,000 control tokens, then 130,072 of its ranks."""
    text = mistral_file("tekken_240911.json")
    if text is None:
        return None
    file = json.loads(text)
    control = file["config"]["default_num_special_tokens"]
    listed = file["vocab"][: file["config"]["default_vocab_size"] - control]
    ranks = {base64.b64decode(each["token_bytes"]): each["rank"] for each in listed}
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    special += [f"<SPECIAL_{index}>" for index in range(len(special), control)]
    tokens = [*special, *map(spelled, ranks)]
    kinds = [CONTROL] * control + [NORMAL] * len(ranks)
    path = folder / "tekken.gguf"
    write(path, "gpt2", tokens, kinds, "tekken", merges(ranks), bos="<s>")
    by_text = {spelled(token): rank for token, rank in ranks.items()}

    def plain(text: str) -> list[str]:
        return list(whole_words(regex.findall(file["config"]["pattern"], text), by_text))

    return RealTokenizer(path, str, plain)


def llama_3_tokenizer(folder: Path) -> RealTokenizer | None:
    """Llama 3's 128,000 tokens, and three of its control tokens."""
    lines = llama_3_ranks()
    if lines is None:
        return None
    ranks = read_ranks(lines)
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    tokens = [*map(spelled, ranks), *special]
    kinds = [NORMAL] * len(ranks) + [CONTROL] * len(special)
    path = folder / "llama-3.gguf"
    write(path, "gpt2", tokens, kinds, "llama-bpe", merges(ranks), bos=special[0], eos=special[2])
    by_text = {spelled(token): rank for token, rank in ranks.items()}

    def plain(text: str) -> list[str]:
        return list(whole_words(llama_3_words(text), by_text))

    return RealTokenizer(path, str, plain)


def mistral_v1_tokenizer(folder: Path) -> RealTokenizer | None:
    return sentencepiece_tokenizer(folder / "v1.gguf", mistral_file("tokenizer.model.v1"))


def mistral_v3_tokenizer(folder: Path) -> RealTokenizer | None:
    found = mistral_file("mistral_instruct_tokenizer_240323.model.v3")
    return sentencepiece_tokenizer(folder / "v3.gguf", found)


def sentencepiece_tokenizer(path: Path, model: bytes | None) -> RealTokenizer | None:
    """A SentencePiece model as Llama and Mistral 7B have it: BPE with byte fallback."""
    if model is None:
        return None
    pieces = [piece(value) for field, value in fields(model) if field == 1]
    tokens = [text for text, _, _ in pieces]
    known = {text: -score for text, score, kind in pieces if kind == NORMAL}
    # So a text can be merged word by word.
    assert not any(re.search("[^▁]▁", text) for text in known)
    kinds = [kind for _, _, kind in pieces]
    scores = [score for _, score, _ in pieces]
    write(path, "llama", tokens, kinds, scores=scores, bos="<s>", eos="</s>", unk="<unk>")

    def plain(text: str) -> list[str]:
        found: list[str] = []
        begin = "▁" if text else ""
        for word in re.findall("▁+[^▁]*|[^▁]+", begin + text.replace(" ", "▁")):
            for part in merged(list(word), lambda a, b: known.get(a + b)):
                in_bytes = [f"<0x{byte:02X}>" for byte in part.encode()]
                found += [part] if part in known else in_bytes
        return found

    return RealTokenizer(path, str, plain)


MAKERS = {
    "smollm2": smollm2_tokenizer,
    "mistral v1": mistral_v1_tokenizer,
    "mistral v3": mistral_v3_tokenizer,
    "qwen": qwen_tokenizer,
    "tekken": tekken_tokenizer,
    "llama 3": llama_3_tokenizer,
}


def byte_level(words: Iterable[str], rank: Callable[[str, str], int | None]) -> Iterator[str]:
    for word in words:
        yield from merged([LETTERS[byte] for byte in word.encode()], rank)


def whole_words(words: Iterable[str], ranks: dict[str, int]) -> Iterator[str]:
    """As `byte_level`, by the ranks of joined pairs; a word that is a token needs no merges."""
    for word in words:
        whole = spelled(word.encode())
        yield from [whole] if whole in ranks else byte_level([word], lambda a, b: ranks.get(a + b))


def read_ranks(lines: bytes) -> dict[bytes, int]:
    """The ranks of tokens, from lines of base64, a space and a rank."""
    pairs = (line.split() for line in lines.splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def merges(ranks: dict[bytes, int]) -> list[str]:
    """The merges that ranks stand for: every pair of tokens that makes a token, by its rank."""
    pairs = []
    for token, rank in ranks.items():
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        found = [(ranks[a], ranks[b], a, b) for a, b in cuts if a in ranks and b in ranks]
        pairs += [(rank, *pair) for pair in sorted(found)]
    return [f"{spelled(a)} {spelled(b)}" for *_, a, b in sorted(pairs)]


def write(
    path: Path,
    model: str,
    tokens: list[str],
    kinds: list[int],
    pre: str = "",
    merges: list[str] | None = None,
    scores: list[float] | None = None,
    **named: str,
) -> None:
    """A GGUF file of a tokenizer alone; named: such as bos="<s>"."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if scores is not None:
        writer.add_token_scores(scores)
    else:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(merges)
    for name, token in named.items():
        getattr(writer, f"add_{name}_token_id")(tokens.index(token))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def piece(data: bytes) -> tuple[str, float, int]:
    """(text, score, kind) of a SentencePiece."""
    found = dict(fields(data))
    return found[1].decode(), struct.unpack("<f", found.get(2, bytes(4)))[0], found.get(3, NORMAL)


def fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """The numbers and values of a protocol buffer's fields."""
    at = 0

    def integer() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        field, wire = divmod(integer(), 8)
        if wire == 0:
            yield field, integer()
            continue
        size = {1: 8, 5: 4}.get(wire) or integer()
        yield field, data[at : at + size]
        at += size
