"""Small models are served from GGUF with the bits of the same model in safetensors.

Heads are cut into eight leaves, and a vocabulary into whole pieces: a small model leaves some of
them empty.
"""

import json
from itertools import product

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.gguf.gguf_models import write_gguf
from tpdet import LLM, SamplingParams
from tpdet.tools.synthetic.make_model import make_model

IDS = 300  # fewer than any tokenizer of bytes and special tokens: files of ids alone
CASES = [("llama", 2, "Q8_0"), ("qwen3", 6, "BF16")]
KINDS = ("F32", "F16", "BF16", "Q4_1", "Q8_0", "Q4_0")
MORE = [*product(("llama", "qwen2", "qwen3"), (2, 4, 6, 8, 9, 14), KINDS)]


def both(folder, like, heads, kind, vocab=IDS):
    """(GGUF file, directory of safetensors) of one model, whose matrices have the type `kind`."""
    sizes = {"hidden": 128, "layers": 1, "intermediate": 128, "vocab": 1024}
    key_heads = heads // 2 if heads % 2 == 0 else heads
    model = make_model(folder / "made", like=like, heads=heads, kv_heads=key_heads, **sizes)
    tensors = load_file(model / "model.safetensors")
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & {*tensors}:
        tensors[name] = tensors[name][:vocab].clone()
    config = json.loads((model / "config.json").read_text()) | {"vocab_size": vocab}
    config |= {"eos_token_id": None, "bos_token_id": None}
    (model / "config.json").write_text(json.dumps(config))
    (model / "generation_config.json").unlink()
    save_file(tensors, model / "model.safetensors")
    file = write_gguf(model, folder / "model.gguf", kind, tokenizer=False)
    if kind != "F32":
        quantised = gguf.GGMLQuantizationType[kind]
        for name, tensor in tensors.items():
            if tensor.dim() > 1:
                stored = gguf.quantize(tensor.float().numpy(), quantised)
                tensors[name] = torch.from_numpy(gguf.dequantize(stored, quantised).copy())
        save_file(tensors, model / "model.safetensors")
    return file, model


def answers(model):
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=5, logprobs=3, ignore_eos=True)
    with LLM(
        str(model), skip_tokenizer_init=True, device="cpu", kv_pages=4, dtype="float32"
    ) as llm:
        return [
            (out.outputs[0].token_ids, out.outputs[0].logprobs)
            for out in llm.generate([[1, 2, 299], [7]], params, use_tqdm=False)
        ]


@pytest.mark.parametrize(("like", "heads", "kind"), CASES)
def test_a_small_model_answers_with_the_bits_of_safetensors(like, heads, kind, tmp_path):
    file, model = both(tmp_path, like, heads, kind)
    assert answers(file) == answers(model)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("like", "heads", "kind"), MORE)
def test_every_small_model_answers_with_the_bits_of_safetensors(like, heads, kind, tmp_path):
    file, model = both(tmp_path, like, heads, kind)
    assert answers(file) == answers(model)
