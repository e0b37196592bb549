"""Times vLLM's `LLM.generate` by the load of `tpdet bench generate`, for its `--peer`.

    python scripts/vllm_generate.py MODEL TP OUT.json [SETTING=VALUE ...]

It runs where vLLM is installed; of tpdet it needs the clone alone (PYTHONPATH). Settings are
keywords of `vllm.LLM`, their values JSON, but for three of the load: `contexts` and `repeats`, as
the flags of `tpdet bench generate`, and `embed`, which times `LLM.embed` instead: [prompts, tokens
of each]. Time one engine while the other is idle, or on a GPU of its own.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpdet.tools.bench.generate_load import Sizes, time_embed, time_generate

_LOAD = ("contexts", "repeats", "embed")
_POOLING = {"runner": "pooling", "convert": "embed"}


def main(arguments: list[str]) -> int:
    """Run every case and write the figures."""
    import vllm

    model, size, out, *pairs = arguments
    settings: dict[str, Any] = {}
    for name, _, value in (pair.partition("=") for pair in pairs):
        settings[name] = json.loads(value)
    load = {name: settings.pop(name) for name in _LOAD if name in settings}
    embed = load.pop("embed", None)
    if embed is not None:
        settings |= _POOLING
    llm = vllm.LLM(
        model=model,
        tensor_parallel_size=int(size),
        skip_tokenizer_init=embed is None,  # its pooling wants a tokenizer
        **settings,
    )
    config = llm.llm_engine.vllm_config
    vocabulary = config.model_config.get_vocab_size()
    if config.model_config.is_hybrid:
        settings["mamba_ssm_cache_dtype"] = state_dtype(config)
    sizes = Sizes(vocabulary=min(Sizes.vocabulary, vocabulary))
    contexts = tuple(load.pop("contexts", ()))
    sizes = replace(sizes, **load, contexts=contexts)
    rows = generate_rows(llm, vllm.SamplingParams, sizes) if embed is None else None
    found = {
        "peer": f"vLLM {vllm.__version__}",
        "tp": int(size),
        "settings": settings,
        "rows": rows or [embed_row(llm, *embed, sizes)],
    }
    Path(out).write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found), flush=True)
    return 0


def state_dtype(config: Any) -> str:
    """The dtype of the states of a hybrid with gated delta nets, as vLLM resolves "auto".

    config: a `VllmConfig`, in which vLLM has put what `config.json` says of it.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator

    cache = config.cache_config
    _, state = MambaStateDtypeCalculator.gated_delta_net_state_dtype(
        config.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    )
    return str(state).removeprefix("torch.")


def generate_rows(llm: Any, sampling: Any, sizes: Sizes) -> list[dict[str, Any]]:
    """The figures of `LLM.generate`, as plain data; each is printed as soon as it is known."""

    def generate(prompts: list[list[int]], tokens: int) -> float:
        params = sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": ids} for ids in prompts]
        begin = time.perf_counter()
        results = llm.generate(given, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        if any(len(each.outputs[0].token_ids) != tokens for each in results):
            raise RuntimeError(f"an answer does not have {tokens} tokens")
        return seconds

    rows = []
    for figure in time_generate(generate, sizes):
        rows.append(figure.plain())
        print(json.dumps(rows[-1]), flush=True)
    return rows


def embed_row(llm: Any, count: int, length: int, sizes: Sizes) -> dict[str, Any]:
    """The figure of `LLM.embed`, as plain data."""

    def embed(prompts: list[list[int]]) -> float:
        given = [{"prompt_token_ids": ids} for ids in prompts]
        begin = time.perf_counter()
        results = llm.embed(given, use_tqdm=False)
        seconds = time.perf_counter() - begin
        if len(results) != len(prompts):
            raise RuntimeError(f"{len(results)} of {len(prompts)} prompts were answered")
        return seconds

    return time_embed(embed, count, length, sizes).plain()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
