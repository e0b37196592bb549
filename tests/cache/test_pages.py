import random

import pytest

from tpdet.cache.pages import PageAllocator
from tpdet.errors import IntegrityError


def test_the_lowest_free_page_is_taken_whatever_the_order_of_releases():
    pages = PageAllocator(8)
    assert [pages.allocate() for _ in range(6)] == [0, 1, 2, 3, 4, 5]
    for page in (4, 0, 2):
        pages.release(page)
    assert [pages.allocate() for _ in range(4)] == [0, 2, 4, 6]
    assert pages.free_count == 1


def test_an_exhausted_cache_refuses():
    pages = PageAllocator(1)
    pages.allocate()
    with pytest.raises(IntegrityError, match="all 1 KV pages are used"):
        pages.allocate()


@pytest.mark.parametrize("page", [0, 2, -1, 5])
def test_releasing_what_nobody_holds_is_refused(page):
    pages = PageAllocator(5)
    pages.allocate()
    pages.allocate()
    pages.release(0)
    with pytest.raises(IntegrityError, match=f"page {page} of 5"):
        pages.release(page)


def test_a_cache_of_no_pages_is_refused():
    with pytest.raises(IntegrityError, match="0 pages"):
        PageAllocator(0)


def test_integrity_holds_through_random_use():
    pages, held, random_ = PageAllocator(40), [], random.Random(1)
    for _ in range(2000):
        if held and (random_.random() < 0.5 or not pages.free_count):
            pages.release(held.pop(random_.randrange(len(held))))
        else:
            page = pages.allocate()
            assert page not in held
            held.append(page)
        pages.check_integrity()
        assert pages.free_count == pages.num_pages - len(held)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pages: pages._free.append(3), "free twice"),
        (lambda pages: pages._free.append(0), "both free and used"),
        (lambda pages: pages._free.append(9), "page 9 is free"),
        (lambda pages: pages._free.remove(3), "a page is lost"),
    ],
)
def test_damage_is_named(damage, message):
    pages = PageAllocator(5)
    pages.allocate()
    pages.check_integrity()
    damage(pages)
    with pytest.raises(IntegrityError, match=message):
        pages.check_integrity()
