"""The index of cached prefixes: its keys, what it finds, and the damage that is seen."""

from dataclasses import replace

import pytest

from tests.cache.prefix_requests import LONG, OTHER, ask, simulation
from tpdet.cache.prefix import PrefixChain, PrefixIndex, prefix_domain
from tpdet.errors import IntegrityError


def test_keys_depend_on_everything_before_and_are_pinned():
    chain = PrefixChain(prefix_domain(b"m", "t", "c"))
    same = PrefixChain(prefix_domain(b"m", "t", "c"))
    assert chain.key(LONG, 1) == same.key(LONG, 1)
    keys = [chain.key(LONG, 0), chain.key(LONG, 1)]
    for identity, tenant, salt in [(b"n", "t", "c"), (b"m", "u", "c"), (b"m", "t", "d")]:
        keys.append(PrefixChain(prefix_domain(identity, tenant, salt)).key(LONG, 0))
    keys.append(PrefixChain(prefix_domain(b"m", "t", "c")).key((*OTHER[:256], *LONG[256:]), 1))
    assert len({key.key for key in keys}) == 6
    assert all(len(key.key) == 32 for key in keys)
    assert keys[1].key.hex()[:16] == PINNED


PINNED = "50c4636601b5cdda"


def test_a_collision_of_keys_is_refused_by_the_token_ids():
    index, chain = PrefixIndex(), PrefixChain(bytes(32))
    mine = chain.key(LONG, 0)
    theirs = replace(PrefixChain(bytes(32)).key(OTHER, 0), key=mine.key)
    other_domain = replace(mine, domain=bytes([1] * 32))
    entry = index.put(mine, 3, None)
    assert index.find(mine, None) is entry
    assert index.find(theirs, None) is None
    assert index.find(other_domain, None) is None
    assert index.find(mine, entry) is None, "the same page behind another"


@pytest.mark.parametrize(
    "damage",
    [
        lambda index: index.take(0),
        lambda index: index.give(0),
        lambda index: index._idle.__setitem__(0, None),
        lambda index: index._by_page.pop(0),
        lambda index: index._entries.clear(),
        lambda index: index._readers.pop(1),
    ],
)
def test_check_integrity_sees_damage(damage):
    sim = simulation()
    sim.add(ask("a", LONG[:600], max_tokens=30))
    for _ in range(12):
        sim.step()
    sim.scheduler.check_integrity()
    damage(sim.scheduler.policy.page_manager.prefixes.index)
    with pytest.raises(IntegrityError):
        sim.scheduler.check_integrity()
