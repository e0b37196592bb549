"""Recorded outputs as tokens: their marks have ids of their own, other text is cut anywhere."""

import re
from bisect import bisect, bisect_left
from collections.abc import Iterable, Mapping, Sequence

ORDINARY = 10**6
"""The id of the first token without a mark; each has an id of its own."""


class CutTokenizer:
    """What parsers ask a tokenizer for, of one output: a text in marks and in pieces."""

    def __init__(self, marks: Mapping[str, int], text: str, ids: Sequence[int]) -> None:
        """marks: added tokens; ids: the output's, of which only those of marks count."""
        self.added_tokens = dict(marks)
        self._texts = {id_: mark for mark, id_ in marks.items()}
        self.ids: list[int] = []
        run = 0
        for id_ in [*ids, None]:
            if id_ is not None and id_ not in self._texts:
                run += 1
                continue
            mark = "" if id_ is None else self._texts[id_]
            place = len(text) if id_ is None else text.index(mark)
            for i in range(run):
                piece = text[i * place // run : (i + 1) * place // run]
                self.ids.append(self.add(piece))
            text, run = text[place + len(mark) :], 0
            if id_ is not None:
                self.ids.append(id_)
        if text:
            raise ValueError(f"{text!r} has no tokens")

    @classmethod
    def cut(cls, marks: Mapping[str, int], text: str, cuts: Iterable[int]) -> "CutTokenizer":
        """A text whose letters of marks are marks, and whose other tokens end at the cuts."""
        tokenizer = cls(marks, "", ())
        position = 0
        pattern = re.compile("|".join(map(re.escape, sorted(marks, key=len)[::-1])) or "(?!)")
        ends = [*cuts, len(text)]
        for match in [*pattern.finditer(text), None]:
            end = len(text) if match is None else match.start()
            borders = ends[bisect(ends, position) : bisect_left(ends, end)]
            for border in [*borders, end]:
                if border > position:
                    tokenizer.ids.append(tokenizer.add(text[position:border]))
                position = border
            if match is not None:
                tokenizer.ids.append(marks[match[0]])
                position = match.end()
        return tokenizer

    @property
    def all_texts(self) -> dict[int, str]:
        """Each token's text, by its id."""
        return self._texts

    def spelled(self, text: str) -> list[int]:
        """Ids of a text without marks, a token for each two characters."""
        return [self.add(text[i : i + 2]) for i in range(0, len(text), 2)]

    def add(self, text: str) -> int:
        id_ = ORDINARY + len(self._texts)
        self._texts[id_] = text
        return id_

    def prompt(self, text: str) -> list[int]:
        """Ids of a prompt's end: marks, and one token for each text between."""
        found: list[int] = []
        while text:
            place, mark = min(
                ((text.find(m), m) for m in self.added_tokens if m in text),
                default=(len(text), ""),
            )
            if place:
                found.append(self.add(text[:place]))
            if mark:
                found.append(self.added_tokens[mark])
            text = text[place + len(mark) :]
        return found

    def texts(self, ids: Sequence[int]) -> list[str]:
        """What a detokenizer that shows marks gives for each token."""
        return [self._texts[id_] for id_ in ids]

    def token_text(self, token_id: int) -> str:
        return self._texts[token_id]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(self.texts(ids))
