"""Models, adapters and rewards of Python programs."""

from typing import Any

import pytest

from translate.test_trl_program import lost, program

ROWS = "train_dataset=load_dataset('org/rows')"
__all__ = ["program"]


@pytest.mark.parametrize(
    "model",
    [
        "'m'",
        "AutoModelForCausalLM.from_pretrained('m', device_map='auto').to('cuda')",
        "prepare_model_for_kbit_training(AutoModelForCausalLM.from_pretrained('m'))",
        "AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path='m')",
        "FastLanguageModel.from_pretrained(model_name='m', load_in_4bit=False)[0]",
        "get_peft_model(AutoModelForCausalLM.from_pretrained('m'), LoraConfig(r=4))",
        "setup_chat_format(model=AutoModelForCausalLM.from_pretrained('m'), tokenizer=tok)[0]",
    ],
)
def test_a_model_has_the_name_that_it_is_loaded_from(program: Any, model: str) -> None:
    translation = program(f"SFTTrainer(model={model}, {ROWS})")
    assert translation.problem is None
    assert translation.recipe["model"]["path"] == "m"


def test_what_a_model_is_loaded_with_is_flags(program: Any) -> None:
    load = (
        "from_pretrained('m', revision='v2', torch_dtype=torch.bfloat16, attn_implementation='x', "
        "trust_remote_code=False, cache_dir='c', variant='fp16', quantization_config="
        "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4'))"
    )
    translation = program(
        f"import torch\nSFTTrainer(AutoModelForCausalLM.{load}, peft_config=LoraConfig(), {ROWS})"
    )
    assert translation.recipe["model"]["revision"] == "v2"
    assert translation.recipe["model"]["quantize"] == "4bit"
    assert lost(translation).keys() == {"dtype", "attn_implementation", "variant"}


def test_weights_in_four_bits_need_an_adapter(program: Any) -> None:
    bits = "quantization_config=BitsAndBytesConfig(load_in_4bit=True)"
    assert "load_in_4bit" in lost(program(f"SFTTrainer('m', {ROWS}, {bits})"))
    other = program(f"SFTTrainer('m', {ROWS}, quantization_config=Mxfp4Config())")
    assert "16 or 32 bits" in lost(other)["quantization_config"][1]


def test_an_adapter_has_the_defaults_of_its_library(program: Any) -> None:
    plain = program(f"SFTTrainer('m', {ROWS}, peft_config=LoraConfig())")
    assert plain.recipe["model"]["lora"] == {"rank": 8, "alpha": 8}  # PEFT's, not TRL's flags'
    assert "there PEFT chooses" in plain.draft.comments["model", "lora", "rank"]
    more = program(
        f"SFTTrainer('m', {ROWS}, peft_config=LoraConfig(r=4, lora_alpha=2, lora_dropout=0.1, "
        "target_modules=['q_proj'], use_rslora=True, bias='none', task_type='CAUSAL_LM', "
        "modules_to_save=['lm_head'], layers_to_transform=1, rank_pattern={'o_proj': 2}, "
        "exclude_modules=['up_proj'], alpha_pattern={'.*q_proj': 1}, layers_pattern='h', "
        "init_lora_weights='gaussian'))"
    )
    assert more.recipe["model"]["lora"] == {
        "rank": 4, "alpha": 2, "dropout": 0.1, "targets": ["q_proj"], "rslora": True,
        "modules_to_save": ["lm_head"], "rank_pattern": {"o_proj": 2},
        "layers_to_transform": [1], "exclude_modules": ["up_proj"],
    }  # fmt: skip
    assert lost(more).keys() == {"layers_pattern", "lora_alpha_pattern", "lora_init"}
    for init, here in (("'pissa_niter_8'", {"init": "pissa_niter_8"}), ("True", {})):
        translation = program(
            f"SFTTrainer('m', {ROWS}, peft_config=LoraConfig(init_lora_weights={init}))"
        )
        assert translation.recipe["model"]["lora"] == {"rank": 8, "alpha": 8, **here}
        assert not lost(translation)
    other = program(f"SFTTrainer('m', {ROWS}, peft_config=PromptTuningConfig())")
    assert "one kind of adapter" in lost(other)["peft_config"][1]
    assert "lora" not in other.recipe["model"]


def test_unsloth_s_adapter_is_on_all_layers_in_four_bits(program: Any) -> None:
    translation = program(
        "model, tok = FastLanguageModel.from_pretrained('unsloth/x-bnb-4bit', max_seq_length=99)\n"
        "model = FastLanguageModel.get_peft_model(model, use_gradient_checkpointing=False)\n"
        f"SFTTrainer(model, tokenizer=tok, {ROWS})".replace("Fast", "unsloth.Fast")
    )
    assert translation.recipe["model"]["lora"] == {"rank": 16, "alpha": 16}
    assert ("model", "lora", "rank") not in translation.draft.comments
    assert translation.recipe["model"]["quantize"] == "4bit"
    assert translation.recipe["model"]["gradient_checkpointing"] is False
    assert translation.recipe["data"]["max_len"] == 99
    assert "stored in four bits" in lost(translation)["model"][1]
    other = program(
        "model, tok = unsloth.FastLanguageModel.from_pretrained('m', max_seq_length=longest())\n"
        f"SFTTrainer(model, {ROWS})"
    )
    assert lost(other)["max_length"][0] == "longest()"
    assert other.recipe["data"]["max_len"] == 1024


def test_a_model_with_an_adapter_or_of_unknown_origin_is_lost(program: Any) -> None:
    adapter = program(f"SFTTrainer(AutoPeftModelForCausalLM.from_pretrained('a'), {ROWS})")
    assert "load its base" in lost(adapter)["model"][1]
    assert adapter.problem is not None
    based = program(f"SFTTrainer(PeftModel.from_pretrained(load_model('b'), 'a'), {ROWS})")
    assert "path" not in based.recipe["model"]
    other = program(f"SFTTrainer(build(), {ROWS})")
    assert lost(other)["model"][0] == "build()"


def test_a_reference_is_a_model_of_its_own_only_where_it_differs(program: Any) -> None:
    for reference in ("None", "'m'", "create_reference_model(model)"):
        same = program(f"DPOTrainer('m', ref_model={reference}, {ROWS})")
        assert "reference" not in same.recipe
        assert lost(same) == {}
    other = program(f"DPOTrainer('m', ref_model=AutoModel.from_pretrained('r'), {ROWS})")
    assert other.recipe["reference"]["model"]["path"] == "r"
    assert "ref_model" in lost(program(f"DPOTrainer('m', ref_model=build(), {ROWS})"))


def test_a_tokenizer_is_the_model_s_own_or_lost(program: Any) -> None:
    load = "tok = AutoTokenizer.from_pretrained({!r})\ntok.pad_token = tok.eos_token\n"
    own_tokenizer = program(load.format("m") + f"SFTTrainer('m', processing_class=tok, {ROWS})")
    assert lost(own_tokenizer) == {}
    other = program(load.format("t") + f"SFTTrainer('m', processing_class=tok, {ROWS})")
    assert lost(other)["processing_class"][0] == "t"
    named = program(
        load.format("m") + "tok.chat_template = 'chatml'\n"
        f"SFTTrainer('m', processing_class=tok, {ROWS})"
    )
    assert named.recipe["data"]["chat_template"] == "chatml"


REWARDS = """
from functools import partial
from project.scores import fluent
from trl.rewards import (
    accuracy_reward, get_repetition_penalty_reward, get_soft_overlong_punishment,
    get_cosine_scaled_reward, think_format_reward)
def short(completions, most=5, **kwargs): ...
def maker(n):
    def made(completions, **kwargs): ...
    return made
class Judge:
    def __call__(self, completions): ...
GRPOTrainer("m", reward_funcs=FUNCTIONS, train_dataset=load_dataset("d"),
            args=GRPOConfig(reward_weights=WEIGHTS))
"""


@pytest.mark.parametrize(
    ("function", "reward"),
    [
        ("accuracy_reward", {"type": "math"}),
        ("think_format_reward", {"type": "format", "pattern": "<think>(?!.*<think>).*</think>.*"}),
        ("get_soft_overlong_punishment(max_completion_len=900, soft_punish_cache=90)",
         {"type": "overlong", "max_new_tokens": 900, "buffer": 90}),
        ("get_soft_overlong_punishment(900, 90)",
         {"type": "overlong", "max_new_tokens": 900, "buffer": 90}),
        ("get_repetition_penalty_reward(ngram_size=4, max_penalty=-0.5)",
         {"type": "repetition", "ngram": 4, "penalty": 0.5}),
        ("get_cosine_scaled_reward(max_len=7)",
         {"type": "my_rewards:get_cosine_scaled_reward", "max_len": 7}),
        ("short", {"type": "my_rewards:short"}),
        ("partial(short, most=3)", {"type": "my_rewards:short", "most": 3}),
        ("maker(3)", {"type": "my_rewards:made"}),
        ("lambda completions, **kwargs: [0.0]", {"type": "my_rewards:score"}),
        ("Judge()", {"type": "my_rewards:Judge"}),
        ("fluent", {"type": "project.scores:fluent"}),
        ("unset_here", {"type": "my_rewards:unset_here"}),
    ],
)  # fmt: skip
def test_a_function_of_reward_is_a_verifier_or_yours(
    program: Any, function: str, reward: dict[str, Any]
) -> None:
    text = REWARDS.replace("FUNCTIONS", f"[{function}]").replace("WEIGHTS", "None")
    translation = program(text)
    assert translation.recipe["rewards"] == [reward]
    assert lost(translation) == {}


def test_a_function_of_the_program_hides_that_of_trl(program: Any) -> None:
    translation = program(
        "def accuracy_reward(completions, **kwargs): ...\n"
        "GRPOTrainer('m', accuracy_reward, train_dataset=load_dataset('d'))"
    )
    assert translation.recipe["rewards"] == [{"type": "my_rewards:accuracy_reward"}]


def test_reward_models_stand_first_with_their_weights(program: Any) -> None:
    text = REWARDS.replace(
        "FUNCTIONS", "[short, 'org/rm', other(), AutoModel.from_pretrained('b')]"
    )
    translation = program(text.replace("WEIGHTS", "[0.5, 2.0, 1.0, 1.0]"))
    assert translation.recipe["reward_model"]["model"]["path"] == "org/rm"
    assert translation.recipe["rewards"] == [
        {"type": "reward_model", "weight": 2.0}, {"type": "my_rewards:short", "weight": 0.5},
        {"type": "my_rewards:other"},
    ]  # fmt: skip
    assert lost(translation)["reward_funcs"][1].endswith("a run has one reward model")


def test_an_unknown_function_of_reward_is_told(program: Any) -> None:
    text = REWARDS.replace("FUNCTIONS", "[short, [f for f in x if f]]").replace("WEIGHTS", "None")
    assert lost(program(text))["reward_funcs"][0] == "[f for f in x if f]"
