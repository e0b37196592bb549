"""The engine's counters and gauges as Prometheus metrics, under our names and vLLM's."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tpdet.scheduler.speculator import PLACES
from tpdet.server.wire.protocol import Status
from tpdet.speculative.proposers.proposer import NAMES


class MetricTables(msgspec.Struct, frozen=True):
    """Names and help texts of metrics, by the name that the engine or the server counts under.

    engine_counters: our name, vLLM's and the text; engine_gauges: our name and the text;
    draft_counters: vLLM's name and the text, of each drafter. histograms_of_vllm: vLLM's names of
    histograms of ours.
    """

    engine_counters: dict[str, tuple[str, str | None, str]]
    engine_gauges: dict[str, tuple[str, str]]
    draft_counters: dict[str, tuple[str, str]]
    histograms_of_vllm: dict[str, str]
    help: dict[str, str]


TABLES = msgspec.json.decode(
    Path(__file__).with_name("metrics.json").read_bytes(), type=MetricTables
)
ENGINE_COUNTERS, ENGINE_GAUGES = TABLES.engine_counters, TABLES.engine_gauges
DRAFT_COUNTERS = TABLES.draft_counters


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
