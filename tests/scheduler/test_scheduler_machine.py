"""The state machine under two hash seeds; and bugs put in on purpose, which it must find."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, seed
from hypothesis.internal.conjecture import providers

from tests.scheduler.scheduler_machine import PROGRAMS, SeedAlone, machine_settings, run_machine
from tpdet.cache.pages import PageAllocator
from tpdet.cache.prefix import PrefixIndex
from tpdet.cache.versions import VersionTable
from tpdet.control.plan import EVICT
from tpdet.errors import IntegrityError
from tpdet.scheduler import prefixes
from tpdet.scheduler.pending_steps import PendingSteps
from tpdet.scheduler.policy import Policy
from tpdet.scheduler.request_table import RequestTable

pytestmark = pytest.mark.long

HASH_SEEDS = ("0", "4242")
EXAMPLES = 400  # every bug below is found within as many
FEW_EXAMPLES, MANY_EXAMPLES = 50, 3334  # of each hash seed


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "examples", [FEW_EXAMPLES, pytest.param(MANY_EXAMPLES, marks=pytest.mark.slow)]
)
def test_no_order_of_events_breaks_the_model_whatever_the_hash_seed(examples):
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.scheduler.scheduler_machine", str(examples), hash_seed],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for hash_seed in HASH_SEEDS
    ]
    try:
        found = [process.communicate() for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(e for _, e in found)
    assert len({digest for digest, _ in found}) == 1, "plans depend on the hash seed"
    assert len(found[0][0].strip()) == 64


def drawn_programs(seed_):
    """The programs that a machine with this seed runs."""
    drawn = []

    @seed(seed_)
    @machine_settings(20, shrink=False)
    @given(PROGRAMS)
    def run(program):
        drawn.append(program)

    providers.CONSTANTS_CACHE.cache.clear()
    run()
    return drawn


def test_what_is_drawn_depends_on_the_seed_alone(monkeypatch):
    """Hypothesis' own draws are constants of imported modules, too: other tests import more."""
    constants = providers.Constants(bytes=[bytes([act] * 20) for act in range(9)])
    ours, others = drawn_programs(1), drawn_programs(2)
    with monkeypatch.context() as patch:
        patch.setattr(providers, "_get_local_constants", lambda: constants)
        assert drawn_programs(1) == ours != others
        patch.delattr(SeedAlone, "_maybe_draw_constant")
        more = drawn_programs(1)
    monkeypatch.delattr(SeedAlone, "_maybe_draw_constant")
    assert drawn_programs(1) != more


def forget_to_recompute(monkeypatch):
    """A preempted sequence believes that its positions are still computed."""
    preempt = Policy.preempt

    def wrong(self, sequence):
        computed = sequence.computed
        preempt(self, sequence)
        sequence.computed = computed

    monkeypatch.setattr(Policy, "preempt", wrong)


def keep_the_version(monkeypatch):
    """An evicted page keeps its version, so a stale reader would pass."""
    change = VersionTable._change

    def wrong(self, event):
        change(self, event)
        if event.kind == EVICT:
            self._versions[event.page] -= 1

    monkeypatch.setattr(VersionTable, "_change", wrong)


def share_across_tenants(monkeypatch):
    """Salts are left out of the keys of the prefix cache."""
    domain = prefixes.prefix_domain
    monkeypatch.setattr(prefixes, "prefix_domain", lambda identity, *salts: domain(identity))


def compare_nothing_but_the_tokens(monkeypatch):
    """A page is found by its own tokens, whatever came before them."""
    monkeypatch.setattr("tpdet.cache.prefix.page_key", lambda parent, domain, ids: domain[:8] + ids)
    monkeypatch.setattr(PrefixIndex, "find", lambda self, key, parent: self._entries.get(key.key))


def free_pages_in_flight(monkeypatch):
    """Pages of a sequence that ends in flight are free at once, while a step still writes them."""
    monkeypatch.setattr(PendingSteps, "has", lambda self, sequence: False)


def give_the_highest_page(monkeypatch):
    """Pages are given in another order: a replay would not get the same."""

    def wrong(self):
        page = max(self._free)
        self._free.remove(page)
        self._used[page] = 1
        return page

    monkeypatch.setattr(PageAllocator, "allocate", wrong)


def forget_who_waits(monkeypatch):
    """The queue is not bounded."""
    monkeypatch.setattr(RequestTable, "started", lambda self, sequence: None)


BUGS = (
    forget_to_recompute, keep_the_version, share_across_tenants, compare_nothing_but_the_tokens,
    free_pages_in_flight, give_the_highest_page, forget_who_waits,
)  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_the_machine_finds_a_bug_that_was_put_in(monkeypatch, bug):
    bug(monkeypatch)
    with pytest.raises((AssertionError, IntegrityError, KeyError, IndexError)):
        run_machine(EXAMPLES, 7, shrink=False)
