"""Tokenizers made on the spot, and chat templates in the shapes of the families that are in use, as Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "The prefill worker reads the whole prompt once and keeps its keys and values in blocks. What is the capital of France?",
    'You are a helpful assistant; answer in one short sentence, please. {"name": "get_weather", "arguments": {"city": 1}}',
    "def main(argv):\n    for index in range(10):\n        print(argv[index])\n\n\nif __name__ == '__main__':\n    main([])",
    "Größe naïve 日本語のテキスト、こんにちは世界 🚂🚃 2024-11-30 12:34:56 user assistant system tool",
)

_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
MISTRAL_TOKENS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {{- message.content | tojson }}
        {{- "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("one tool at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and not ns.found %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
        {%- set ns.found = true %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and message.reasoning_content is string %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {% generation %}{{- content }}{% endgeneration %}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.function.name }}
            {{- '", "arguments": ' }}{{- tool_call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and tools is not none %}
            {{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
"""

PARTS = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- for part in message.content %}
        {%- if part.type == 'text' %}{{- part.text }}{%- else %}{{- '<|' + part.type + '|>' }}{%- endif %}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def _special(texts: tuple[str, ...]) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in texts]


@cache
def byte_level(tokens: tuple[str, ...], *, bos: str | None = None) -> str:
    """Byte-level BPE with the split of recent models. JSON of the tokenizer."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=_special(tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS * 3, trainer)
    if bos is not None:
        made.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))])
    return made.to_str()


@cache
def metaspace(tokens: tuple[str, ...], *, scheme: str = "first") -> str:
    """BPE over SentencePiece's spaces with byte fallback, as with Llama 2 and Mistral."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[*_special(tokens), *_special(tuple(f"<0x{byte:02X}>" for byte in range(256)))],
        show_progress=False,
    )
    made.train_from_iterator(CORPUS * 3, trainer)
    return made.to_str()


@cache
def normalised(tokens: tuple[str, ...]) -> str:
    """As with the first Llama: the space before a text is put there by a normalizer."""
    made = Tokenizer.from_str(metaspace(tokens))
    made.pre_tokenizer = None
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made.to_str()


KINDS: dict[str, Callable[[], str]] = {
    "byte level": lambda: byte_level(CHATML_TOKENS),
    "byte level, bos": lambda: byte_level(LLAMA3_TOKENS, bos="<|begin_of_text|>"),
    "metaspace, first": lambda: metaspace(MISTRAL_TOKENS),
    "metaspace, always": lambda: metaspace(MISTRAL_TOKENS, scheme="always"),
    "prepended by a normalizer": lambda: normalised(MISTRAL_TOKENS),
}


def folder(path: Path, tokenizer: str, template: str | None, **config: object) -> Path:
    """A Hugging Face folder of it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(tokenizer)
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def family(path: Path, name: str) -> Path:
    """The folder of one of the families."""
    if name == "chatml":
        return folder(path, byte_level(CHATML_TOKENS), CHATML, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    if name == "parts":
        return folder(path, byte_level(CHATML_TOKENS), PARTS, eos_token="<|im_end|>")
    if name == "qwen":
        return folder(path, byte_level(CHATML_TOKENS), QWEN, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    if name == "llama3":
        tokenizer = byte_level(LLAMA3_TOKENS, bos="<|begin_of_text|>")
        return folder(path, tokenizer, LLAMA3, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")
    assert name == "mistral"
    return folder(
        path, metaspace(MISTRAL_TOKENS), MISTRAL, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True
    )


FAMILIES = ("chatml", "llama3", "qwen", "mistral", "parts")
