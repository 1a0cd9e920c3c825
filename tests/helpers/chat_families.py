"""Chat templates that write what well-known families publish, in words of their own, and the
special tokens that each needs: the first one is eos.
"""

from typing import NamedTuple


class Family(NamedTuple):
    """special: tokens, eos first. ends: what ends an answer's turn."""

    template: str
    special: tuple[str, ...]
    ends: str


_CHATML_TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
_CHATML_ANSWER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = Family(
    "{% for m in messages %}" + _CHATML_TURN + "{% endfor %}" + _CHATML_ANSWER,
    ("<|im_end|>", "<|im_start|>"),
    "<|im_end|>",
)
# Earlier answers lose their thoughts; the answer after the last question has its thoughts, or an
# empty one.
QWEN3 = Family(
    "{% set ns = namespace(asked=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set thought, said = '', m.content %}"
    "{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}"
    "{% endif %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.asked %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ said + '<|im_end|>\n' }}"
    "{% else %}" + _CHATML_TURN + "{% endif %}{% endfor %}" + _CHATML_ANSWER,
    ("<|im_end|>", "<|im_start|>"),
    "<|im_end|>",
)
PHI3 = Family(  # a whole conversation ends with the end of text
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
    "<|end|>",
)
LLAMA3 = Family(
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim"
    " + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    "<|eot_id|>",
)
MISTRAL = Family(
    "{{ '<s>' }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant have to take turns') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}",
    ("</s>", "<s>", "[INST]", "[/INST]"),
    "</s>",
)
GEMMA = Family(
    "{{ '<bos>' }}{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n'"
    " + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    ("<end_of_turn>", "<bos>", "<start_of_turn>"),
    "<end_of_turn>",
)
FAMILIES = {
    "chatml": CHATML,
    "qwen3": QWEN3,
    "phi3": PHI3,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
}
