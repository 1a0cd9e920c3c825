"""Fresh models of bytes with the chat templates of families that call tools, and grammars by which
they do.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from helpers.tiny_runs import MODEL
from helpers.tool_templates import WITH_TOOLS
from postgrad.models.fresh import PAD, _bpe, _config
from postgrad.models.save import save_model
from postgrad.models.settings import ModelInit
from postgrad.rollout.environments.tools import load_tool

# What the policy may write: a call, or the letter a or b. A mark is its token, {…}.
ARGUMENTS = r'/\{"expression": "[1-9] [+] ?[1-9]?"\}/'
ANSWER = '("a" | "b")'
GRAMMARS = {
    "qwen": '"<tool_call>{\\"name\\": \\"calculator\\", \\"arguments\\": " ARGS "}</tool_call>"',
    "mistral": '{[TOOL_CALLS]} "calculator" {[ARGS]} ARGS',
    "mistral_list": '{[TOOL_CALLS]} " [{\\"name\\": \\"calculator\\", \\"arguments\\": " ARGS "}]"',
    "deepseek": '{<｜tool▁calls▁begin｜>} {<｜tool▁call▁begin｜>} "function" {<｜tool▁sep｜>} '
    '"calculator\\n```json\\n" ARGS "\\n```" {<｜tool▁call▁end｜>} {<｜tool▁calls▁end｜>}',
    "deepseek_plain": "{<｜tool▁calls▁begin｜>} {<｜tool▁call▁begin｜>} "
    '"calculator" {<｜tool▁sep｜>} ARGS {<｜tool▁call▁end｜>} {<｜tool▁calls▁end｜>}',
    "gpt_oss": '{<|channel|>} "commentary to=functions.calculator " {<|constrain|>} "json" '
    "{<|message|>} ARGS",
    "kimi": '{<|tool_calls_section_begin|>} {<|tool_call_begin|>} "functions.calculator:0" '
    "{<|tool_call_argument_begin|>} ARGS {<|tool_call_end|>} {<|tool_calls_section_end|>}",
}
FINAL = {"gpt_oss": '{<|channel|>} "final" {<|message|>} '}


def model_of(family: str, folder: Path) -> tuple[str, Any]:
    """A fresh model of bytes whose tokenizer has the family's template and special tokens."""
    template, (end, *others) = WITH_TOOLS[family]
    init = ModelInit.model_validate(
        {**MODEL["init"], "max_position_embeddings": 1024,
         "tokenizer": {"kind": "bpe", "vocab_size": 600}}
    )  # fmt: skip
    backend = _bpe(init.tokenizer, [json.dumps(load_tool("calculator").schema)] * 9)
    backend.add_special_tokens([PAD, end, *others])
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, pad_token=PAD, chat_template=template,
        additional_special_tokens=others, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    torch.manual_seed(0)
    lm: Any = AutoModelForCausalLM.from_config(_config(init, tokenizer), dtype=torch.float32)
    ends = [end, "<|call|>"] if family == "gpt_oss" else [end]
    ids = tokenizer.convert_tokens_to_ids(ends)
    lm.generation_config = GenerationConfig(eos_token_id=ids, pad_token_id=tokenizer.pad_token_id)
    save_model(lm, tokenizer, folder)
    return str(folder), tokenizer


def grammar_of(family: str, tokenizer: Any) -> str:
    text = f"start: call | answer\ncall: {GRAMMARS[family]}\n"
    text += f"answer: {FINAL.get(family, '')}{ANSWER}\nARGS: {ARGUMENTS}\n"
    for token in tokenizer.all_special_tokens:
        number = tokenizer.convert_tokens_to_ids(token)
        text = text.replace(f"{{{token}}}", f"<[{number}]>")
    return text
