"""Runs with images: what says so, which models are trained on them, what recipes leave out."""

import pytest

from postgrad.cli.main import main
from postgrad.core.errors import UsageError
from postgrad.models.settings import IMAGE_TYPES
from postgrad.translate.draft import Draft, ImageRun
from postgrad.translate.images import freezes, require_read, vllm_samples
from postgrad.translate.translate import Translation, translate

PPO = "ppo --pretrain Qwen/Qwen2.5-VL-3B-Instruct --prompt_data d"


def of(system: str, flags: str) -> Translation:
    return translate(system, flags.split())


@pytest.mark.parametrize(
    ("system", "flags", "needed"),
    [
        ("openrlhf", "ppo --pretrain m --prompt_data d --data.image_key images", "data.image_key"),
        ("openrlhf", "ppo --pretrain m --prompt_data d --image_key images", "image_key"),
        ("openrlhf", "ppo --pretrain m --prompt_data hiyouga/geometry3k", "prompt_data"),
        ("trl", "sft --model_name_or_path Qwen/Qwen2.5-VL-3B --dataset_name d", "model_name"),
        ("trl", "python trl/scripts/grpo_vlm.py --model_name_or_path m", "grpo_vlm"),
        ("trl", "python examples/scripts/gspo_vlm.py --model_name_or_path m", "grpo_vlm"),
        ("trl", "sft_vlm --model_name_or_path m --dataset_name d", "sft_vlm"),
        ("trl", "sft --model_name_or_path m --dataset_name org/llava-instruct", "dataset_name"),
    ],
)
def test_a_run_with_images_has_a_recipe_that_loads(system: str, flags: str, needed: str) -> None:
    translation = of(system, flags)
    assert translation.problem is None
    assert translation.draft.images is not None
    assert needed in translation.draft.images.needed
    assert [option.why for option in translation.draft.missing] == []


def test_an_option_of_images_that_is_off_is_none() -> None:
    translation = of("openrlhf", "ppo --pretrain m --prompt_data d --data.max_images_per_prompt 0")
    assert translation.draft.images is None


@pytest.mark.parametrize(
    "model",
    [
        "Qwen/Qwen2-VL-2B-Instruct",
        "Qwen/Qwen2.5-Omni-3B",
        "google/gemma-4-E4B-it",
        "google/gemma-3n-E2B-it",
        "meta-llama/Llama-3.2-11B-Vision-Instruct",
        "nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16",
        "HuggingFaceM4/idefics2-8b",
    ],
)
def test_a_model_that_is_not_trained_on_images_is_refused_by_name(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sft_vlm", "--model_name_or_path", model, "--dataset_name", "d"]
    assert main(["translate", "trl", *words]) == 2
    stderr = capsys.readouterr().err
    assert model in stderr
    assert all(name in stderr for name in IMAGE_TYPES)
    assert "with model_name_or_path" in stderr


@pytest.mark.parametrize(
    ("model", "by_vllm"),
    [
        ("Qwen/Qwen2.5-VL-3B-Instruct", True),
        ("Qwen/Qwen3-VL-2B-Instruct", True),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", True),
        ("Qwen/Qwen3.5-2B", True),
        ("Qwen/Qwen3.6-35B-A3B", True),
        ("/models/mine", True),  # its name says nothing
        ("google/gemma-3-4b-it", False),
        ("HuggingFaceTB/SmolVLM2-2.2B-Instruct", False),
        ("HuggingFaceM4/Idefics3-8B-Llama3", False),
        ("llava-hf/llava-v1.6-mistral-7b-hf", False),
        ("llava-hf/llava-onevision-qwen2-7b-ov-hf", False),
        ("llava-hf/vip-llava-7b-hf", False),
        ("mistral-community/pixtral-12b", False),
        ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", False),
        ("OpenGVLab/InternVL3-2B-hf", False),
    ],
)
def test_only_types_of_qwen_are_sampled_by_vllm(model: str, by_vllm: bool) -> None:
    run = ImageRun("sft_vlm", model, "model_name_or_path")
    require_read(run)
    assert vllm_samples(run) is by_vllm


def test_engines_of_a_model_that_vllm_does_not_sample_are_lost() -> None:
    engines = "--vllm.num_engines 2 --vllm.tensor_parallel_size 2 --data.image_key images"
    translation = of("openrlhf", f"{PPO} {engines}")
    assert translation.recipe["rollout"]["type"] == "vllm"
    translation = of("openrlhf", f"ppo --pretrain google/gemma-3-4b-it --prompt_data d {engines}")
    assert translation.problem is None
    assert "type" not in translation.recipe["rollout"]
    lost = {option.name for option in translation.draft.missing}
    assert lost == {"vllm.num_engines", "vllm.tensor_parallel_size"}


def test_layers_are_compiled_that_carry_no_state() -> None:
    words = "sft_vlm --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --dataset_name d --use_peft"
    translation = of("trl", f"{words} --torch_compile")
    assert translation.problem is None
    assert translation.recipe["model"]["compile"] is True
    assert not translation.draft.missing
    words = words.replace("Qwen2.5-VL-3B-Instruct", "Qwen3.5-2B")
    translation = of("trl", f"{words} --torch_compile")
    assert "compile" not in translation.recipe["model"]
    why = {option.name: option.why for option in translation.draft.missing}
    assert why == {"torch_compile": "layers that carry a state along a sequence are not compiled"}


@pytest.mark.parametrize(
    ("model", "carried"),
    [
        ("Qwen/Qwen2.5-VL-3B-Instruct", True),
        ("google/gemma-3-4b-it", True),
        ("Qwen/Qwen3.5-4B", True),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", False),  # of experts, which run and plan refuse
        ("Qwen/Qwen3.5-35B-A3B", False),
    ],
)
def test_four_bits_are_carried_but_of_experts(model: str, carried: bool) -> None:
    words = f"sft_vlm --model_name_or_path {model} --dataset_name d --use_peft --load_in_4bit"
    translation = of("trl", words)
    assert translation.problem is None
    assert translation.recipe["model"].get("quantize") == ("4bit" if carried else None)
    why = {option.name: option.why for option in translation.draft.missing}
    lost = {"load_in_4bit": "experts of a mixture are not held in four bits"}
    assert why == ({} if carried else lost)


@pytest.mark.parametrize(
    ("model", "lost"),
    [
        ("Qwen/Qwen2.5-VL-3B-Instruct", False),
        ("Qwen/Qwen3.5-4B", True),
    ],  # whose layers carry states
)
def test_ranks_share_matrices_and_sequences_where_layers_carry_no_states(
    model: str, lost: bool
) -> None:
    flags = f"ppo --pretrain {model} --prompt_data d --data.image_key images"
    shares = "--ds.tensor_parallel_size 2 --ds.ring_attn_size 2"
    translation = of("openrlhf", f"{flags} {shares} --actor.num_gpus_per_node 4")
    assert translation.problem is None
    learner = translation.recipe["learner"]
    shared = {key: learner.get(f"{key}_parallel") for key in ("tensor", "context")}
    assert shared == dict.fromkeys(shared, None if lost else 2)
    names = {option.name for option in translation.draft.missing}
    assert names == ({"ds.tensor_parallel_size", "ds.ring_attn_size"} if lost else set())


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("freeze_vision_tower", ["vision"]),
        ("freeze_vision_model", ["vision"]),
        ("freeze_vision_projection", ["projector"]),
        ("freeze_audio_tower", None),
    ],
)
def test_what_is_frozen_is_in_model_freeze_if_the_run_reads_images(
    name: str, parts: list[str] | None
) -> None:
    rule = freezes()[name]
    run = ImageRun("--x", "m", "model")
    draft = Draft("rl", "s", run)
    rule(draft, name, True, "")
    assert draft.get("model.freeze") == parts
    for images, value in ((run, False), (None, True)):  # off, and a run on text
        draft = Draft("rl", "s", images)
        rule(draft, name, value, "")
        assert draft.values == {}
        assert [option.name for option in draft.needless] == [name]


def test_a_run_on_text_of_a_model_that_reads_images_too_keeps_what_reads_them() -> None:
    words = "sft --model_name_or_path Qwen/Qwen3.5-2B --dataset_name d"
    translation = of("trl", f"{words} --use_peft --load_in_4bit --max_length 2048")
    assert translation.problem is None
    assert translation.recipe["model"]["freeze"] == ["vision", "projector"]
    assert "images" not in translation.recipe["data"]
    assert translation.recipe["model"]["quantize"] == "4bit"
    assert not translation.draft.missing
    translation = of("trl", words.replace("sft", "sft_vlm"))
    assert "freeze" not in translation.recipe["model"]
    assert translation.recipe["data"]["images"] == "images"


def test_text_of_qwen3_5_is_sampled_by_vllm() -> None:
    flags = "ppo --pretrain Qwen/Qwen3.5-2B --prompt_data d --vllm.num_engines 2"
    translation = of("openrlhf", flags)
    assert translation.problem is None
    assert translation.recipe["rollout"]["type"] == "vllm"
    assert not translation.draft.missing
    grpo = "grpo --model_name_or_path Qwen/Qwen3.5-2B --dataset_name d --use_vllm True"
    assert of("trl", grpo).recipe["data"]["max_len"] == 1024  # as without images


def test_a_frozen_language_model_is_lost() -> None:
    draft = Draft("rl", "s", ImageRun("--x", "m", "model"))
    rule = freezes("c.")["c.freeze_language_model"]
    rule(draft, "c.freeze_language_model", False, "")
    assert (draft.missing, draft.values) == ([], {})
    rule(draft, "c.freeze_language_model", True, "")
    assert [option.name for option in draft.missing] == ["c.freeze_language_model"]


def test_a_script_with_rows_of_its_own_does_not_read_others() -> None:
    words = "rloo_vlm --model_name_or_path m --dataset_name other --reward_funcs a.b"
    translation = of("trl", words)
    assert translation.recipe["data"]["path"] == "lmms-lab/multimodal-open-r1-8k-verified"
    assert "dataset_name" in [option.name for option in translation.draft.needless]
    assert any("SYSTEM_PROMPT" in note for note in translation.draft.notes)


def test_a_reader_of_text_is_not_asked_for_images() -> None:
    with pytest.raises(UsageError, match="an agent's world is an environment"):
        of("trl", "python examples/scripts/openenv/carla_vlm.py --model m")
