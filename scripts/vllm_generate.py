"""Times vLLM's `LLM.generate` by the load of `tpdet bench generate`, for its `--peer`.

    python scripts/vllm_generate.py MODEL TP OUT.json [SETTING=VALUE ...]

It runs where vLLM is installed; of tpdet it needs the clone alone (PYTHONPATH). Settings are
keywords of `vllm.LLM`, their values JSON. Time one engine while the other is idle.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from tpdet.tools.bench.generate_load import Sizes, time_generate


def main(arguments: list[str]) -> int:
    """Run every case and write the figures."""
    import vllm

    model, size, out, *pairs = arguments
    settings: dict[str, Any] = {}
    for name, _, value in (pair.partition("=") for pair in pairs):
        settings[name] = json.loads(value)
    llm = vllm.LLM(
        model=model, tensor_parallel_size=int(size), skip_tokenizer_init=True, **settings
    )

    def generate(prompts: list[list[int]], tokens: int) -> float:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        given = [{"prompt_token_ids": ids} for ids in prompts]
        begin = time.perf_counter()
        results = llm.generate(given, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        if any(len(each.outputs[0].token_ids) != tokens for each in results):
            raise RuntimeError(f"an answer does not have {tokens} tokens")
        return seconds

    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    sizes = Sizes(vocabulary=min(Sizes.vocabulary, vocabulary))
    rows = [figure.plain() for figure in time_generate(generate, sizes)]
    found = {
        "peer": f"vLLM {vllm.__version__}",
        "tp": int(size),
        "settings": settings,
        "rows": rows,
    }
    Path(out).write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
