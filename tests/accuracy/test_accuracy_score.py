"""`tpdet score` against transformers on the same weights: tokens and log-probabilities."""

import json
import math

import torch
import transformers

from tpdet.cli import main

TEXT = "The for statement is used to iterate over the elements of a sequence."
TOLERANCE = 1e-4  # of a log-probability in fp32


def test_every_log_probability_is_that_of_transformers(tiny_model, capsys):
    model = str(tiny_model("llama", kv_heads=2))
    given = ["--prompt", TEXT, "--json", "--top", "1", "--device", "cpu", "--kv-pages", "16"]
    assert main(["score", model, *given]) == 0
    _, *tokens, total = map(json.loads, capsys.readouterr().out.splitlines())
    ids = transformers.AutoTokenizer.from_pretrained(model)(TEXT).input_ids
    assert [line["id"] for line in tokens] == ids
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        rows = network(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    wanted = [float(rows[place, token]) for place, token in enumerate(ids[1:])]
    for place, line in enumerate(tokens[1:]):
        assert math.isclose(line["logprob"], wanted[place], abs_tol=TOLERANCE)
        assert line["top"][0]["id"] == int(rows[place].argmax())
    assert math.isclose(total["mean"], math.fsum(wanted) / len(wanted), abs_tol=TOLERANCE)
