"""`tpdet.nn` on a GPU: operators as torch sees them, and the bits of an engine on that GPU."""

import tempfile
from pathlib import Path

import torch

import tpdet.nn
from tests.gpu.lib.checks import Differences, same
from tests.gpu.lib.suite import Check
from tests.nn.operator_cases import cases
from tpdet import LLM, SamplingParams
from tpdet.tools.synthetic.make_model import make_model

MODELS = ("qwen3", "qwen3_moe")
SHAPE = {"hidden": 512, "layers": 2, "intermediate": 1024, "vocab": 1100, "dtype": "bfloat16"}
PROMPTS = [[(7 * i + j) % 1100 for i in range(length)] for j, length in enumerate((3, 40, 300))]


def operators_hold(dtype):
    """Schemas, shapes, traces and gradients of every operator."""
    differences = Differences()
    for case in cases("cuda", dtype):
        leaves = tuple(
            value.clone().requires_grad_()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for value in case.arguments
        )
        differences.keep(torch.library.opcheck, case.operator, leaves)
    return differences.finish()


def log_prob_has_the_engine_s_bits(family):
    """Tokens that an `LLM` sampled, with gradients and without, packed and alone."""
    differences = Differences()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / family, like=family, head_dim=64, **SHAPE)
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, logprobs=0, ignore_eos=True)
        with LLM(model, device="cuda", kv_pages=32, skip_tokenizer_init=True) as llm:
            answers = [each.outputs[0] for each in llm.generate(PROMPTS, params, use_tqdm=False)]
        loaded = tpdet.nn.load(model, device="cuda")
        sequences = [[*p, *a.token_ids] for p, a in zip(PROMPTS, answers, strict=True)]
        lengths = [len(each) for each in sequences]
        packed = loaded.log_prob([i for each in sequences for i in each], lengths)
        rows = packed.detach().split([length - 1 for length in lengths])
        for ids, row, answer in zip(sequences, rows, answers, strict=True):
            with torch.no_grad():
                differences.keep(same, row, loaded.log_prob(ids, [len(ids)]), "packed and alone")
            bits = [
                int.from_bytes(bytes.fromhex(b), "big", signed=True) for b in answer.logprob_bits
            ]
            theirs = torch.tensor(bits, dtype=torch.int32, device="cuda").view(torch.float32)
            differences.keep(same, row[-len(bits) :], theirs, "engine")
        packed.square().sum().backward()
        assert all(each.grad.isfinite().all() for each in loaded.parameters())
    return differences.finish()


def log_prob_checks():
    """Every check of operators and models."""
    return [
        Check("operators float32", operators_hold, (torch.float32,)),
        Check("operators bfloat16", operators_hold, (torch.bfloat16,)),
        *(Check(family, log_prob_has_the_engine_s_bits, (family,)) for family in MODELS),
    ]
