"""What the plan says of weights in four bits and of moments in eight."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.image_directories import write_model
from postgrad.learner import eight_bits
from postgrad.learner.optimizer import MasterOptimizer
from postgrad.learner.settings import LearnerSettings
from postgrad.models.adapters import add_adapter
from postgrad.models.four_bits import FourBitLinear
from postgrad.models.frozen_parts import freeze_parts
from postgrad.models.known_shapes import any_shape, shape_of_model
from postgrad.models.load import load_model
from postgrad.models.settings import LoraSettings, ModelSettings
from postgrad.models.shapes import shape_of
from postgrad.ops import quantization
from postgrad.plan import held
from postgrad.plan.hardware import parse_hardware
from postgrad.plan.plan import Facts, RunPlan, make_plan
from postgrad.plan.roles import PlannedRole
from postgrad.plan.sizes import Sharing
from postgrad.recipe.load import load_recipe

FOLDER = Path(__file__).parent.parent.parent / "recipes" / "24gb"
SMALL = LearnerSettings(optimizer_state="8bit")


def planned(name: str, *flags: str) -> RunPlan:
    recipe = load_recipe(FOLDER / f"{name}.toml", flags)
    return make_plan(recipe, Facts(shape_of_model, parse_hardware("RTX-4090")))


@pytest.mark.parametrize(("name", "slots"), [("grpo_8b_qlora", 32), ("grpo_1.7b", 32)])
def test_the_recipes_for_small_cards_fit_one(name: str, slots: int) -> None:
    run_plan = planned(name)
    assert run_plan.fits
    engine = {line.purpose for line in run_plan.memory.lines if line.role == "engine"}
    assert "weights" not in engine  # it reads the policy's
    assert run_plan.sizes.engine is not None
    assert run_plan.sizes.engine.slots == slots


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("grpo_8b_qlora", ("--model.quantize", "none")),
        ("grpo_1.7b", ("--learner.optimizer_state", "float32")),
        ("grpo_1.7b", ("--rollout.dtype", "float32")),  # then the engine has a copy
    ],
)
def test_without_what_makes_them_small_they_do_not(name: str, flags: tuple[str, ...]) -> None:
    assert not planned(name, *flags).fits


def test_the_constants_are_those_of_the_learner() -> None:
    assert held.SMALLEST == eight_bits.SMALLEST
    assert held.WIDE_BLOCK == quantization.WIDE_BLOCK
    packed = quantization.quantize_4bit(torch.ones(1024, 1024))
    bits = sum(tensor.nbytes for tensor in packed) / 2**20
    assert bits == pytest.approx(held.FOUR_BITS, rel=1e-3)


@pytest.mark.parametrize("optimizer_state", ["8bit", "float32"])
@pytest.mark.parametrize(
    ("lora", "tied"),
    [
        (None, True),
        (None, False),
        (LoraSettings(rank=24, alpha=24), True),
        (LoraSettings(rank=24, alpha=24, modules_to_save=("embed_tokens", "lm_head")), False),
        (LoraSettings(rank=24, alpha=24, modules_to_save=("lm_head",)), False),
    ],
)
def test_the_moments_are_those_that_the_optimizer_will_keep(
    lora: LoraSettings | None, tied: bool, optimizer_state: Literal["8bit", "float32"]
) -> None:
    learner = LearnerSettings(optimizer_state=optimizer_state)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=500, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=tied,
        max_position_embeddings=64,
    )  # fmt: skip
    lm = AutoModelForCausalLM.from_config(config)
    trained = lm if lora is None else add_adapter(lm, lora, seed=0).parameters()
    shape = shape_of(config.to_dict())
    model = ModelSettings(path="x", lora=lora)
    role = PlannedRole("policy", shape, model, learner)
    kept = MasterOptimizer(trained, learner).state_bytes() - torch.int64.itemsize
    assert held.state_bytes(role) == kept


@pytest.mark.parametrize("freeze", [(), ("router",)])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_moments_of_experts_and_routers_are_those_that_the_optimizer_will_keep(
    kind: str, freeze: tuple[str, ...]
) -> None:
    """Of gpt_oss the biases of all experts are 2-D, and no matrices."""
    config = AutoConfig.for_model(
        kind, vocab_size=300, hidden_size=256, intermediate_size=384, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_local_experts=20,
        num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    lm = AutoModelForCausalLM.from_config(config)
    model = ModelSettings(path="x", freeze=freeze)  # pyright: ignore[reportArgumentType]
    freeze_parts(lm, model)
    for settings in ({"optimizer_state": "8bit"}, {"optimizer": "muon"}):
        learner = LearnerSettings.model_validate(settings)
        role = PlannedRole("policy", any_shape(config.to_dict(), kind), model, learner)
        optimizer = MasterOptimizer(lm, learner)
        assert held.state_bytes(role) == optimizer.state_bytes() - torch.int64.itemsize


def test_copies_that_train_beside_an_adapter_are_in_the_plan() -> None:
    """Qwen3-8B's embeddings and head are 151936 rows of 4096 each: copies of two bytes a weight,
    and masters, gradients and two moments of four.
    """
    saved = "--model.lora.modules_to_save", '["embed_tokens", "lm_head"]'
    before, after = planned("grpo_8b_qlora"), planned("grpo_8b_qlora", *saved)
    weights = 2 * 151936 * 4096
    without, with_them = (
        {line.purpose: line.bytes["update"] for line in run_plan.memory.lines
         if line.role == "policy" and "update" in line.bytes}
        for run_plan in (before, after)
    )  # fmt: skip
    added = {purpose: size - without.get(purpose, 0) for purpose, size in with_them.items()}
    assert added["trained copies"] == 2 * weights
    assert added["adapter"] == 4 * weights
    assert added["optimizer"] == 8 * weights
    assert added["gradients"] == 4 * weights


def wide(config: Any) -> None:
    """Matrices of whole groups of numbers."""
    text = config.get_text_config()
    text.hidden_size, text.intermediate_size = 256, 512
    if hasattr(config.vision_config, "out_hidden_size"):
        config.vision_config.out_hidden_size = 256


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3", "smolvlm"])
def test_of_a_model_that_reads_images_the_decoders_layers_alone_are_in_four_bits(
    kind: str, tmp_path: Path
) -> None:
    path = write_model(kind, tmp_path / "model", wide)
    lm = load_model(path, dtype=torch.float32, quantize="4bit", images=True).lm
    packed = [module for module in lm.modules() if isinstance(module, FourBitLinear)]
    tensors = [*lm.parameters(), *(t for m in packed for t in (m.scales, m.maxima, m.offset))]
    model = ModelSettings(path=path, quantize="4bit", lora=LoraSettings())
    shape = shape_of_model(model)
    assert shape.packed_parameters == sum(m.in_features * m.out_features for m in packed)
    role = PlannedRole("policy", shape, model, LearnerSettings())
    lines = held.held(role, 4, Sharing.of(LearnerSettings()), cpu=True)
    (weights,) = (line.bytes["update"] for line in lines if line.purpose == "weights")
    assert weights == pytest.approx(sum(tensor.nbytes for tensor in tensors), rel=0.02)
    assert shape.tower is not None
    assert weights > 4 * shape.tower.frozen(("vision", "projector"))
