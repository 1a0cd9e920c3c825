"""prime-rl: what the cases do not have."""

from pathlib import Path
from typing import Any, get_args

import pytest

from postgrad.core.errors import UsageError
from postgrad.recipe.load import parse_recipe
from postgrad.rollout.environments.tool_formats import ToolFormat
from postgrad.translate.common import TOOL_FORMATS
from postgrad.translate.draft import toml_value
from postgrad.translate.translate import Translation, sources, translate

SOURCE = """
[[orchestrator.train.source]]
[orchestrator.train.source.env.taskset]
id = "sums"
"""


def of(tmp_path: Path, text: str = "", /, **options: Any) -> Translation:
    """The translation of a config with one taskset, and of options by dotted names."""
    path = tmp_path / "rl.toml"
    lines = "".join(f"{name} = {toml_value(value)}\n" for name, value in options.items())
    path.write_text(lines + SOURCE + text, "utf-8")
    return translate("prime-rl", [str(path)])


def missing(translation: Translation) -> set[str]:
    return {option.name for option in translation.draft.missing}


def test_samples_are_eight_steps_ahead_where_nothing_is_said(tmp_path: Path) -> None:
    recipe = of(tmp_path, max_steps=10, **{"orchestrator.group_size": 4}).recipe
    assert recipe["rollout"]["max_staleness"] == 8
    assert recipe["algorithm"]["old_logprobs"] == "sampled"
    assert recipe["cluster"]["rollout"] == {"workers": 1}


def test_filters_that_prime_rl_replays_are_of_the_built_in_engine(tmp_path: Path) -> None:
    options = {"orchestrator.group_size": 4, "orchestrator.train.sampling.top_p": 0.9}
    (option,) = of(tmp_path, max_steps=10, **options).draft.missing
    assert option.name == "orchestrator.train.sampling.top_p"
    assert "keep_sampling_mask = true" in option.why


@pytest.mark.parametrize("steps", [0, 1, 32])
def test_max_off_policy_steps_bounds_staleness(tmp_path: Path, steps: int) -> None:
    options = {"orchestrator.group_size": 4, "orchestrator.max_off_policy_steps": steps}
    translation = of(tmp_path, max_steps=10, **options)
    assert translation.recipe["rollout"]["max_staleness"] == steps
    assert translation.problem is None
    assert missing(translation) == set()


@pytest.mark.parametrize(
    ("stated", "model", "frozen"),
    [
        (True, "Qwen/Qwen3-30B-A3B", ["router"]),
        (False, "Qwen/Qwen3-30B-A3B", None),
        (True, "Qwen/Qwen3-0.6B", None),
    ],
)
def test_routers_are_frozen_where_a_model_may_have_some(
    stated: bool, model: str, frozen: list[str] | None, tmp_path: Path
) -> None:
    options = {"orchestrator.group_size": 4, "trainer.model.freeze_moe_router": stated}
    translation = of(tmp_path, max_steps=10, **{"model.name": model}, **options)
    assert translation.problem is None
    assert translation.recipe["model"].get("freeze") == frozen
    assert missing(translation) == set()


@pytest.mark.parametrize(
    ("parser", "tool_format"),
    [("hermes", "hermes"), ("openai", "harmony"), ("kimi_k2", "kimi"), ("auto", None)],
)
def test_a_parser_of_tool_calls_is_the_environments_format(
    parser: str, tool_format: str | None, tmp_path: Path
) -> None:
    assert {None, *get_args(ToolFormat)} == set(TOOL_FORMATS.values())
    for name in ("inference.vllm.tool_call_parser", "orchestrator.renderer.tool_parser"):
        translation = of(tmp_path, max_steps=10, **{"orchestrator.group_size": 4, name: parser})
        assert translation.problem is None
        assert translation.recipe["environment"].get("tool_format") == tool_format
        assert missing(translation) == set()
        unknown = of(tmp_path, max_steps=10, **{"orchestrator.group_size": 4, name: "xlam"})
        assert missing(unknown) == {name}


@pytest.mark.parametrize(
    ("renderer", "thoughts"),
    [
        ({}, "reasoning_content"),
        ({"name": "qwen3"}, "reasoning_content"),
        ({"name": "default"}, None),
        ({"name": "default", "reasoning_parser": "none"}, None),
        ({"name": "default", "reasoning_parser": "think"}, "reasoning_content"),
    ],
)
def test_tasks_read_answers_without_thoughts_where_the_renderer_takes_them_out(
    renderer: dict[str, str], thoughts: str | None, tmp_path: Path
) -> None:
    options = {f"orchestrator.renderer.{key}": value for key, value in renderer.items()}
    options |= {"inference.vllm.reasoning_parser": "qwen3"}
    translation = of(tmp_path, max_steps=10, **{"orchestrator.group_size": 4}, **options)
    assert translation.problem is None
    assert translation.recipe["environment"].get("thoughts") == thoughts
    assert missing(translation) == set()


def test_groups_of_one_sample_are_a_problem_that_the_recipe_names(tmp_path: Path) -> None:
    problem = of(tmp_path, max_steps=10).problem
    assert problem is not None
    assert "n_samples_per_prompt" in problem


def test_an_option_that_nobody_knows_is_listed_with_the_nearest_name(tmp_path: Path) -> None:
    translation = of(tmp_path, **{"orchestrator.max_of_policy_steps": 2, "trainer.optim.decay": 0})
    whys = {option.name: option.why for option in translation.draft.missing}
    assert "not an option that this translator knows" in whys["trainer.optim.decay"]
    assert "orchestrator" in whys["orchestrator.max_of_policy_steps"]


def test_nodes_of_training_and_inference_become_ranks_and_engines(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "deployment.type": "multi_node", "deployment.num_train_nodes": 2,
        "deployment.num_infer_nodes": 1, "deployment.num_infer_replicas": 3,
        "inference.vllm.tensor_parallel_size": 4, "trainer.model.cp": 4,
        "orchestrator.group_size": 4, "max_steps": 10,
    }  # fmt: skip
    recipe = of(tmp_path, **options).recipe
    assert (recipe["learner"]["ranks"], recipe["cluster"]["policy"]["machines"]) == (16, 2)
    assert recipe["cluster"]["rollout"]["workers"] == 6
    assert recipe["learner"]["context_parallel"] == 4


SEVERAL = """
[[orchestrator.train.source]]
name = "my words"
ratio = 0.25
group_size = 4
env = { taskset = { id = "words" }, agent = { timeout = { rollout = 90 } } }
[[orchestrator.train.source]]
group_size = 8
env = { taskset = { id = "sums" } }
[[orchestrator.eval.source]]
name = "first"
env = { taskset = { id = "words" } }
[[orchestrator.eval.source]]
name = "first"
interval = 7
env = { taskset = { id = "puzzles", hard = true } }
"""


def test_each_taskset_is_an_environment_and_each_source_a_dataset_that_names_it(
    tmp_path: Path,
) -> None:
    options = {"orchestrator.eval.interval": 5, "orchestrator.group_size": 4, "max_steps": 10}
    translation = of(tmp_path, SEVERAL, **options)
    assert translation.problem is None
    recipe = translation.recipe
    assert [(e["name"], e["taskset"]) for e in recipe["environment"]["sets"]] == [
        ("sums", "sums"), ("my-words", "words"), ("first", "puzzles"),
    ]  # fmt: skip
    assert recipe["environment"]["sets"][1]["episode_seconds"] == 90.0
    assert recipe["environment"]["sets"][2]["settings"] == {"hard": True}
    rows = [
        (d["task"]["taskset"], d["environment"], d.get("weight")) for d in recipe["data"]["sets"]
    ]
    assert rows == [("sums", "sums", None), ("words", "my-words", 0.25), ("sums", "sums", None)]
    held_out = [(d["name"], d["environment"]) for d in recipe["eval"]["sets"]]
    assert held_out == [("first", "my-words"), ("first-2", "first")]
    assert recipe["eval"]["every"] == 5
    # all sources have one number of samples, and all sets of [eval] are evaluated together
    assert missing(translation) == {
        "orchestrator.train.source.2.group_size", "orchestrator.eval.source.1.interval",
    }  # fmt: skip


def test_sources_of_one_taskset_share_its_limits_and_no_other_is_lost_in_silence(
    tmp_path: Path,
) -> None:
    text = "".join(
        f"""
[[orchestrator.train.source]]
env = {{ taskset = {{ id = "sums" }}, agent = {{ timeout = {{ rollout = {seconds} }} }} }}
"""
        for seconds in (60, 90, 60)
    )
    translation = of(tmp_path, text, max_steps=10, **{"orchestrator.group_size": 4})
    assert translation.recipe["environment"]["episode_seconds"] == 60.0
    assert missing(translation) == {"orchestrator.train.source.2.env.agent.timeout.rollout"}


def test_another_taskset_is_held_out_alone(tmp_path: Path) -> None:
    text = """
[[orchestrator.eval.source]]
env = { taskset = { id = "words" } }
"""
    recipe = of(tmp_path, text, max_steps=10, **{"orchestrator.group_size": 4}).recipe
    assert recipe["data"]["environment"] == "sums"
    assert recipe["eval"]["environment"] == "words"
    assert "sets" not in recipe["eval"]


def test_an_evaluation_has_its_filters(tmp_path: Path) -> None:
    text = """
[[orchestrator.eval.source]]
env = { taskset = { id = "words" } }
sampling = { temperature = 0.6, top_p = 0.95, top_k = -1, min_p = 0.1 }
"""
    translation = of(tmp_path, text, max_steps=10, **{"orchestrator.group_size": 4})
    sampled = translation.recipe["eval"]
    assert (sampled["temperature"], sampled["top_p"], sampled["min_p"]) == (0.6, 0.95, 0.1)
    assert sampled.get("top_k", 0) == 0
    assert missing(translation) == set()


def test_each_source_of_an_evaluation_has_its_own_samples(tmp_path: Path) -> None:
    text = """
[[orchestrator.eval.source]]
name = "aime"
group_size = 32
sampling = { temperature = 0.6, top_p = 0.95, max_completion_tokens = 900 }
env = { taskset = { id = "words" } }
[[orchestrator.eval.source]]
name = "math"
num_examples = 500
env = { taskset = { id = "puzzles" } }
[[orchestrator.eval.source]]
name = "hard"
group_size = 32
sampling = { temperature = 0.6, top_p = 0.9, max_completion_tokens = 800 }
env = { taskset = { id = "puzzles", hard = true } }
"""
    options = {"orchestrator.group_size": 4, "orchestrator.eval.group_size": 2, "seq_len": 1024}
    translation = of(tmp_path, text, max_steps=10, **options)
    assert translation.problem is None
    sampled = parse_recipe(translation.recipe).eval.samplings
    assert [(s.n_samples, s.temperature, s.top_p, s.max_new_tokens) for s in sampled] == [
        (32, 0.6, 0.95, 900), (2, 1.0, 1.0, 900), (32, 0.6, 0.9, 800),
    ]  # fmt: skip
    sets = translation.recipe["eval"]["sets"]
    assert [set(entry) & {"n_samples", "top_p"} for entry in sets] == [
        set(), {"n_samples", "top_p"}, {"top_p"},
    ]  # fmt: skip
    assert missing(translation) == set()


def test_evaluation_without_a_source_is_none(tmp_path: Path) -> None:
    translation = of(tmp_path, **{"orchestrator.eval.interval": 5})
    assert missing(translation) == {"orchestrator.eval.interval"}
    assert "eval" not in translation.recipe


def test_a_teacher_behind_a_server_grades_samples(tmp_path: Path) -> None:
    options = {
        "orchestrator.algo.type": "opd",
        "orchestrator.algo.teacher.base_url": "http://localhost:8001/v1",
        "orchestrator.algo.teacher.name": "teacher",
        "max_steps": 10,
    }
    translation = of(tmp_path, **options)
    assert translation.problem is None
    assert translation.recipe["algorithm"]["type"] == "on_policy_distillation"
    assert translation.recipe["teacher"]["server"]["model"] == "teacher"


def test_self_distillation_has_the_policy_for_a_teacher_and_a_hint_of_the_demonstration(
    tmp_path: Path,
) -> None:
    options = {"orchestrator.algo.type": "opsd", "orchestrator.algo.demo_key": "solution"}
    translation = of(tmp_path, max_steps=10, **options)
    assert translation.problem is None
    assert missing(translation) == set()
    algorithm = translation.recipe["algorithm"]
    assert (algorithm["type"], algorithm["graded_by"]) == ("on_policy_distillation", "policy")
    assert "<demonstration>\n{solution}\n" in translation.recipe["data"]["hint"]
    assert "teacher" not in translation.recipe
    stated = {"orchestrator.algo.template": "See {demonstration}."}
    own_hint = of(tmp_path, max_steps=10, **options, **stated)
    assert own_hint.recipe["data"]["hint"] == "See {solution}."


@pytest.mark.parametrize(
    ("stated", "zeros", "lost"),
    [
        ({}, True, set[str]()),
        ({"trainer.loss.adv_tau": 2.0}, True, {"trainer.loss.adv_tau"}),
        ({"trainer.loss.adv_tau": 1.0}, True, set[str]()),
        ({"orchestrator.train.filter_zero_advantages": False}, False, set[str]()),
        # no advantages that could be 0; and its teacher's server is another entry
        ({"orchestrator.algo.type": "opd"}, False, set[str]()),
    ],
)
def test_what_a_loss_does_beside_its_settings_is_told(
    stated: dict[str, Any], zeros: bool, lost: set[str], tmp_path: Path
) -> None:
    translation = of(tmp_path, max_steps=10, **{"orchestrator.group_size": 4, **stated})
    comment = translation.draft.comments.get(("algorithm", "aggregation"), "")
    assert ("advantage is 0" in comment) == zeros
    assert missing(translation) == lost


@pytest.mark.parametrize(
    ("stated", "bounds", "drift"),
    [
        ({}, (None, None), 0.001),
        ({"dppo_mask_low": 0.1, "dppo_mask_high": 0.3, "kl_tau": 0.0}, (0.1, 0.3), None),
        ({"dppo_mask_low": 5.0, "kl_tau": 0.01}, (1.0, None), 0.01),
        ({"type": "ipo", "ipo_threshold": 0.15}, (0.15, 0.15), 0.001),
    ],
)
def test_masks_and_the_penalty_of_the_loss_are_carried(
    stated: dict[str, Any], bounds: tuple[float | None, ...], drift: float | None, tmp_path: Path
) -> None:
    options = {f"trainer.loss.{key}": value for key, value in stated.items()}
    translation = of(tmp_path, max_steps=10, **{"orchestrator.group_size": 4, **options})
    assert translation.problem is None
    knobs = translation.recipe["algorithm"]
    assert (knobs["clip_by"], knobs["old_logprobs"]) == ("probability", "sampled")
    assert (knobs.get("clip_low"), knobs.get("clip_high")) == bounds
    assert knobs.get("drift_coef") == drift
    assert not missing(translation)


@pytest.mark.parametrize(
    ("stated", "penalty"),
    [
        ({}, None),
        ({"type": "linear"}, {"output_tokens": 0.25, "input_tokens": 0.1, "turns": 0.1}),
        ({"num_output_tokens_weight": 0.0}, {"input_tokens": 0.1, "turns": 0.1}),
        (
            {"num_output_tokens_weight": 1, "num_input_tokens_weight": 0, "num_turns_weight": 0.0},
            {"output_tokens": 1.0},
        ),
    ],
)
def test_a_length_penalty_is_relative_to_the_group_here_too(
    stated: dict[str, Any], penalty: dict[str, float] | None, tmp_path: Path
) -> None:
    options = {f"orchestrator.algo.length_penalty.{key}": value for key, value in stated.items()}
    translation = of(tmp_path, max_steps=10, **{"orchestrator.group_size": 4, **options})
    assert translation.problem is None
    assert translation.recipe["algorithm"].get("length_penalty") == penalty
    assert not missing(translation)


@pytest.mark.parametrize(
    ("roles", "coefficient", "lost"),
    [
        ({}, 0.1, False),  # of tools
        ({"user": 0.05}, 0.05, False),
        ({"user": 0.05, "tool": 0.2}, 0.2, True),
    ],
)
def test_replies_are_predicted_with_the_weight_of_their_roles(
    tmp_path: Path, roles: dict[str, float], coefficient: float, lost: bool
) -> None:
    options = {f"orchestrator.algo.roles.{role}.alpha": alpha for role, alpha in roles.items()}
    translation = of(tmp_path, **{"orchestrator.algo.type": "echo", **options})
    algorithm = translation.recipe["algorithm"]
    assert (algorithm["type"], algorithm["observation_coef"]) == ("dr_grpo", coefficient)
    assert missing(translation) == ({"orchestrator.algo.roles.*.alpha"} if lost else set())


def test_a_filter_of_replies_is_lost_with_its_reason(tmp_path: Path) -> None:
    options = {"orchestrator.algo.type": "echo", "orchestrator.algo.filter.import_path": "a.b"}
    (lost,) = of(tmp_path, **options).draft.missing
    assert lost.name == "orchestrator.algo.filter.import_path"
    assert "all tokens of a reply count" in lost.why


def test_an_algorithm_and_a_loss_that_are_not_here_are_lost(tmp_path: Path) -> None:
    options = {"orchestrator.algo.type": "rae", "trainer.loss.import_path": "mine.loss"}
    options["trainer.loss.type"] = "custom"
    translation = of(tmp_path, **options)
    assert missing(translation) >= {"orchestrator.algo.type", "trainer.loss.import_path"}
    assert "clip_by" not in translation.recipe["algorithm"]


def test_a_harness_that_is_a_program_is_lost(tmp_path: Path) -> None:
    options = {"id": "bash", "runtime": "modal"}
    text = f"""
[orchestrator.train.source.env.agent]
harness = {{ id = "{options["id"]}" }}
runtime = {{ type = "{options["runtime"]}" }}
"""
    place = "orchestrator.train.source.0.env.agent"
    assert missing(of(tmp_path, text)) == {f"{place}.harness.id", f"{place}.runtime.type"}


def test_a_run_that_reads_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="have not been tried with any"):
        of(tmp_path, **{"model.vlm.vision_encoder_attr": "model.visual"})


def test_a_model_that_could_read_images_plays_its_tasks_on_text(tmp_path: Path) -> None:
    sizes = {"orchestrator.batch_size": 64, "orchestrator.group_size": 8}
    translation = of(tmp_path, max_steps=10, **{"model.name": "Qwen/Qwen3.5-4B", **sizes})
    assert translation.problem is None
    assert translation.recipe["cluster"] == {"type": "ray", "rollout": {"workers": 1}}
    assert translation.recipe["model"]["freeze"] == ["vision", "projector"]
    assert translation.recipe["rollout"]["type"] == "vllm"


def test_a_config_of_another_program_says_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sft.toml"
    path.write_text("max_steps = 3\n", "utf-8")
    with pytest.raises(UsageError, match="what does it train"):
        translate("prime-rl", [str(path)])
    with pytest.raises(UsageError, match='sft: write a recipe of job = "sft"'):
        translate("prime-rl", ["sft", str(path)])
    assert sources("prime-rl", ["rl", str(path)]).commands[0].options == {"max_steps": 3}


def test_offloaded_activations_are_inputs_of_layers_in_the_hosts_memory(tmp_path: Path) -> None:
    group = {"orchestrator.group_size": 4}
    for offloading in ({}, {"max_inflight_activations": 5}):
        translation = of(
            tmp_path, max_steps=10, **group, **{"trainer.model.ac_offloading": offloading}
        )
        assert translation.recipe["model"]["gradient_checkpointing"] == "offload"
        assert missing(translation) == set()
    assert of(tmp_path, max_steps=10, **group).recipe["model"]["gradient_checkpointing"] is True


def test_checkpoints_that_are_kept_for_ever_are_kept_here(tmp_path: Path) -> None:
    words = {"ckpt.interval": 20, "ckpt.keep_last": 2}
    translation = of(tmp_path, max_steps=100, **words, **{"ckpt.keep_interval": 60})
    saves = translation.recipe["checkpoint"]
    assert [saves[key] for key in ("save_steps", "max_ckpt_num", "keep_steps")] == [20, 2, 60]
    assert not [option for option in translation.draft.missing if "ckpt" in option.name]
    some = of(tmp_path, max_steps=100, **words, **{"ckpt.keep_interval": 50})
    assert some.recipe["checkpoint"]["keep_steps"] == 100  # of 50 and 100 the latter alone is saved
    assert "every 50 there, as far as they are saved" in some.text
