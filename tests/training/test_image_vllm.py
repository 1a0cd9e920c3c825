"""RL on rows with images, sampled by real vLLM: it sees what the learner sees, before and after
every publish.
"""

from pathlib import Path
from string import ascii_letters
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from helpers.image_directories import write_model
from helpers.runs import lines, tensors
from helpers.torchvision_of_vllm import require_torchvision
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.training.start import train
from rollout.vllm.test_images import recipe

pytestmark = pytest.mark.vllm
SECTIONS = {  # of rotary positions
    "qwen2_5_vl": [4, 6, 6],
    "qwen3_vl": [6, 5, 5],
    "qwen3_vl_moe": [6, 5, 5],
    "qwen3_5": [3, 3, 2],  # on half of a head
    "qwen3_5_moe": [3, 3, 2],
}
# On CPUs vLLM computes delta rules in bfloat16 alone.
DTYPES = {"qwen3_5": "bfloat16", "qwen3_5_moe": "bfloat16"}
# Mean differences of logprobs when weights are published, and of the probabilities of samples.
ROUNDING = {"float32": (1e-4, 1e-4), "bfloat16": (0.03, 3e-4)}


@pytest.fixture(autouse=True)
def torchvision() -> None:
    """Skips where vLLM's environment has none that can be imported."""
    require_torchvision()


def widened(config: Any) -> None:
    """One head of 32, as wide as vLLM's attention on CPUs wants it; weights that tell tokens
    apart.
    """
    text = config.get_text_config()
    text.num_attention_heads = text.num_key_value_heads = 1
    text.head_dim = 32
    if hasattr(text, "linear_key_head_dim"):
        text.linear_key_head_dim = text.linear_value_head_dim = 64
    if hasattr(text, "num_experts"):
        text.moe_intermediate_size = 64
        text.norm_topk_prob = True  # as configs on the hub say, and vLLM reads
    text.rope_parameters["mrope_section"] = SECTIONS[config.model_type]
    spread = 0.1 if config.model_type in DTYPES else 0.2  # more would round off to other experts
    text.initializer_range = config.vision_config.initializer_range = spread


def agree(line: dict[str, Any], kind: str) -> bool:
    """Whether engine and learner give tokens the same logprobs, but for rounding, when they are
    published and, in a step that trains, when they are sampled.
    """
    published, sampled = ROUNDING[DTYPES.get(kind, "float32")]
    return (
        line["sentinel/publish_difference"] < published
        and line.get("sentinel/prob_difference", 0.0) < sampled
    )


@pytest.mark.parametrize("kind", SECTIONS)
def test_vllm_samples_behind_images_with_the_learners_logprobs(kind: str, tmp_path: Path) -> None:
    model = write_model(kind, tmp_path / "model", widened)
    train(recipe(tmp_path, model, dtype=DTYPES.get(kind, "float32")), Console())
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert len(metrics) == 3
    for line in metrics:
        assert line["policy/grad_norm"] > 0
        assert "sentinel/prob_difference" in line
        assert agree(line, kind)
    samples = lines(tmp_path / "run" / "samples.jsonl")
    assert {len(sample["images"]) for sample in samples} == {1, 2}


@pytest.mark.parametrize("kind", [kind for kind in SECTIONS if not kind.endswith("_moe")])
def test_an_adapter_is_sent_alone_and_samples_are_the_policys(kind: str, tmp_path: Path) -> None:
    """On all linear layers of the decoder; vLLM has the tower of the base."""
    model = write_model(kind, tmp_path / "model", widened)
    dtype = DTYPES.get(kind, "float32")
    plain = recipe(tmp_path, model, dtype=dtype).dump()
    plain["model"]["lora"] = {"rank": 4, "alpha": 16}
    plain["rollout"]["vllm"]["lora"] = "adapter"
    plain["checkpoint"]["save_steps"] = 3
    train(parse_recipe(plain), Console())
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert len(metrics) == 3
    for line in metrics:
        assert agree(line, kind)
        assert line["sentinel/policy_moved"] > 1e-2
    learned = tensors(str(tmp_path / "run"), 3)
    adapter = 4 * sum(
        tensor.numel() for name, tensor in learned.items() if name.startswith("policy.weights/")
    )
    assert metrics[-1]["publish/sent_bytes"] == pytest.approx(adapter, rel=0.05)


def test_vllm_gets_four_bits_expanded_and_merged(tmp_path: Path) -> None:
    model = write_model("qwen3_vl", tmp_path / "model", widened)
    plain = recipe(tmp_path, model).dump()
    plain["model"] |= {"quantize": "4bit", "lora": {"rank": 4, "alpha": 16}}
    train(parse_recipe(plain), Console())
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert len(metrics) == 3
    for line in metrics:
        assert agree(line, "qwen3_vl")


def test_experts_are_read_as_they_lie_on_the_hub(tmp_path: Path) -> None:
    model = Path(write_model("qwen3_vl_moe", tmp_path / "model", widened))
    weights = load_file(model / "model.safetensors")
    experts = [name for name in weights if name.endswith(("experts.gate_up_proj", "s.down_proj"))]
    assert len(experts) == 2 * 3  # of three layers
    weights |= {name: weights[name].transpose(1, 2).contiguous() for name in experts}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    train(recipe(tmp_path, str(model)).model_copy(update={"steps": 1}), Console())
    (line,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert line["sentinel/prob_difference"] < 1e-4  # of samples before the first publish
    assert agree(line, "qwen3_vl_moe")


@pytest.mark.parametrize("kind", SECTIONS)
def test_vllm_plays_episodes_with_images_in_prompts_and_replies(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "helpers"))
    model = write_model(kind, tmp_path / "model", widened)
    dtype = DTYPES.get(kind, "float32")
    plain = recipe(tmp_path, model, dtype=dtype, max_new_tokens=30, stop=[*ascii_letters]).dump()
    shows = {"type": "showing:Showing", "max_turns": 3}
    changed = {"environment": shows, "rewards": [], "steps": 2}
    changed["data"] = {"path": plain["data"]["path"], "messages": "messages", "max_len": 500}
    train(parse_recipe(plain | changed), Console())
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    for line in metrics:
        assert line["environment/turns"] > 2
        assert agree(line, kind)
    assert any("sentinel/prob_difference" in line for line in metrics)
    samples = lines(tmp_path / "run" / "samples.jsonl")
    shown = {sum(len(turn.get("images", ())) for turn in sample["turns"]) for sample in samples}
    assert 2 in shown
