"""Byte-level BPE in plain Python, from a table of ranks: the oracle of real tokenizers."""

from itertools import pairwise

import regex

GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

LLAMA_3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")


def alphabet():
    """GPT-2's letter for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(256 + len(letters) - len(plain))
    return letters


LETTERS = alphabet()


def spelled(token):
    """Bytes in GPT-2's letters."""
    return "".join(LETTERS[byte] for byte in token)


def smollm_words(text):
    """Each digit by itself, and what is between them as GPT-2 splits it."""
    parts = regex.split(r"(\p{N})", text)
    return [word for part in parts if part for word in regex.findall(GPT_2, part)]


def qwen_words(text):
    return regex.findall(QWEN, text)


def llama_3_words(text):
    return regex.findall(LLAMA_3, text)


def merged(parts, rank):
    """The tokens of a word's letters; rank: of two neighbours, None if they do not merge."""
    while len(parts) > 1:
        ranks = [rank(*pair) for pair in pairwise(parts)]
        found = [value for value in ranks if value is not None]
        if not found:
            break
        at = ranks.index(min(found))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
