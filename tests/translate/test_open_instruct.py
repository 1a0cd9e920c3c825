"""Open-Instruct's options whose meaning depends on their sign, their range, or the loss."""

from postgrad.translate.translate import Translation, translate

GRPO = ["grpo", "--model_name_or_path", "m", "--dataset_mixer_list", "d", "1.0"]


def of(*flags: str) -> Translation:
    found = translate("open-instruct", [*GRPO, *flags])
    assert found.problem is None
    return found


def test_a_non_stop_penalty_replaces_the_reward() -> None:
    gate = {"type": "stop_properly", "gate": True, "gate_at": 0.0}
    found = of("--non_stop_penalty", "--non_stop_penalty_value", "-2.0").recipe["rewards"]
    assert found[-1] == {**gate, "gate_value": -2.0}
    assert of("--non_stop_penalty", "True").recipe["rewards"][-1] == {**gate, "gate_value": 0.0}
    off = of("--non_stop_penalty", "False", "--non_stop_penalty_value", "-2.0")
    assert [one["type"] for one in off.recipe["rewards"]] == ["math"]


def test_centred_advantages_are_not_divided_whatever_the_loss() -> None:
    cispo = of("--loss_fn", "cispo", "--clip_lower", "0.2", "--clip_higher", "0.3")
    assert cispo.recipe["algorithm"]["std_norm"] is False
    assert cispo.recipe["algorithm"]["clip_high"] == 0.3
    assert "clip_low" not in cispo.recipe["algorithm"]
    standard = of("--loss_fn", "cispo", "--advantage_normalization_type", "standard")
    assert "std_norm" not in standard.recipe["algorithm"]


def test_a_cap_of_importance_weights_is_tis_and_0_is_none() -> None:
    cap = "--truncated_importance_sampling_ratio_cap"
    found = of(cap, "3.0").recipe["algorithm"]
    assert (found["correction"], found["correction_high"]) == ("tis", 3.0)
    assert "correction" not in of(cap, "0.0").recipe["algorithm"]


def test_a_final_rate_belongs_to_linear_schedules() -> None:
    linear = of("--final_lr_ratio", "0.1", "--lr_scheduler_type", "linear", "--warmup_ratio", "0.1")
    assert linear.recipe["learner"]["min_lr_ratio"] == 0.1
    assert linear.recipe["learner"]["warmup_ratio"] == 0.1
    cosine = of("--final_lr_ratio", "0.1", "--lr_scheduler_type", "cosine")
    assert "min_lr_ratio" not in cosine.recipe["learner"]


def test_all_checkpoints_kept_is_said_to_be_another_number_here() -> None:
    found = of("--keep_last_n_checkpoints", "-1")
    assert [one.name for one in found.draft.missing] == ["keep_last_n_checkpoints"]
