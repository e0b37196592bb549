"""Requests that share prefixes, and the simulation that serves them."""

from tests.scheduler.simulated.answers import make_prompt
from tests.scheduler.simulated.simulation import Simulation, make_scheduler

LONG = tuple(10 + (i * i + i // 7) % 40 for i in range(1200))
OTHER = tuple(10 + (3 * i * i + i // 5) % 40 for i in range(1200))


def simulation(**settings) -> Simulation:
    """Of 16 pages and a model with an identity, unless told otherwise."""
    return Simulation(make_scheduler(**{"prefix_identity": b"model", "num_pages": 16} | settings))


def ask(name, ids, **params):
    """Three tokens after these ids, unless told otherwise."""
    return make_prompt(name, ids, **{"max_tokens": 3, "ignore_eos": True, **params})


def serve(sim, *requests, ahead=False):
    """Run the requests to their end; each must be answered as when alone."""
    for request in requests:
        sim.add(request)
    sim.run(ahead=ahead)
    for request in requests:
        sim.check_answer(request)
    sim.check_idle()


def hits(sim):
    """Tokens read from the cache so far."""
    return sim.scheduler.statistics().totals.prefix_hit_tokens


def cached_tokens(sim, request):
    """Tokens that one request read from the cache; it is served to its end."""
    before = hits(sim)
    serve(sim, request)
    return hits(sim) - before
