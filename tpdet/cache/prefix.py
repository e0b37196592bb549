"""The index of the prefix cache: which full page holds the K/V of which tokens, and its readers.

A page is found by its key: SHA-256 over its parent's key, its token ids, the salts, the model's
digest and the contract's id. The key only finds a candidate. A page is shared only if its parent is
the page found before it, and its salted domain and token ids are equal byte for byte; so prefixes
whose keys collide are never shared.

A page without a reader stays until it is evicted; the page that has been without a reader for
longest goes first. Pages that are released together are ordered from the deepest position up, so a
page is evicted before the pages that lead to it. Only rank 0 has an index; it needs no torch.
"""

import hashlib
import struct
from array import array
from collections import OrderedDict, abc
from dataclasses import dataclass

from tpdet.errors import IntegrityError
from tpdet.kernels.order import PAGE_TOKENS

_NO_PARENT = bytes(32)


@dataclass(frozen=True, slots=True)
class PageKey:
    """What identifies a full page: its key, and the parts that are compared with a candidate's."""

    key: bytes
    domain: bytes
    token_bytes: bytes


@dataclass(frozen=True, slots=True, eq=False)
class CachedPage:
    """An entry of the index: `page` holds `key` after the pages of `parent`.

    depth: how many pages that makes, this one among them.
    """

    key: PageKey
    page: int
    parent: "CachedPage | None"
    depth: int


def prefix_domain(identity: bytes, *salts: str) -> bytes:
    """32 bytes that differ wherever pages must not be shared: by model, contract and salts.

    identity: names the weights and the contract. The digest covers the length of each part.
    """
    digest = hashlib.sha256(b"tpdet prefix cache 1")
    for part in (identity, *(salt.encode("utf-8", "surrogatepass") for salt in salts)):
        digest.update(struct.pack("<Q", len(part)) + part)
    return digest.digest()


class PrefixChain:
    """The keys of one sequence's full pages, each computed once; tokens are only appended."""

    def __init__(self, domain: bytes) -> None:
        self._domain = domain
        self._keys: list[PageKey] = []

    def key(self, tokens: abc.Sequence[int], index: int) -> PageKey:
        """The key of page `index`; `tokens` must cover this page."""
        while len(self._keys) <= index:
            first = len(self._keys) * PAGE_TOKENS
            ids = array("i", tokens[first : first + PAGE_TOKENS]).tobytes()
            parent = self._keys[-1].key if self._keys else _NO_PARENT
            self._keys.append(PageKey(page_key(parent, self._domain, ids), self._domain, ids))
        return self._keys[index]


@dataclass(slots=True)
class PrefixUse:
    """How one sequence uses the prefix cache, which alone writes this.

    chain: the keys of its full pages. last: the parent of its next page in the cache. offered: how
    many of its pages were read from the cache or offered to it. cached_tokens: how many tokens were
    read from it when the sequence first got pages; None before.
    """

    chain: PrefixChain | None = None
    last: CachedPage | None = None
    offered: int = 0
    cached_tokens: int | None = None


def page_key(parent: bytes, domain: bytes, token_bytes: bytes) -> bytes:
    """SHA-256 over the parent's key [32], the domain [32] and a page's token ids (int32)."""
    return hashlib.sha256(parent + domain + token_bytes).digest()


class PrefixIndex:
    """All shared pages: those that can be found, the readers of each, and the idle ones."""

    def __init__(self, dropped: abc.Callable[[CachedPage], None] | None = None) -> None:
        """dropped: hears of each entry that can no longer be found."""
        self._dropped = dropped
        self._entries: dict[bytes, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        # Of every shared page, also of those that can no longer be found.
        self._readers: dict[int, int] = {}
        # Pages without a reader, longest idle first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def idle_count(self) -> int:
        """How many pages have no reader and can be evicted."""
        return len(self._idle)

    def is_shared(self, page: int) -> bool:
        """Whether `page` is shared: it may have several readers, and nobody may write it."""
        return page in self._readers

    def is_idle(self, page: int) -> bool:
        """Whether `page` is shared and has no reader."""
        return page in self._idle

    def find(self, key: PageKey, parent: CachedPage | None) -> CachedPage | None:
        """The page of `key` that follows `parent`; None if there is none, or the keys collide."""
        entry = self._entries.get(key.key)
        if entry is None or entry.parent is not parent or not self.same_tokens(entry, key):
            return None
        return entry

    @staticmethod
    def same_tokens(entry: CachedPage, key: PageKey) -> bool:
        """Whether an entry's salted domain and token ids are those of `key`, byte for byte."""
        return entry.key.domain == key.domain and entry.key.token_bytes == key.token_bytes

    def holds(self, entry: CachedPage | None) -> bool:
        """Whether `entry` can still be found; None, the empty prefix, always can."""
        return entry is None or self._by_page.get(entry.page) is entry

    def occupant(self, key: PageKey) -> CachedPage | None:
        """The entry under the same key, even if its tokens differ."""
        return self._entries.get(key.key)

    def put(self, key: PageKey, page: int, parent: CachedPage | None) -> CachedPage:
        """Share `page`, which has one reader. Raises IntegrityError if it or its key is there."""
        if page in self._readers or key.key in self._entries:
            raise IntegrityError(f"page {page} is put into the prefix cache twice, or its key is")
        entry = CachedPage(key, page, parent, 1 if parent is None else parent.depth + 1)
        self._entries[key.key] = self._by_page[page] = entry
        self._readers[page] = 1
        return entry

    def take(self, page: int) -> None:
        """Count another reader of `page`."""
        self._readers[page] += 1
        self._idle.pop(page, None)

    def give(self, page: int) -> bool:
        """Count one reader less; True when the page has to be freed."""
        if self._readers[page] < 1:
            raise IntegrityError(f"page {page} is released but nobody reads it")
        self._readers[page] -= 1
        if self._readers[page]:
            return False
        if page in self._by_page:
            self._idle[page] = None
            return False
        del self._readers[page]
        return True

    def drop(self, page: int) -> bool:
        """Make `page` impossible to find; True when it has no reader and must be freed."""
        entry = self._by_page.pop(page, None)
        if entry is None:
            return False
        del self._entries[entry.key.key]
        if self._dropped is not None:
            self._dropped(entry)
        if self._readers[page]:
            return False
        del self._idle[page], self._readers[page]
        return True

    def evict(self) -> int:
        """Drop the page that has been idle for longest; returns it, and it must be freed."""
        page = next(iter(self._idle))
        self.drop(page)
        return page

    def check_integrity(self, holders: abc.Mapping[int, int]) -> None:
        """Refuse (IntegrityError) unless `holders` counts each shared page's readers.

        holders: how many sequences hold each page, for pages that are held.
        """
        for page, readers in self._readers.items():
            if readers != holders.get(page, 0):
                raise IntegrityError(
                    f"page {page} has {readers} readers, but {holders.get(page, 0)} hold it"
                )
            if (readers == 0) != (page in self._idle) or not (readers or page in self._by_page):
                raise IntegrityError(f"page {page} has {readers} readers and is misplaced")
        pages = self._by_page.keys()
        if len(self._entries) != len(pages) or not pages <= self._readers.keys():
            raise IntegrityError("the prefix cache finds pages that are not shared")
        for page, entry in self._by_page.items():
            if entry.page != page or self._entries.get(entry.key.key) is not entry:
                raise IntegrityError(f"page {page} is in the prefix cache under another key")
