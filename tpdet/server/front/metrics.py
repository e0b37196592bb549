"""Prometheus metrics: ours under `tpdet_`, and beside them the `vllm:` names dashboards know.

What the HTTP process sees itself (times, tokens, refusals) it counts here; the engine's counters
come with its status messages. A metric nobody can fill truthfully yet is not exported. No label
holds a key, prompt, tenant or request id.
"""

from collections.abc import Callable, Iterator
from time import monotonic

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from tpdet.request import TokenOutput
from tpdet.server.front.engine_metrics import EngineCollector
from tpdet.server.wire.protocol import Status

# Seconds, as vLLM has them, so that its dashboards' quantiles keep their resolution.
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
INTER_TOKEN_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0,
)  # fmt: skip

_HELP = {
    "time_to_first_token_seconds":
        "Time from a request's arrival in the queue to its first token, in seconds",
    "inter_token_seconds": "Time between two tokens of a choice, in seconds",
    "request_seconds":
        "Time from a request's arrival in the queue to the end of each of its choices, in seconds",
    "step_seconds": "Time of one engine step, in seconds",
    "prompt_tokens": "Prompt tokens of admitted requests",
    "generation_tokens": "Generated tokens",
    "requests": "Requests that reached the engine, by how they ended: completed, aborted or failed",
    "rejected": "HTTP requests that were refused before the engine ran them, by the error's code",
    "batch_swing":
        "Change of the mean batch size between the last two windows of 10 seconds, as a share of "
        "the former (0 to 1 and above)",
    "batch_swing_alarms":
        "Windows of 10 seconds whose mean batch size changed by more than --batch-swing-alarm",
}  # fmt: skip


class Clock:
    """Times one group of requests: to the first token, and between the tokens of each choice."""

    def __init__(self, metrics: "Metrics", started: float) -> None:
        self._metrics, self._started = metrics, started
        self._last: dict[tuple[str, int], float] = {}

    def token(self, output: TokenOutput) -> None:
        """One committed token has arrived."""
        now = monotonic()
        key = (output.request_id, output.choice)
        last = self._last.get(key)
        if last is not None:
            self._metrics.inter_token(now - last)
        elif key[1] == 0:
            self._metrics.first_token(now - self._started)
        self._last[key] = now
        if output.token_id >= 0:
            self._metrics.generation_tokens.count()
        if output.finish_reason is not None:
            self.finished(output.request_id, output.choice, output.finish_reason)

    def finished(self, request_id: str, choice: int, reason: str) -> None:
        """A choice has ended."""
        self._last.pop((request_id, choice), None)
        self._metrics.finished(reason, monotonic() - self._started)


class _Pair:
    """One number under our name and vLLM's."""

    def __init__(self, ours: Counter, theirs: Counter) -> None:
        self._both = ours, theirs
        self.total = 0

    def count(self, amount: int = 1) -> None:
        """Add to both."""
        self.total += amount
        for counter in self._both:
            counter.inc(amount)


class Metrics:
    """All metrics of one HTTP process."""

    def __init__(self, model_name: str, status: Callable[[], Status]) -> None:
        # Without this call every series has a second one, `..._created`.
        disable_created_metrics()
        self._registry = CollectorRegistry(auto_describe=False)
        self._model = {"model_name": model_name}
        self._first = self._histograms("time_to_first_token_seconds", FIRST_TOKEN_BUCKETS)
        self._inter = self._histograms(
            "inter_token_seconds", INTER_TOKEN_BUCKETS, "inter_token_latency_seconds"
        )
        self._whole = self._histograms(
            "request_seconds", REQUEST_BUCKETS, "e2e_request_latency_seconds"
        )
        self._step = Histogram(
            *_named("step_seconds"), buckets=FIRST_TOKEN_BUCKETS, registry=self._registry
        )
        self.prompt_tokens = self._pair("prompt_tokens")
        self.generation_tokens = self._pair("generation_tokens")
        self._requests = Counter(*_named("requests"), ["outcome"], registry=self._registry)
        self._rejected = Counter(*_named("rejected"), ["code"], registry=self._registry)
        self._success = Counter(
            "vllm:request_success",
            "Finished choices, by their finish reason",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._swing = Gauge(*_named("batch_swing"), registry=self._registry)
        self._swing_alarms = Counter(*_named("batch_swing_alarms"), registry=self._registry)
        self._registry.register(EngineCollector(status, model_name))

    def clock(self, started: float) -> Clock:
        """A clock for one group that was submitted at `started` (monotonic seconds)."""
        return Clock(self, started)

    def first_token(self, seconds: float) -> None:
        """A request's first token came after `seconds`."""
        for histogram in self._first:
            histogram.observe(seconds)

    def inter_token(self, seconds: float) -> None:
        """A choice's next token came after `seconds`."""
        for histogram in self._inter:
            histogram.observe(seconds)

    def finished(self, reason: str, seconds: float) -> None:
        """A choice ended after `seconds`."""
        for histogram in self._whole:
            histogram.observe(seconds)
        self._success.labels(finished_reason=reason, **self._model).inc()

    def step(self, seconds: float) -> None:
        """The engine took one step."""
        self._step.observe(seconds)

    def batch_swing(self, share: float, alarmed: bool) -> None:
        """The mean batch size changed by `share` of what it was in the window before."""
        self._swing.set(share)
        self._swing_alarms.inc(alarmed)

    def outcome(self, outcome: str) -> None:
        """An HTTP request that reached the engine ended: completed, aborted or failed."""
        self._requests.labels(outcome=outcome).inc()

    def rejected(self, code: str) -> None:
        """An HTTP request was refused before the engine ran it."""
        self._rejected.labels(code=code).inc()

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

    def _histograms(
        self, ours: str, buckets: tuple[float, ...], theirs: str | None = None
    ) -> tuple[Histogram, Histogram]:
        mine = Histogram(*_named(ours), buckets=buckets, registry=self._registry)
        other = Histogram(
            f"vllm:{theirs or ours}",
            _HELP[ours],
            ["model_name"],
            buckets=buckets,
            registry=self._registry,
        )
        return mine, other.labels(**self._model)

    def _pair(self, name: str) -> _Pair:
        mine = Counter(*_named(name), registry=self._registry)
        other = Counter(f"vllm:{name}", _HELP[name], ["model_name"], registry=self._registry)
        return _Pair(mine, other.labels(**self._model))


def _named(name: str) -> tuple[str, str]:
    return f"tpdet_{name}", _HELP[name]
