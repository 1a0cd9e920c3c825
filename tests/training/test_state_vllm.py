"""RL on text with models whose layers carry states, sampled by real vLLM: it computes what the
learner computes, before and after every publish.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.model_types import config_of
from helpers.runs import lines
from helpers.torchvision_of_vllm import require_torchvision
from postgrad.models.fresh import make_fresh
from postgrad.models.save import save_model
from postgrad.models.settings import ModelInit
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.rollout.vllm.start import OF_IMAGE_MODELS
from postgrad.training.start import train

pytestmark = pytest.mark.vllm
KINDS = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]
STEPS = 3


def write_model(kind: str, to: Path) -> str:
    """Heads as wide as vLLM's kernels on CPUs want them; weights that tell tokens apart. Skips
    where vLLM cannot import a model of this kind.
    """
    if kind in OF_IMAGE_MODELS:
        require_torchvision()
    init = {"tokenizer": {"kind": "bpe"}, "hidden_size": 8, "num_hidden_layers": 1}
    make_fresh(ModelInit.model_validate(init), [], 0, to.with_name("text"))
    tokenizer = load_tokenizer(str(to.with_name("text")))
    config = config_of(kind, len(tokenizer))
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 2, 1, 32
    config.linear_key_head_dim = config.linear_value_head_dim = 64
    config.max_position_embeddings = 2048
    config.initializer_range = 0.1
    config.layer_types = [*["linear_attention"] * 3, "full_attention"]
    config.num_hidden_layers = 4
    if kind != "qwen3_5_text":
        config.moe_intermediate_size = config.shared_expert_intermediate_size = 64
        config.num_experts_per_tok = config.num_experts  # rounding would choose others of fewer
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, token, getattr(tokenizer, token))
    torch.manual_seed(0)
    save_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32), tokenizer, to)
    return str(to)


def recipe(folder: Path, model: str, repeats: Sequence[int], **vllm: Any) -> Any:
    """Four prompts of 9 tokens and more, 11 for each repeat."""
    rows = [{"question": f"{'tell more. ' * more} well: ", "answer": "a"} for more in repeats]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return parse_recipe(
        {
            "job": "rl",
            "run_dir": str(folder / "run"),
            "steps": STEPS,
            "model": {"path": model, "dtype": "float32"},
            "data": {"path": str(folder / "rows.jsonl"), "max_len": 60 + 11 * max(repeats)},
            "rewards": [{"type": "tiny_rewards:vowels"}],
            "algorithm": {"type": "grpo"},
            "batch": {"rollout_batch_size": 4, "n_samples_per_prompt": 4},
            "rollout": {"type": "vllm", "max_new_tokens": 40, "dtype": "bfloat16", "vllm": vllm},
            "scoring": {"workers": 1},
            "learner": {"lr": 1e-2, "threads": 1},
        }
    )


def require_agreement(folder: Path) -> None:
    """Fails where a step's samples and publish show more than the rounding of bfloat16."""
    metrics = lines(folder / "metrics.jsonl")
    assert len(metrics) == STEPS
    for line in metrics:
        assert line["sentinel/publish_difference"] < 0.03  # the built-in engine in bfloat16: 0.01
        assert line["sentinel/prob_difference"] < 3e-4
        assert line["sentinel/policy_moved"] > 0.1
    log = (folder / "vllm-0.log").read_text()
    together = re.findall(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x", log)
    assert float(together[-1]) >= 16  # all samples of a step


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_samples_a_model_with_states_with_the_learners_logprobs(
    kind: str, tmp_path: Path
) -> None:
    state_recipe = recipe(tmp_path, write_model(kind, tmp_path / "model"), (0, 30, 12, 3))
    train(state_recipe, Console())
    require_agreement(tmp_path / "run")


def test_samples_go_on_from_the_states_behind_long_prompts(tmp_path: Path) -> None:
    model = write_model("qwen3_5_text", tmp_path / "model")
    train(recipe(tmp_path, model, (0, 130, 70, 100), seeded=False), Console())
    require_agreement(tmp_path / "run")
    log = (tmp_path / "run" / "vllm-0.log").read_text()
    assert "Mamba cache mode is set to 'align'" in log
    assert "Setting attention block size to 640 tokens" in log  # some prompts have more
