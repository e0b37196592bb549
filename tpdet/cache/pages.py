"""The page allocator: gives out KV pages of 256 tokens, always the free page with the lowest id.

The choice depends only on which pages are free, not on the order in which they were freed, so a
replay of the same requests gets the same pages.
"""

import heapq

from tpdet.errors import IntegrityError


class PageAllocator:
    """Pages 0 to `num_pages - 1`, each free or used. Only rank 0 has one, for its scheduler."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise IntegrityError(f"a cache of {num_pages} pages holds nothing: give at least 1")
        self.num_pages = num_pages
        self._free = list(range(num_pages))  # ascending, so already a heap
        self._used = bytearray(num_pages)

    @property
    def free_count(self) -> int:
        """How many pages are free."""
        return len(self._free)

    def is_used(self, page: int) -> bool:
        """Whether `page` is in use."""
        return bool(self._used[page])

    def allocate(self) -> int:
        """Take the lowest free page. Raises IntegrityError when there is none."""
        if not self._free:
            raise IntegrityError(f"all {self.num_pages} KV pages are used: preempt before asking")
        page = heapq.heappop(self._free)
        self._used[page] = 1
        return page

    def release(self, page: int) -> None:
        """Give `page` back. Raises IntegrityError when it is not in use."""
        if not 0 <= page < self.num_pages or not self._used[page]:
            raise IntegrityError(f"page {page} of {self.num_pages} is released but nobody holds it")
        self._used[page] = 0
        heapq.heappush(self._free, page)

    def check_integrity(self) -> None:
        """Refuse (IntegrityError) unless every page is free or used, and free at most once."""
        for before, page in zip([-1, *sorted(self._free)], sorted(self._free), strict=False):
            if page == before:
                raise IntegrityError(f"page {page} is listed as free twice")
            if not 0 <= page < self.num_pages:
                raise IntegrityError(f"page {page} is free, but there are {self.num_pages} pages")
            if self._used[page]:
                raise IntegrityError(f"page {page} is both free and used")
        if sum(self._used) + len(self._free) != self.num_pages:
            raise IntegrityError(
                f"{sum(self._used)} used and {len(self._free)} free pages do not add up to "
                f"{self.num_pages}: a page is lost"
            )
