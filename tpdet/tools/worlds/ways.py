"""The ways to start and connect a world's ranks: launcher, transport, nodes; no bit may change."""

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
class LaunchWay:
    """The launcher of a world's ranks, the transport of their sums, and the number of nodes."""

    launcher: str = "self"
    transport: str = "auto"
    nodes: int = 1

    def __str__(self) -> str:
        nodes = f", {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.launcher}, {self.transport}{nodes}"


USUAL = LaunchWay()


@dataclass(frozen=True)
class Ways:
    """The ways to verify: every launcher with every transport and every number of nodes."""

    launchers: tuple[str, ...] = ("self",)
    transports: tuple[str, ...] = ("auto",)
    nodes: tuple[int, ...] = (1,)

    def every(self) -> list[LaunchWay]:
        """All ways, by launcher first, in the given order."""
        return [
            LaunchWay(launcher, transport, nodes)
            for launcher in self.launchers
            for transport in self.transports
            for nodes in self.nodes
        ]


@dataclass(frozen=True)
class Chosen:
    """The worlds to run as (size, way), and for each reason how many were left out."""

    worlds: list[tuple[int, LaunchWay]]
    left_out: dict[str, int]


def launchers_help() -> str:
    """The sentence of `--help` on `--launcher`."""
    texts = "; ".join(f"{name}: {what}" for name, what in LAUNCHERS.items())
    return f"who starts the ranks, a list of names. {texts}"


def choose(ways: Ways, tps: Sequence[int], device: str, control: bool) -> Chosen:
    """The worlds of the sizes `tps` that are possible on "cpu" or "cuda".

    A list such as gather,mpi may name what is impossible for one launcher or size; such worlds are
    left out. Raises UsageError for a name or number that is impossible everywhere.
    """
    if control and (ways.nodes != (1,) or not {*ways.transports} <= {"auto", "gather"}):
        raise UsageError(
            "--control replaces one gather by a stock all-reduce: leave --nodes out, and "
            "--transport mpi and peer"
        )
    chosen = Chosen([], {})
    reasons: dict[str, str] = {}
    for way in ways.every():
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


def _why_not(tp: int, way: LaunchWay, device: str) -> str | None:
    """Why a world is impossible, with the remedy; None if it is possible."""
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


def _known(tp: int, way: LaunchWay, worlds: Sequence[tuple[int, LaunchWay]]) -> str | None:
    """Why a world would show nothing new: one rank sends nothing by any transport."""
    if tp > 1 or all((1, way.launcher) != (size, known.launcher) for size, known in worlds):
        return None
    return f"transport {way.transport} with --tp 1: one rank sends nothing"


def _wanted(tp: int, way: LaunchWay) -> tuple[str, ...]:
    """The flags that a world covers."""
    return (
        f"--launcher {way.launcher}",
        f"--transport {way.transport}",
        f"--nodes {way.nodes}",
        f"--tp {tp}",
    )
