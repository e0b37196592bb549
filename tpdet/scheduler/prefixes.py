"""What sequences share: which pages of the prefix cache one may read, and which it adds.

A page is added when logits that depend on all of it were committed without a failure, so nothing
that may hold NaN is ever read by another sequence. Until then the page counts as under way, and
the head of the waiting line waits for it instead of computing it again: the choices of one request
share its prompt so, and requests that arrive together share theirs. It never waits long: while a
prompt is computed there is no token budget for the waiting line anyway.
"""

from collections.abc import Iterator

from tpdet.cache.prefix import CachedPage, PrefixChain, PrefixIndex, prefix_domain
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.scheduler.sequence import Sequence


class Prefixes:
    """The prefix cache as sequences use it. Without an identity nothing is shared."""

    def __init__(self, identity: bytes | None) -> None:
        self.index = PrefixIndex()
        self.query_tokens = 0
        self.hit_tokens = 0
        self._identity = identity
        self._under_way: dict[bytes, Sequence] = {}

    @property
    def shares(self) -> bool:
        """Whether pages are shared at all."""
        return self._identity is not None

    def restart(self, identity: bytes | None) -> None:
        """Begin again with an empty index, under another identity; the counts go on."""
        self.index = PrefixIndex()
        self._identity = identity
        self._under_way = {}

    def find(self, sequence: Sequence) -> list[CachedPage]:
        """The longest cached prefix of `sequence` that leaves a token to compute, page by page."""
        found: list[CachedPage] = []
        if self._identity is None or not sequence.reads_cache:
            return found
        chain, parent = self._chain(sequence, self._identity), None
        for index in range((len(sequence.tokens) - 1) // PAGE_TOKENS):
            parent = self.index.find(chain.key(sequence.tokens, index), parent)
            if parent is None:
                break
            found.append(parent)
        return found

    def must_wait(self, sequence: Sequence, found: int) -> bool:
        """Whether a running sequence computes the page after the `found` first ones."""
        wanted = (len(sequence.tokens) - 1) // PAGE_TOKENS
        if self._identity is None or not sequence.reads_cache or found >= wanted:
            return False
        key = self._chain(sequence, self._identity).key(sequence.tokens, found)
        return key.key in self._under_way

    def admitted(self, sequence: Sequence, found: list[CachedPage]) -> None:
        """Note what `sequence` reads, and that its other full pages are under way."""
        sequence.last_cached = found[-1] if found else None
        sequence.offered = len(found)
        if self._identity is None:
            return
        if sequence.reads_cache:
            self.query_tokens += len(sequence.tokens)
            self.hit_tokens += len(found) * PAGE_TOKENS
        if sequence.cached_tokens is None:
            sequence.cached_tokens = len(found) * PAGE_TOKENS
        chain = self._chain(sequence, self._identity)
        for index in range(len(found), len(sequence.tokens) // PAGE_TOKENS):
            self._under_way.setdefault(chain.key(sequence.tokens, index).key, sequence)

    def share(self, sequence: Sequence, end: int) -> Iterator[tuple[int, int | None]]:
        """Add the full pages before `end` that are not there yet.

        Yields each page that is shared from now on, with one that its key no longer finds and
        that must be freed first (None if there is no such page). A page that is there already, of
        another sequence, is not added: this one's copy stays its own.
        """
        if self._identity is None:
            return
        chain = self._chain(sequence, self._identity)
        for index in range(sequence.offered, end // PAGE_TOKENS):
            sequence.offered = index + 1
            key = chain.key(sequence.tokens, index)
            self._arrived(key.key, sequence)
            parent, page = sequence.last_cached, sequence.pages[index]
            entry = self.index.find(key, parent)
            if entry is None and self.index.holds(parent):
                occupant, stale = self.index.occupant(key), None
                if occupant is not None and self.index.drop(occupant.page):
                    stale = occupant.page
                entry = self.index.put(key, page, parent)
                yield page, stale
            # What hangs on a page that cannot be found is never found, so it is not added.
            sequence.last_cached = entry or parent

    def released(self, sequence: Sequence) -> None:
        """Forget what `sequence` had under way."""
        if sequence.chain is not None:
            for index in range(sequence.offered, sequence.tokens_when_admitted // PAGE_TOKENS):
                self._arrived(sequence.chain.key(sequence.tokens, index).key, sequence)
        sequence.last_cached, sequence.offered = None, 0

    def _arrived(self, key: bytes, sequence: Sequence) -> None:
        if self._under_way.get(key) is sequence:
            del self._under_way[key]

    @staticmethod
    def _chain(sequence: Sequence, identity: bytes) -> PrefixChain:
        if sequence.chain is None:
            request = sequence.request
            domain = prefix_domain(identity, request.tenant_salt, request.cache_salt)
            sequence.chain = PrefixChain(domain)
        return sequence.chain
