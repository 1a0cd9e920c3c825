"""What scores a sample: verifiers, an environment, and recipes in which nothing does."""

from collections.abc import Callable
from pathlib import Path

import pytest

from postgrad.core.errors import UsageError
from postgrad.recipe.load import load_recipe, recipe_from_json, with_overrides
from postgrad.recipe.recipe import RLRecipe
from postgrad.recipe.scored import rates_mean_nothing

Write = Callable[..., Path]
REWARDS = '[[rewards]]\ntype = "gsm8k"\n'
GAME = '[environment]\ntype = "guess_number"\n'
TOOLS = '[environment]\ntype = "tools"\ntools = ["calculator"]\n'


def test_an_environment_is_a_component_of_the_reward_beside_the_verifiers(write: Write) -> None:
    recipe = load_recipe(write((REWARDS, REWARDS + GAME + "weight = 0.5\nmax_turns = 3\n")))
    assert recipe.reward_components == ["gsm8k", "environment"]
    assert recipe.environment_weight == 0.5
    assert recipe.environment is not None
    assert recipe.environment.sets[0].max_turns == 3
    assert recipe_from_json(recipe.dump()) == recipe


def test_an_environment_with_rewards_needs_no_verifier(write: Write) -> None:
    recipe = load_recipe(write((REWARDS, GAME)), ["--eval.component", "environment"])
    assert recipe.reward_components == ["environment"]


def test_a_reward_that_is_called_as_an_environments_is_told_with_the_line_of_its_name(
    write: Write,
) -> None:
    path = write((REWARDS, f'{GAME}{REWARDS}{REWARDS}name = "environment"\n'))
    with pytest.raises(UsageError) as refused:
        load_recipe(path)
    line = path.read_text().splitlines().index('name = "environment"') + 1
    expected = f"{path}:{line}: rewards.1.name: the rewards of [environment]"
    assert str(refused.value).startswith(expected)


def test_an_environment_without_rewards_does(write: Write) -> None:
    assert load_recipe(write((REWARDS, REWARDS + TOOLS))).reward_components == ["gsm8k"]
    with pytest.raises(UsageError, match="nothing scores the samples"):
        load_recipe(write((REWARDS, TOOLS)))


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ('[environment]\ntype = "gess_number"', "12: environment.type: no environment is called "
         "'gess_number': did you mean 'guess_number'"),
        ("[environment]\nmax_turns = 3", "12: environment.type is missing"),
        (GAME + "miss_rewards = 0.0", "did you mean 'miss_reward'"),
        (GAME + "miss_reward = 0.5", "environment.miss_reward: 0.5 does not fit 'guess_number': "
         "input should be less"),
        (GAME + 'miss_reward = "0"', "environment.miss_reward: '0' does not fit 'guess_number': "
         "input should be a valid number"),
        (GAME + "max_turns = 0", "environment.max_turns = 0"),
        ('[environment]\ntype = "postgrad.core.errors:UsageError"', "is not a subclass of"),
        (GAME + '[[rewards]]\ntype = "gsm8k"\nname = "environment"', "give this another `name`"),
    ],
)  # fmt: skip
def test_a_section_that_is_wrong_is_told_before_anything_runs(
    section: str, why: str, write: Write
) -> None:
    text = section if "[[rewards]]" in section else section + "\n" + REWARDS
    with pytest.raises(UsageError) as error:
        load_recipe(write((REWARDS, text + "\n")))
    assert why.split(": ", 1)[-1] in str(error.value)


JUDGE = f'{REWARDS}[[rewards]]\ntype = "judge"\nmodel = "m"\n'
VLLM = f'{REWARDS}[rollout]\ntype = "vllm"\n[rollout.vllm]\n'


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (REWARDS.replace("gsm8k", "mine.py:score"),
         ":16: rewards.0.type: verifier 'mine.py:score' names a file: name its module, as "
         "'mine:score' with the folder that it begins in on PYTHONPATH: "
         "`PYTHONPATH=. postgrad ...` if that is the current one"),
        (REWARDS.replace("gsm8k", "a/mine:score"), "name its module, as 'a.mine:score'"),
        (REWARDS.replace("gsm8k", "mine:"), "no verifier is called 'mine:': your own is 'package."),
        (REWARDS.replace("gsm8k", "a:b:c"), "no verifier is called 'a:b:c': your own is 'package."),
        ('[rewards]\ntype = "gsm8k"\n', ":15: rewards = {'type': 'gsm8k'}: several are wanted: "
         "each begins with [[rewards]], in two brackets"),
        (f'{REWARDS}datasets = "rows"\n', ":17: rewards.0.datasets = 'rows': a list is wanted: "
         '["rows"]'),
        (f'{REWARDS}when = ["a"]\n', ":17: rewards.0.when = ['a']: a table of keys is wanted"),
        (f"{REWARDS}[{GAME.replace(']', ']]', 1)}", "environment = [{'type': 'guess_number'}]: one "
         "table alone is wanted: it begins with [environment], in one bracket"),
        (JUDGE, ":17: rewards.1.base_url: 'judge' needs it, and it is missing"),
        (f'{JUDGE}base_url = "http://a/v1"\nsandbox = true\n', ":21: rewards.1.sandbox: 'judge' "
         "asks a server, and sandbox = true has no network: leave it out"),
        (f"{VLLM}engine_args = {{ max-num-batched-tokens = 9 }}\n", "'max-num-batched-tokens': "
         "here vLLM's arguments have underscores: 'max_num_batched_tokens'"),
    ],
)  # fmt: skip
def test_a_common_slip_is_told_with_what_to_write(
    sections: str, message: str, write: Write
) -> None:
    with pytest.raises(UsageError) as refused:
        load_recipe(write((REWARDS, sections)))
    assert message in str(refused.value)


def test_what_is_wrong_in_one_of_several_tables_is_told_with_the_line_of_its_key(
    write: Write,
) -> None:
    tables = """[[rewards]]
type = "gsm8k"

[[rewards]]
name = "b"
wieght = 2.0
type = "gsm8k"

[[rewards]]
weight = 0.5
type = "nonsense"

[[rewards]]
type = "regex"
pattern = 3

[[rewards]]
weight = 0.5
name = "b"
type = "gsm8k"

[environment]
[[environment.sets]]
name = "sums"
type = "tools"
tools = ["calculator"]
max_turnz = 3

[[environment.sets]]
name = "words"
type = "tolls"
"""
    path = write((REWARDS, tables), ('path = "rows', 'environment = "sums"\npath = "rows'))
    with pytest.raises(UsageError) as refused:
        load_recipe(path)
    recipe = path.read_text().splitlines()
    problems = [
        line.removeprefix(f"{path}:").split(": ")[:2] for line in str(refused.value).split("\n")
    ]
    assert [(recipe[int(line) - 1], key) for line, key in problems] == [
        ('name = "b"', "rewards.4.name"),
        ("wieght = 2.0", "rewards.1.wieght"),
        ('type = "nonsense"', "rewards.2.type"),
        ("pattern = 3", "rewards.3.pattern"),
        ("max_turnz = 3", "environment.sets.0.max_turnz"),
        ('type = "tolls"', "environment.sets.1.type"),
    ]
    assert int(problems[0][0]) > int(problems[1][0])  # the second of the two names


VOTES = ("every = 5", "every = 5\nn_samples = 4\nmaj_at = [4]")


def test_an_environment_reads_no_answer_to_vote_on(write: Write) -> None:
    for sections in (GAME, REWARDS + GAME):
        with pytest.raises(UsageError, match=r"maj_at: votes on answers, and 'environment' reads"):
            load_recipe(write(VOTES, (REWARDS, sections)), ["--eval.component", "environment"])
    with pytest.raises(UsageError, match=r"maj_at: votes on answers, and 'environment' reads"):
        load_recipe(write(VOTES, (REWARDS, GAME)))
    assert load_recipe(write(VOTES, (REWARDS, REWARDS + GAME))).eval.maj_at == (4,)


def test_two_rewards_of_one_name_are_told_with_the_file_where_there_are_votes_too(
    write: Write,
) -> None:
    with pytest.raises(UsageError, match=r"recipe\.toml.*2 of \[\[rewards\]\] are called 'gsm8k'"):
        load_recipe(write(VOTES, (REWARDS, REWARDS + REWARDS)))


LENGTH = f'{REWARDS}\n[[rewards]]\ntype = "relative_length"\n'


def test_a_reward_that_compares_the_samples_of_a_prompt_needs_two(write: Write) -> None:
    alone = [(REWARDS, LENGTH), ("n_samples_per_prompt = 8", "n_samples_per_prompt = 1")]
    with pytest.raises(UsageError) as refused:
        load_recipe(write(*alone, ('type = "grpo"\nclip_high = 0.28', 'type = "reinforce_pp"')))
    assert str(refused.value).endswith(
        ':19: rewards.1.type: "relative_length" compares the samples of a prompt, and gives 0 '
        "where there is one: raise batch.n_samples_per_prompt to at least 2, or leave it out"
    )
    assert load_recipe(write((REWARDS, LENGTH))).rewards[1].type == "relative_length"
    penalised = 'type = "reinforce_pp"\nlength_penalty = { output_tokens = 0.25 }'
    stated = ('type = "grpo"\nclip_high = 0.28', penalised)
    with pytest.raises(UsageError, match="length_penalty: compares the samples of a prompt"):
        load_recipe(write(stated, alone[1]))
    load_recipe(write(stated))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (
            [(REWARDS, LENGTH), ("every = 5", 'every = 5\ncomponent = "relative_length"')],
            "component",
        ),
        ([(REWARDS, '[[rewards]]\ntype = "relative_length"\n')], "n_samples"),
    ],
)
def test_a_lone_sample_is_not_judged_by_what_compares_samples(
    changes: list[tuple[str, str]], key: str, write: Write
) -> None:
    with pytest.raises(UsageError, match=f"eval.{key}.*'relative_length' would judge which answer"):
        load_recipe(write(*changes))
    both = ["--eval.n_samples", "4", "--eval.correct_at", "0.5"]
    assert load_recipe(write(*changes), both).rewards[-1].type == "relative_length"


@pytest.mark.parametrize(
    "other", ["chat_template_kwargs = { thinking = true }", 'chat_template = "chatml"']
)
def test_an_environment_speaks_through_one_template_with_one_set_of_variables(
    other: str, write: Write
) -> None:
    path = write((REWARDS, REWARDS + GAME), ('split = "test"', f'split = "test"\n{other}'))
    with pytest.raises(UsageError, match=rf"{other.split()[0]}:.*have those of .data."):
        load_recipe(path)


SETS = """[environment]
max_turns = 3

[[environment.sets]]
type = "guess_number"

[[environment.sets]]
type = "tools"
name = "sums"
tools = ["calculator"]
max_turns = 2
"""
BY_GAME = ('path = "rows.jsonl"', 'path = "rows.jsonl"\nenvironment = "guess_number"')


def test_environments_take_what_they_leave_out_from_their_section(write: Write) -> None:
    recipe = load_recipe(write((REWARDS, REWARDS + SETS), BY_GAME))
    assert recipe.environment is not None
    assert recipe.environment.names == ("guess_number", "sums")
    assert [environment.max_turns for environment in recipe.environment.sets] == [3, 2]
    assert recipe.environment.sets[1].extra_settings == {"tools": ["calculator"]}
    assert recipe.reward_components == ["gsm8k", "environment"]
    assert recipe.eval.sets[0].data.environment == "guess_number"
    assert recipe_from_json(recipe.dump()) == recipe


def test_an_override_of_the_section_reaches_each_environment(write: Write) -> None:
    recipe = load_recipe(write((REWARDS, REWARDS + SETS), BY_GAME))
    changed = with_overrides(recipe, ["--environment.step_seconds", "5"])
    assert changed.environment is not None
    assert [environment.step_seconds for environment in changed.environment.sets] == [5.0, 5.0]
    alone = load_recipe(write((REWARDS, REWARDS + TOOLS)))
    more = with_overrides(alone, ["--environment.longest_result", "9"])
    assert more.environment is not None
    assert more.environment.sets[0].extra_settings["longest_result"] == 9


@pytest.mark.parametrize(
    ("section", "why"),
    [
        (SETS, "data.environment: it is left out, and there are 2 environments: say one of"),
        (SETS.replace("sums", "guess_number"), "2 of [[environment.sets]] are called"),
        (SETS.replace('"sums"', '"none"'), "'none' is what data.environment says for none"),
        (SETS + "weight = 0.5", "give `weight` in [environment], for all of them"),
        (SETS + "tool = 1", "environment.sets.1.tool: 'tools' has no such setting"),
        (SETS.replace("max_turns = 2", "max_turns = 0"), "environment.sets.1.max_turns = 0"),
        (SETS.replace('type = "tools"', ""), "environment.sets.1.type is missing"),
        (SETS.replace("max_turns = 3", "tools = []"), "unknown key 'environment.tools'"),
        ("[environment]\nsets = []", "environment.sets"),
        ("", "data.environment: 'guess_number': the recipe has no [environment]"),
    ],
)
def test_what_is_wrong_with_several_environments_is_told_with_its_key(
    section: str, why: str, write: Write
) -> None:
    changes = [(REWARDS, f"{REWARDS}{section}\n")]
    if "left out" not in why:
        changes.append(BY_GAME)
    with pytest.raises(UsageError) as error:
        load_recipe(write(*changes))
    assert why in str(error.value)


def rewards(*lines: str) -> str:
    return "".join(f"[[rewards]]\n{line}\n" for line in lines)


OVERLONG = 'type = "overlong"\nbuffer = 8'


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        (rewards(OVERLONG, 'type = "gsm8k"'),
         "eval.correct_at: 'overlong' would judge which answers are right, and its best score, 0, "
         "is below correct_at = 1: let eval.component name 'gsm8k'"),
        (rewards('type = "gsm8k"\nwhen = { level = 1 }', OVERLONG.replace("8", "600")),
         "buffer = 600 is more than max_new_tokens"),  # wrong settings are told, and no more
        (rewards('type = "stop_properly"\nstopped = 0.5', 'type = "gsm8k"'),
         "its best score, 0.5"),
    ],
)  # fmt: skip
def test_what_judges_answers_can_call_one_right(sections: str, why: str, write: Write) -> None:
    with pytest.raises(UsageError) as error:
        load_recipe(write((REWARDS, sections)))
    assert why in str(error.value)


REMOTE = 'type = "remote"\nurl = "http://127.0.0.1:9"'


@pytest.mark.parametrize(
    ("sections", "nothing"),
    [
        (rewards(REMOTE), True),
        (rewards(REMOTE, 'type = "gsm8k"'), True),  # the first one judges
        (rewards(OVERLONG), True),
        (rewards('type = "gsm8k"', REMOTE), False),
        (rewards(REMOTE, 'type = "gsm8k"') + "[eval]\ncomponent = 'gsm8k'\n", False),
        (rewards(REMOTE) + "[eval]\ncorrect_at = 0.5\n", False),
        (rewards('type = "mine:Verifier"'), False),
    ],
)  # fmt: skip
def test_rates_mean_nothing_where_only_scales_judge(
    sections: str, nothing: bool, write: Write
) -> None:
    sections, _, stated = sections.partition("[eval]\n")
    recipe = load_recipe(write((REWARDS, sections), ("every = 5", f"every = 5\n{stated}")))
    assert isinstance(recipe, RLRecipe)
    assert rates_mean_nothing(recipe.eval, recipe.rewards) == nothing


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("correct_at = 2.0", "eval.correct_at: 'gsm8k' would judge"),
        ('component = "overlong"', "eval.component: 'overlong' would judge"),
    ],
)
def test_what_is_stated_can_be_reached(key: str, why: str, write: Write) -> None:
    path = write((REWARDS, REWARDS + rewards(OVERLONG)), ("every = 5", f"every = 5\n{key}"))
    with pytest.raises(UsageError, match=why):
        load_recipe(path)


@pytest.mark.parametrize(
    "sections",
    [
        rewards(OVERLONG),  # for the mean of its scores
        rewards('type = "gsm8k"', OVERLONG),
        rewards('type = "gsm8k"\ndatasets = ["rows.jsonl"]', 'type = "f1"', OVERLONG),
        rewards('type = "stop_properly"\nstopped = 1.0'),
        rewards('type = "my_rewards:score"', OVERLONG),
    ],
)
def test_rewards_of_which_one_can_call_an_answer_right_are_evaluated(
    sections: str, write: Write
) -> None:
    recipe = load_recipe(write((REWARDS, sections)))
    assert recipe.evaluates_answers
    assert recipe_from_json(recipe.dump()) == recipe  # as a resume reads it


def test_what_a_reward_model_does_not_read_is_refused_before_it_is_loaded(write: Write) -> None:
    asks = '[[rewards]]\ntype = "reward_model"\nspecial_tokens = true\n'
    model = '[reward_model.model]\npath = "some/model"\n'
    why = r"rewards\.0\.special_tokens: the run's own reward model gives this score"
    with pytest.raises(UsageError, match=why):
        load_recipe(write((REWARDS, asks + model)))


@pytest.mark.parametrize(
    ("section", "place"),
    [
        (rewards('type = "gsm8k"\nweight = 0'), "rewards"),
        (rewards('type = "gsm8k"\nweight = 0.0', 'type = "math"\nweight = 0'), "rewards"),
        (rewards('type = "gsm8k"\nweight = 0', 'type = "format"\nmultiply = true'), "rewards"),
        (rewards('type = "gsm8k"\nweight = 0\ngate = true'), "rewards"),
        (rewards('type = "gsm8k"\nweight = 0') + GAME + "weight = 0\n", "rewards"),
        (GAME + "weight = 0\n", "environment.weight"),
    ],
)
def test_rewards_of_which_none_has_a_weight_are_refused(
    section: str, place: str, write: Write
) -> None:
    flags = [] if "gsm8k" in section else ["--eval.component", "environment"]
    with pytest.raises(UsageError, match="all weights are 0") as refused:
        load_recipe(write((REWARDS, section)), flags)
    assert f"{place}: all weights are 0" in str(refused.value)


@pytest.mark.parametrize(
    "section",
    [
        rewards('type = "gsm8k"\nweight = 0', 'type = "math"\nweight = -1'),
        rewards(
            'type = "gsm8k"\nweight = 0',
            'type = "format"\ngate = true\nweight = 0\ngate_value = -1',
        ),
        rewards('type = "gsm8k"\nweight = 0') + GAME,
    ],
)
def test_a_reward_that_is_only_logged_stands_beside_others(section: str, write: Write) -> None:
    assert load_recipe(write((REWARDS, section))).reward_components


def test_replies_teach_without_rewards_and_only_an_environment_has_some(write: Write) -> None:
    logged = rewards('type = "gsm8k"\nweight = 0') + GAME + "weight = 0\n"
    observed = ["--algorithm.observation_coef", "0.05"]
    assert load_recipe(write((REWARDS, logged)), observed).reward_components
    with pytest.raises(UsageError, match=r"algorithm\.observation_coef: .* no \[environment\]"):
        load_recipe(write(), observed)


def test_the_weights_of_gdpo_are_its_own_and_a_teacher_needs_none(write: Write) -> None:
    logged = rewards('type = "gsm8k"\nweight = 0', 'type = "math"\nweight = 0')
    gdpo = ["--algorithm.type", "gdpo", "--algorithm.component_weights"]
    assert load_recipe(write((REWARDS, logged)), [*gdpo, "{gsm8k = 1, math = 0}"])
    with pytest.raises(UsageError, match=r"algorithm\.component_weights: all weights are 0"):
        load_recipe(write(), [*gdpo, "{gsm8k = 0}"])
    taught = ["--algorithm.type", "on_policy_distillation", "--teacher.model.path", "org/teacher"]
    assert load_recipe(write((REWARDS, logged)), taught)
