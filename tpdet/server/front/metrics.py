"""Prometheus metrics: ours under `tpdet_`, and beside them the `vllm:` names dashboards know.

What the HTTP processes see themselves (times, tokens, refusals) they count in a `SharedTally`; the
engine's counters come with its status messages. A metric nobody can fill truthfully yet is not
exported. No label holds a key, prompt, tenant or request id.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tpdet.requests.request import TokenOutput
from tpdet.server.front.engine_metrics import TABLES, EngineCollector, both_names
from tpdet.server.front.tally import HISTOGRAMS, LABELS, TOTALS, SharedTally
from tpdet.server.wire.protocol import Status

_THEIRS, _HELP = TABLES.histograms_of_vllm, TABLES.help


class Clock:
    """Times one group of requests: to the first token, and between the tokens of each choice."""

    def __init__(self, metrics: "Metrics", started: float) -> None:
        self._metrics, self._started = metrics, started
        self._last: dict[tuple[str, int], float] = {}

    def token(self, output: TokenOutput, now: float) -> None:
        """A committed token arrived at `now` (monotonic seconds)."""
        key = (output.request_id, output.choice)
        last = self._last.get(key)
        if last is not None:
            self._metrics.inter_token.add(now - last)
        elif output.choice == 0:
            self._metrics.first_token.add(now - self._started)
        self._last[key] = now
        if output.token_id >= 0:
            self._metrics.tally.add("generation_tokens")
        if output.finish_reason is not None:
            self.finished(output.request_id, output.choice, output.finish_reason, now)

    def finished(self, request_id: str, choice: int, reason: str, now: float) -> None:
        """A choice has ended."""
        self._last.pop((request_id, choice), None)
        self._metrics.finished(reason, now - self._started)


class Metrics:
    """All metrics of a server, as one of its HTTP processes shows them."""

    def __init__(
        self, model_name: str, status: Callable[[], Status], tally: SharedTally | None = None
    ) -> None:
        """tally: that of this process; without one it is the only process."""
        self.tally = tally or SharedTally.alone()
        self.first_token = self.tally.times("time_to_first_token_seconds")
        self.inter_token = self.tally.times("inter_token_seconds")
        self._whole = self.tally.times("request_seconds")
        self._step = self.tally.times("step_seconds")
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(HttpCollector(self.tally, model_name))
        self._registry.register(EngineCollector(status, model_name))

    def clock(self, started: float) -> Clock:
        """A clock for one group that was submitted at `started` (monotonic seconds)."""
        return Clock(self, started)

    def finished(self, reason: str, seconds: float) -> None:
        """A choice ended after `seconds`."""
        self._whole.add(seconds)
        self.tally.add(f"finished {reason}")

    def step(self, seconds: float) -> None:
        """The engine took one step."""
        self._step.add(seconds)

    def batch_swing(self, share: float, alarmed: bool) -> None:
        """The mean batch size changed by `share` of what it was in the window before."""
        self.tally.set("batch_swing", share)
        self.tally.add("batch_swing_alarms", alarmed)

    def outcome(self, outcome: str) -> None:
        """An HTTP request that reached the engine ended: completed, aborted or failed."""
        self.tally.add(f"requests {outcome}")

    def answer_cache(self, result: str) -> None:
        """The cache of answers was asked: hit, miss or bypass."""
        self.tally.add(f"answer_cache {result}")

    def rejected(self, code: str) -> None:
        """An HTTP request was refused before the engine ran it."""
        self.tally.add(f"rejected {code}")

    def render(self) -> bytes:
        """The text exposition format, version 0.0.4."""
        return generate_latest(self._registry)

    def described(self) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
        """Name as it is scraped, kind, labels and meaning of each metric that has a sample."""
        for metric in self._registry.collect():
            if not metric.samples:
                continue
            labels = tuple(label for label in metric.samples[0].labels if label != "le")
            suffix = "_total" if metric.type == "counter" else ""
            yield metric.name + suffix, metric.type, labels, metric.documentation


class HttpCollector(Collector):
    """Reads the tallies of all processes when Prometheus asks."""

    def __init__(self, tally: SharedTally, model_name: str) -> None:
        self._tally, self._model = tally, model_name

    def collect(self) -> Iterator[Metric]:
        """What the HTTP processes counted, summed."""
        for name in HISTOGRAMS:
            buckets, total = self._tally.histogram(name)
            named = [(floatToGoString(end), count) for end, count in buckets]
            yield HistogramMetricFamily(*_named(name), named, total)
            if name in _THEIRS:
                theirs = HistogramMetricFamily(
                    f"vllm:{_THEIRS[name]}", _HELP[name], labels=["model_name"]
                )
                theirs.add_metric([self._model], named, total)
                yield theirs
        for name in TOTALS:
            names, total = (f"tpdet_{name}", f"vllm:{name}"), self._tally.total(name)
            yield from both_names(CounterMetricFamily, *names, _HELP[name], self._model, total)
        yield self._labelled(*_named("requests"), "requests", ["outcome"])
        yield self._labelled(*_named("rejected"), "rejected", ["code"])
        yield self._labelled(
            "vllm:request_success",
            "Finished choices, by their finish reason",
            "finished",
            ["model_name", "finished_reason"],
        )
        yield self._labelled(*_named("answer_cache"), "answer_cache", ["result"])
        size = self._tally.total("answer_cache_bytes")
        if size:
            yield GaugeMetricFamily(*_named("answer_cache_bytes"), size)
        yield GaugeMetricFamily(*_named("batch_swing"), self._tally.total("batch_swing"))
        yield CounterMetricFamily(
            *_named("batch_swing_alarms"), self._tally.total("batch_swing_alarms")
        )
        for name in ("receipts", "receipts_failed"):
            yield CounterMetricFamily(*_named(name), self._tally.total(name))

    def _labelled(self, name: str, text: str, field: str, labels: list[str]) -> Metric:
        """A counter with a sample for each label that was counted."""
        found = CounterMetricFamily(name, text, labels=labels)
        for label in LABELS[field]:
            total = self._tally.total(f"{field} {label}")
            if total:
                found.add_metric([self._model, label][-len(labels) :], total)
        return found


def _named(name: str) -> tuple[str, str]:
    return f"tpdet_{name}", _HELP[name]
