"""How far log-probabilities lie from fp32: ours, and those of transformers in bf16, on one GPU.

    python -m tests.gpu.engine.accuracy [--model-shape qwen3-8b,llama-3-8b] [--layers N]
        [--output DIR]

A model of each shape is made of normal weights, sigma 1 of the embedding and 0.02 of all others, in
bf16, and written to memory. The
reference is transformers in fp32 on the same weights, without TF32. Figures are the mean, the root
mean square and the largest absolute difference of the log-probabilities of given tokens. The fp32
model of 8 billion weights takes 33 GB of the GPU.
"""

import argparse
import gc
import json
import random
import shutil
import tempfile
from pathlib import Path

import torch
import transformers

from tpdet import LLM, SamplingParams
from tpdet.checkpoint.model_config.known_shapes import write_shape
from tpdet.tools.bench.kernels.gpu import gpu_only
from tpdet.tools.measurement.results_file import append_run
from tpdet.tools.worlds.machine import machine

LENGTHS = (200, 511, 900, 1500)
"""Tokens of the prompts."""
AIM = 0.60  # of transformers' error, of the fold
SIGMA = 0.02


def main() -> int:
    """All shapes in turn; 1 if one misses the aim."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.engine.accuracy", allow_abbrev=False)
    parser.add_argument("--model-shape", default="qwen3-8b,llama-3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    gpu_only("accuracy")
    found = [row for name in options.model_shape.split(",") for row in measure(name, options)]
    if options.output:
        command = f"python -m tests.gpu.engine.accuracy --model-shape {options.model_shape}"
        append_run(options.output, "accuracy", machine("cuda", 1), command, found)
    missed = [row for row in found if row["mode"] == "tree" and row["ratio"] > AIM]
    return 1 if missed else 0


def measure(name: str, options: argparse.Namespace) -> list[dict]:
    """Rows of one shape: the fold, gathered rows, transformers."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        prompts = random_prompts()
        reference, theirs = transformers_log_probabilities(folder, name, options.layers, prompts)
        peer, rows = errors(theirs, reference), []
        for mode, settings in (("tree", {}), ("gather", {"row_layers": "gather"})):
            ours = errors(product_log_probabilities(folder, prompts, settings), reference)
            rows.append(row_of(name, mode, len(reference), ours, peer))
            print(rows[-1], flush=True)
        return rows
    finally:
        shutil.rmtree(folder)


def row_of(
    name: str, mode: str, tokens: int, ours: dict[str, float], peer: dict[str, float]
) -> dict[str, object]:
    """A row of a results file: our mean error beside that of transformers."""
    return {
        "case": f"log-probabilities of {tokens} tokens against fp32",
        "value": ours["mean"],
        "unit": "1e-3 nats",
        "model": name,
        "dtype": "bfloat16",
        "mode": mode,
        "tp": 1,
        "peer": "transformers bf16",
        "peer_value": peer["mean"],
        "ratio": round(ours["mean"] / peer["mean"], 3),
        "rms": ours["rms"],
        "largest": ours["largest"],
        "peer_rms": peer["rms"],
        "peer_largest": peer["largest"],
    }


def random_prompts() -> list[list[int]]:
    """Token ids below 100,000, the same every time."""
    generator = random.Random(41)
    return [[generator.randrange(100, 100_000) for _ in range(n)] for n in LENGTHS]


def transformers_log_probabilities(
    folder: Path, name: str, layers: int | None, prompts: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the model to `folder`; its log-probabilities in fp32 and in bf16, fp64 [tokens]."""
    torch.backends.cuda.matmul.allow_tf32 = False
    write_shape(folder, name)
    shape = json.loads((folder / "config.json").read_text())
    shape["num_hidden_layers"] = layers or shape["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(shape))
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("cuda"):
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(7)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.dim() > 1:
                embeds = weight is network.get_input_embeddings().weight
                weight.normal_(0.0, 1.0 if embeds else SIGMA, generator=generator)
            else:
                weight.fill_(1.0)
    network.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(shape))  # as it was, in no library's dialect
    theirs = [picked(network, ids) for ids in prompts]
    reference = [picked(network.float(), ids) for ids in prompts]
    del network
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cat(reference), torch.cat(theirs)


def picked(network: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of ids[1:], each given the ids before it."""
    with torch.no_grad():
        logits = network(torch.tensor([ids], device="cuda")).logits[0, :-1]
    wanted = torch.tensor(ids[1:], device="cuda")[:, None]
    return logits.double().log_softmax(-1).gather(1, wanted)[:, 0].cpu()


def product_log_probabilities(
    folder: Path, prompts: list[list[int]], settings: dict[str, object]
) -> torch.Tensor:
    """The same by `tpdet.LLM` at TP 1."""
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    with LLM(folder, skip_tokenizer_init=True, kv_pages=64, max_model_len=2048, **settings) as llm:
        answers = llm.generate(asked, params, use_tqdm=False)
    found = [
        position[token].logprob
        for answer in answers
        for token, position in zip(
            answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=True
        )
    ]
    return torch.tensor(found, dtype=torch.float64)


def errors(found: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """Of absolute differences, in 1e-3 nats."""
    apart = (found - reference).abs()
    kinds = {"mean": apart.mean(), "rms": apart.square().mean().sqrt(), "largest": apart.max()}
    return {kind: round(1000 * value.item(), 2) for kind, value in kinds.items()}


if __name__ == "__main__":
    raise SystemExit(main())
