"""TRL's unmodified `VLLMClient` against the server at a URL; prints what it saw as one JSON line.

    python trl_run.py URL

It runs by itself because the client wants a `vllm` that can be imported; the test makes one whose
names are empty, since only the transfer of weights uses them.
"""

import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType


def main() -> None:
    """Every call of the client that needs no GPU."""
    import trl

    # Its package imports all trainers, which take twice as long as the client.
    package = ModuleType("trl.generation")
    package.__path__ = [str(Path(trl.__file__).with_name("generation"))]
    sys.modules[package.__name__] = package
    from trl.generation import vllm_client

    client = vllm_client.VLLMClient(base_url=sys.argv[1], connection_timeout=30)
    prompts = [[1 + i, 2, 3 + i % 7] for i in range(100)]
    alone, many = prompts[:2], client.generate(prompts, max_tokens=3)
    sampled = client.generate(
        alone, n=2, max_tokens=8, temperature=1.0, generation_kwargs={"seed": 5}
    )
    again = client.generate(
        alone, n=2, max_tokens=8, temperature=1.0, generation_kwargs={"seed": 5}
    )
    rows = zip(sampled["prompt_ids"], sampled["completion_ids"][::2], strict=True)
    sequences = [[*prompt, *completion] for prompt, completion in rows]
    scored = {
        top: client.get_sequence_logprobs(sequences, [3] * 2, top_logprobs=top) for top in (1, 100)
    }
    changed = [[*sequence[:-1], sequence[-1] ^ 1] for sequence in sequences]
    other = client.get_sequence_logprobs(changed, [3] * 2, top_logprobs=1)
    chat = client.chat([[{"role": "user", "content": "hello"}]], max_tokens=4)
    print(
        json.dumps(
            {
                "file": hashlib.sha256(Path(vllm_client.__file__).read_bytes()).hexdigest(),
                "many": many,
                "sampled": sampled,
                "again": again,
                "scored": scored,
                "other": other,
                "chat": chat,
                "info": client.get_server_info(),
                "world_size": client.get_world_size(),
            }
        )
    )


if __name__ == "__main__":
    main()
