"""`--enable-return-routed-experts` over HTTP: whole answers hold them, in messages of any size."""

from base64 import b64decode
from types import SimpleNamespace

import pytest

from tests.lib.server.served import Served
from tpdet.checkpoint.model_config import load_model_config
from tpdet.errors import UsageError
from tpdet.requests.request import TokenOutput
from tpdet.server.commands import preflight
from tpdet.server.leader import bridge
from tpdet.server.wire import protocol


def test_a_step_whose_experts_are_many_is_several_messages(monkeypatch):
    monkeypatch.setattr(bridge, "MAX_ROUTED_BYTES", 10)
    sent = []
    link = SimpleNamespace(socket=SimpleNamespace(send=sent.append))
    tokens = [TokenOutput(f"r{i}", 0, i, 0.0, routed_experts=bytes(6 * (i != 3))) for i in range(7)]
    bridge.send_step(link, tokens, 0.5)
    assert all(isinstance(each, protocol.Outputs) for each in sent)
    assert [each.step_seconds for each in sent] == [None, None, None, 0.5][-len(sent) :]
    assert [token for each in sent for token in each.tokens] == tokens
    assert 1 < len(sent) < 7
    assert max(sum(len(t.routed_experts) for t in each.tokens) for each in sent) <= 16


def test_experts_that_no_answer_holds_are_refused(tiny_model):
    preflight.check_routed(load_model_config(tiny_model("qwen3_moe")), 4096)
    with pytest.raises(UsageError, match="lower --max-model-len"):
        preflight.check_routed(load_model_config(tiny_model("qwen3_moe")), 1 << 24)
    with pytest.raises(UsageError, match="qwen3 has no experts"):
        preflight.check_routed(load_model_config(tiny_model("qwen3")), 64)


@pytest.mark.slow
def test_a_server_returns_them(tiny_model, tmp_path):
    flags = ["--enable-return-routed-experts", "--skip-tokenizer-init", "--max-model-len", "256"]
    server = Served(tiny_model("qwen3_moe"), tmp_path, 2, *flags)
    try:
        asked = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "n": 2}
        found = [server.client.completions.create(**asked) for _ in range(2)]
        for answer in found:
            for choice in answer.choices:
                assert len(b64decode(choice.model_extra["routed_experts"])) == 2 * 6 * 1 * 4
        texts = [[c.model_extra["routed_experts"] for c in answer.choices] for answer in found]
        assert texts[0] == texts[1]
    finally:
        server.end()
