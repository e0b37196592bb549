"""Where vLLM's public names are here, and what replaces those that are not. Data only.

`FOUND` gives a name's place, "module:attribute"; `REPLACED` says what to use instead of a name, and
`NO_MODULES` of a module. `MODULES` are vLLM's modules (without "vllm.") that hold some of them.
"""

FOUND = {
    "AsyncEngineArgs": "tpdet.vllm_names.engine_args:AsyncEngineArgs",
    "AsyncLLM": "tpdet.llm:AsyncLLM",
    "AsyncLLMEngine": "tpdet.llm:AsyncLLM",
    "ClassificationOutput": "tpdet.llm.pooling:ClassificationOutput",
    "ClassificationRequestOutput": "tpdet.llm.pooling:ClassificationRequestOutput",
    "CompletionOutput": "tpdet.llm:CompletionOutput",
    "EmbeddingOutput": "tpdet.llm.pooling:EmbeddingOutput",
    "EmbeddingRequestOutput": "tpdet.llm.pooling:EmbeddingRequestOutput",
    "EngineArgs": "tpdet.vllm_names.engine_args:EngineArgs",
    "FlexibleArgumentParser": "tpdet.vllm_names.argument_parser:FlexibleArgumentParser",
    "GuidedDecodingParams": "tpdet.requests.structured_outputs:StructuredOutputsParams",
    "LLM": "tpdet.llm:LLM",
    "LLMEngine": "tpdet.llm:LLMEngine",
    "Logprob": "tpdet.llm:Logprob",
    "PoolingOutput": "tpdet.llm.pooling:PoolingOutput",
    "PoolingParams": "tpdet.requests.pooling_params:PoolingParams",
    "PoolingRequestOutput": "tpdet.llm.pooling:PoolingRequestOutput",
    "PromptType": "tpdet.llm.prompts:Prompt",
    "RequestOutput": "tpdet.llm:RequestOutput",
    "RequestOutputKind": "tpdet.requests.output_kind:RequestOutputKind",
    "SamplingParams": "tpdet.requests.sampling_params:SamplingParams",
    "ScoringOutput": "tpdet.llm.pooling:ScoringOutput",
    "ScoringRequestOutput": "tpdet.llm.pooling:ScoringRequestOutput",
    "StructuredOutputsParams": "tpdet.requests.structured_outputs:StructuredOutputsParams",
    "TextPrompt": "tpdet.llm.prompts:TextPrompt",
    "TokensPrompt": "tpdet.llm.prompts:TokensPrompt",
    "cleanup_dist_env_and_memory": "tpdet.vllm_names.cleanup:cleanup_dist_env_and_memory",
}  # fmt: skip

TOP = (
    "AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine", "ClassificationOutput",
    "ClassificationRequestOutput", "CompletionOutput", "EmbeddingOutput",
    "EmbeddingRequestOutput", "EngineArgs", "LLM", "LLMEngine", "Logprob", "PoolingOutput",
    "PoolingParams", "PoolingRequestOutput", "PromptType", "RequestOutput", "RequestOutputKind",
    "SamplingParams", "ScoringOutput", "ScoringRequestOutput", "StructuredOutputsParams",
    "TextPrompt", "TokensPrompt",
)  # fmt: skip
"""The names of `tpdet` itself; all others are in modules."""

_ADAPTERS = "adapters are not supported: merge them into the checkpoint"
_CLOSE = "LLM.close(), or the end of `with LLM(...)`, ends all of a model"
REPLACED = {
    "BeamSearchParams": "there is no beam search: raise n of SamplingParams",
    "LoRARequest": _ADAPTERS,
    "ModelRegistry": "models are those of docs/checkpoints.md: there are no plugins",
    "PromptAdapterRequest": _ADAPTERS,
    "SequenceGroup": "the engine's requests are its own: read RequestOutput",
    "destroy_distributed_environment": _CLOSE,
    "destroy_model_parallel": _CLOSE,
    "get_tokenizer": "LLM.get_tokenizer() gives the model's",
    "get_tp_group": "LLM.rank is the rank of this process",
    "init_distributed_environment": "LLM(tensor_parallel_size=N) starts its ranks",
    "initialize_ray_cluster": "LLM(tensor_parallel_size=N) starts its ranks; there is no Ray",
    "random_uuid": "use uuid.uuid4().hex",
    "set_random_seed": "give each request a seed: SamplingParams(seed=1)",
}

_PARAMS = (
    "SamplingParams", "RequestOutputKind", "StructuredOutputsParams", "GuidedDecodingParams",
    "BeamSearchParams",
)  # fmt: skip
_OUTPUTS = (
    "CompletionOutput", "RequestOutput", "ClassificationOutput", "ClassificationRequestOutput",
    "EmbeddingOutput", "EmbeddingRequestOutput", "PoolingOutput", "PoolingRequestOutput",
    "ScoringOutput", "ScoringRequestOutput",
)  # fmt: skip
_RANKS = (
    "cleanup_dist_env_and_memory", "destroy_distributed_environment", "destroy_model_parallel",
    "get_tp_group", "init_distributed_environment",
)  # fmt: skip
MODULES: dict[str, tuple[str, ...]] = {
    "beam_search": ("BeamSearchParams",),
    "distributed": _RANKS,
    "distributed.parallel_state": _RANKS,
    "engine.arg_utils": ("EngineArgs", "AsyncEngineArgs"),
    "engine.async_llm_engine": ("AsyncLLMEngine",),
    "engine.llm_engine": ("LLMEngine",),
    "entrypoints.llm": ("LLM",),
    "inputs": ("PromptType", "TextPrompt", "TokensPrompt"),
    "inputs.data": ("PromptType", "TextPrompt", "TokensPrompt"),
    "logprobs": ("Logprob",),
    "lora.request": ("LoRARequest",),
    "outputs": _OUTPUTS,
    "pooling_params": ("PoolingParams",),
    "prompt_adapter.request": ("PromptAdapterRequest",),
    "sampling_params": _PARAMS,
    "sequence": ("Logprob", "SequenceGroup"),
    "tokenizers": ("get_tokenizer",),
    "transformers_utils.tokenizer": ("get_tokenizer",),
    "utils": ("FlexibleArgumentParser", "random_uuid"),
    "utils.argparse_utils": ("FlexibleArgumentParser",),
    "v1.engine.async_llm": ("AsyncLLM",),
    "v1.engine.llm_engine": ("LLMEngine",),
}

_IMAGES = "models read text: there are no images, sounds or videos"
_OWN = "models run on tpdet's own layers (docs/architecture.md)"
NO_MODULES = {
    "assets": _IMAGES,
    "attention": _OWN,
    "benchmarks": "use tpdet bench",
    "compilation": _OWN,
    "entrypoints.openai": "a server is started by tpdet serve (docs/server.md)",
    "envs": "settings are LLM's keywords, or TPDET_ variables (docs/server.md)",
    "logger": "use logging.getLogger(__name__)",
    "model_executor": _OWN,
    "multimodal": _IMAGES,
    "platforms": _OWN,
    "plugins": "there are no plugins",
    "reasoning": "tpdet serve --reasoning-parser splits reasoning (docs/server.md)",
    "v1.metrics": "a server has metrics (docs/operations.md)",
    "worker": _OWN,
}
