"""recipes/7b: what their comments say follows from their numbers."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from postgrad.models.adapter_targets import target_layers
from postgrad.models.settings import LoraSettings
from postgrad.recipe.load import load_recipe
from postgrad.recipe.recipe import RLRecipe

FOLDER = Path(__file__).parent.parent.parent / "recipes" / "7b"
ADAPTERS = [path for path in sorted(FOLDER.glob("*.toml")) if path.stem.endswith("_lora")]
WHOLE = [path for path in sorted(FOLDER.glob("*.toml")) if path not in ADAPTERS]


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.stem)
def test_an_adapter_learns_at_least_ten_times_as_fast_as_the_whole_model(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.model.lora is not None
    assert recipe.model.gradient_checkpointing
    full_recipe_path = FOLDER / path.name.replace("_lora", "")
    if full_recipe_path.exists():
        other = load_recipe(full_recipe_path)
        assert other.model.lora is None
        assert recipe.learner.lr >= 0.999 * 10 * other.learner.lr
        assert (recipe.data, recipe.batch) == (other.data, other.batch)


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
def test_a_whole_model_of_8b_says_what_it_needs_and_what_to_do_until_then(path: Path) -> None:
    text = path.read_text("utf-8")
    assert "18 bytes per parameter" in text
    assert "Shard over ranks" in text
    assert load_recipe(path, ["--model.path", "Qwen/Qwen3-4B"]).model.path == "Qwen/Qwen3-4B"


@pytest.mark.parametrize(
    ("name", "rows", "share"),
    [("sft", 939_343, 0.03), ("reward", 62_000, 0.03), ("dpo", 62_000, 0.10)],
)
def test_a_warm_up_is_the_share_of_the_updates_that_its_comment_names(
    name: str, rows: int, share: float
) -> None:
    recipe = load_recipe(FOLDER / f"{name}.toml")
    updates = recipe.geometry(rows).total_updates
    assert updates is not None
    assert recipe.learner.warmup_updates == pytest.approx(share * updates, rel=0.05)


def test_the_critic_of_ppo_lies_on_the_weights_of_the_reward_model() -> None:
    recipe = load_recipe(FOLDER / "ppo_lora.toml")
    assert isinstance(recipe, RLRecipe)
    reward_recipe = load_recipe(FOLDER / "reward_lora.toml")
    assert recipe.reward_model.model.path == f"{reward_recipe.run_dir}/model"
    assert reward_recipe.checkpoint.save_hf
    assert recipe.critic.model.path == recipe.reward_model.model.path
    assert recipe.critic.model.lora == recipe.model.lora
    assert recipe.critic.learner.lr == pytest.approx(9e-5)
    assert recipe.reference.model.path == recipe.model.path
    numbers = recipe.geometry()
    assert (numbers.steps, numbers.total_updates) == (97, 776)
    assert recipe.data.max_len - recipe.rollout.max_new_tokens == 1024


def test_the_sums_of_memory_are_those_of_the_model_s_shapes() -> None:
    config = Qwen3Config(  # of Qwen/Qwen3-8B
        vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        lm = cast(Any, AutoModelForCausalLM).from_config(config)
    parameter_count = sum(weight.numel() for weight in lm.parameters())
    body = parameter_count - lm.lm_head.weight.numel()
    layers = [lm.get_submodule(name) for name in target_layers(lm, LoraSettings())]
    width = sum(layer.in_features + layer.out_features for layer in layers)  # of rank 1
    recipe_texts = {
        path.stem: " ".join(path.read_text("utf-8").split()) for path in FOLDER.glob("*.toml")
    }
    for name in ("sft", "dpo", "grpo"):
        assert f"{18 * parameter_count / 1e9:.0f} GB" in recipe_texts[name].replace("# ", "")
    assert f"{18 * body / 1e9:.0f} GB" in recipe_texts["reward"].replace("# ", "")
    for name in ("dpo_lora", "grpo_lora", "ppo_lora"):
        assert f"{2 * parameter_count / 1e9:.0f} GB for the frozen" in recipe_texts[name]
    for name in ("reward_lora", "ppo_lora"):
        assert f"{2 * body / 1e9:.0f} GB for the" in recipe_texts[name]
    for name, rank, adapters in (("reward_lora", 64, 1), ("ppo_lora", 64, 2), ("grpo_lora", 32, 1)):
        recipe = load_recipe(FOLDER / f"{name}.toml")
        assert recipe.model.lora is not None
        assert recipe.model.lora.rank == rank
        assert f"{rank * width / 1e6:.0f}M" in recipe_texts[name]
        assert f"{adapters * 16 * rank * width / 1e9:.1f} GB" in recipe_texts[name].replace(
            "# ", ""
        )
