"""What page tables ought to do, in the simplest words: the model to compare with.

Pages are entries of a dictionary; a page's content is the whole list of tokens up to its last
written one, so a page under a wrong prefix is seen at once. Requests are names.
"""

from dataclasses import dataclass, field

from tpdet.cache.versions import ALL_PAGES, NOBODY, SHARED
from tpdet.control.plan import ALLOCATE, EVICT, NAN, RELOAD, SHARE, PageEvent, Row, StepPlan


@dataclass
class Page:
    """A page by what happened to it."""

    version: int = 0
    owner: int = NOBODY
    content: tuple[int, ...] = ()  # tokens from position 0 to the last that was written here
    salts: tuple[str, str] | None = None  # who may read it, once it is shared


@dataclass
class ModelOfPages:
    """Follows plans and refuses (AssertionError) whatever no plan may do."""

    count: int
    size: int
    pages: list[Page] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pages = [Page() for _ in range(self.count)]

    def follow(self, plan: StepPlan, salts: dict[int, tuple[str, str]], drawn: list[int]) -> None:
        """Apply a plan. salts: of each owner; drawn: tokens of the step before."""
        for event in plan.events:
            self._change(event, salts)
        written: set[int] = set()
        for row in plan.rows:
            written |= self._compute(row, salts[row.version_id], drawn, written)

    @property
    def used(self) -> int:
        """Pages that somebody owns, or all may read."""
        return sum(page.owner != NOBODY for page in self.pages)

    def _change(self, event: PageEvent, salts: dict[int, tuple[str, str]]) -> None:
        if event.kind == RELOAD:
            assert event.page == ALL_PAGES and self.used == 0
            for page in self.pages:
                page.version += 1
            return
        page = self.pages[event.page]
        if event.kind == ALLOCATE:
            free = [i for i, other in enumerate(self.pages) if other.owner == NOBODY]
            assert event.page == free[0], "the lowest free page is given"
            page.owner, page.content, page.version = event.version_id, (), page.version + 1
        elif event.kind == SHARE:
            assert page.owner == event.version_id not in (NOBODY, SHARED)
            assert len(page.content) % self.size == 0 < len(page.content), "only full pages"
            page.owner, page.salts = SHARED, salts[event.version_id]
        else:
            assert event.kind in (EVICT, NAN) and page.owner == event.version_id != NOBODY
            page.version += 1
            if event.kind == EVICT:
                page.owner, page.content, page.salts = NOBODY, (), None

    def _compute(
        self, row: Row, salts: tuple[str, str], drawn: list[int], written: set[int]
    ) -> set[int]:
        """A row's reads and writes; which pages it wrote. `written` are those of rows before."""
        size, tokens = self.size, tuple(t if t >= 0 else drawn[-1 - t] for t in row.token_ids)
        end = row.start + len(tokens)
        pages = [self.pages[page] for page in row.pages]
        assert len(set(row.pages)) == len(pages) == -(-end // size)
        assert [page.version for page in pages] == list(row.versions), "a stale version"
        whole: tuple[int, ...] = ()
        if row.start:
            before = pages[(row.start - 1) // size]
            whole = before.content
            assert len(whole) == row.start, "a row begins where the one before it ended"
        for index, page in enumerate(pages[: row.start // size]):
            assert page.content == whole[: (index + 1) * size], "a page of another prefix"
            assert page.owner == row.version_id or (page.owner == SHARED and page.salts == salts)
        whole += tokens
        mine = set()
        for index in range(row.start // size, len(pages)):
            assert pages[index].owner == row.version_id, "only its own pages are written"
            assert row.pages[index] not in written, "two rows write one page"
            pages[index].content = whole[: (index + 1) * size]
            mine.add(row.pages[index])
        return mine
