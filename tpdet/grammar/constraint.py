"""The token ids that may follow an output: a pure function of its form and the output's ids.

The library's matcher only caches the tokens that it has consumed. It can be dropped at any time (a
preemption does so) and made again from the tokens, so no mask depends on a batch, a chunk or a
rank. Only rank 0, which samples, makes masks; no plan carries one.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from tpdet.errors import RequestError
from tpdet.grammar.byte_texts import import_library
from tpdet.grammar.compile import compile_form, marks_of
from tpdet.requests.answer_form import AnswerForm
from tpdet.text.tokenizer import Tokenizer

_LONGEST_FORCED = 4096  # bytes; more is no draft of a step, and costs one
_KEPT = 32  # compiled forms; each takes up to about 50 MB


class Next(NamedTuple):
    """What may follow: id i is allowed if bit `i & 7` of byte `i >> 3` of `allowed` is set.

    `complete`: the text so far is a complete answer.
    """

    allowed: bytes
    complete: bool

    @property
    def dead(self) -> bool:
        """Whether no id may follow."""
        return not any(self.allowed)

    def also(self, token: int) -> "Next":
        """The same, and `token` may follow too."""
        allowed = bytearray(self.allowed)
        allowed[token >> 3] |= 1 << (token & 7)
        return self._replace(allowed=bytes(allowed))


class Constraint:
    """One choice's form; `next_ids` takes any output, and is cheapest while the output grows."""

    def __init__(
        self,
        form: AnswerForm,
        start: Any,
        vocab_size: int,
        encode: Callable[[str], list[int]] | None = None,
        renew: Callable[[AnswerForm], Any] | None = None,
    ) -> None:
        """start: the compiled form, which is copied and not changed. encode: cuts text into ids,
        for `forced_ids`. renew: compiles the form again.
        """
        self._renew = renew
        self._form, self._start = form, start
        self._vocab_size, self._encode = vocab_size, encode
        self._matcher: Any = None
        self._consumed: list[int] = []
        self._latest: tuple[object, Next] | None = None  # arguments and answer of the last call

    @property
    def nothing(self) -> bytes:
        """The mask that allows no id."""
        return bytes(-(-self._vocab_size // 8))

    def next_ids(
        self, output_ids: Sequence[int], ending: Sequence[int], forbidden: Sequence[int] = ()
    ) -> Next:
        """What may follow `output_ids`: `ending` ids where the text is complete, no `forbidden`.

        Raises RequestError when the library reaches a limit by this output alone. Copies of a
        matcher share their limits: where others used them up, the form is compiled again.
        """
        arguments = (tuple(output_ids), tuple(ending), tuple(forbidden))
        if self._latest is None or self._latest[0] != arguments:
            self._latest = arguments, self._next(*arguments)
        return self._latest[1]

    def forced_ids(self, output_ids: Sequence[int]) -> list[int]:
        """Ids of the text that alone can follow `output_ids`; [] where several can.

        Other ids may stand for the same text. It reaches no mask, and is [] at a limit.
        """
        if self._encode is None:
            return []
        try:
            self._consume(list(output_ids))
            # It may use up the limits for a long text, and says so at the next mask only.
            text: bytes = self._matcher.compute_ff_bytes()
            self._check()
        except RequestError:
            return []
        if len(text) > _LONGEST_FORCED:
            self._encode = None
            return []
        ids = self._encode(text.decode(errors="ignore")) if text else []
        return ids if max(ids, default=0) < self._vocab_size else []

    def _next(
        self, output_ids: Sequence[int], ending: Sequence[int], forbidden: Sequence[int]
    ) -> Next:
        try:
            mask = self._mask(output_ids)
        except RequestError:
            if self._renew is None:
                raise
            self._start = self._renew(self._form)
            mask = self._mask(output_ids)
        # The bit past the vocabulary is the library's own end token.
        complete = bool(mask[self._vocab_size >> 3] >> (self._vocab_size & 7) & 1)
        allowed = bytearray(mask[: -(-self._vocab_size // 8)])
        if self._vocab_size & 7:
            allowed[-1] &= (1 << (self._vocab_size & 7)) - 1
        for token in ending if complete else ():
            allowed[token >> 3] |= 1 << (token & 7)
        for token in forbidden:
            allowed[token >> 3] &= ~(1 << (token & 7))
        return Next(bytes(allowed), complete)

    def _mask(self, output_ids: Sequence[int]) -> Any:
        self._consume(list(output_ids))
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask

    def forget(self) -> None:
        """Drop the cached matcher; the next call makes it again from the tokens."""
        self._matcher, self._consumed, self._latest = None, [], None

    def _consume(self, output: list[int]) -> None:
        known = len(self._consumed)
        if self._matcher is not None and output[:known] != self._consumed:
            known = _shared(output, self._consumed)
            # Drafts are tried and taken back: few tokens, behind a long output.
            if known == 0 or not self._matcher.rollback(len(self._consumed) - known):
                self._matcher = None
        if self._matcher is None:
            self._matcher, known = self._start.deep_copy(), 0
        if len(output) > known:
            self._matcher.consume_tokens(output[known:])
        self._consumed = output
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            self.forget()
            raise RequestError(
                f"the {self._form.noun} is too complex for the text made so far: simplify it",
                self._form.field,
            )


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


class Grammars:
    """Compiles forms of answers for one model's vocabulary, and keeps the latest."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: the model's, which may be larger than the tokenizer's.

        Raises RequestError without the library. It takes about a second for 150,000 ids.
        """
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._vocabularies: dict[tuple[str, ...], Any] = {}
        self._vocabulary({})
        self._compiled: OrderedDict[AnswerForm, Any] = OrderedDict()
        self._encode = partial(tokenizer.encode, add_special_tokens=False)

    def constrain(self, form: AnswerForm) -> Constraint:
        """The constraint of one choice. Raises RequestError for a form that cannot be used."""
        if form not in self._compiled:
            self._compile(form)
        self._compiled.move_to_end(form)
        while len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        start = self._compiled[form]
        return Constraint(form, start, self._vocab_size, self._encode, self._compile)

    def _vocabulary(self, marks: Mapping[str, int]) -> Any:
        """An LLTokenizer whose texts never have these marks."""
        names = tuple(sorted(marks))
        if names not in self._vocabularies:
            library = import_library()
            self._vocabularies[names] = library.LLTokenizer(
                _Vocabulary(self._tokenizer, self._vocab_size, marks),
                slices=library.LLTokenizer.json_slices(),
            )
        return self._vocabularies[names]

    def _compile(self, form: AnswerForm) -> Any:
        added = self._tokenizer.added_tokens
        marks = {mark: added[mark] for mark in marks_of(form) if mark in added}
        marks = {mark: token for mark, token in marks.items() if token < self._vocab_size}
        start = compile_form(form, self._vocabulary(marks), marks)
        self._compiled[form] = start
        return start


class _Vocabulary:
    """A tokenizer in the library's interface: the bytes of each id, and one more id, the end.

    The bytes are those that the answer's text is made of. A constrained text never has special
    tokens, or ids without a token.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, marks: Mapping[str, int]) -> None:
        """marks: tokens that are special here, whatever the tokenizer says."""
        self.eos_token_id = vocab_size
        self.tokens: list[bytes] = []
        self.special_token_ids = [vocab_size]
        special = {token: mark for mark, token in marks.items()}
        unnamed = "no text %d" if marks else "%.0s"  # one without a name could begin any mark
        for token_id in range(vocab_size):
            token = tokenizer.token(token_id, skip_special_tokens=True)
            if token is None or token_id in special:
                self.special_token_ids.append(token_id)
                self.tokens.append(special.get(token_id, unnamed % token_id).encode())
            else:
                self.tokens.append(tokenizer.decoder_rules.token_bytes(token, False))
        self.tokens.append((unnamed % vocab_size).encode())

    def __call__(self, text: str | bytes) -> list[int]:
        """Never called: grammars force no tokens."""
        raise NotImplementedError(f"tokens of {json.dumps(str(text[:20]))} were asked for")
