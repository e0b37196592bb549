"""The version table: the version and the owner of every KV page, the same on every rank.

Each change of a page bumps its version, so a row that names the page under an older version is
refused. Ranks never decide a change: they apply the plan's events in order and compare digests.

There are two digests. `digest()` is a chain over every event *and the state that it led to*. It
costs O(1) for each changed page and is sent with every plan. If an event is lost, added, reordered
or altered on one rank, its digest differs from that step on. `full_digest()` also covers the table
in memory, in O(pages). It finds a table that was damaged without an event, and is meant for
heartbeats and idle time. Until then such damage is refused where it matters: `check_readers` looks
up every page that a step touches.
"""

import struct
from collections import abc

import blake3
import numpy as np

from tpdet.control import plan
from tpdet.errors import IntegrityError
from tpdet.kernels.order import PAGE_TOKENS

NOBODY = 0  # owner of a free page
SHARED = 2**64 - 1  # owner of a page that all may read at its version, and no row may write
ALL_PAGES = -1  # `page` of a RELOAD event

_LINK = struct.Struct("<BqQQ")  # kind, page, version after, owner after
_STATE = struct.Struct("<QQ")  # version, owner


def version_id(request_id: str, seed: int, choice: int = 0) -> int:
    """The 64-bit id under which one choice of a request owns pages; never NOBODY or SHARED."""
    name = request_id.encode("utf-8", "surrogatepass")
    body = struct.pack("<QI", seed, choice) + name
    owner = int.from_bytes(blake3.blake3(body).digest(length=8), "little")
    return owner if owner not in (NOBODY, SHARED) else 1


class VersionTable:
    """Version and owner of pages 0 to `num_pages - 1`; all start at version 0, unowned."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._versions = np.zeros(num_pages, np.int64)
        self._owners = np.full(num_pages, NOBODY, np.uint64)
        self._chain = blake3.blake3(struct.pack("<Q", num_pages)).digest()

    def version(self, page: int) -> int:
        """The version of `page`: how often it has changed."""
        return int(self._versions[page])

    def owner(self, page: int) -> int:
        """The version_id that `page` was allocated to, SHARED, or NOBODY."""
        return int(self._owners[page])

    def apply(self, events: abc.Iterable[plan.PageEvent]) -> None:
        """Apply a plan's events in order.

        ALLOCATE wants a free page and gives it to `version_id`; EVICT frees it; NAN only
        bumps the version. SHARE takes a page from its owner for good, so that nobody writes
        it; its tokens stay, and so does its version. These want the owner named (SHARED, once
        shared). RELOAD (page ALL_PAGES) bumps every page, none of which may be owned. Raises
        IntegrityError naming the page and both owners.
        """
        for event in events:
            if event.kind == plan.RELOAD:
                self._reload(event)
            else:
                self._change(event)

    def check_readers(self, rows: plan.PlanRows) -> None:
        """Refuse (IntegrityError) rows that may not touch the pages they name.

        A row must name every page under its present version, its pages must cover its positions,
        and it must own each page that it writes; free and shared pages are never written. It
        costs one look-up for each page of each row, of all rows at once.
        """
        if len(rows) and not self._may_touch(rows):
            for row in rows:
                self._refuse(row)
            raise IntegrityError("a row may not touch its pages")

    def _may_touch(self, rows: plan.PlanRows) -> bool:
        pages, counts, start, owner = rows.page_ids, rows.held, rows.start, rows.version_id
        if (counts * PAGE_TOKENS < start + rows.unverified + rows.count).any():
            return False
        if not len(pages) or pages.min() < 0 or pages.max() >= self.num_pages:
            return False
        if not np.array_equal(self._versions[pages], rows.page_versions):
            return False
        index = np.arange(len(pages)) - np.repeat(np.cumsum(counts) - counts, counts)
        written = index >= np.repeat(start // PAGE_TOKENS, counts)
        writers = np.repeat(owner, counts)[written]
        somebody = (writers != NOBODY) & (writers != SHARED)
        return bool((somebody & (self._owners[pages[written]] == writers)).all())

    def _refuse(self, row: plan.Row) -> None:
        """Raise IntegrityError for a row that may not touch the pages it names."""
        end = row.start + row.unverified + len(row.token_ids)
        if len(row.pages) * PAGE_TOKENS < end:
            raise IntegrityError(
                f"{plan.row_name(row)} has {len(row.pages)} pages for {end} positions"
            )
        if row.pages and not 0 <= min(row.pages) <= max(row.pages) < self.num_pages:
            raise IntegrityError(
                f"{plan.row_name(row)} names pages {min(row.pages)} to {max(row.pages)}; "
                f"there are {self.num_pages}"
            )
        for page, version in zip(row.pages, row.versions, strict=True):
            if self.version(page) != version:
                raise IntegrityError(
                    f"{plan.row_name(row)} holds page {page} at version {version}, "
                    f"but the page is at version {self.version(page)}"
                )
        for page in row.pages[row.start // PAGE_TOKENS :]:
            if self.owner(page) != row.version_id or row.version_id in (NOBODY, SHARED):
                raise IntegrityError(
                    f"{plan.row_name(row)} would write page {page} as owner "
                    f"{row.version_id:#018x}, but it belongs to {self.owner(page):#018x}"
                )

    def digest(self) -> bytes:
        """32 bytes over all events so far and the state after each."""
        return self._chain

    def full_digest(self) -> bytes:
        """32 bytes over the events so far and the table itself; O(pages)."""
        return blake3.blake3(self._chain + self.snapshot()).digest()

    def snapshot(self) -> bytes:
        """16 bytes for each page: version, then owner, as little-endian 64-bit integers."""
        return np.stack([self._versions.view(np.uint64), self._owners], 1).astype("<u8").tobytes()

    def _reload(self, event: plan.PageEvent) -> None:
        if event.page != ALL_PAGES:
            raise IntegrityError(f"reload of page {event.page}: a reload is for all pages (-1)")
        owned = np.flatnonzero(self._owners != NOBODY)
        if len(owned):
            page = int(owned[0])
            raise IntegrityError(
                f"reload while page {page} belongs to {self.owner(page):#018x}: drain before a "
                "reload"
            )
        self._versions += 1
        link = _LINK.pack(event.kind, event.page, 0, NOBODY) + self.snapshot()
        self._chain = blake3.blake3(self._chain + link).digest()

    def _change(self, event: plan.PageEvent) -> None:
        kind, page = event.kind, event.page
        if kind not in (plan.ALLOCATE, plan.EVICT, plan.NAN, plan.SHARE):
            raise IntegrityError(f"page event of unknown kind {kind} for page {page}")
        if not 0 <= page < self.num_pages:
            raise IntegrityError(
                f"{plan.EVENT_NAMES[kind]} of page {page}: there are {self.num_pages} pages"
            )
        expected = NOBODY if kind == plan.ALLOCATE else event.version_id
        unowned = (NOBODY, SHARED) if kind in (plan.ALLOCATE, plan.SHARE) else (NOBODY,)
        if self.owner(page) != expected or event.version_id in unowned:
            raise IntegrityError(
                f"{plan.EVENT_NAMES[kind]} of page {page} for {event.version_id:#018x}: "
                f"it belongs to {self.owner(page):#018x}"
            )
        self._versions[page] += kind != plan.SHARE
        after = {plan.ALLOCATE: event.version_id, plan.EVICT: NOBODY, plan.SHARE: SHARED}
        self._owners[page] = after.get(kind, event.version_id)
        link = _LINK.pack(kind, page, self.version(page), self.owner(page))
        self._chain = blake3.blake3(self._chain + link).digest()


def first_difference(
    here: bytes, there: bytes, terms: tuple[str, str, str, str] = ("page", "is", "version", "of")
) -> str | None:
    """Name the first page at which two snapshots differ, with both versions and owners.

    terms: what is compared, how it is at what number, and how an owner is named.
    """
    what, verb, number, by = terms
    if len(here) != len(there):
        return f"{len(here) // _STATE.size} {what}s here, {len(there) // _STATE.size} there"
    pairs = zip(_STATE.iter_unpack(here), _STATE.iter_unpack(there), strict=True)
    for index, (ours, theirs) in enumerate(pairs):
        if ours != theirs:
            one, other = (
                f"at {number} {count} {by} {owner:#018x}" for count, owner in (ours, theirs)
            )
            return f"{what} {index} {verb} {one} here, {other} there"
    return None
