"""The body of vLLM's route for token ids: the fields of a completion, by other names.

It becomes the body of a completion, so that everything is checked and prepared in one way.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, create_model

from tpdet.requests.body import idle_fields, limits
from tpdet.requests.body.idle_fields import Idle
from tpdet.requests.body.schema import Body, CompletionBody, OwnFields, StreamOptions, TokenIds
from tpdet.requests.sampling_params import SamplingParams
from tpdet.requests.structured_outputs import FIELD
from tpdet.requests.vllm_parameters import PARAMETERS

_IDS_ONLY = "answers hold token ids alone: use /v1/completions for text"


class _TokenSamplingBase(Body):
    """Those of vLLM's sampling parameters that no completion has."""

    idle = {name: Idle(values, why) for name, (values, why) in PARAMETERS.items()} | {
        "detokenize": Idle((True, False), _IDS_ONLY),
        "output_kind": Idle((0, 1, 2), "0, 1 and 2 are"),
        "thinking_token_budget": idle_fields.GENERATION["thinking_token_budget"],
        "watermarking": idle_fields.GENERATION["watermarking"],
    }
    routed_experts_prompt_start: Annotated[int, Field(ge=0)] | None = None
    routed_experts_format: Literal["npy", "object"] | None = None


if TYPE_CHECKING:
    TokenSampling = _TokenSamplingBase
else:
    TokenSampling = create_model(
        "TokenSampling",
        __base__=_TokenSamplingBase,
        __doc__="vLLM's sampling parameters, as completions take them beside the prompt.",
        **{
            name: (field.annotation, field)
            for name, field in CompletionBody.model_fields.items()
            if name in SamplingParams.__struct_fields__ or name == FIELD
        },
    )


class TokensBody(Body):
    """`POST /inference/v1/generate`: token ids in and out. The answer repeats `request_id`."""

    idle: ClassVar[dict[str, Idle]] = {
        "content_parts": Idle(([],), "text is the only kind of content"),
        "ec_transfer_params": Idle(({},), "leave it out"),
        "features": Idle((), "text is the only kind of content"),
        "kv_transfer_params": Idle(({},), "leave it out"),
        "output_mode": Idle(("tokens",), _IDS_ONLY),
        "parse_context": Idle((), _IDS_ONLY),
        "priority": idle_fields.GENERATION["priority"],
        "reasoning_ended": Idle((), 'use tpdet {"json_schema_after": [ids]}'),
        "reasoning_parser_kwargs": Idle((), "answers of token ids are not split"),
        "token_offsets": Idle((), "leave it out"),
    }
    parts: ClassVar[dict[str, type[Body]]] = {
        "stream_options": StreamOptions,
        "sampling_params": TokenSampling,
    }
    model: Annotated[str, Field(max_length=limits.MAX_MODEL_CHARACTERS)] | None = None
    request_id: Annotated[str, Field(max_length=limits.MAX_NAME_CHARACTERS)] | None = None
    token_ids: Annotated[TokenIds, Field(min_length=1)]
    sampling_params: TokenSampling
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    tpdet: OwnFields | None = None

    def completion(self) -> CompletionBody:
        """The same request as a completion's body; its fields are checked already."""
        sampling: dict[str, Any] = {
            name: getattr(self.sampling_params, name)
            for name in self.sampling_params.model_fields_set
            if name in CompletionBody.model_fields
        }
        shared = {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name in CompletionBody.model_fields
        }
        return CompletionBody.model_construct(prompt=[self.token_ids], **shared, **sampling)
