"""The prefix cache as sequences use it: which cached pages one reads, and which pages it adds.

A sequence adds a page once logits that depend on all of it were committed without a failure, so no
other sequence ever reads a page that may hold NaN. Until then the page counts as being computed,
and the head of the waiting queue waits for it instead of computing it again. In this way the
choices of one request share its prompt, and so do requests that arrive together. The wait is short:
while a prompt is computed, it takes the token budget that the waiting queue would need anyway.
"""

import sys
from collections import abc

from tpdet.cache.prefix import CachedPage, PrefixChain, PrefixIndex, prefix_domain
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.scheduler.sequence import Sequence, readable_tokens


class Prefixes:
    """Look-up and sharing of cached pages. Without an identity nothing is shared."""

    def __init__(
        self,
        identity: bytes | None,
        dropped: abc.Callable[[CachedPage], None] | None = None,
    ) -> None:
        """dropped: as for `PrefixIndex`."""
        self.index, self._dropped = PrefixIndex(dropped), dropped
        self.query_tokens = 0
        self.hit_tokens = 0
        self._identity = identity
        self._being_computed: dict[bytes, Sequence] = {}

    def restart(self, identity: bytes | None) -> None:
        """Empty the index and take another identity; the token counts go on."""
        self.index = PrefixIndex(self._dropped)
        self._identity = identity
        self._being_computed = {}

    def keep(self, kept: abc.Iterable[Sequence], identity: bytes | None) -> None:
        """Take another identity, while sequences keep pages of the one before, and share none."""
        self._identity, self._being_computed = identity, {}
        for sequence in kept:
            for page in sequence.pages:
                self.index.drop(page)
            sequence.prefix.chain, sequence.prefix.last = None, None
            sequence.prefix.offered = sys.maxsize  # until it is computed again

    def find(self, sequence: Sequence) -> list[CachedPage]:
        """The longest cached prefix of `sequence` that it may read, page by page."""
        entries: list[CachedPage] = []
        if self._identity is None or not sequence.reads_cache:
            return entries
        chain, parent = self._chain(sequence, self._identity), None
        for index in range(readable_tokens(sequence) // PAGE_TOKENS):
            parent = self.index.find(chain.key(sequence.tokens, index), parent)
            if parent is None:
                break
            entries.append(parent)
        return entries

    @property
    def shares(self) -> bool:
        """Whether anything is shared."""
        return self._identity is not None

    def must_wait(self, sequence: Sequence, cached: int) -> bool:
        """Whether a running sequence is computing the page after the first `cached` pages."""
        readable = readable_tokens(sequence) // PAGE_TOKENS
        if self._identity is None or not sequence.reads_cache or cached >= readable:
            return False
        key = self._chain(sequence, self._identity).key(sequence.tokens, cached)
        return key.key in self._being_computed

    def being_computed(
        self, sequence: Sequence, cached: int, matched: int
    ) -> tuple[int, Sequence | None]:
        """How far a running sequence computes the pages of `sequence` behind the first `cached`.

        The index has the first `matched` pages. Returns (pages, by whom); by None if nobody does.
        """
        end, other = cached, None
        if self._identity is None or not sequence.reads_cache:
            return end, other
        chain = self._chain(sequence, self._identity)
        for index in range(cached, readable_tokens(sequence) // PAGE_TOKENS):
            computing = self._being_computed.get(chain.key(sequence.tokens, index).key)
            if computing is not None:
                end, other = index + 1, computing
            elif index >= matched:
                break
        return end, other

    def admitted(self, sequence: Sequence, entries: list[CachedPage]) -> None:
        """Note the cached pages that `sequence` reads; its other full pages are being computed."""
        use, cached_tokens = sequence.prefix, len(entries) * PAGE_TOKENS
        use.last = entries[-1] if entries else None
        use.offered = len(entries)
        if self._identity is None:
            return
        if sequence.reads_cache:
            self.query_tokens += len(sequence.tokens)
            self.hit_tokens += cached_tokens
        if use.cached_tokens is None:
            use.cached_tokens = cached_tokens
        chain = self._chain(sequence, self._identity)
        for index in range(len(entries), len(sequence.tokens) // PAGE_TOKENS):
            self._being_computed.setdefault(chain.key(sequence.tokens, index).key, sequence)

    def share(self, sequence: Sequence, end: int) -> abc.Iterator[tuple[int, int | None]]:
        """Add the full pages before position `end` that are not cached yet.

        Yields (page, stale) for each page that is shared from now on. `stale` is the page that the
        same key found until now, which must be freed first; None if there is none. Where the cache
        has the page of another sequence already, this sequence's copy stays private.
        """
        if self._identity is None:
            return
        chain, use = self._chain(sequence, self._identity), sequence.prefix
        for index in range(use.offered, end // PAGE_TOKENS):
            use.offered = index + 1
            key = chain.key(sequence.tokens, index)
            self._computed(key.key, sequence)
            parent, page = use.last, sequence.pages[index]
            entry = self.index.find(key, parent)
            if entry is None and self.index.holds(parent):
                occupant, stale = self.index.occupant(key), None
                if occupant is not None and self.index.drop(occupant.page):
                    stale = occupant.page
                entry = self.index.put(key, page, parent)
                yield page, stale
            # A page whose parent cannot be found is never found either, so it is not added.
            use.last = entry or parent

    def released(self, sequence: Sequence) -> None:
        """Forget the pages that `sequence` was computing."""
        use = sequence.prefix
        if use.chain is not None:
            for index in range(use.offered, sequence.tokens_when_admitted // PAGE_TOKENS):
                self._computed(use.chain.key(sequence.tokens, index).key, sequence)
        use.last, use.offered = None, 0

    def _computed(self, key: bytes, sequence: Sequence) -> None:
        if self._being_computed.get(key) is sequence:
            del self._being_computed[key]

    @staticmethod
    def _chain(sequence: Sequence, identity: bytes) -> PrefixChain:
        chain = sequence.prefix.chain
        if chain is None:
            request = sequence.request
            domain = prefix_domain(identity, request.tenant_salt, request.cache_salt)
            chain = sequence.prefix.chain = PrefixChain(domain)
        return chain
