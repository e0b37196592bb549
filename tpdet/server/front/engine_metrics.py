"""The engine's counters and gauges as Prometheus metrics, under our names and vLLM's."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tpdet.scheduler.speculator import PLACES
from tpdet.server.wire.protocol import Status
from tpdet.speculative.proposers.proposer import NAMES

# Engine counter -> our name and vLLM's, with the help text.
ENGINE_COUNTERS = {
    "preemptions": ("tpdet_preemptions", "vllm:num_preemptions",
        "Sequences that gave up their KV pages and were computed again"),
    "requests_failed": ("tpdet_nan", None,
        "Requests that failed because their logits held NaN, infinity or no token to choose"),
    "prefix_query_tokens": ("tpdet_prefix_query_tokens", "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache"),
    "prefix_hit_tokens": ("tpdet_prefix_hit_tokens", "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache and not computed"),
    "plan_digest_mismatches": ("tpdet_plan_digest_mismatch", None,
        "Step plans that a rank refused because their digest did not match"),
    "page_version_conflicts": ("tpdet_page_version_conflict", None,
        "Reads of a KV page that were refused because they named an older version of it"),
    "snapshots_taken": ("tpdet_snapshots_taken", None,
        "Snapshots of linear-attention states that were made at page ends"),
    "snapshots_read": ("tpdet_snapshot_hits", None,
        "Sequences that began at a snapshot of linear-attention states"),
    "snapshots_evicted": ("tpdet_snapshots_evicted", None,
        "Snapshots of linear-attention states that gave way to newer ones"),
    "canary_mismatches": ("tpdet_canary_mismatch", None,
        "Canary answers whose bits were not those of the first one"),
    "weight_updates": ("tpdet_weight_updates", None,
        "Changes of the weights since the start"),
}  # fmt: skip

# Engine gauge -> our name, with the help text.
ENGINE_GAUGES = {
    "approximate": ("tpdet_approximate",
        "1 while answers are computed approximately, 0 while they are deterministic"),
    "slowdown_ratio": ("tpdet_deterministic_slowdown_ratio",
        "Time of deterministic decode steps, as a multiple of the time measured at the start"),
    "paused": ("tpdet_paused",
        "1 while a pause holds up requests, running or new, 0 while they are served"),
    "start_seconds": ("tpdet_start_seconds",
        "Time that loading, compiling and warming up took at the start, in seconds"),
}  # fmt: skip

# Counter of a drafter -> vLLM's name, with the help text.
DRAFT_COUNTERS = {
    "drafts": ("num_drafts", "Rows that carried drafts"),
    "draft_tokens": ("num_draft_tokens", "Draft tokens that were verified"),
    "accepted_tokens": ("num_accepted_tokens", "Draft tokens that were right"),
}


class EngineCollector(Collector):
    """Reads the engine's last status message when Prometheus asks."""

    def __init__(self, status: Callable[[], Status], model_name: str) -> None:
        self._status, self._model_name = status, model_name

    def collect(self) -> Iterator[Metric]:
        """Gauges and counters of the engine process."""
        status = self._status()
        counters = status.counters
        yield from both_names(
            GaugeMetricFamily,
            "tpdet_requests_running",
            "vllm:num_requests_running",
            "Requests whose choices are being computed",
            self._model_name,
            status.running,
        )
        yield from both_names(
            GaugeMetricFamily,
            "tpdet_requests_waiting",
            "vllm:num_requests_waiting",
            "Requests that wait in the queue",
            self._model_name,
            status.waiting,
        )
        if "sequences_running" in counters:
            text = "Sequences that a step computes, one for each choice"
            yield GaugeMetricFamily("tpdet_batch_rows", text, counters["sequences_running"])
        if {"pages_used", "pages_free"} <= counters.keys():
            yield from self._pages(counters)
        if "state_slots" in counters:
            yield from self._states(counters)
        for name, (ours, text) in ENGINE_GAUGES.items():
            if name in counters:
                yield GaugeMetricFamily(ours, text, counters[name])
        for name, (ours, theirs, text) in ENGINE_COUNTERS.items():
            if name in counters:
                yield from both_names(
                    CounterMetricFamily, ours, theirs, text, self._model_name, counters[name]
                )
        yield from self._drafts(counters)

    def _pages(self, counters: Mapping[str, float]) -> Iterator[Metric]:
        """Pages of the KV cache by state, and the share that is in use."""
        used, free = counters["pages_used"], counters["pages_free"]
        cached = counters.get("pages_cached", 0.0)  # free, and kept for the prefix cache
        pages = GaugeMetricFamily(
            "tpdet_kv_pages",
            "Pages of the KV cache, of 256 tokens each, by state: used, "
            "free, or free and kept for the prefix cache (cached)",
            labels=["state"],
        )
        for state, count in (("used", used), ("cached", cached), ("free", free - cached)):
            pages.add_metric([state], count)
        yield pages
        yield from both_names(
            GaugeMetricFamily,
            None,
            "vllm:kv_cache_usage_perc",
            "Share of the KV cache's pages that sequences use, 0 to 1",
            self._model_name,
            used / (used + free) if used + free else 0.0,
        )

    def _states(self, counters: Mapping[str, float]) -> Iterator[Metric]:
        """Slots of linear-attention states, those of snapshots, and the bytes of both."""
        kinds = (("sequence", "state_slots"), ("snapshot", "snapshots"))
        slots = GaugeMetricFamily(
            "tpdet_state_slots",
            "Slots of linear-attention states, by kind (of a running sequence or a snapshot) and "
            "state (used or free)",
            labels=["kind", "state"],
        )
        size = GaugeMetricFamily(
            "tpdet_state_bytes",
            "Memory of a rank for linear-attention states, by kind, in bytes",
            labels=["kind"],
        )
        for kind, name in kinds:
            used = counters[f"{name}_used"]
            slots.add_metric([kind, "used"], used)
            slots.add_metric([kind, "free"], counters[name] - used)
            size.add_metric([kind], counters[name] * counters.get(f"{kind}_state_bytes", 0.0))
        yield slots
        yield size

    def _drafts(self, counters: Mapping[str, float]) -> Iterator[Metric]:
        """Draft tokens by drafter, and the right ones also by their place in the row."""
        drafters = [name for name in NAMES if f"{name}.drafts" in counters]
        labels = ["model_name", "drafter"]
        for counter, (theirs, text) in DRAFT_COUNTERS.items():
            family = CounterMetricFamily(f"vllm:spec_decode_{theirs}", text, labels=labels)
            for name in drafters:
                family.add_metric([self._model_name, name], counters[f"{name}.{counter}"])
            yield family
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were right, by their place in the row: 0 to 15",
            labels=[*labels, "position"],
        )
        for name in drafters:
            for place in range(PLACES):
                count = counters[f"{name}.accepted_at.{place}"]
                family.add_metric([self._model_name, name, str(place)], count)
        yield family
        off = GaugeMetricFamily(
            "tpdet_drafter_switched_off",
            "1 once a drafter failed or took too long: it drafts no more, answers go on",
            labels=["drafter"],
        )
        for name in drafters:
            off.add_metric([name], counters.get(f"{name}.switched_off", 0.0))
        yield off


def both_names(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    ours: str | None,
    theirs: str | None,
    text: str,
    model_name: str,
    value: float,
) -> Iterator[Metric]:
    """A metric under our name and under vLLM's, whose has the model as label; None: not there."""
    if ours is not None:
        yield kind(ours, text, value)
    if theirs is not None:
        family = kind(theirs, text, labels=["model_name"])
        family.add_metric([model_name], value)
        yield family
