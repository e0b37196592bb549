"""The operators that a model may use: as they are, in whole vectors, or replaced by our own.

Names are those below autograd, as PyTorch's dispatcher has them: linear, matmul, cross entropy and
attention are none of them. They are what Llama, GPT-2 and Qwen3-MoE of transformers 5 call on
PyTorch 2.13, forward, backward and in greedy generation, and their kin of one kind. What a name
promises is written above it; an operator that is in no list is refused.
"""

COPIES = (
    "_local_scalar_dense", "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "arange",
    "arange.start", "arange.start_step", "as_strided", "cat", "chunk", "clone",
    "constant_pad_nd", "copy_", "detach", "detach_", "diagonal", "embedding",
    "empty.memory_format", "empty_like", "empty_strided", "expand", "fill_.Scalar",
    "fill_.Tensor", "flip", "full", "full_like", "gather", "index.Tensor", "index_select",
    "item", "lift_fresh", "masked_fill.Scalar", "masked_fill.Tensor", "masked_fill_.Scalar",
    "masked_fill_.Tensor", "masked_scatter", "masked_select", "new_empty", "new_empty_strided",
    "new_full", "new_ones", "new_zeros", "nll_loss_backward", "nonzero", "ones", "ones_like",
    "permute", "repeat", "repeat_interleave.Tensor", "repeat_interleave.self_Tensor",
    "resize_", "roll", "scalar_tensor", "scatter.src", "scatter.value", "scatter_.src",
    "scatter_.value", "select.int", "select_backward", "select_scatter",
    "set_.source_Storage_storage_offset", "set_.source_Tensor", "slice.Tensor",
    "slice_backward", "slice_scatter", "split.Tensor", "split_with_sizes", "squeeze",
    "squeeze.dim", "squeeze.dims", "squeeze_.dim", "stack", "t", "transpose.int", "tril",
    "triu", "unbind.int", "unfold", "unsqueeze", "unsqueeze_", "view", "view.dtype",
    "where.self", "zero_", "zeros", "zeros_like",
)  # fmt: skip
"""Copies of values and views: no arithmetic, or (nll_loss_backward) one division."""

EXACT = (
    "abs", "add.Scalar", "add.Tensor", "add_.Scalar", "add_.Tensor", "bitwise_and.Scalar",
    "bitwise_and.Tensor", "bitwise_and_.Tensor", "bitwise_not", "bitwise_or.Tensor",
    "bitwise_or_.Tensor", "bitwise_xor.Tensor", "ceil", "clamp", "clamp_", "clamp_max",
    "clamp_min", "div.Scalar", "div.Tensor", "div_.Scalar", "div_.Tensor", "eq.Scalar",
    "eq.Tensor", "floor", "ge.Scalar", "ge.Tensor", "gt.Scalar", "gt.Tensor", "isfinite",
    "isinf", "isnan", "le.Scalar", "le.Tensor", "logical_and", "logical_not", "logical_or",
    "lt.Scalar", "lt.Tensor", "maximum", "minimum", "mul.Scalar", "mul.Tensor", "mul_.Scalar",
    "mul_.Tensor", "ne.Scalar", "ne.Tensor", "neg", "neg_", "reciprocal", "relu", "relu_",
    "round", "rsub.Scalar", "rsub.Tensor", "sgn", "sign", "sqrt", "sqrt_", "square",
    "sub.Scalar", "sub.Tensor", "sub_.Scalar", "sub_.Tensor", "threshold_backward",
)  # fmt: skip
"""One operation of IEEE 754 an element, rounded once: scalar and vector code agree. A factor
(`alpha`) may be fused or not, so it is refused."""

ORDER_FREE = (
    "_unique2", "all", "all.dim", "amax", "amin", "aminmax", "any", "any.dim", "any.dims",
    "argmax", "argmin", "bucketize.Tensor", "equal", "histc", "is_nonzero",
    "isin.Scalar_Tensor", "isin.Tensor_Scalar", "isin.Tensor_Tensor", "max", "max.dim", "min",
    "min.dim", "searchsorted.Tensor", "sort.stable",
)  # fmt: skip
"""Maxima, comparisons, counts below 2^24 and orders without ties or with ties in order."""

WHOLE_NUMBERS = (
    "bitwise_left_shift.Tensor", "bitwise_right_shift.Tensor", "div.Scalar_mode",
    "div.Tensor_mode", "floor_divide", "floor_divide.Scalar", "fmod.Scalar", "prod",
    "prod.dim_int", "remainder.Scalar", "remainder.Tensor",
)  # fmt: skip
"""Exact for integers and booleans, and refused for floating values."""

ELEMENTWISE = (
    "cos", "erf", "exp", "exp2", "expm1", "gelu", "gelu_backward", "hardtanh", "log", "log1p",
    "log2", "pow.Tensor_Scalar", "rsqrt", "sigmoid", "sigmoid_backward", "silu",
    "silu_backward", "sin", "softplus", "softplus_backward", "tanh", "tanh_backward",
)  # fmt: skip
"""Functions of one element that a CPU's scalar and vector code compute differently, or may."""

REPLACED = {
    "mm": "products.mm",
    "addmm": "products.addmm",
    "bmm": "products.bmm",
    "mv": "products.mv",
    "dot": "products.dot",
    "_grouped_mm": "products.grouped_mm",
    "sum": "reductions.sum_of_all",
    "sum.dim_IntList": "reductions.sum_of",
    "mean": "reductions.mean_of_all",
    "mean.dim": "reductions.mean_of",
    "cumsum": "reductions.running_sum",
    "logsumexp": "reductions.log_sum_exp",
    "nll_loss_forward": "reductions.nll_loss",
    "_softmax": "reductions.softmax",
    "_softmax_backward_data": "reductions.softmax_backward",
    "_log_softmax": "reductions.log_softmax",
    "_log_softmax_backward_data": "reductions.log_softmax_backward",
    "native_layer_norm": "norms.layer_norm",
    "native_layer_norm_backward": "norms.layer_norm_backward",
    "_fused_rms_norm": "norms.rms_norm",
    "_fused_rms_norm_backward": "norms.rms_norm_backward",
    "index_put": "indices.index_put",
    "index_put_": "indices.index_put_",
    "index_add": "indices.index_add",
    "index_add_": "indices.index_add_",
    "scatter_add": "indices.scatter_add",
    "scatter_add_": "indices.scatter_add_",
    "embedding_dense_backward": "indices.embedding_backward",
    "topk": "indices.topk",
    "sort": "indices.sort",
}
"""An operator, and the function of this room that takes its place, as `file.function`."""

REMEDIES = {
    "bernoulli_.float": "dropout draws by the batch: call model.eval() or set dropout to 0",
    "native_dropout": "dropout draws by the batch: call model.eval() or set dropout to 0",
    "multinomial": "draw outside, from the logits",
}
"""What to do about an operator that many models call."""
