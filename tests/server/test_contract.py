"""The names and numbers that clients and operators rely on, as they were promised.

The other tests read limits, routes and metrics from the code; here they stand as constants, so that
a change of one of them is a change of this page too.
"""

import json
import os
import time

import pytest

from tests.lib.server.harness import MODEL, Server
from tpdet import errors
from tpdet.cache.state_table import StateRoom
from tpdet.requests.body.limits import all_limits
from tpdet.scheduler import Scheduler
from tpdet.scheduler.speculator import DraftCounts
from tpdet.server.front import engine_metrics
from tpdet.server.front.app import Services, make_app
from tpdet.server.front.metrics import Metrics
from tpdet.server.leader.bridge import counters_of
from tpdet.server.wire.protocol import Status

KEY = "sk-contract-1"
PATH, CHAT = "/v1/completions", "/v1/chat/completions"
PUBLIC = {"/health", "/health_generate", "/ready", "/metrics", "/version"}
ROUTES = {
    "GET": PUBLIC | {"/v1/models", "/v1/models/{model_id:path}", "/v1/receipts/{receipt_id}",
                     "/tokenizer_info", "/server_info", "/get_server_info", "/model_info",
                     "/get_model_info", "/get_world_size", "/v1/loads", "/openapi.json", "/",
                     "/docs", "/v1/answers/{request_digest}", "/info"},
    "POST": {PATH, CHAT, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
             "/inference/v1/generate", "/generate", "/tokenize", "/detokenize", "/v1/embeddings",
             "/classify", "/pooling", "/score", "/rerank", "/v1/rerank", "/v2/rerank",
             "/v1/score", "/embed", "/predict", "/similarity", "/"},
}  # fmt: skip
LIMITS = {
    "body_bytes": 10 << 20, "json_depth": 32, "n": [1, 128], "logprobs": [0, 100],
    "top_logprobs": [0, 100], "stop_strings": 16, "stop_string_bytes": [1, 256],
    "logit_bias_ids": 1024, "logit_bias": [-100.0, 100.0], "batch_prompts": 1024,
    "temperature": [0.0, 2.0], "smallest_temperature_above_zero": 0.001, "seed": [0, 2**63 - 1],
    "user_bytes": 256, "cache_salt_bytes": 256, "top_p": [0.0, 1.0], "top_k": [-1, 2**31 - 1],
    "min_p": [0.0, 1.0], "presence_penalty": [-2.0, 2.0], "frequency_penalty": [-2.0, 2.0],
    "repetition_penalty_above": 0.0, "headers": 100, "header_bytes": 16 << 10,
    "error_bytes": 4 << 10, "discarded_body_seconds": 1.0,
}  # fmt: skip
# Each with a value that is not its default's.
FIELDS = {
    "max_tokens": 3, "max_completion_tokens": 3, "n": 2, "temperature": 0.5, "top_p": 0.5,
    "seed": 3, "stop": ["zz"], "stream": True, "stream_options": {"include_usage": True},
    "logprobs": 1, "logit_bias": {"5": 1}, "presence_penalty": 1, "frequency_penalty": 1,
    "user": "u", "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5, "stop_token_ids": [7],
    "ignore_eos": True, "min_tokens": 1, "prompt_logprobs": 1, "skip_special_tokens": False,
    "add_special_tokens": False, "include_stop_str_in_output": True, "truncate_prompt_tokens": 2,
    "return_tokens_as_token_ids": True, "cache_salt": "c", "return_token_ids": True,
    "response_format": {"type": "text"},
}  # fmt: skip
METRICS = """
    tpdet_requests_running tpdet_requests_waiting tpdet_requests_total tpdet_rejected_total
    tpdet_time_to_first_token_seconds tpdet_inter_token_seconds tpdet_prompt_tokens_total
    tpdet_generation_tokens_total tpdet_batch_rows tpdet_kv_pages tpdet_prefix_hit_tokens_total
    tpdet_preemptions_total tpdet_nan_total tpdet_plan_digest_mismatch_total
    tpdet_page_version_conflict_total tpdet_canary_mismatch_total
    tpdet_deterministic_slowdown_ratio tpdet_step_seconds vllm:num_requests_running
    vllm:num_requests_waiting vllm:time_to_first_token_seconds vllm:kv_cache_usage_perc
    vllm:prompt_tokens_total vllm:generation_tokens_total vllm:request_success_total
    vllm:num_preemptions_total vllm:spec_decode_num_drafts_total
    vllm:spec_decode_num_draft_tokens_total vllm:spec_decode_num_accepted_tokens_total
    vllm:spec_decode_num_accepted_tokens_per_pos_total tpdet_drafter_switched_off
""".split()
EXIT_CODES = {
    "UsageError": 2, "CheckpointError": 65, "NotFoundError": 66, "TpdetError": 70,
    "ResourceError": 71, "PeerLostError": 75, "IntegrityError": 75, "NotPermittedError": 77,
    "DisagreementError": 78, "DrainTimeoutError": 143, "AuditError": 65,
    "AuditUnavailableError": 74,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    keys = folder / "keys"
    keys.write_text(KEY + "\n")
    keys.chmod(0o600)
    found = Server(folder, "--api-key-file", str(keys))
    found.http.headers["authorization"] = f"Bearer {KEY}"
    yield found
    assert found.stop() == 0, found.log.read_text()


def chat(server, **fields):
    messages = fields.pop("messages", [{"role": "user", "content": "hi"}])
    body = {"model": MODEL, "messages": messages, "max_tokens": 2} | fields
    return server.http.post(CHAT, json=body)


# --- what is fixed in the code ------------------------------------------------------------------


def test_the_routes_are_the_promised_ones_and_no_more():
    found: dict[str, set[str]] = {}
    for route in make_app(Services(None, None, None, None, "m", 1.0, 0, True)).routes:
        for method in route.methods:
            found.setdefault(method, set()).add(route.path)
    assert found == ROUTES


def test_the_limits_have_the_promised_numbers():
    found = all_limits()
    assert {name: found[name] for name in LIMITS} == LIMITS


@pytest.mark.parametrize("name", EXIT_CODES)
def test_errors_end_a_process_with_the_promised_code(name):
    assert getattr(errors, name).exit_code == EXIT_CODES[name]


def test_every_promised_metric_is_there_once_the_engine_has_counted():
    counters = dict.fromkeys(
        [
            *engine_metrics.ENGINE_COUNTERS,
            *engine_metrics.ENGINE_GAUGES,
            "sequences_running",
            "pages_used",
            "pages_free",
            *(f"ngram.{name}" for name in engine_metrics.DRAFT_COUNTERS),
            *(f"ngram.accepted_at.{place}" for place in range(16)),
        ],
        1.0,
    )
    shown = Metrics("m", lambda: Status("accepting", 1, 1, counters))
    clock = shown.clock(time.monotonic())
    clock.finished("r", 0, "stop", time.monotonic())
    shown.outcome("completed")
    shown.rejected("not_found")
    text = shown.render().decode()
    for name in METRICS:
        assert f"\n{name}" in text, name
    assert {label for *_, labels, _ in shown.described() for label in labels} <= {
        "model_name",
        "outcome",
        "code",
        "state",
        "finished_reason",
        "drafter",
        "position",
    }
    assert "_created" not in text
    for name, kind, _, meaning in shown.described():
        plain = name.partition(":")[2].removesuffix("_total").replace("_", " ") or name
        assert len(meaning) > 15 and plain != meaning.lower(), name
        assert not name.endswith("_seconds") or meaning.endswith("in seconds"), name
        assert kind in ("counter", "gauge", "histogram")


# --- what a running server does -----------------------------------------------------------------


def test_ready_json_has_the_promised_keys(server):
    assert {"url", "ranks", "system_fingerprint", "vocab_size", "tp"} <= server.ready.keys()
    for rank in server.ready["ranks"]:
        assert {"rank", "pid", "host", "device"} <= rank.keys()
    assert (server.ready["tp"], server.ready["ranks"][0]["pid"]) == (1, server.process.pid)


def test_every_promised_field_is_known_as_a_value_and_as_null(server):
    for name, value in FIELDS.items():
        needs = {"stream": True} if name == "stream_options" else {}
        needs |= {"max_tokens": None} if name == "max_completion_tokens" else {}
        found = server.complete(**needs | {name: value})
        assert found.status_code == 200, (name, found.text)
        shown = True if name == "logprobs" else value
        found = chat(server, **needs | {name: shown})
        assert found.status_code == 200, (name, found.text)
    nulls = dict.fromkeys(FIELDS)
    assert server.complete(**nulls, echo=None).status_code == 200
    assert chat(server, **nulls, top_logprobs=None, tools=None).status_code == 200
    assert chat(server, logprobs=True, top_logprobs=2).status_code == 200
    assert chat(server, tools=[{"type": "function"}]).json()["error"]["param"] == "tools"


def test_the_five_roles_and_text_parts_are_taken(server):
    roles = ("system", "developer", "user", "assistant", "tool")
    messages = [{"role": role, "content": "x"} for role in roles]
    messages += [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert chat(server, messages=messages).status_code == 200
    for role in ("function", "User", "", None, 3):
        assert chat(server, messages=[{"role": role, "content": "x"}]).status_code == 400


def test_every_answer_has_an_id_of_its_own_and_says_who_answered(server):
    ids = []
    for path in (*sorted(PUBLIC), "/v1/models", "/server_info", "/nothing"):
        ids.append(server.http.get(path).headers["x-request-id"])
    for found in (server.complete(), chat(server), server.complete(n=0)):
        ids.append(found.headers["x-request-id"])
    assert len({*ids}) == len(ids)
    for found in (server.complete(), chat(server)):
        answer = found.json()
        assert answer["system_fingerprint"] == server.ready["system_fingerprint"]
        assert answer["tpdet"].keys() >= {"seed", "replay_digest", "replay_version"}
    events = server.complete(stream=True).text.split("\n\n")[:-1]
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert {chunk["system_fingerprint"] for chunk in chunks} == {"fp_fake"}
    assert chunks[-1]["tpdet"].keys() >= {"seed", "replay_digest", "replay_version"}


def test_a_wrong_key_is_an_authentication_error_everywhere_but_on_the_four(server):
    wrong = {"authorization": f"Bearer {KEY}x"}
    for path in ("/v1/models", "/nothing", PATH, "/v1/receipts/1", "/docs", "/"):
        found = server.http.get(path, headers=wrong)
        error = found.json()["error"]
        assert (found.status_code, error["type"]) == (401, "authentication_error"), path
        assert error["code"] == "invalid_api_key" and found.headers["x-request-id"]
    for path in PUBLIC:
        assert server.http.get(path, headers=wrong).status_code == 200
    for path in ("/v1/receipts/1", "/redoc", "/docs/", "/v1", "/v1/images", "/metrics/"):
        assert server.http.get(path).status_code == 404, path


def test_the_models_card_has_the_context(server):
    (card,) = server.http.get("/v1/models").json()["data"]
    assert card["id"] == MODEL and card["max_model_len"] == 256
    assert server.http.get(f"/v1/models/{MODEL}").json() == card


def test_the_http_process_stays_in_the_process_group_of_rank_0(server):
    assert os.getpgid(server.child.pid) == os.getpgid(server.process.pid)


def test_slots_of_states_reach_the_metrics_where_a_model_has_them():
    for room in (None, StateRoom(4, 9)):
        scheduler = Scheduler(4, 100, 10, 10, 100, state_room=room)
        sizes = {"sequence_state_bytes": 100.0, "snapshot_state_bytes": 30.0}
        counters = counters_of(scheduler.statistics()) | sizes
        text = Metrics("m", lambda c=counters: Status("accepting", 0, 0, c)).render().decode()
        for line in (
            'tpdet_state_slots{kind="sequence",state="free"} 4.0',
            'tpdet_state_slots{kind="snapshot",state="used"} 0.0',
            'tpdet_state_bytes{kind="sequence"} 400.0',
            'tpdet_state_bytes{kind="snapshot"} 270.0',
            "tpdet_snapshots_taken_total 0.0",
            "tpdet_snapshot_hits_total 0.0",
            "tpdet_snapshots_evicted_total 0.0",
        ):
            assert (f"{line}\n" in text) is (room is not None), line


def test_drafts_of_each_drafter_reach_the_metrics():
    scheduler = Scheduler(4, 100, 10, 10, 100)
    counts = scheduler.speculator.counts["ngram"] = DraftCounts()
    counts.add(7, 2)
    status = Status("accepting", 0, 0, counters_of(scheduler.statistics()))
    text = Metrics("m", lambda: status).render().decode()
    for name, value in (
        ("num_drafts_total{", 1),
        ("num_draft_tokens_total{", 7),
        ("num_accepted_tokens_total{", 2),
    ):
        assert f'spec_decode_{name}drafter="ngram",model_name="m"}} {value}.0\n' in text
    places = [f'drafter="ngram",model_name="m",position="{place}"}}' for place in range(3)]
    assert [f"{place} 1.0" in text for place in places] == [True, True, False]
