"""The operators that a model may use: as they are, in whole vectors, or replaced by our own.

Names are those below autograd, as PyTorch's dispatcher has them: linear, matmul, cross entropy and
attention are none of them. They are what Llama, GPT-2 and Qwen3-MoE of transformers 5 call on
PyTorch 2.13, forward, backward and in greedy generation, and their kin of one kind. What a list of
`admitted.json` promises is said of it here; an operator that is in none is refused.
"""

from pathlib import Path

import msgspec


class AdmittedOperators(msgspec.Struct, frozen=True):
    """Names of operators by what they compute.

    copies: of values and views: no arithmetic, or (nll_loss_backward) one division. exact: one
    operation of IEEE 754 an element, rounded once: scalar and vector code agree; a factor (`alpha`)
    may be fused or not, so it is refused. order_free: maxima, comparisons, counts below 2^24 and
    orders without ties or with ties in order. whole_numbers: exact for integers and booleans, and
    refused for floating values. elementwise: functions of one element that a CPU's scalar and
    vector code compute differently, or may. replaced: and the function of this room that takes an
    operator's place, as `file.function`. remedies: what to do about one that many models call.
    """

    copies: tuple[str, ...]
    exact: tuple[str, ...]
    order_free: tuple[str, ...]
    whole_numbers: tuple[str, ...]
    elementwise: tuple[str, ...]
    replaced: dict[str, str]
    remedies: dict[str, str]


ADMITTED = msgspec.json.decode(
    Path(__file__).with_suffix(".json").read_bytes(), type=AdmittedOperators
)
