"""Thousands of requests on a virtual clock, with everything that goes wrong; and seeded bugs."""

import pytest

from tests.scheduler.event_simulation import LIMITS, World, longest_step, random_clients
from tests.scheduler.simulated.small_pages import small_pages
from tpdet.cache.prefix import PrefixIndex
from tpdet.errors import IntegrityError
from tpdet.scheduler.page_manager import PageManager
from tpdet.scheduler.policy import Policy
from tpdet.scheduler.prefixes import Prefixes
from tpdet.scheduler.sequence import Sequence


def simulate(seed: int, count: int, ahead: bool, losses=(), rate=30.0, **limits) -> World:
    with small_pages(4):
        world = World(random_clients(seed, count, rate), list(losses), ahead, **limits)
        world.run()
        world.check()
    return world


@pytest.mark.parametrize(
    ("ahead", "count"),
    [(False, 400), (True, 800), pytest.param(True, 20_000, marks=pytest.mark.slow)],
)
def test_whatever_happens_every_finished_answer_is_the_one_computed_alone(ahead, count):
    losses = [3.0 * i for i in range(1, 9)]
    world = simulate(5, count, ahead, losses)
    ends = list(world.done.values())
    assert ends.count("finished") > 0.9 * count
    assert ends.count("left") > 0.02 * count and ends.count("failed") > 0.002 * count
    assert world.restarts == 8 and world.lost_answers > 20
    assert min(world.preemptions, world.refusals) > 20 and world.hit_tokens > 1000


def test_a_decode_never_waits_for_more_than_one_chunk_of_prompts():
    """Between two tokens of a sequence that keeps its pages lies one step of the token budget.

    Two where the sequence depends on results and steps are planned ahead without it.
    """
    for ahead in (False, True):
        world = simulate(6, 500, ahead)
        bound = longest_step(LIMITS["max_num_batched_tokens"])
        assert 0.9 * bound < world.gaps.longest <= bound + 1e-9
        assert world.gaps.longest_absent <= (2 if ahead else 1) * bound + 1e-9
        assert not ahead or world.gaps.longest_absent > bound, "it was left out"
        assert world.gaps.longest_preempted > bound, "the exception is what it is for"


def test_the_bound_holds_where_the_budget_is_less_than_the_seats():
    world = simulate(6, 150, False, max_num_batched_tokens=3)
    assert world.gaps.longest <= longest_step(3) + 1e-9


@pytest.mark.parametrize("bug", ["prompts first", "whole prompts"])
def test_the_bound_is_broken_by_a_scheduler_that_does_not_keep_it(monkeypatch, bug):
    """Negative control: what the order and the chunks are for."""
    if bug == "prompts first":

        def share_budget(self):
            takes, budget = {}, self.max_num_batched_tokens
            for sequence in sorted(self.running, key=lambda s: -s.remaining):
                if budget and sequence.remaining:
                    takes[sequence.key] = min(sequence.remaining, budget)
                    budget -= takes[sequence.key]
            return takes, budget

        monkeypatch.setattr(Policy, "_share_budget", share_budget)
    else:
        admit = Policy._admit

        def admit_whole(self, takes, budget):
            before = set(takes)
            admit(self, takes, budget)
            for sequence in self.running:
                if sequence.key in takes and sequence.key not in before:
                    takes[sequence.key] = sequence.remaining

        monkeypatch.setattr(Policy, "_admit", admit_whole)
    world = simulate(6, 300, False)
    assert world.gaps.longest > longest_step(LIMITS["max_num_batched_tokens"]) + 1e-9


def read_after_any_parent(monkeypatch):
    """A page is found by its own tokens, whatever came before them."""
    monkeypatch.setattr("tpdet.cache.prefix.page_key", lambda parent, domain, ids: domain[:8] + ids)
    monkeypatch.setattr(PrefixIndex, "find", lambda self, key, parent: self._entries.get(key.key))


def free_what_others_read(monkeypatch):
    """A shared page is freed with its first reader."""

    def give(self, page):
        self._readers[page] -= 1
        self.drop(page)
        return True

    monkeypatch.setattr(PrefixIndex, "give", give)


def share_what_is_poisoned(monkeypatch):
    """Pages are shared as soon as they are computed, before logits spoke for them."""
    admit = PageManager.admit

    def hasty(self, sequence):
        admitted = admit(self, sequence)
        if admitted:
            self.share(sequence, len(sequence.tokens) // 4 * 4)
        return admitted

    monkeypatch.setattr(PageManager, "admit", hasty)


def wait_for_ever(monkeypatch):
    """The head of the line waits for a page that nobody computes any more."""
    monkeypatch.setattr(Prefixes, "released", lambda self, sequence: None)


def plan_without_results(monkeypatch):
    """A penalised row is planned while the token that it counts is still drawn."""
    monkeypatch.setattr(Sequence, "awaits_results", False)


@pytest.mark.parametrize(
    "bug",
    [
        read_after_any_parent,
        free_what_others_read,
        share_what_is_poisoned,
        wait_for_ever,
        plan_without_results,
    ],
    ids=lambda bug: bug.__name__,
)
def test_a_bug_that_was_put_in_is_caught(monkeypatch, bug):
    bug(monkeypatch)
    with pytest.raises((AssertionError, IntegrityError, KeyError, IndexError)):
        simulate(5, 400, True)


def test_a_server_that_keeps_a_rank_from_before_the_loss_is_caught(monkeypatch):
    """A restart is of all ranks: one with the old table refuses the first plan."""
    restart = World.lose_a_rank

    def careless(self):
        old = self.sim.ranks[1]
        restart(self)
        self.sim.ranks[1] = old

    monkeypatch.setattr(World, "lose_a_rank", careless)
    with pytest.raises((AssertionError, IntegrityError)):
        simulate(5, 300, False, [5.0])
