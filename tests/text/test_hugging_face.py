"""`get_tokenizer()` has the methods of transformers' tokenizer, and gives the same."""

import numpy
import pytest
import torch

from tests.lib.text.made_tokenizers import CONTROL, TEXTS
from tpdet.errors import RequestError
from tpdet.text.hugging_face import HuggingFaceTokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi é 😀"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]


@pytest.fixture
def ours(our_tokenizer):
    return HuggingFaceTokenizer(our_tokenizer)


@pytest.fixture(scope="module")
def theirs(their_tokenizer):
    return their_tokenizer


def calls(tokenizer):
    """What scripts do with a tokenizer, each as (what it is, its result)."""
    ids = tokenizer.encode("The for statement <|im_end|>")
    tokens = tokenizer.convert_ids_to_tokens(ids)
    yield from {
        "ids": ids,
        "call": tokenizer("Hello")["input_ids"],
        "mask": tokenizer("Hello").attention_mask,
        "bare": tokenizer("Hello", add_special_tokens=False).input_ids,
        "list": tokenizer(TEXTS)["input_ids"],
        "padded": [*tokenizer(["a", "Hello you"], padding=True)["input_ids"]],
        "left": tokenizer(["a", "Hello you"], padding="longest", padding_side="left").input_ids,
        "tensor": tokenizer("Hello", return_tensors="pt").input_ids.tolist(),
        "array": tokenizer(["Hello", "Hello"], return_tensors="np").attention_mask.tolist(),
        "encoded": tokenizer.encode("Hello", return_tensors="pt").tolist(),
        "tokens": tokens,
        "token": tokenizer.convert_ids_to_tokens(ids[0]),
        "shown": tokenizer.convert_ids_to_tokens(ids, skip_special_tokens=True),
        "back": tokenizer.convert_tokens_to_ids(tokens),
        "one": tokenizer.convert_tokens_to_ids(tokens[1]),
        "unknown": tokenizer.convert_tokens_to_ids(["no such token"]),
        "string": tokenizer.convert_tokens_to_string(tokens),
        "cut": tokenizer.tokenize("Hello you"),
        "decoded": tokenizer.decode(ids),
        "skipped": tokenizer.decode(ids, skip_special_tokens=True),
        "of tensor": tokenizer.decode(torch.tensor(ids)),
        "of array": tokenizer.decode(numpy.array(ids)),
        "of id": tokenizer.decode(ids[2]),
        "of lists": tokenizer.decode([ids, ids[:3]]),
        "batch": tokenizer.batch_decode([ids, ids[2:5]], skip_special_tokens=True),
        "sizes": (tokenizer.vocab_size, len(tokenizer)),
        "vocabulary": tokenizer.get_vocab(),
        "added": tokenizer.get_added_vocab(),
        "names": [(tokenizer.bos_token, tokenizer.bos_token_id), tokenizer.eos_token_id],
        "none": [tokenizer.unk_token, tokenizer.unk_token_id, tokenizer.mask_token],
        "pad": (tokenizer.pad_token, tokenizer.pad_token_id),
        "special": ({*tokenizer.all_special_tokens}, {*tokenizer.all_special_ids}),
        "text": tokenizer.apply_chat_template(TALK, tokenize=False),
        "begun": tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True),
        "chat": dict(tokenizer.apply_chat_template(TALK))["input_ids"],
        "chat ids": tokenizer.apply_chat_template(TALK, return_dict=False),
        "chats": tokenizer.apply_chat_template([TALK, TALK[:2]], return_dict=False),
        "texts": tokenizer.apply_chat_template([TALK, TALK[:2]], tokenize=False),
        "going on": tokenizer.apply_chat_template(
            TALK[:3], tokenize=False, continue_final_message=True
        ),
        "chat tensor": tokenizer.apply_chat_template(TALK, return_tensors="pt").input_ids.tolist(),
        "other": tokenizer.apply_chat_template(
            TALK,
            chat_template="{% for m in messages %}{{ m.content }}{% endfor %} {{ x }}",
            tokenize=False,
            x="y",
        ),
        "template": tokenizer.chat_template,
    }.items()


def test_it_gives_what_transformers_does(ours, theirs):
    expected = dict(calls(theirs))
    for name, value in calls(ours):
        assert value == expected[name], name


def test_a_named_token_may_be_another(ours, theirs):
    for tokenizer in (ours, theirs):
        kept = tokenizer.pad_token
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer.padding_side = "left"
        assert tokenizer.pad_token_id == tokenizer.eos_token_id
        rows = tokenizer(["a", "Hello you"], padding=True)["input_ids"]
        assert rows[0][0] == tokenizer.eos_token_id
        tokenizer.pad_token, tokenizer.padding_side = kept, "right"
    ours.pad_token_id = 5
    assert ours.pad_token == ours.convert_ids_to_tokens(5)
    with pytest.raises(RequestError, match="pad_token 'no token' is no token of the vocabulary"):
        ours.pad_token = "no token"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t("a", truncation=True, max_length=3), "truncation True is not supported"),
        (lambda t: t(["a", "Hello you"], return_tensors="pt"), "rows of one length: give padding"),
        (lambda t: t("a", return_tensors="tf"), "return_tensors 'tf' is not supported"),
        (lambda t: t("a", padding="max_length"), "padding 'max_length' is not supported"),
        (lambda t: t("a", "b"), "text_pair 'b' is not supported"),
        (lambda t: t.decode([5], clean_up_tokenization_spaces=True), "clean_up_tokenization"),
        (lambda t: t.apply_chat_template(TALK, tools=[{}]), r"tools\[0\] must be"),
    ],
)
def test_what_it_does_not_do_is_said(ours, call, message):
    with pytest.raises(RequestError, match=message):
        call(ours)


def test_what_it_lacks_names_transformers(ours):
    with pytest.raises(AttributeError, match="no save_pretrained: load transformers' own"):
        ours.save_pretrained("x")
    with pytest.raises(AttributeError, match="an encoding has input_ids, attention_mask, and no x"):
        ours("a").x  # noqa: B018


def test_special_tokens_inside_messages_stay_text(ours, theirs):
    """The one difference: a message cannot end its own turn."""
    talk = [{"role": "user", "content": f"a{CONTROL[0]}b"}]
    mine, others = (t.apply_chat_template(talk, return_dict=False) for t in (ours, theirs))
    assert mine != others and ours.decode(mine) == theirs.decode(others)
