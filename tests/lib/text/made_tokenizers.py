"""Texts and tokenizers to try: what is special in them, and a vocabulary as Llama 2's."""

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

TEXTS = (
    "",
    "Hello world, 123 things",
    " leading and  double  spaces\n\n\tand tabs ",
    "naïve e\u0301tude, 日本語, 🎉🇩🇪",
    "<|im_start|>user\nhi<|im_end|>\n",
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN3_LIKE = """\
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
"""
# As models of three families render calls: arguments as JSON, as text or JSON, key by key.
TOOL_TEMPLATES = tuple(
    """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function %}
{{- '<call>' + call.name + ': ' }}ARGUMENTS{{ '</call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
""".replace("ARGUMENTS", arguments)
    for arguments in (
        "{{ call.arguments | tojson }}",
        "{% if call.arguments is string %}{{ call.arguments }}{% else %}"
        "{{ call.arguments | tojson }}{% endif %}",
        "{% for key, value in call.arguments | items %}{{ key }}={{ value | tojson }},{% endfor %}",
    )
)


def sentencepiece_like(special_in_vocabulary: bool = True) -> tokenizers.Tokenizer:
    """As Llama 2's: prefix space, byte tokens, and special tokens inside the vocabulary."""
    words = ["<unk>", "<s>", "</s>"] if special_in_vocabulary else ["<unk>"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    words += ["▁", *"abcdehilnorstw</>", "▁a", "▁t", "▁th"]
    vocab = {word: place for place, word in enumerate(words)}
    merges = [("▁", "a"), ("▁", "t"), ("▁t", "h")]
    model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    for token in ("<s>", "</s>"):
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return backend
