"""What a recipe answers about its job, so that nobody has to ask which class it is of."""

from pathlib import Path
from typing import Any

import pytest

from postgrad.core.errors import UsageError
from postgrad.recipe.recipe import PreferenceRecipe, Recipe, RewardRecipe, RLRecipe, SFTRecipe
from postgrad.rollout.settings import EnvironmentSets, EnvironmentSettings

QUESTIONS: Any = {"path": "rows.jsonl", "max_len": 100}
PAIRS: Any = {"path": "pairs.jsonl", "max_len": 100}
HELD_OUT: Any = {"path": "held_out.jsonl"}
MODEL: Any = {"path": "some/model"}
VERIFIED: Any = ({"type": "gsm8k"},)


def sft(**sections: Any) -> SFTRecipe:
    return SFTRecipe(run_dir="runs/a", steps=1, model=MODEL, data=QUESTIONS, **sections)


def rl(**sections: Any) -> RLRecipe:
    sections = {"rewards": VERIFIED, "algorithm": {"type": "grpo"}, **sections}
    rollout = {"max_new_tokens": 60, "temperature": 0.7, **sections.pop("rollout", {})}
    return RLRecipe(
        run_dir="runs/a", steps=1, model=MODEL, data=QUESTIONS, rollout=rollout, **sections
    )


def reward(**sections: Any) -> RewardRecipe:
    return RewardRecipe(run_dir="runs/a", steps=1, model=MODEL, data=PAIRS, **sections)


def preference(kind: str, **knobs: Any) -> PreferenceRecipe:
    algorithm: Any = {"type": kind, **knobs}
    return PreferenceRecipe(run_dir="runs/a", steps=1, model=MODEL, data=PAIRS, algorithm=algorithm)


def places(tables: dict[Any, Any]) -> list[str]:
    return [".".join(place) for place in tables]


@pytest.mark.parametrize(
    ("recipe", "kind", "sequences", "answers", "least"),
    [
        (sft(), "conversation", 1, 1, 100),
        (rl(batch={"n_samples_per_prompt": 4}), "prompt", 1, 4, 100),
        (reward(), "pair", 2, 2, 200),
        (preference("dpo"), "pair", 2, 2, 200),
        (preference("kto"), "labelled", 1, 1, 200),
    ],
    ids=lambda value: value.job if hasattr(value, "job") else "",
)
def test_a_recipe_says_what_its_samples_are(
    recipe: Recipe, kind: str, sequences: int, answers: int, least: int
) -> None:
    assert recipe.row_kind == kind
    assert recipe.sequences_per_sample == sequences
    assert recipe.answers_per_prompt == answers
    assert recipe.min_micro_tokens == least


def test_only_rl_learns_from_what_it_samples_and_at_its_temperature() -> None:
    others = [sft(), reward(), preference("dpo")]
    assert [job_recipe.trains_on_rollouts for job_recipe in [rl(), *others]] == [
        True,
        False,
        False,
        False,
    ]
    assert [job_recipe.logprob_temperature for job_recipe in [rl(), *others]] == [
        0.7,
        1.0,
        1.0,
        1.0,
    ]
    assert [job_recipe.sampled_tokens for job_recipe in [rl(), *others]] == [60, None, None, None]
    assert [job_recipe.trained_role for job_recipe in others] == [
        "policy",
        "reward_model",
        "policy",
    ]


def test_an_sft_job_samples_answers_only_where_something_scores_them() -> None:
    held_out: Any = {**HELD_OUT, "loss": True}
    assert (sft().samples_answers, sft().measures_loss) == (False, False)
    by_loss = sft(eval=HELD_OUT)
    assert (by_loss.samples_answers, by_loss.measures_loss) == (False, True)
    scored = sft(eval=HELD_OUT, rewards=VERIFIED, rollout={"max_new_tokens": 60})
    assert (scored.samples_answers, scored.measures_loss) == (True, False)
    both = sft(eval=held_out, rewards=VERIFIED, rollout={"max_new_tokens": 60})
    assert (both.samples_answers, both.measures_loss) == (True, True)
    assert (rl().samples_answers, rl().measures_loss) == (True, False)
    paired = reward(eval=HELD_OUT)
    assert (paired.samples_answers, paired.measures_loss) == (False, False)


def test_jobs_on_pairs_have_no_rollout_section() -> None:
    assert rl().rollout_settings == rl().rollout
    assert sft().rollout_settings == sft().rollout
    assert reward().rollout_settings is None
    assert preference("dpo").rollout_settings is None


def test_a_recipe_lists_the_tables_of_its_roles_and_which_of_them_the_job_loads() -> None:
    assert places(sft().model_tables) == places(reward().model_tables) == ["model"]
    with_critic = rl(
        algorithm={"type": "ppo", "kl_coef": 0.1},
        rewards=({"type": "reward_model"},),
        reward_model={"model": {"path": "some/reward-model"}},
    )
    roles = ["model", "reference.model", "critic.model", "reward_model.model"]
    assert places(rl().model_tables) == [*roles, "teacher.model"]
    assert places(rl().loaded_models) == ["model"]
    assert (rl().asks_reward_model, with_critic.asks_reward_model) == (False, True)
    assert places(with_critic.loaded_models) == roles
    assert places(with_critic.learner_tables) == ["learner", "critic.learner"]
    assert places(with_critic.trained_models) == ["model", "critic.model"]
    assert with_critic.trained_models["critic", "model"].path == "some/reward-model"


def test_a_preference_loads_its_reference_only_where_its_loss_reads_one() -> None:
    assert places(preference("dpo").loaded_models) == ["model", "reference.model"]
    assert places(preference("simpo").loaded_models) == ["model"]
    assert places(preference("simpo").trained_models) == ["model"]


def test_rewards_whose_environment_cannot_be_built_have_no_names() -> None:
    unknown = EnvironmentSettings.model_construct(type="no_such_game")
    environment = EnvironmentSets.model_construct(sets=(unknown,))
    recipe = rl().model_copy(update={"environment": environment})
    assert recipe.reward_components is None
    with pytest.raises(UsageError, match="no environment is called"):
        _ = recipe.environment_weight


@pytest.mark.parametrize(
    "place", ["runs/a", "runs/a/mirror", "b/../runs/a/init/mirror", "saved/mirror"]
)
def test_a_mirror_is_no_part_of_what_it_holds(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    for root in (f"file://{tmp_path}", f"local://{tmp_path}/link", "file://."):
        with pytest.raises(UsageError, match=r"checkpoint\.mirror: .* would hold copies of itself"):
            sft(checkpoint={"ckpt_path": "saved", "mirror": f"{root}/{place}"})
    for mirror in (f"file://{tmp_path}/runs/apart", "s3://runs/a/mirror"):
        sft(checkpoint={"ckpt_path": "saved", "mirror": mirror})
