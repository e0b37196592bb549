"""Every key of `config.json` that may occur, as data: parsed, inert, or allowed at one value.

A key that is not listed is refused by name, because it could change the arithmetic. The lists hold
the keys that transformers 4 and 5 write for every family.
"""

PARSED = frozenset(
    "architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers "
    "num_attention_heads num_key_value_heads head_dim rms_norm_eps max_position_embeddings "
    "tie_word_embeddings rope_theta rope_scaling rope_parameters torch_dtype dtype eos_token_id "
    "bos_token_id quantization_config original_max_position_embeddings layer_types".split()
)

NEEDED = frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "max_position_embeddings".split()
)
"""Keys that every checkpoint states."""

# None of these changes what a model computes: notes about the checkpoint, settings of training, and
# choices between transformers' implementations.
_NOTES = (
    "_name_or_path name_or_path _commit_hash transformers_version transformers.js_config auto_map "
    "custom_pipelines model_name original_architecture is_llama_config is_composition "
    "initializer_range initializer_factor init_method return_dict output_attentions "
    "output_hidden_states use_bfloat16 id2label label2id num_labels problem_type finetuning_task "
    "task_specific_params tokenizer_class processor_class prefix tf_legacy_loss torchscript "
    "pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id "
    "is_decoder model_max_length max_sequence_length max_seq_length max_seq_len seq_length "
    "max_window_layers"
)
_TRAINING = (
    "unsloth_fixed unsloth_version unsloth_tiled_mlp axolotl_version trl_version peft_version "
    "attention_dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob "
    "residual_dropout embedding_dropout resid_pdrop embd_pdrop attn_pdrop classifier_dropout "
    "ffn_dropout dropout layerdrop loss_type ignore_index router_aux_loss_coef router_z_loss_coef "
    "router_jitter_noise output_router_logits neftune_noise_alpha gradient_checkpointing "
    "use_reentrant_checkpointing use_liger_kernel label_smoothing z_loss lm_loss_weight "
    "use_resampler pixel_shuffle_factor"
)
_IMPLEMENTATION = (
    "use_cache attn_implementation _attn_implementation _attn_implementation_autoset "
    "_attn_implementation_internal _experts_implementation experts_implementation "
    "_flash_attn_2_enabled use_flash_attn use_flash_attention use_flash_attention_2 attn_mode "
    "flash_attn use_sdpa fused_norm use_fused_rms_norm use_fused_rope cache_implementation "
    "base_model_tp_plan base_model_pp_plan tp_plan ep_size ep_plan low_cpu_mem_usage "
    "_load_in_8bit _load_in_4bit _pre_quantization_dtype compile_config reference_compile"
)

# Generation settings that old checkpoints kept in config.json; tpdet reads none of them.
_GENERATION = (
    "max_length max_new_tokens min_length min_new_tokens do_sample early_stopping num_beams "
    "num_beam_groups diversity_penalty temperature top_k top_p min_p typical_p epsilon_cutoff "
    "eta_cutoff repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores output_logits "
    "return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values "
    "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens"
)

INERT = frozenset(" ".join((_NOTES, _TRAINING, _IMPLEMENTATION, _GENERATION)).split())

Allowed = tuple[tuple[object, ...], str]
"""(values that are allowed beside null, what the refusal of any other value says)"""

_ONE_WAY = "tokens see those before them alone: attention in both directions is not supported"
_NOT_SUPPORTED = "tpdet does not support it"

NEUTRAL: dict[str, Allowed] = {
    "hidden_act": (("silu",), "only silu is supported"),
    "attention_bias": ((False,), "a checkpoint with this bias is not supported"),
    "mlp_bias": ((False,), "a checkpoint with this bias is not supported"),
    "pretraining_tp": ((1,), "the sliced product it asks for is not supported"),
    "partial_rotary_factor": ((1,), "only fully rotated heads are supported"),
    "use_mrope": ((False,), _NOT_SUPPORTED),
    "rope_interleaved": ((False,), _NOT_SUPPORTED),
    "qk_layer_norms": ((False,), _NOT_SUPPORTED),
    "use_sliding_window": ((False,), "this family has no sliding window"),
    "quantization": ((), "weights as MLX quantises them are not supported, use the original"),
    "is_encoder_decoder": ((False,), _NOT_SUPPORTED),
    "add_cross_attention": ((False,), _NOT_SUPPORTED),
    "cross_attention_hidden_size": ((), _NOT_SUPPORTED),
    "tie_encoder_decoder": ((False,), _NOT_SUPPORTED),
    "chunk_size_feed_forward": ((0,), _NOT_SUPPORTED),
    "is_causal": ((True,), _ONE_WAY),
    "use_bidirectional_attention": ((False,), _ONE_WAY),
    "pruned_heads": (({},), "use the checkpoint before pruning"),
}
"""Keys that are allowed at these values only; a `Family` may add keys or replace them."""

ALIASES = (
    ("num_experts", "num_local_experts", "n_routed_experts"),
    ("num_experts_per_tok", "experts_per_token"),
)
"""Names of one key: which of them a checkpoint has depends on who wrote it."""

DEFAULT_THETA = 10000.0
DEFAULT_MAX_WINDOW_LAYERS = 28
DEFAULT_WINDOW = 4096
DEFAULT_NO_ROPE_INTERVAL = 4
"""What transformers assumes where these keys are absent."""
