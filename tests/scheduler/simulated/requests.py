"""A simulated scheduler with requests in its line, and whose rows a plan holds."""

from tests.scheduler.simulated.simulation import Simulation, make_scheduler


def simulation(*requests, **settings) -> Simulation:
    """One that holds these requests; `settings` are make_scheduler's."""
    sim = Simulation(make_scheduler(**settings))
    for request in requests:
        sim.scheduler.add(request)
    return sim


def keys(plan) -> list[tuple[int, int]]:
    """(admission, choice) of a plan's rows."""
    return [(row.admission, row.choice) for row in plan.rows]
