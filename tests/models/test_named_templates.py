"""Chat templates by name: what each writes, and what is told of a wrong name."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from postgrad.core.errors import UsageError
from postgrad.models.fresh import END, TEMPLATE
from postgrad.models.named_templates import chat_template_of, names, template_text, with_template

CHAT = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "a2"},
]
SYSTEM = {"role": "system", "content": "be kind"}
R1 = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves "
    "it. The assistant first thinks about the reasoning process in the mind and then provides the "
    "user with the answer. The reasoning process and answer are enclosed within <think> </think> "
    "and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> "
    "<answer> answer here </answer>.\n\n"
)
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n"
)
OLMO = "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n"
OLMO_2 = (
    "<|im_start|>system\nYou are OLMo, a helpful function-calling AI assistant built by Ai2. Your "
    "date cutoff is November 2024, and your model weights are available at "
    "https://huggingface.co/allenai. You do not currently have access to any functions. "
    "<functions></functions><|im_end|>\n"
)
WRITTEN = {  # the whole conversation, and what begins an answer behind a question
    "chatml": (
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\na2<|im_end|>\n",
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n",
    ),
    "tulu": (
        "<|user|>\nq1\n<|assistant|>\na1</s>\n<|user|>\nq2\n<|assistant|>\na2</s>",
        "<|user|>\nq1\n<|assistant|>\n",
    ),
    "tulu_thinker": (
        "<|user|>\nq1\n<|assistant|>\na1</s>\n<|user|>\nq2\n<|assistant|>\na2</s>",
        "<|user|>\nq1\n<|assistant|>\n<think>",
    ),
    "zephyr": (
        "<|user|>\nq1</s>\n<|assistant|>\na1</s>\n<|user|>\nq2</s>\n<|assistant|>\na2</s>\n",
        "<|user|>\nq1</s>\n<|assistant|>\n",
    ),
    "simple_chat": ("User: q1\n\nAssistant: a1\n\nUser: q2\n\nAssistant: a2</s>", "User: q1"),
    "plain": ("q1a1</s>q2a2</s>", "q1"),
    "simple_concat_with_space": ("q1 a1 q2 a2</s>", "q1"),
    "simple_concat_with_new_line": ("q1\na1\nq2\na2</s>", "q1"),
    "r1_simple_chat": (
        f"{R1}User: q1\n\n\nAssistant: a1\n\n\nUser: q2\n\n\nAssistant: a2\n",
        f"{R1}User: q1\nAssistant:",
    ),
    "r1_simple_chat_postpend_think": (
        f"{R1}User: q1\n\n\nAssistant: a1\n\n\nUser: q2\n\n\nAssistant: a2\n",
        f"{R1}User: q1\nAssistant: <think>",
    ),
    "olmo_thinker": (
        f"{OLMO}<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\na2</s>",
        f"{OLMO}<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n<think>",
    ),
    "olmo": (
        f"{OLMO_2}<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\na2</s>",
        f"{OLMO_2}<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama3": (
        "<s><|start_header_id|>user<|end_header_id|>\n\nq1<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\na1<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nq2<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\na2<|eot_id|>",
        "<s><|start_header_id|>user<|end_header_id|>\n\nq1<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma": (
        "<s><start_of_turn>user\nq1<end_of_turn>\n<start_of_turn>model\na1<end_of_turn>\n"
        "<start_of_turn>user\nq2<end_of_turn>\n<start_of_turn>model\na2<end_of_turn>\n",
        "<s><start_of_turn>user\nq1<end_of_turn>\n<start_of_turn>model\n",
    ),
    "vicuna": (
        f"{VICUNA} USER: q1 ASSISTANT: a1</s>USER: q2 ASSISTANT: a2</s>",
        f"{VICUNA} USER: q1 ASSISTANT:",
    ),
    "alpaca": (
        f"{ALPACA}### Instruction:\nq1\n\n### Response:\na1</s>\n\n"
        "### Instruction:\nq2\n\n### Response:\na2</s>\n\n",
        f"{ALPACA}### Instruction:\nq1\n\n### Response:\n",
    ),
}
WITH_SYSTEM = {  # behind the system message "be kind", the question "q1"
    "tulu": "<|system|>\nbe kind\n<|user|>\nq1\n<|assistant|>\n",
    "zephyr": "<|system|>\nbe kind</s>\n<|user|>\nq1</s>\n<|assistant|>\n",
    "gemma": "<s><start_of_turn>user\nbe kind\n\nq1<end_of_turn>\n<start_of_turn>model\n",
    "vicuna": "be kind USER: q1 ASSISTANT:",
    "alpaca": "be kind\n\n### Instruction:\nq1\n\n### Response:\n",
    "olmo": (
        "<|im_start|>system\nbe kind You do not currently have access to any functions. "
        "<functions></functions><|im_end|>\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n"
    ),
    "olmo_thinker": (
        "<|im_start|>system\nbe kind You do not currently have access to any functions. "
        "<functions></functions><|im_end|>\n<|im_start|>user\nq1<|im_end|>\n"
        "<|im_start|>assistant\n<think>"
    ),
}


def written(name: str, messages: list[dict[str, str]], generation: bool) -> Any:
    texts, _ = render_jinja_template(
        conversations=[messages],
        chat_template=template_text(name),
        add_generation_prompt=generation,
        bos_token="<s>",
        eos_token="</s>",
    )
    return texts[0]


def test_every_shipped_template_is_held_to_its_text() -> None:
    assert set(names()) == set(WRITTEN)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_shipped_template_writes_what_its_family_writes(name: str) -> None:
    assert written(name, CHAT, False) == WRITTEN[name][0]
    assert written(name, CHAT[:1], True) == WRITTEN[name][1]


@pytest.mark.parametrize("name", WITH_SYSTEM)
def test_a_system_message_stands_where_its_family_has_it(name: str) -> None:
    assert written(name, [SYSTEM, CHAT[0]], True) == WITH_SYSTEM[name]


def test_a_file_a_models_folder_and_a_text_are_templates_too(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ x }} é", "utf-8")
    assert template_text(str(tmp_path / "chat_template.jinja")) == "{{ x }} é"
    assert template_text(str(tmp_path)) == "{{ x }} é"
    assert template_text("{{ y }}") == "{{ y }}"


def test_a_wrong_name_is_told_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"chat_template 'chatlm'.*did you mean 'chatml'\?"):
        template_text("chatlm")
    with pytest.raises(UsageError, match="the names are alpaca, chatml, gemma"):
        template_text("\x00")


def with_own(template: str | None) -> Any:
    """A tokenizer of one word, with this template of its own."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({END: 0}, END)),
        eos_token=END,
        chat_template=template,
    )


def test_a_text_takes_in_a_named_template() -> None:
    assert template_text('{{ bos_token }}{% include "tulu" %}') == "{{ bos_token }}" + (
        template_text("tulu")
    )
    with pytest.raises(UsageError, match=r"includes 'tulo': .*did you mean 'tulu'\?"):
        template_text("{%- include 'tulo' -%}")


def test_a_text_takes_in_the_tokenizer_s_own_template(tmp_path: Path) -> None:
    stated = template_text("{{ eos_token }}{%- include 'tokenizer' %}")
    assert chat_template_of(with_own(TEMPLATE), stated) == "{{ eos_token }}" + TEMPLATE
    assert chat_template_of(with_own(TEMPLATE), None) == TEMPLATE
    assert chat_template_of(with_own(TEMPLATE), "{{ x }}") == "{{ x }}"
    (tmp_path / "begun.jinja").write_text(stated, "utf-8")
    exported = with_template(with_own(TEMPLATE), str(tmp_path / "begun.jinja"))
    assert exported.chat_template == "{{ eos_token }}" + TEMPLATE
    with pytest.raises(UsageError, match="own template, and it has none"):
        chat_template_of(with_own(None), stated)
