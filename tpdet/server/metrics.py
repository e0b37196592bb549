"""Prometheus metrics: ours under `tpdet_`, and beside them the `vllm:` names dashboards know.

What the HTTP process sees itself (times, tokens, refusals) it counts here; the engine's counters
come with its status messages. A metric nobody can fill truthfully yet is not exported. No label
holds a key, prompt, tenant or request id.
"""

from collections.abc import Callable, Iterator
from time import monotonic

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tpdet.request import TokenOutput
from tpdet.server.protocol import Status

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

# Engine counter -> our name and vLLM's, with the help text.
ENGINE_COUNTERS = {
    "preemptions": (
        "tpdet_preemptions",
        "vllm:num_preemptions",
        "sequences that gave up their pages and were recomputed",
    ),
    "requests_failed": (
        "tpdet_nan",
        None,
        "requests failed because their logits held NaN or infinity, or nothing to choose",
    ),
    "prefix_query_tokens": (
        "tpdet_prefix_query_tokens",
        "vllm:prefix_cache_queries",
        "prompt tokens looked up in the prefix cache",
    ),
    "prefix_hit_tokens": (
        "tpdet_prefix_hit_tokens",
        "vllm:prefix_cache_hits",
        "prompt tokens found in the prefix cache",
    ),
    "plan_digest_mismatches": (
        "tpdet_plan_digest_mismatch",
        None,
        "step plans whose digest did not match",
    ),
    "page_version_conflicts": (
        "tpdet_page_version_conflict",
        None,
        "readers refused because they held an older page version",
    ),
    "canary_mismatches": (
        "tpdet_canary_mismatch",
        None,
        "canary answers whose bits were not those of the first",
    ),
}


# Engine gauge -> our name: 1 while answers are approximate; strict steps' time over that at start.
ENGINE_GAUGES = {
    "approximate": "tpdet_approximate",
    "slowdown_ratio": "tpdet_deterministic_slowdown_ratio",
    "start_seconds": "tpdet_start_seconds",
}


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
    """All metrics of one HTTP process, in a registry of its own."""

    def __init__(self, model_name: str, status: Callable[[], Status]) -> None:
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
            "tpdet_step_seconds", "one engine step", buckets=FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        )  # fmt: skip
        self.prompt_tokens = self._pair("prompt_tokens", "prompt tokens of admitted requests")
        self.generation_tokens = self._pair("generation_tokens", "tokens generated")
        self._requests = Counter(
            "tpdet_requests", "HTTP requests by how they ended", ["outcome"],
            registry=self._registry,
        )  # fmt: skip
        self._rejected = Counter(
            "tpdet_rejected", "refused HTTP requests by code", ["code"], registry=self._registry
        )
        self._success = Counter(
            "vllm:request_success", "finished choices", ["model_name", "finished_reason"],
            registry=self._registry,
        )  # fmt: skip
        self._swing = Gauge(
            "tpdet_batch_swing", "change of the mean batch size between the last two windows, as a "
            "share of the former", registry=self._registry,
        )  # fmt: skip
        self._swing_alarms = Counter(
            "tpdet_batch_swing_alarms", "windows whose batch size swung past the alarm",
            registry=self._registry,
        )  # fmt: skip
        self._registry.register(_EngineCollector(status, model_name))

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
        text = ours.replace("_", " ")
        mine = Histogram(f"tpdet_{ours}", text, buckets=buckets, registry=self._registry)
        other = Histogram(
            f"vllm:{theirs or ours}", text, ["model_name"], buckets=buckets,
            registry=self._registry,
        )  # fmt: skip
        return mine, other.labels(**self._model)

    def _pair(self, name: str, text: str) -> _Pair:
        mine = Counter(f"tpdet_{name}", text, registry=self._registry)
        other = Counter(f"vllm:{name}", text, ["model_name"], registry=self._registry)
        return _Pair(mine, other.labels(**self._model))


class _EngineCollector(Collector):
    """Reads the engine's last status message when Prometheus asks."""

    def __init__(self, status: Callable[[], Status], model_name: str) -> None:
        self._status, self._model_name = status, model_name

    def collect(self) -> Iterator[Metric]:
        """Gauges and counters of the engine process."""
        status = self._status()
        counters = status.counters
        yield from self._gauge("tpdet_requests_running", status.running, "num_requests_running")
        yield from self._gauge("tpdet_requests_waiting", status.waiting, "num_requests_waiting")
        if "sequences_running" in counters:
            yield from self._gauge("tpdet_batch_rows", counters["sequences_running"], None)
        if {"pages_used", "pages_free"} <= counters.keys():
            used, free = counters["pages_used"], counters["pages_free"]
            cached = counters.get("pages_cached", 0.0)  # free, and kept for the prefix cache
            pages = GaugeMetricFamily("tpdet_kv_pages", "KV pages by state", labels=["state"])
            for state, count in (("used", used), ("cached", cached), ("free", free - cached)):
                pages.add_metric([state], count)
            yield pages
            share = used / (used + free) if used + free else 0.0
            yield from self._gauge(None, share, "kv_cache_usage_perc")
        for name, ours in ENGINE_GAUGES.items():
            if name in counters:
                yield from self._gauge(ours, counters[name], None)
        for name, (ours, theirs, text) in ENGINE_COUNTERS.items():
            if name in counters:
                yield CounterMetricFamily(ours, text, value=counters[name])
                if theirs is not None:
                    family = CounterMetricFamily(theirs, text, labels=["model_name"])
                    family.add_metric([self._model_name], counters[name])
                    yield family

    def _gauge(self, ours: str | None, value: float, theirs: str | None) -> Iterator[Metric]:
        if ours is not None:
            yield GaugeMetricFamily(ours, ours.removeprefix("tpdet_").replace("_", " "), value)
        if theirs is not None:
            family = GaugeMetricFamily(
                f"vllm:{theirs}", theirs.replace("_", " "), labels=["model_name"]
            )
            family.add_metric([self._model_name], value)
            yield family
