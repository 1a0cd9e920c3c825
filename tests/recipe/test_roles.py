"""Recipes of several roles and of preferences: what is wrong is said before a row is read."""

from collections.abc import Callable
from pathlib import Path

import pytest

from postgrad.core.errors import UsageError
from postgrad.recipe.load import load_recipe, parse_recipe, require_runnable

PAIRS = """job = "{job}"
run_dir = "runs/a"
steps = 10

[model]
path = "some/model"

[data]
path = "pairs.jsonl"

[batch]
train_batch_size = 16
"""
PPO = """job = "rl"
run_dir = "runs/a"
steps = 10

[model]
path = "some/model"

[data]
path = "rows.jsonl"

[[rewards]]
type = "reward_model"

[reward_model.model]
path = "a/reward-model"

[algorithm]
type = "ppo"
kl_coef = 0.1
"""
SFT = """job = "sft"
run_dir = "runs/a"
steps = 10

[model]
path = "some/model"

[data]
path = "rows.jsonl"
[batch]
train_batch_size = 16
"""
LORA = "\n[model.lora]\nrank = 8\n"

REFUSED = {
    "samples to learn from in a job that evaluates alone": (
        SFT + "[rollout]\ndynamic_sampling = true\n",
        'recipe.toml:13: rollout.dynamic_sampling: is of samples that have rewards (job = "rl"): '
        "leave it out",
    ),
    "a replay in a job that evaluates alone": (
        SFT + '[rollout]\nsource = "replay"\n',
        'recipe.toml:13: rollout.source: "replay" is of job = "rl": leave it out',
    ),
    "routers of a reference that is under the policy's adapter": (
        PPO + LORA + '\n[reference.model]\nrouter_dtype = "float32"\n',
        'recipe.toml:25: reference.model.router_dtype: "float32": the reference is the weights '
        'that the policy begins with, which are loaded once, with model.router_dtype = "auto": '
        "leave it out",
    ),
    "a reference of pairs in other bits than the policy that it begins as": (
        PAIRS.format(job="preference").replace(
            'path = "some/model"', 'path = "some/model"\nquantize = "4bit"'
        )
        + LORA
        + '\n[reference.model]\nquantize = "none"\n',
        'recipe.toml:19: reference.model.quantize: "none": the reference is the weights that the '
        'policy begins with, which are loaded once, with model.quantize = "4bit": leave it out',
    ),
    "two warm-ups of the policy": (
        PPO + "\n[learner]\nwarmup_updates = 3\nwarmup_ratio = 0.1\n",
        "warmup_updates = 3 and warmup_ratio = 0.1 both say",
    ),
    "a learning rate of B without an adapter": (
        PPO + "\n[learner]\nloraplus_lr_ratio = 16.0\n",
        "is of an adapter's B, and nothing trains as an adapter: give [model.lora]",
    ),
    "a key of the critic": (
        PPO + "\n[critic.learner]\nlrr = 1e-3\n",
        "recipe.toml:22: unknown key 'critic.learner.lrr': did you mean 'critic.learner.lr'?",
    ),
    "a table of the critic": (
        PPO + "\n[critic.modell]\npath = 'x'\n",
        "unknown key 'critic.modell': did you mean 'critic.model'?",
    ),
    "a key of the adapter": (
        PPO + "\n[model.lora]\nrnk = 8\n",
        "recipe.toml:22: unknown key 'model.lora.rnk': did you mean 'model.lora.rank'?",
    ),
    "a key of the reward model": (
        PPO.replace('path = "a/reward-model"', 'pth = "a/reward-model"'),
        "unknown key 'reward_model.model.pth': did you mean 'reward_model.model.path'?",
    ),
    "a knob of PPO": (
        PPO + "lamb = 0.9\n",
        "unknown key 'algorithm.lamb': did you mean 'algorithm.lam'?",
    ),
    "a knob of DPO": (
        PAIRS.format(job="preference") + '[algorithm]\ntype = "dpo"\nbta = 0.2\n',
        "unknown key 'algorithm.bta': did you mean 'algorithm.beta'?",
    ),
    "a column of pairs": (
        PAIRS.format(job="reward").replace('jsonl"', 'jsonl"\nchosn = "good"'),
        "recipe.toml:10: unknown key 'data.chosn': did you mean 'data.chosen'?",
    ),
    "a reward model that is not named": (
        PPO.replace('[reward_model.model]\npath = "a/reward-model"\n', ""),
        'reward_model.model.path: [[rewards]] of type "reward_model" ask this model: give its',
    ),
    "a reward model in SFT": (
        SFT + '[[rewards]]\ntype = "reward_model"\n',
        'rewards.0.type: "reward_model" is the reward model of an RL job',
    ),
    "rollouts in a reward job": (
        PAIRS.format(job="reward") + "\n[rollout]\nmax_new_tokens = 8\n",
        "recipe.toml:14: unknown key 'rollout': ",
    ),
    "an algorithm of RL in a reward job": (
        PAIRS.format(job="reward") + '[algorithm]\ntype = "dpo"\n',
        "algorithm.type: 'dpo' is not for this job; known: bradley_terry",
    ),
    "an algorithm that needs samples in a preference job": (
        PAIRS.format(job="preference") + '[algorithm]\ntype = "ppo"\n',
        "algorithm.type: 'ppo' is not for this job; known: dpo, ipo, simpo, cpo, wpo, aot, kto, "
        "orpo",
    ),
    "a forward too small for a pair": (
        PAIRS.format(job="reward").replace('jsonl"', 'jsonl"\nmax_len = 512')
        + "micro_train_tokens = 1000\n",
        "recipe.toml:14: batch.micro_train_tokens: 1000 tokens cannot hold a pair of sequences of "
        "data.max_len = 512: at least 1024",
    ),
    "an answer whose reference point is itself": (
        PAIRS.format(job="preference").replace("= 16", "= 1") + '[algorithm]\ntype = "kto"\n',
        "recipe.toml:12: batch.train_batch_size: 1: the reference point of an update is measured "
        "on prompts with the answer of another sample",
    ),
    "a reference that follows adapters": (
        PPO + LORA + "\n[reference]\nrefresh_steps = 5\n",
        "recipe.toml:25: reference.refresh_steps: a reference that follows the policy needs",
    ),
    "an average that follows adapters": (
        PPO + LORA + "\n[reference]\nema_decay = 0.5\n",
        "recipe.toml:25: reference.ema_decay: a reference that follows the policy needs",
    ),
    "a reference in four bits that follows": (
        PPO + '\n[reference]\nrefresh_steps = 5\n[reference.model]\nquantize = "4bit"\n',
        'reference.model.quantize: "4bit" weights are frozen, and this reference follows the',
    ),
    "a reference that follows and that the loss does not read": (
        PAIRS.format(job="preference")
        + '\n[reference]\nema_decay = 0.5\n[algorithm]\ntype = "simpo"\n',
        "recipe.toml:15: reference.ema_decay: nothing reads it: this loss has no reference",
    ),
    "routers that are frozen and adapted": (
        PPO.replace("[data]", 'freeze = ["router"]\n\n[data]', 1)
        + LORA
        + 'targets = ["q_proj", "router"]\n',
        'recipe.toml:8: model.freeze: "router" beside "router" in model.lora.targets',
    ),
    "four bits that would have to train": (
        PAIRS.format(job="reward").replace('model"\n', 'model"\nquantize = "4bit"\n'),
        'recipe.toml:7: model.quantize: "4bit" weights are frozen, so there has to be an adapter '
        "that trains: give [model.lora]",
    ),
    "four bits of a critic that would have to train": (
        PPO + '\n[critic.model]\nquantize = "4bit"\n',
        'recipe.toml:22: critic.model.quantize: "4bit" weights are frozen, so there has to be an '
        "adapter that trains: give [critic.model.lora]",
    ),
    "a critic in a dtype of its own": (
        PPO.replace('some/model"\n', 'some/model"\ndtype = "float32"\n')
        + '\n[critic.model]\ndtype = "bfloat16"\n',
        'recipe.toml:23: critic.model.dtype: "bfloat16": all models of a run compute in '
        'model.dtype = "float32": leave it out',
    ),
    "an adapter of a reward model that does not learn": (
        PPO + "\n[reward_model.model.lora]\nrank = 8\n",
        "recipe.toml:21: reward_model.model.lora: is of models that are trained, and this one is "
        "not: leave it out",
    ),
    "an adapter of a reference whose policy has another": (
        PPO + LORA + "\n[reference.model.lora]\nrank = 4\n",
        "recipe.toml:24: reference.model.lora: is of models that are trained",
    ),
    "frozen parts of a teacher that does not learn": (
        SFT + '[algorithm]\ntype = "distillation"\n'
        '[teacher.model]\npath = "a/teacher"\nfreeze = ["router"]\n',
        "recipe.toml:16: teacher.model.freeze: is of models that are trained",
    ),
    "an engine in another dtype than the four bits that it reads": (
        PPO.replace('some/model"\n', 'some/model"\nquantize = "4bit"\n')
        + LORA
        + '\n[rollout]\ndtype = "float32"\n',
        'rollout.dtype: "float32": the engine reads the policy\'s weights in four bits',
    ),
    "a target that cannot be a layer's name": (
        PPO + '\n[model.lora]\ntargets = [".*proj"]\n',
        "model.lora.targets: '.*proj' is not the end of a layer's name",
    ),
    "a margin that the loss does not know": (
        PAIRS.format(job="reward")
        + '[algorithm]\ntype = "bradley_terry"\nloss = "log_exp"\nmargin = true\n',
        "the log_exp loss has no margin: set loss = 'log_sigmoid', or leave margin out",
    ),
    "one column that is both answers": (
        PAIRS.format(job="reward").replace('jsonl"', 'jsonl"\nchosen = "rejected"'),
        "two of its columns have one name",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named_with_its_place_and_the_way_out(
    case: str, write: Callable[..., Path]
) -> None:
    text, expected = REFUSED[case]
    path = write(text=text)
    with pytest.raises(UsageError) as error:
        load_recipe(path)
    error_lines = str(error.value).replace(f"{path.parent}/", "").splitlines()
    assert len(error_lines) == 1, error_lines
    assert expected in error_lines[0]


def test_a_critic_takes_what_it_leaves_out_from_policy_and_reward_model(
    write: Callable[..., Path],
) -> None:
    text = PPO + LORA + "\n[learner]\nlr = 1e-5\n[critic.learner]\nwarmup_updates = 3\n"
    recipe = load_recipe(write(text=text))
    critic = recipe.critic  # pyright: ignore[reportAttributeAccessIssue]
    assert critic.model.path == "a/reward-model"
    assert critic.model.lora.rank == 8
    assert (critic.learner.lr, critic.learner.warmup_updates) == (1e-5, 3)
    assert recipe.learner.warmup_updates == 0
    reference = recipe.reference  # pyright: ignore[reportAttributeAccessIssue]
    assert reference.model.path == "some/model"


def test_a_reference_may_state_that_what_trains_the_policy_is_not_for_it(
    write: Callable[..., Path],
) -> None:
    trained = PPO.replace('some/model"\n', 'some/model"\ngradient_checkpointing = true\n')
    stated = trained + "\n[reference.model]\ngradient_checkpointing = false\n"
    reference = load_recipe(write(text=stated)).reference  # pyright: ignore[reportAttributeAccessIssue]
    assert reference.model.gradient_checkpointing is False


def test_a_critic_that_says_how_it_warms_up_does_not_take_over_the_other_way(
    write: Callable[..., Path],
) -> None:
    text = PPO + "\n[learner]\nwarmup_ratio = 0.3\n[critic.learner]\nwarmup_updates = 3\n"
    recipe = load_recipe(write(text=text))
    critic = recipe.critic  # pyright: ignore[reportAttributeAccessIssue]
    assert (critic.learner.warmup_updates, critic.learner.warmup_ratio) == (3, 0.0)
    both = load_recipe(write(text=PPO + "\n[learner]\nwarmup_ratio = 0.3\n"))
    assert both.critic.learner.warmup_ratio == 0.3  # pyright: ignore[reportAttributeAccessIssue]
    assert parse_recipe(recipe.dump()) == recipe


def test_a_critic_takes_over_the_start_of_a_warm_up_unless_it_has_no_warm_up(
    write: Callable[..., Path],
) -> None:
    start = "\n[learner]\nwarmup_updates = 5\nwarmup_start_ratio = 0.1\n"
    for updates, inherited in (("3", 0.1), ("0", None)):
        text = PPO + start + f"[critic.learner]\nwarmup_updates = {updates}\n"
        critic = load_recipe(write(text=text)).critic  # pyright: ignore[reportAttributeAccessIssue]
        assert critic.learner.warmup_start_ratio == inherited


def test_a_critic_that_says_how_its_rate_falls_does_not_take_over_the_other_way(
    write: Callable[..., Path],
) -> None:
    text = PPO + '\n[learner]\nschedule = "linear"\ndecay_ratio = 0.3\n[critic.learner]\n'
    decay_lines = ("decay_updates = 3", 'schedule = "constant"', 'schedule = "cosine"')
    decays = {
        line: load_recipe(write(text=text + line)).critic.learner  # pyright: ignore[reportAttributeAccessIssue]
        for line in decay_lines
    }
    resolved_decays = [
        (decays[line].decay_updates, decays[line].decay_ratio) for line in decay_lines
    ]
    assert resolved_decays == [(3, 0.0), (0, 0.0), (0, 0.3)]


def test_four_bits_under_an_adapter_are_taken_over_by_a_critic(write: Callable[..., Path]) -> None:
    text = PPO.replace('some/model"\n', 'some/model"\nquantize = "4bit"\n') + LORA
    recipe = load_recipe(write(text=text))
    assert recipe.critic.model.quantize == "4bit"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("role", ["reference", "critic", "reward_model"])
def test_the_model_of_another_stage_cannot_be_trained_from_alone(
    role: str, write: Callable[..., Path]
) -> None:
    recipe = load_recipe(write(text=PPO), [f"--{role}.model.path", "@earlier"])
    with pytest.raises(UsageError, match=rf"{role}\.model\.path = '@earlier'.*pipeline\.toml"):
        require_runnable(recipe)
