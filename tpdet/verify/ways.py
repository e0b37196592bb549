"""The ways in which a world's ranks are started, talk and lie on nodes: none may change a bit."""

from collections.abc import Sequence
from dataclasses import dataclass

from tpdet.errors import UsageError

LAUNCHERS = {
    "self": "tpdet itself, as tpdet serve does",
    "torchrun": "torchrun's elastic agent",
    "slurm": "srun, on the cluster that it finds here",
    "mpi": "mpirun of Open MPI or MPICH",
}
TRANSPORTS = ("auto", "gather", "peer", "mpi")


@dataclass(frozen=True)
class Way:
    """Who starts a world's ranks, what carries their sums, and on how many nodes they lie."""

    launcher: str = "self"
    transport: str = "auto"
    nodes: int = 1

    def __str__(self) -> str:
        nodes = f", {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.launcher}, {self.transport}{nodes}"


USUAL = Way()


@dataclass(frozen=True)
class Ways:
    """What was asked for: every launcher with every transport and every number of nodes."""

    launchers: tuple[str, ...] = ("self",)
    transports: tuple[str, ...] = ("auto",)
    nodes: tuple[int, ...] = (1,)

    def each(self) -> list[Way]:
        """All of them, the launchers' first, in the order asked for."""
        return [
            Way(launcher, transport, nodes)
            for launcher in self.launchers
            for transport in self.transports
            for nodes in self.nodes
        ]


@dataclass(frozen=True)
class Chosen:
    """The worlds to run, (size, way), and how many were left out for which reason."""

    worlds: list[tuple[int, Way]]
    left_out: dict[str, int]


def parse_launchers(text: str) -> tuple[str, ...]:
    """ "torchrun,slurm" as names. Raises UsageError."""
    return _names("launcher", text, tuple(LAUNCHERS))


def parse_transports(text: str) -> tuple[str, ...]:
    """ "gather,mpi" as names. Raises UsageError."""
    return _names("transport", text, TRANSPORTS)


def launchers_help() -> str:
    """What `--launcher` takes, in a sentence for `--help`."""
    each = "; ".join(f"{name}: {what}" for name, what in LAUNCHERS.items())
    return f"who starts the ranks, a list of names. {each}"


def choose(ways: Ways, tps: Sequence[int], device: str, control: bool) -> Chosen:
    """The worlds of these sizes that there can be on "cpu" or "cuda".

    A list such as gather,mpi may hold what one launcher or size cannot have: that is left out.
    Raises UsageError for a name or number that would be left out everywhere.
    """
    if control and (ways.nodes != (1,) or not {*ways.transports} <= {"auto", "gather"}):
        raise UsageError(
            "--control replaces one gather by a stock all-reduce: leave --nodes out, and "
            "--transport mpi and peer"
        )
    chosen = Chosen([], {})
    reasons: dict[str, str] = {}
    for way in ways.each():
        for tp in dict.fromkeys(tps):
            reason = _why_not(tp, way, device) or _known(tp, way, chosen.worlds)
            if reason is None:
                chosen.worlds.append((tp, way))
                continue
            chosen.left_out[reason] = chosen.left_out.get(reason, 0) + 1
            for name in _wanted(tp, way):
                reasons.setdefault(name, reason)
    run = {name for tp, way in chosen.worlds for name in _wanted(tp, way)}
    for name, reason in reasons.items():
        if name not in run:
            raise UsageError(f"nothing can be verified of {name}: {reason}")
    return chosen


def _why_not(tp: int, way: Way, device: str) -> str | None:
    """Why there is no such world, with what to do about it; None if there is."""
    if way.transport == "mpi" and way.launcher != "mpi":
        return (
            f"transport mpi with launcher {way.launcher}: MPI carries between ranks that mpirun "
            "started (--launcher mpi)"
        )
    if way.transport == "peer" and device == "cpu":
        return "transport peer: the CPU has no peer memory (--transport gather, --device cuda)"
    if tp % way.nodes:
        return f"--nodes {way.nodes} with --tp {tp}: nodes have as many ranks each"
    if way.transport == "peer" and 1 < tp == way.nodes:
        return f"transport peer, --nodes {tp}, --tp {tp}: one rank a node has no peer in it"
    return None


def _known(tp: int, way: Way, worlds: Sequence[tuple[int, Way]]) -> str | None:
    """One rank sends nothing: a second transport would show nothing."""
    if tp > 1 or all((1, way.launcher) != (size, known.launcher) for size, known in worlds):
        return None
    return f"transport {way.transport} with --tp 1: one rank sends nothing"


def _wanted(tp: int, way: Way) -> tuple[str, ...]:
    """What a world shows of what was asked for, by its flags."""
    return (
        f"--launcher {way.launcher}",
        f"--transport {way.transport}",
        f"--nodes {way.nodes}",
        f"--tp {tp}",
    )


def _names(flag: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    wanted = tuple(dict.fromkeys(text.split(",")))
    for name in wanted:
        if name not in known:
            raise UsageError(f"{flag} {name!r}: use some of {', '.join(known)}")
    return wanted
