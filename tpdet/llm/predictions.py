"""Reads what callers know of an answer before it is made: drafts, predictions, what they have."""

from collections.abc import Mapping, Sequence

from tpdet.errors import RequestError
from tpdet.llm.prompts import (
    Drafts,
    Predictions,
    PromptReader,
    are_ids,
    listed,
    shown,
    token_ids_of,
)
from tpdet.llm.results import RequestOutput
from tpdet.requests.body.parse import parse_body
from tpdet.requests.body.problems import ApiError
from tpdet.requests.body.schema import Resume
from tpdet.requests.engine_facts import AnswerOrigin
from tpdet.requests.request import SamplingParams
from tpdet.requests.resumed import check_resume_fields, check_resume_origin, shown_digests

_DRAFTS = "None, a list of token ids, or such a list for each choice"
_RESUME = "the last RequestOutput, or {contract, weights, seed, choices} as over HTTP"


def read_predictions(
    reader: PromptReader, drafts: object, predictions: object, params: Sequence[SamplingParams]
) -> list[Predictions]:
    """The predictions of each prompt; `params` are the parameters of each. None: no predictions.

    Raises RequestError for other types, and if there are not as many as prompts.
    """
    each_draft = _for_each("drafts", drafts, len(params), _DRAFTS)
    each_prediction = _for_each("predictions", predictions, len(params), "None, text or token ids")
    found = []
    for index, (draft, prediction) in enumerate(zip(each_draft, each_prediction, strict=True)):
        choices = read_drafts(draft, params[index].n, f"drafts[{index}]")
        found.append(Predictions(choices, reader.prediction(prediction, f"predictions[{index}]")))
    return found


def read_drafts(given: object, choices: int, place: str = "drafts") -> Drafts:
    """One prompt's drafts: ids for all choices, or for each. Raises RequestError with `place`."""
    given = listed(() if given is None else given)
    expected = [given] * choices if are_ids(given) else given
    if isinstance(expected, list | tuple):
        expected = [listed(each) for each in expected]
        if all(isinstance(each, list | tuple) for each in expected):
            return tuple(token_ids_of(each, place, _DRAFTS, "drafts") for each in expected)
    raise RequestError(f"{place} is {shown(given)}: give {_DRAFTS}", "drafts")


def read_resume(
    given: object, params: SamplingParams, has_drafts: bool, here: AnswerOrigin
) -> tuple[Drafts, int]:
    """The ids of each choice that the caller has, and the seed of their answer.

    given: the last output that came, or an object as `tpdet.resume` over HTTP; here: what computes
    this model's answers. Raises RequestError for anything else, and for an approximate answer;
    DisagreementError for one that something else computed.
    """
    found = _resume_of(given)
    check_resume_fields(found.seed, params.seed, has_drafts, "resume")
    theirs = AnswerOrigin(found.contract, found.weights, found.logprobs_mode)
    check_resume_origin(theirs, here, "a model")
    return tuple(map(tuple, found.choices)), found.seed


def _resume_of(given: object) -> Resume:
    if isinstance(given, RequestOutput):
        if given.system_fingerprint is None:
            raise RequestError(
                "an answer of several weights cannot be resumed: give its ids as a prompt", "resume"
            )
        digests = shown_digests(given.system_fingerprint)
        if digests is None:
            raise RequestError(
                "an approximate answer cannot be resumed: ask for it from its beginning", "resume"
            )
        choices = [list(choice.token_ids) for choice in given.outputs]
        return Resume(
            contract=digests[0],
            weights=digests[1],
            seed=given.seed,
            choices=choices,
            logprobs_mode=given.logprobs_mode,
        )
    if not isinstance(given, Mapping):
        raise RequestError(f"resume is {shown(given)}: give {_RESUME}", "resume")
    try:
        return parse_body(Resume, dict(given))
    except (ApiError, RequestError) as error:
        raise RequestError(f"resume: {error}", "resume") from None


def _for_each(name: str, given: object, count: int, form: str) -> Sequence[object]:
    found = listed([None] * count if given is None else given)
    if not isinstance(found, list | tuple) or len(found) != count:
        raise RequestError(
            f"{name} is {shown(found)}, with {count} prompts: give a list that has for each "
            f"prompt {form}",
            name,
        )
    return found
