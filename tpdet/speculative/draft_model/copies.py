"""The draft model's copies of sequences, and the pages that they have in its own KV cache.

A copy has the tokens of its sequence, and how many of them are in its pages. Drafts that turn out
wrong are forgotten: the copy is cut, and its pages are written again.
"""

from collections import OrderedDict, abc

import msgspec

from tpdet.control.row_messages import RowKey
from tpdet.scheduler.page_manager import PageManager
from tpdet.scheduler.sequence import PENDING, Sequence, pages_for


class DraftCopies:
    """All copies, and the pages of the draft model."""

    def __init__(self, num_pages: int, vocabulary: int) -> None:
        """vocabulary: token ids of the draft model."""
        self.pages = PageManager(num_pages)
        self._vocabulary = vocabulary
        self._copies: OrderedDict[RowKey, _Copy] = OrderedDict()  # the latest used last

    def lacking(self, target: Sequence) -> int:
        """Tokens of a sequence that its copy has not computed."""
        copy = self._copies.get(target.key)
        return len(target.tokens) - (0 if copy is None else copy.sequence.computed)

    def follow(self, target: Sequence) -> Sequence | None:
        """The copy of a sequence: what it has behind the first difference is forgotten.

        None for a sequence with a token that the draft model does not have.
        """
        key = target.key
        if key not in self._copies:
            self._copies[key] = _Copy(_plain(target))
        self._copies.move_to_end(key)
        copy = self._copies[key]
        copy.follow(target.tokens)
        return copy.sequence if copy.largest < self._vocabulary else None

    def reserve(self, copy: Sequence, drafts: int, kept: abc.Container[RowKey]) -> bool:
        """Take the pages of a copy and its drafts; False, and no pages, if too few are free.

        Copies that were used longest ago give theirs back, those of the keys `kept` excepted.
        """
        missing = pages_for(len(copy.tokens) + drafts - 1) - len(copy.pages)
        if missing <= 0:
            return True
        for other in [key for key in self._copies if key not in kept]:
            if missing <= self.pages.free_count:
                break
            self.forget(other)
        if missing > self.pages.free_count:
            return False
        known = len(copy.tokens)
        copy.tokens += [PENDING] * (drafts - 1)
        self.pages.grow(copy)
        del copy.tokens[known:]
        return True

    def forget(self, key: RowKey) -> None:
        """Give back the pages of a sequence, which may be unknown."""
        copy = self._copies.pop(key, None)
        if copy is not None:
            self.pages.release(copy.sequence)


class _Copy:
    """A sequence as the draft model has it, and how many of its tokens were compared."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence, self._compared = sequence, 0
        self.largest = 0  # token id of the sequence itself

    def follow(self, tokens: list[int]) -> None:
        """Have `tokens`, which begin with those of the last call; the last is not computed yet."""
        own, same = self.sequence.tokens, min(self._compared, len(tokens))
        while same < min(len(own), len(tokens)) and own[same] == tokens[same]:
            same += 1
        self.largest = max([self.largest, *tokens[self._compared :]])
        del own[same:]
        own += tokens[same:]
        self._compared = len(own)
        self.sequence.computed = min(self.sequence.computed, same, len(own) - 1)


def _plain(target: Sequence) -> Sequence:
    """An empty copy that samples by what is cheap: no penalties, biases, schema or end."""
    params = msgspec.structs.replace(
        target.request.params,
        min_tokens=0,
        logprobs=None,
        prompt_logprobs=None,
        prompt_logprobs_last_n=None,
        logprob_token_ids=(),
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias={},
        json_schema=None,
        regex=None,
        json_schema_after=None,
    )
    request = msgspec.structs.replace(target.request, params=params, drafts=(), prediction=())
    copy = Sequence.of(request, *target.key)
    copy.tokens.clear()
    copy.wait_for_drafts(True)  # its rows may have a draft
    return copy
