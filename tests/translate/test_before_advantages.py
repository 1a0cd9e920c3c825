"""What a source does with samples before advantages, and what its older versions do otherwise."""

from postgrad.translate.translate import Translation, translate

OLD = ["ppo", "--pretrain", "m", "--prompt_data", "d", "--reward_pretrain", "r",
       "--n_samples_per_prompt", "4", "--actor_num_gpus_per_node", "1"]  # fmt: skip
NEW = ["ppo", "--actor.model_name_or_path", "m", "--data.prompt_dataset", "d",
       "--reward.model_name_or_path", "r", "--rollout.n_samples_per_prompt", "4",
       "--actor.num_gpus_per_node", "1"]  # fmt: skip
OPEN = ["grpo", "--model_name_or_path", "m", "--dataset_mixer_list", "d", "1.0"]
VERL = ["ppo", "actor_rollout_ref.model.path=m", "data.train_files=d",
        "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4",
        "trainer.n_gpus_per_node=1"]  # fmt: skip
NEMO = ["grpo", "policy.model_name=m", "grpo.max_num_steps=10",
        "grpo.use_dynamic_sampling=true"]  # fmt: skip


def comment(translation: Translation, *place: str) -> str:
    return translation.draft.comments.get(place, "")


def test_filters_judge_the_scores_that_their_source_judges() -> None:
    active = translate("open-instruct", [*OPEN, "--active_sampling", "True"], devices=1)
    assert active.recipe["rollout"]["filter_on"] == "total"
    switch = "algorithm.filter_groups.enable=True"
    for metric, judged in (("acc", None), ("score", None), ("seq_reward", "total"),
                           ("seq_final_reward", "total")):  # fmt: skip
        words = [*VERL, switch, f"algorithm.filter_groups.metric={metric}"]
        assert translate("verl", words).recipe["rollout"].get("filter_on") == judged, metric


def test_open_instruct_s_denominator_without_filtered_groups_is_told() -> None:
    note = "groups of equal scores stay in the denominator"
    default = translate("open-instruct", OPEN, devices=1)
    assert note in comment(default, "algorithm", "type")
    cispo = translate("open-instruct", [*OPEN, "--loss_fn", "cispo"], devices=1)
    assert comment(cispo, "algorithm", "type").startswith(note)
    off = translate("open-instruct", [*OPEN, "--filter_zero_std_samples", "False"], devices=1)
    assert note not in comment(off, "algorithm", "type")


def test_nemo_rl_s_filter_of_single_samples_is_told() -> None:
    note = "whose siblings have equal scores"
    left_out = translate("nemo-rl", [*NEMO, "grpo.use_leave_one_out_baseline=true"], devices=1)
    assert note in comment(left_out, "rollout", "dynamic_sampling")
    with_own_baseline = translate(
        "nemo-rl", [*NEMO, "grpo.use_leave_one_out_baseline=false"], devices=1
    )
    assert with_own_baseline.recipe["rollout"]["dynamic_sampling"] is True
    assert note not in comment(with_own_baseline, "rollout", "dynamic_sampling")


def test_what_openrlhf_computed_otherwise_before_0_11_is_told_of_its_older_options() -> None:
    words = ["--advantage_estimator", "rloo", "--init_kl_coef", "0.1"]
    old = translate("openrlhf", [*OLD, *words])
    kind = comment(old, "algorithm", "type")
    assert "before 0.11 within each micro-batch" in kind
    assert "before 0.8.5 whitened too" in kind
    assert comment(old, "algorithm", "kl_max") == "a token's KL, as there since 0.8.6"
    new = translate("openrlhf", [*NEW, "--algo.advantage.estimator", "rloo",
                                 "--algo.kl.init_coef", "0.1"])  # fmt: skip
    assert comment(new, "algorithm", "type") == "rloo"
    assert comment(new, "algorithm", "kl_max") == "a token's KL, as there"
    assert old.recipe["algorithm"] == new.recipe["algorithm"]


def test_a_target_of_a_kl_in_openrlhf_s_loss_is_lost() -> None:
    translation = translate(
        "openrlhf", [*OLD, "--use_kl_loss", "--init_kl_coef", "0.1", "--kl_target", "0.2"]
    )
    assert "algo.kl.target" in {option.name for option in translation.draft.missing}
    assert "kl_target" not in translation.recipe["algorithm"]


def test_what_an_adaptive_kl_is_read_from_is_told() -> None:
    old = translate("openrlhf", [*OLD, "--init_kl_coef", "0.1", "--kl_target", "0.2"])
    verl = translate("verl", [*VERL, "algorithm.use_kl_in_reward=True",
                              "algorithm.kl_ctrl.type=adaptive"])  # fmt: skip
    for translation in (old, verl):
        assert "averaged over responses" in comment(translation, "algorithm", "kl_target")


def test_openrlhf_s_heads_and_teachers_that_are_others_here_are_told() -> None:
    prm = translate("openrlhf", ["prm", "--pretrain", "m", "--dataset", "d", "--placeholder_token",
                                 "x"])  # fmt: skip
    assert "a head with two labels" in comment(prm, "algorithm", "type")
    kd = translate("openrlhf", ["kd", "--pretrain", "m", "--dataset", "d", "--teacher_model", "t"])
    assert "one token later" in comment(kd, "algorithm", "teacher_coef")


def test_a_prompt_s_own_limit_of_older_openrlhf_drops_what_it_cut_there() -> None:
    translation = translate("openrlhf", [*OLD, "--prompt_max_len", "512"])
    assert any("more than 512 tokens are dropped" in note for note in translation.draft.notes)


def test_verl_s_sft_keeps_the_beginning_of_long_rows() -> None:
    words = ["sft", "model.path=m", "data.train_files=d", "trainer.n_gpus_per_node=1"]
    for cut, note in (("right", "as there"), ("left", "left there")):
        translation = translate("verl", [*words, f"data.truncation={cut}"])
        assert translation.recipe["data"]["on_too_long"] == "truncate"
        assert (
            comment(translation, "data", "on_too_long") == f"{note}: rows keep their beginning here"
        )
