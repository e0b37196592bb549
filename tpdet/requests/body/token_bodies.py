"""The body of vLLM's route for token ids: the fields of a completion, by other names.

It becomes the body of a completion, so that everything is checked and prepared in one way.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from tpdet.requests.body import limits, schema
from tpdet.requests.body.idle_fields import IDLE, Idle
from tpdet.requests.sampling_params import SamplingParams
from tpdet.requests.structured_outputs import FIELD
from tpdet.requests.vllm_parameters import PARAMETERS


class _TokenSamplingBase(schema.Body):
    """Those of vLLM's sampling parameters that no completion has."""

    idle = {name: Idle(values, why) for name, (values, why) in PARAMETERS.items()} | IDLE[
        "token_sampling"
    ]
    routed_experts_prompt_start: Annotated[int, Field(ge=0)] | None = None
    routed_experts_format: Literal["npy", "object"] | None = None


TokenSampling: Any = schema.with_fields(
    "TokenSampling",
    _TokenSamplingBase,
    "vLLM's sampling parameters, as completions take them beside the prompt.",
    {
        name: field
        for name, field in schema.CompletionBody.model_fields.items()
        if name in SamplingParams.__struct_fields__ or name == FIELD
    },
)


class TokensBody(schema.Body):
    """`POST /inference/v1/generate`: token ids in and out. The answer repeats `request_id`."""

    idle = IDLE["tokens"]
    model: Annotated[str, Field(max_length=limits.MAX_MODEL_CHARACTERS)] | None = None
    request_id: Annotated[str, Field(max_length=limits.MAX_NAME_CHARACTERS)] | None = None
    token_ids: Annotated[schema.TokenIds, Field(min_length=1)]
    sampling_params: TokenSampling
    stream: bool | None = None
    stream_options: schema.StreamOptions | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    tpdet: schema.OwnFields | None = None

    def completion(self) -> schema.CompletionBody:
        """The same request as a completion's body; its fields are checked already."""
        sampling: dict[str, Any] = {
            name: getattr(self.sampling_params, name)
            for name in self.sampling_params.model_fields_set
            if name in schema.CompletionBody.model_fields
        }
        shared = {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name in schema.CompletionBody.model_fields
        }
        return schema.CompletionBody.model_construct(prompt=[self.token_ids], **shared, **sampling)
