"""Tokenizers of characters whose chat templates teach tool calls, in three families' shapes."""

from typing import Any

from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from postgrad.models.fresh import END, PAD, START, TEMPLATE, _characters
from postgrad.models.settings import TokenizerInit

HERMES = (  # as Qwen 2.5: results of tools stand in one turn of the user
    "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}"
    '</tools>\nSay <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (  # as Llama 3.1: a result is JSON in a turn of its own
    "{{ '<|begin_of_text|>' }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    'Say {"name": function name, "parameters": dictionary}.'
    "{% for t in tools %}{{ t | tojson }}{% endfor %}<|eot_id|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>{% else %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim }}<|eot_id|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN_XML = HERMES.replace(  # as Qwen3-Coder and Qwen 3.5
    '<tool_call>{"name": ..., "arguments": {...}}</tool_call>',
    "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>",
)
LLAMA_SPECIAL = ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")


def chat_tokenizer(template: str | None = TEMPLATE, special: tuple[str, ...] = ()) -> Any:
    """The first of `special` ends a turn; ChatML's marks are always there."""
    backend = _characters(TokenizerInit(kind="characters"), [])
    backend.add_special_tokens([PAD, START, END, *special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=special[0] if special else END,
        pad_token=PAD,
        additional_special_tokens=[START, *special[1:]],
        chat_template=template,
    )


def with_begin(tokenizer: Any, *, ends: bool = False) -> Any:
    """The tokenizer, which writes <s> before every text by itself, as Llama's and Gemma's do. ends:
    and its end of text behind it.
    """
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    end = tokenizer.eos_token
    pairs = [("<s>", tokenizer.bos_token_id), (end, tokenizer.eos_token_id)]
    form = f"<s> $A {end}" if ends else "<s> $A"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(form, None, pairs)
    return tokenizer
