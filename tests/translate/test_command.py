"""`postgrad translate` as it is typed."""

import json
import tomllib

import pytest

from postgrad.cli.main import main
from postgrad.core.errors import UsageError
from postgrad.translate.translate import translate

DPO = ["dpo", "--model_name_or_path", "Qwen/Qwen3-0.6B", "--dataset_name", "org/pairs"]


def test_flags_become_a_recipe_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "trl", *DPO, "--max_steps", "10", "--learning_rate", "5e-7"]) == 0
    written = capsys.readouterr()
    recipe = tomllib.loads(written.out)
    assert (recipe["job"], recipe["steps"], recipe["learner"]["lr"]) == ("preference", 10, 5e-7)
    assert written.err == ""


def test_json_lists_what_has_no_counterpart(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--ds.use_liger_kernel", "--eval.steps", "-1", "--nonsense", "3"]
    stated = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d"]
    assert main(["translate", "openrlhf", "ppo", *stated, *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    missing = {option["name"]: option for option in report["missing"]}
    assert missing["ds.use_liger_kernel"]["value"] is True
    assert "not an option" in missing["nonsense"]["why"]
    assert report["problem"] is None
    assert report["recipe"] == tomllib.loads(report["toml"])


def test_devices_multiply_the_batch_where_the_source_is_silent() -> None:
    more = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2"]
    translation = translate("trl", [*DPO, *more], devices=8)
    assert translation.recipe["batch"] == {"train_batch_size": 64, "micro_train_batch_size": 4}
    assert "per device 4 * accumulation 2 * devices 8" in translation.text
    alone = translate("trl", [*DPO, *more])
    assert alone.recipe["batch"]["train_batch_size"] == 8
    assert any("--devices N" in note for note in alone.draft.notes)


def test_a_source_without_a_model_says_what_the_recipe_lacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["translate", "trl", "sft", "--dataset_name", "org/chats"]) == 0
    assert "not a complete recipe yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("system", "program", "data"),
    [("trl", "grpo", "--dataset_name org/maths --reward_funcs accuracy_reward"),
     ("trl", "rloo", "--dataset_name org/maths --reward_funcs accuracy_reward"),
     ("open-instruct", "grpo", "--dataset_mixer_list org/gsm 1.0")],
)  # fmt: skip
def test_truncated_completions_leave_the_loss_where_they_do_there(
    system: str, program: str, data: str
) -> None:
    flags = [program, "--model_name_or_path", "m", *data.split()]
    translation = translate(system, [*flags, "--mask_truncated_completions", "True"])
    assert translation.problem is None
    assert translation.recipe["algorithm"]["mask_truncated_completions"] is True
    off = translate(system, [*flags, "--mask_truncated_completions", "False"])
    assert "mask_truncated_completions" not in off.recipe["algorithm"]


def test_the_held_out_loss_of_sft_is_evaluated_and_chooses_the_best_checkpoint() -> None:
    sft = ["sft", "--model_name_or_path", "m", "--dataset_name", "org/chats", "--max_steps", "90"]
    best = ["--load_best_model_at_end", "--metric_for_best_model", "eval_loss"]
    translation = translate("trl", [*sft, "--eval_strategy", "steps", "--eval_steps", "30",
                                    "--eval_on_start", "True", *best])  # fmt: skip
    assert translation.problem is None
    held_out = {"split": "test", "every": 30, "at_start": True, "on_too_long": "truncate"}
    assert translation.recipe["eval"] == held_out
    chosen = translation.recipe["checkpoint"]
    assert (chosen["best_metric"], chosen["best_mode"]) == ("eval/loss", "min")
    named = ["--load_best_model_at_end", "--metric_for_best_model", "accuracy"]
    other = translate("trl", [*sft, "--eval_strategy", "steps", "--eval_steps", "30", *named])
    assert "metric_for_best_model" in {option.name for option in other.draft.missing}
    openrlhf = ["sft", "--pretrain", "m", "--dataset", "org/chats", "--eval_dataset", "org/held",
                "--eval_steps", "30", "--max_samples", "1000"]  # fmt: skip
    theirs = translate("openrlhf", openrlhf)
    assert theirs.problem is None
    assert (theirs.recipe["eval"]["path"], theirs.recipe["eval"]["every"]) == ("org/held", 30)


def test_a_pass_rate_from_which_a_prompt_is_learned_retires_its_row() -> None:
    flags = "--model_name_or_path m --dataset_mixer_list org/gsm 1.0 --no_resampling_pass_rate 0.9"
    translation = translate("open-instruct", ["grpo", *flags.split()])
    assert translation.problem is None
    assert translation.recipe["rollout"]["curriculum"] == {"retire_at": 0.9}


def test_an_update_that_does_not_divide_a_step_is_made_to() -> None:
    flags = (
        "--pretrain m --prompt_data d --rollout_batch_size 100 --n_samples_per_prompt 1 "
        "--actor_num_gpus_per_node 1"
    )
    sizes = "--train_batch_size 64 --micro_train_batch_size 4"
    translation = translate("openrlhf", ["ppo", *flags.split(), *sizes.split()])
    assert translation.problem is None
    assert translation.recipe["batch"]["train_batch_size"] == 50
    assert translation.recipe["batch"]["micro_train_batch_size"] == 2
    assert "64 there, which does not divide a step of 100 samples" in translation.text


def test_an_unknown_system_is_told_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean openrlhf"):
        translate("openrhlf", ["sft"])


def test_what_it_trains_has_to_be_said() -> None:
    with pytest.raises(UsageError, match="put the command before it"):
        translate("trl", ["--model_name_or_path", "m"])


def test_local_numbers_of_open_instruct_are_one_learners() -> None:
    flags = (
        "--model_name_or_path m --dataset_mixer_list d 1.0 --local_rollout_batch_size 4 "
        "--number_samples_per_prompt 8 --local_mini_batch_size 16 --actor_num_gpus_per_node 4 8"
    )
    translation = translate("open-instruct", ["grpo_vllm_thread_ray_gtrl", *flags.split()])
    assert translation.problem is None
    batch = translation.recipe["batch"]
    assert batch["rollout_batch_size"] == 4 * 12
    assert batch["n_samples_per_prompt"] == 8
    assert batch["train_batch_size"] == 16 * 12


def test_a_value_that_is_no_number_is_named() -> None:
    with pytest.raises(UsageError, match=r"total_episodes: a number is expected, not 'many'"):
        translate("open-instruct", ["grpo", "--total_episodes", "many"])
    translation = translate("trl", [*DPO, "--weight_decay", "some"])
    assert [(option.name, option.why) for option in translation.draft.missing] == [
        ("weight_decay", "its value cannot be read")
    ]


@pytest.mark.parametrize(
    ("folder", "mirror"),
    [("gs://bucket/states", "gs://bucket/states"), ("/weka/states", "file:///weka/states")],
)
def test_a_folder_that_checkpoints_are_copied_to_is_taken_over(folder: str, mirror: str) -> None:
    words = ["grpo", "--model_name_or_path", "org/base", "--dataset_mixer_list", "org/rows", "1.0"]
    translation = translate("open-instruct", [*words, "--gs_checkpoint_state_dir", folder])
    assert translation.recipe["checkpoint"]["mirror"] == mirror
    verl = ["ppo", "actor_rollout_ref.model.path=org/base", "data.train_files=rows.parquet"]
    translation = translate("verl", [*verl, f"trainer.default_hdfs_dir={folder}"])
    assert translation.recipe["checkpoint"]["mirror"] == mirror
    translation = translate("verl", [*verl, "trainer.default_hdfs_dir=states"])
    assert "trainer.default_hdfs_dir" in {option.name for option in translation.draft.missing}
    assert "mirror" not in translate("verl", verl).recipe["checkpoint"]


@pytest.mark.parametrize(
    ("words", "saved", "revision"),
    [
        ("trl sft --model_revision v1 --push_to_hub --output_dir out/mine", "mine", "v1"),
        (
            "trl sft --push_to_hub --hub_model_id org/x --hub_private_repo --output_dir a",
            "org/x",
            None,
        ),
        ("trl sft --hub_model_id org/x --output_dir a", None, None),
        ("open-instruct sft --push_to_hub --hf_entity me --hf_repo_id x", "me/x", None),
        ("open-instruct sft --hf_entity me --hf_repo_id x --model_revision main", None, None),
        ("open-instruct sft --push_to_hub false --hf_repo_id me/x --model_revision r", None, "r"),
    ],
)
def test_what_goes_to_the_hub_and_comes_from_it_is_taken_over(
    words: str, saved: str | None, revision: str | None
) -> None:
    system, *rest = words.split()
    more = "--model_name_or_path org/base --dataset_name org/rows --per_device_train_batch_size 2"
    translation = translate(system, [*rest, *more.split(), "--max_seq_length", "64"], devices=1)
    assert translation.recipe["checkpoint"].get("push_to_hub") == saved
    assert translation.recipe["checkpoint"].get("push_private", False) == ("private" in words)
    assert translation.recipe["model"].get("revision") == revision
    assert translation.problem is None
