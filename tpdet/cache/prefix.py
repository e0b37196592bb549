"""The prefix cache's index: which full page holds the K/V of which tokens, and who reads it.

A page is found by a key: SHA-256 over its parent's key, its token ids, the salts, the model's
digest and the contract's id. A key only finds: a page is shared when its parent is the page that
was found before it, and its salted domain and its token ids are compared and equal, so that two
prefixes whose keys collide never share.

A page without a reader stays until it is evicted, in the total order of release: the page longest
without a reader goes first. Pages that are released together stand deepest position first, so that
a page goes before the pages that it can only be found through. Lives on rank 0, without torch.
"""

import hashlib
import struct
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpdet.errors import IntegrityError
from tpdet.kernels.order import PAGE_TOKENS

_NO_PARENT = bytes(32)


@dataclass(frozen=True, slots=True)
class PageKey:
    """A full page by what it holds: its key, and what is compared when the key is found."""

    key: bytes
    domain: bytes
    token_bytes: bytes


@dataclass(frozen=True, slots=True, eq=False)
class CachedPage:
    """An entry of the index: `page` holds `key` after the pages of `parent`."""

    key: PageKey
    page: int
    parent: "CachedPage | None"


def prefix_domain(identity: bytes, *salts: str) -> bytes:
    """32 bytes that keep apart what must not be shared: models, contracts and salts.

    identity: names the weights and the contract. Every part counts with its length.
    """
    digest = hashlib.sha256(b"tpdet prefix cache 1")
    for part in (identity, *(salt.encode("utf-8", "surrogatepass") for salt in salts)):
        digest.update(struct.pack("<Q", len(part)) + part)
    return digest.digest()


class PrefixChain:
    """The keys of one sequence's full pages, each made once; tokens are only ever appended."""

    def __init__(self, domain: bytes) -> None:
        self._domain = domain
        self._keys: list[PageKey] = []

    def key(self, tokens: Sequence[int], index: int) -> PageKey:
        """The key of page `index`, whose token ids (and all before) are known."""
        while len(self._keys) <= index:
            first = len(self._keys) * PAGE_TOKENS
            ids = array("i", tokens[first : first + PAGE_TOKENS]).tobytes()
            parent = self._keys[-1].key if self._keys else _NO_PARENT
            self._keys.append(PageKey(page_key(parent, self._domain, ids), self._domain, ids))
        return self._keys[index]


def page_key(parent: bytes, domain: bytes, token_bytes: bytes) -> bytes:
    """SHA-256 over the parent's key [32], the domain [32] and a page's token ids (int32)."""
    return hashlib.sha256(parent + domain + token_bytes).digest()


class PrefixIndex:
    """Shared pages: the entries that can be found, the readers of each page, the idle pages."""

    def __init__(self) -> None:
        self._entries: dict[bytes, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        self._readers: dict[int, int] = {}  # of every shared page, found or no longer found
        self._idle: OrderedDict[int, None] = OrderedDict()  # no reader; longest without one first

    @property
    def idle_count(self) -> int:
        """Pages without a reader, which can be evicted."""
        return len(self._idle)

    def is_shared(self, page: int) -> bool:
        """Whether `page` may have several readers and none may write it."""
        return page in self._readers

    def is_idle(self, page: int) -> bool:
        """Whether `page` is kept although nobody reads it."""
        return page in self._idle

    def find(self, key: PageKey, parent: CachedPage | None) -> CachedPage | None:
        """The page of `key` that follows `parent`; None if there is none, or a key collides."""
        entry = self._entries.get(key.key)
        if entry is None or entry.parent is not parent or not self.same_tokens(entry, key):
            return None
        return entry

    @staticmethod
    def same_tokens(entry: CachedPage, key: PageKey) -> bool:
        """Whether an entry's salted domain and token ids are those of `key`, byte for byte."""
        return entry.key.domain == key.domain and entry.key.token_bytes == key.token_bytes

    def holds(self, entry: CachedPage | None) -> bool:
        """Whether `entry` can be found; None stands for the empty prefix, which always can."""
        return entry is None or self._by_page.get(entry.page) is entry

    def occupant(self, key: PageKey) -> CachedPage | None:
        """The entry under the same key, whatever it holds."""
        return self._entries.get(key.key)

    def put(self, key: PageKey, page: int, parent: CachedPage | None) -> CachedPage:
        """Let `page`, which has one reader, be found. Raises IntegrityError if it is shared."""
        if page in self._readers or key.key in self._entries:
            raise IntegrityError(f"page {page} is put into the prefix cache twice, or its key is")
        entry = CachedPage(key, page, parent)
        self._entries[key.key] = self._by_page[page] = entry
        self._readers[page] = 1
        return entry

    def take(self, page: int) -> None:
        """Count one more reader of `page`."""
        self._readers[page] += 1
        self._idle.pop(page, None)

    def give(self, page: int) -> bool:
        """Count one reader less; True when the page is left to nobody and must be freed."""
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
        """Let `page` be found no more; True when it has no reader and must be freed."""
        entry = self._by_page.pop(page, None)
        if entry is None:
            return False
        del self._entries[entry.key.key]
        if self._readers[page]:
            return False
        del self._idle[page], self._readers[page]
        return True

    def evict(self) -> int:
        """Drop the page that has been without a reader for longest; it must be freed."""
        page = next(iter(self._idle))
        self.drop(page)
        return page

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """Refuse (IntegrityError) unless `holders` counts each shared page's readers.

        holders: how many sequences hold a page, of those that are held.
        """
        for page, readers in self._readers.items():
            if readers != holders.get(page, 0):
                raise IntegrityError(
                    f"page {page} has {readers} readers, but {holders.get(page, 0)} hold it"
                )
            if (readers == 0) != (page in self._idle) or not (readers or page in self._by_page):
                raise IntegrityError(f"page {page} has {readers} readers and is misplaced")
        found = self._by_page.keys()
        if len(self._entries) != len(found) or not found <= self._readers.keys():
            raise IntegrityError("the prefix cache finds pages that are not shared")
        for page, entry in self._by_page.items():
            if entry.page != page or self._entries.get(entry.key.key) is not entry:
                raise IntegrityError(f"page {page} is in the prefix cache under another key")
