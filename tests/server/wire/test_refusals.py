"""What a client is told of bodies and fields that cannot be used: the value, and the remedy."""

import pytest

from tpdet.requests.body.json_body import parse_object
from tpdet.requests.body.problems import ApiError, bad_request
from tpdet.server.wire.control_verbs import fields_of

BODIES = {
    b"[1]": "the body must be a JSON object, not an array",
    b"null": "the body must be a JSON object, not null",
    b'{"a":%b}' % (b"9" * 5000): "the body holds a number of over 4300 digits: send a shorter one",
    b'\xef\xbb\xbf{"a":1}': "the body begins with a byte order mark: leave it out",
    b'{"a":"\x01"}': "the body is not JSON: Invalid control character at character 6",
}
FIELDS = (
    ("pause", {"mode": "zz"}, "mode: Invalid enum value 'zz': use one of abort, wait, keep"),
    ("pause", {"keep_kv": "maybe"}, "keep_kv: Expected `bool`, got `str`"),
    ("pause", {"a\nb": 1}, r"unknown field 'a\nb': leave it out"),
    ("update_weight_version", {}, "new_version is missing"),
    ("abort_requests", {"request_ids": [1]}, "request_ids[0]: Expected `str`, got `int`"),
    (
        "update_weights_from_disk",
        {"model_path": "x", "load_format": "gguf"},
        "load_format: Invalid enum value 'gguf': use one of auto, safetensors",
    ),
)


@pytest.mark.parametrize(("body", "message"), BODIES.items(), ids=range(len(BODIES)))
def test_a_body_that_is_no_object(body, message):
    with pytest.raises(ApiError) as error:
        parse_object(body)
    assert error.value.message == message


@pytest.mark.parametrize(("verb", "fields", "message"), FIELDS)
def test_fields_that_are_not_a_verbs(verb, fields, message):
    with pytest.raises(ApiError) as error:
        fields_of(verb, fields, {})
    assert error.value.message == message and error.value.param in message.replace(r"\n", "\n")


def test_a_long_message_keeps_its_beginning_and_its_remedy():
    value = "9" * 5000
    told = bad_request(f"token id {value} in prompt is outside the vocabulary [0, 512)").body()
    assert b'"token id 999' in told and b"...999" in told and b"[0, 512)" in told
