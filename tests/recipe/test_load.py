"""Recipes: every problem of a file at once, each with its line and the way out."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.algorithms.rloo import RLOO
from postgrad.core.errors import UsageError
from postgrad.recipe.compare import compare
from postgrad.recipe.lines import KeyPath
from postgrad.recipe.load import (
    load_recipe,
    parse_recipe,
    recipe_from_json,
    require_runnable,
    with_overrides,
)
from postgrad.recipe.overrides import Override
from postgrad.recipe.recipe import RLRecipe, SFTRecipe

Write = Callable[..., Path]
ROOT = Path(__file__).parent.parent.parent
NAMES = ("gsm8k_sft", "gsm8k_grpo", "hh_reward", "quickstart/sft", "quickstart/rl")
SHIPPED = [ROOT / "recipes" / f"{name}.toml" for name in NAMES]


def places(table: Any, place: KeyPath = ()) -> Iterator[KeyPath]:
    """Every place of a resolved recipe."""
    entries = table.items() if isinstance(table, dict) else enumerate(table)
    for key, inner in entries:
        yield (*place, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*place, key))


RESOLVED = {path: load_recipe(path).dump() for path in SHIPPED}
PLACES = [(path, place) for path, recipe in RESOLVED.items() for place in places(recipe)]
NUMBERS = st.integers(-1, 2**70) | st.floats() | st.integers(0, 64).map(lambda n: n / 64)
ANYTHING = st.recursive(
    NUMBERS
    | st.text(max_size=4)
    | st.booleans()
    | st.sampled_from(["@sft", "a:b", "reasoning-gym:"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=3,
)


def refused(path: Path, *overrides: str) -> list[str]:
    """The lines of the message, without the folder."""
    with pytest.raises(UsageError) as error:
        load_recipe(path, overrides)
    return str(error.value).replace(f"{path.parent}/", "").splitlines()


def test_a_recipe_has_its_defaults_written_out(write: Write) -> None:
    recipe = load_recipe(write())
    assert isinstance(recipe, RLRecipe)
    assert recipe.algorithm.model_dump()["clip_high"] == 0.28
    assert recipe.learner.lr == 1e-6
    assert recipe.geometry().samples_per_step == 128


@pytest.mark.parametrize(
    "algorithm",
    ['correction = "tis"', 'old_logprobs = "sampled"', "off_policy_threshold = 0.1"],
)
def test_with_sampling_masks_filters_go_with_every_correction(write: Write, algorithm: str) -> None:
    kept = "[rollout]\ntop_p = 0.9\nkeep_sampling_mask = true"
    recipe = load_recipe(write(("clip_high = 0.28", f"{algorithm}\n{kept}")))
    assert isinstance(recipe, RLRecipe)
    assert recipe.rollout.keep_sampling_mask


@pytest.mark.parametrize(
    ("teacher", "key"),
    [
        ({"server": {"base_url": "http://localhost:1/v1"}, "model": {"path": None}}, "server"),
        ({"model": {"path": "another"}, "align": "text"}, "align"),
    ],
)
def test_a_teacher_of_whole_vocabularies_does_not_go_with_sampling_masks(
    write: Write, teacher: dict[str, Any], key: str
) -> None:
    raw = load_recipe(write()).model_dump()
    raw["algorithm"], raw["teacher"] = {"type": "on_policy_distillation"}, teacher
    raw["rollout"] = {"top_k": 5, "keep_sampling_mask": True}
    message = f"rollout.keep_sampling_mask: with teacher.{key}: this teacher's logprobs"
    with pytest.raises(UsageError, match=message):
        parse_recipe(raw)


VOTES_ON_FORMAT = 'every = 5\nn_samples = 4\nmaj_at = [4]\n\n[[rewards]]\ntype = "format"'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("clip_high = 0.28", "clip_hihg = 0.28"),
            "recipe.toml:20: unknown key 'algorithm.clip_hihg': "
            "did you mean 'algorithm.clip_high'?",
        ),
        (
            (
                'type = "grpo"\nclip_high = 0.28',
                'type = "grpo"\ncorrection = "tis"\n[rollout]\ntop_p = 0.9\ntop_k = 5',
            ),
            "recipe.toml:20: algorithm.correction: with rollout.top_p and rollout.top_k samples",
        ),
        (
            ("clip_high = 0.28", "clip_high = 0.28\n[rollout]\nmax_staleness = 4"),
            "recipe.toml:22: rollout.max_staleness: 4 trains on samples of older weights, and "
            "nothing corrects for it",
        ),
        (
            ("clip_high = 0.28", 'old_logprobs = "sampled"\ncorrection = "icepop"'),
            'recipe.toml:20: algorithm.old_logprobs: "sampled" clips the ratio to the sampler',
        ),
        (
            ("clip_high = 0.28", "rejection = { token = [0.5, 2.0] }\n[rollout]\ntop_k = 5"),
            "recipe.toml:20: algorithm.rejection: with rollout.top_k samples",
        ),
        (
            ("clip_high = 0.28", 'correction = "tis"\n[rollout]\nregex = "a+"'),
            "recipe.toml:20: algorithm.correction: with rollout.regex samples",
        ),
        (
            ("clip_high = 0.28", "second_moment = 0.04\n[rollout]\ntop_p = 0.9"),
            "recipe.toml:20: algorithm.second_moment: with rollout.top_p samples come from",
        ),
        (
            ("clip_high = 0.28", 'old_logprobs = "sampled"\n[rollout]\nregex = "a+"'),
            'recipe.toml:20: algorithm.old_logprobs: "sampled" with rollout.regex: samples',
        ),
        (
            ("clip_high = 0.28", 'clip_high = 0.28\n[rollout]\nregex = "(a"'),
            "recipe.toml:22: rollout.regex: no grammar: at 1(8): invalid regex",
        ),
        (
            ("clip_high = 0.28", 'clip_high = 0.28\n[rollout]\njson_schema = "{"'),
            "recipe.toml:22: rollout.json_schema: no grammar",
        ),
        (
            ("clip_high = 0.28", "clip_high = 0.28\n[rollout]\nregex = 'a'\nlark = 'start: \"a\"'"),
            "rollout: give one grammar, not regex and lark",
        ),
        (
            (
                "clip_high = 0.28",
                'correction = "tis"\ncorrection_with_filters = true\n[rollout]\ntype = "vllm"\n'
                'max_staleness = 1\nregex = "a"',
            ),
            "recipe.toml:25: rollout.regex: with rollout.max_staleness = 1: vLLM begins a grammar",
        ),
        (
            ("clip_high = 0.28", 'old_logprobs = "sampled"\n[rollout]\nmin_p = 0.1'),
            'recipe.toml:20: algorithm.old_logprobs: "sampled" with rollout.min_p: samples',
        ),
        (
            ("clip_high = 0.28", "clip_high = 0.28\n[rollout]\nin_flight_updates = false"),
            "recipe.toml:22: rollout.in_flight_updates: is of samples that are under way",
        ),
        (
            ("clip_high = 0.28", "clip_high = 0.28\n[rollout]\nkeep_sampling_mask = true"),
            "recipe.toml:22: rollout.keep_sampling_mask: keeps the tokens that top_p, top_k and "
            "min_p leave, and none of them is on: set one of them",
        ),
        (
            (
                "clip_high = 0.28",
                'clip_high = 0.28\n[rollout]\nregex = "a+"\nkeep_sampling_mask = true',
            ),
            "recipe.toml:23: rollout.keep_sampling_mask: keeps the tokens that top_p, top_k and "
            "min_p leave, and none of them is on, and rollout.regex leaves too many",
        ),
        (
            (
                "clip_high = 0.28",
                'clip_high = 0.28\n[rollout]\ntype = "vllm"\ntop_p = 0.9\n'
                "keep_sampling_mask = true",
            ),
            'recipe.toml:24: rollout.keep_sampling_mask: with rollout.type = "vllm", whose samples',
        ),
        (
            ('path = "rows.jsonl"', 'pth = "rows.jsonl"'),
            "recipe.toml:9: unknown key 'data.pth': did you mean 'data.path'?",
        ),
        (
            ("every = 5", "evry = 5"),
            "recipe.toml:13: unknown key 'eval.evry': did you mean 'eval.every'?",
        ),
        (
            ('run_dir = "runs/a"', 'run_dri = "runs/a"'),
            "recipe.toml:2: unknown key 'run_dri': did you mean 'run_dir'?",
        ),
        (
            ("steps = 10", "steps = 10\nlr = 1e-5"),
            "recipe.toml:4: unknown key 'lr': did you mean 'learner.lr'?",
        ),
        (
            ("steps = 10", "steps = 10\nlearning_rate = 1e-5"),
            "recipe.toml:4: unknown key 'learning_rate': did you mean 'learner.lr'?",
        ),
        (
            ("every = 5", 'every = 5\ncompletion = "text"'),
            "recipe.toml:14: unknown key 'eval.completion': did you mean 'eval.answer'?",
        ),
        (
            ("every = 5", "every = 5\nmax_new_tokens = 9999"),
            "leaves no room for a prompt in 1024 tokens: lower eval.max_new_tokens, or raise data",
        ),
        (
            ('type = "grpo"', ""),
            "recipe.toml:18: algorithm.type: missing; it is one of grpo, dr_grpo, ",
        ),
        (
            ('type = "grpo"', "type = 3"),
            "recipe.toml:19: algorithm.type: 3 is no name; it is one of grpo, dr_grpo, ",
        ),
        (
            ('type = "grpo"', 'type = "gpro"'),
            "recipe.toml:19: algorithm.type: no algorithm is called 'gpro': did you mean 'grpo'?",
        ),
        (
            ("steps = 10", 'steps = "10"'),
            "recipe.toml:3: steps = '10': input should be a valid integer",
        ),
        (("steps = 10", "steps = 0"), "recipe.toml:3: steps = 0: input should be greater than"),
        (
            ("steps = 10", "steps = 10\nepochs = 1.0"),
            "recipe.toml:4: epochs: steps and epochs are both stated",
        ),
        (
            ("n_samples_per_prompt = 8", "n_samples_per_prompt = 8\ntrain_batch_size = 48"),
            "recipe.toml:25: batch.train_batch_size: 128 samples of a step",
        ),
        (
            ("n_samples_per_prompt = 8", "n_samples_per_prompt = 1"),
            "recipe.toml:24: batch.n_samples_per_prompt: 1 is too few for a baseline",
        ),
        (
            (
                'type = "grpo"',
                'type = "grpo"\nkl_in = "reward"\nkl_coef = 0.1\nkl_target = 0.1\nkl_horizon = 25',
            ),
            "algorithm.kl_horizon: 25 samples are too few: a step of 128 samples changes "
            "algorithm.kl_coef by up to 102%, and could make it 0 or negative: more than 25.6",
        ),
        (
            ('type = "gsm8k"', 'type = "gms8k"'),
            "no verifier is called 'gms8k': did you mean 'gsm8k'?",
        ),
        (('job = "rl"', 'job = "rll"'), "recipe.toml:1: job = 'rll': did you mean 'rl'?"),
        (
            ('job = "rl"\n', ""),
            'job is missing: say job = "sft" or "reward" or "preference" or "rl" at the top',
        ),
        (('path = "some/model"\n', ""), "no weights are named: give path, or [model.init]"),
        (
            ("[batch]", "[learner]\nranks = 4\n[batch]"),
            "recipe.toml:23: learner.ranks: 4 ranks need a cluster, on one machine too: --cluster",
        ),
        (
            ("[batch]", "[rollout]\nmax_new_tokens = 1024\n[batch]"),
            "recipe.toml:23: rollout.max_new_tokens: 1024 leaves no room for a prompt",
        ),
        (
            ("[batch]", "[rollout]\ntemperature = 0.0\n[batch]"),
            "gives the same greedy answer in all samples of a prompt",
        ),
        (
            ("[batch]", '[rollout]\nsource = "replay"\n[batch]'),
            'source = "replay" needs the run directory whose samples are read',
        ),
        (
            (
                "[batch]",
                '[rollout]\nsource = "replay"\nreplay_path = "a"\ndynamic_sampling = true\n[batch]',
            ),
            "recipe.toml:25: rollout.dynamic_sampling: samples nothing in a replay",
        ),
        (
            (
                "[batch]",
                '[rollout]\nsource = "replay"\nreplay_path = "a"\n'
                "[rollout.curriculum]\nretire_at = 1.0\n[batch]",
            ),
            "rollout.curriculum: samples nothing in a replay",
        ),
        (
            ("[batch]", "[batch]\nmicro_train_tokens = 100"),
            "100 tokens cannot hold a sequence of data.max_len = 1024",
        ),
        (('path = "rows.jsonl"', 'path = "rows.jsonl"\nsets = 1'), "data.sets"),
        (("every = 5", "every = 5\npass_at = [1, 4]"), "pass_at = [1, 4] needs numbers from 1 to"),
        (
            ("every = 5", "every = 5\nmaj_at = [4]"),
            "maj_at = [4] needs numbers from 2 to n_samples",
        ),
        (
            ('every = 5\n\n[[rewards]]\ntype = "gsm8k"', VOTES_ON_FORMAT),
            "eval.maj_at: votes on answers, and 'format' reads none",
        ),
        (("every = 5", 'every = 5\ncomponent = "math"'), "no reward is called 'math'"),
        (
            ("[batch]", '[rollout]\ndynamic_sampling = true\nfilter_on = "math"\n[batch]'),
            "rollout.filter_on: no reward is called 'math'; known: gsm8k, total",
        ),
        (("[batch]", "[learner]\nlr = inf\n[batch]"), "learner.lr = inf: input should be a finite"),
        (
            ('path = "rows.jsonl"', 'path = "rows.jsonl"\ntask = { words = [1, nan] }'),
            "recipe.toml:10: data.task.words.1: infinity and NaN are no values for a recipe",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line_and_the_way_out(
    change: tuple[str, str], message: str, write: Write
) -> None:
    lines = refused(write(change))
    assert any(message in line for line in lines), lines


def test_several_problems_are_one_message_with_a_line_each(write: Write) -> None:
    lines = refused(
        write(("steps = 10", "steps = -1"), ("clip_high = 0.28", "clip_hi = 0.28")),
        "--learner.lrr",
        "1",
    )
    assert len(lines) == 3
    assert any(line.startswith("recipe.toml:3: steps") for line in lines)
    assert any(line.startswith("recipe.toml:20: unknown key") for line in lines)
    assert any(line.startswith("--learner.lrr 1: unknown key") for line in lines)


def test_what_is_no_toml_and_what_is_not_there_is_told(write: Write, tmp_path: Path) -> None:
    assert "is not TOML" in refused(write(("[data]", "[data")))[0]
    assert "no recipe at recipes.toml; did you mean recipe.toml?" in refused(
        tmp_path / "recipes.toml"
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gsm8k_gpro", "did you mean gsm8k_grpo?"),
        ("7b/dpo_lra.toml", "did you mean 7b/dpo_lora?"),
        ("nothing_like_it.toml", "`postgrad recipes` lists those that ship"),
    ],
)
def test_a_recipe_that_is_not_there_is_told_with_those_that_ship(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(hint)):
        load_recipe(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("steps = 10", "steps = 10\nsteps = 11"),
            "the key is there twice: remove one (at line 4,",
        ),
        (("steps = 10", "steps = \u201c10\u201d"), ": 'steps = \u201c10\u201d'"),
        (("steps = 10", "steps: 10"), ": 'steps: 10'"),
    ],
)
def test_a_line_that_is_no_toml_is_shown(
    write: Write, change: tuple[str, str], message: str
) -> None:
    (line,) = refused(write(change))
    assert message in line
    assert line.endswith(change[1].split("\n")[-1] + "'")


def test_lines_are_right_in_lists_and_texts_over_several_lines(write: Write) -> None:
    path = write(
        ('[[rewards]]\ntype = "gsm8k"', '[[rewards]]\ntype = "gsm8k"\n\n[[rewards]]\nweight = "1"'),
        ('split = "test"', 'split = "test"\nsystem = """two\nlines"""'),
    )
    lines = refused(path)
    assert any(line.startswith("recipe.toml:21: rewards.1.weight = '1'") for line in lines), lines
    assert any("rewards.1.type is missing" in line for line in lines), lines


def test_flags_win_over_the_file(write: Write) -> None:
    recipe = load_recipe(
        write(),
        [
            "--learner.lr", "1e-4",
            "--data.split=train[:5]",
            "--rewards.0.weight", "2.5",
            "--algorithm.type", "rloo",
            "--algorithm.clip_high", "0.3",
            "--epochs", "2",
            "--eval.greedy", "true",
        ],
    )  # fmt: skip
    assert isinstance(recipe, RLRecipe)
    assert recipe.learner.lr == 1e-4
    assert recipe.data.split == "train[:5]"
    assert recipe.rewards[0].weight == 2.5
    assert isinstance(recipe.algorithm, RLOO)
    assert (recipe.steps, recipe.epochs) == (None, 2)  # a flag takes the place of the other way
    assert recipe.eval.greedy


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learner.lr"], "--learner.lr needs a value"),
        (["learner.lr", "1"], "'learner.lr': a flag such as --section.key is expected here"),
        (["--rewards.3.weight", "1"], "rewards is a list of 1"),
        (["--steps.x", "1"], "steps is a value, not a table"),
        (["--a..b", "1"], "a dotted key such as --learner.lr is expected"),
    ],
)
def test_a_flag_that_cannot_be_is_named(words: list[str], message: str, write: Write) -> None:
    assert message in refused(write(), *words)[0]


def test_evaluation_reads_rows_as_training_does_unless_it_says_otherwise(write: Write) -> None:
    path = write(('path = "rows.jsonl"', 'path = "rows.jsonl"\nprompt = "problem"\nname = "main"'))
    eval_set = load_recipe(path).eval.sets[0]
    assert (eval_set.path, eval_set.prompt, eval_set.subset, eval_set.split) == (
        "rows.jsonl",
        "problem",
        "main",
        "test",
    )
    other = load_recipe(path, ["--eval.path", "other.jsonl"]).eval.sets[0]
    assert (other.path, other.prompt, other.subset) == ("other.jsonl", "problem", None)


def test_how_columns_become_questions_is_taken_over_unless_a_set_names_its_own(
    write: Write,
) -> None:
    data = (
        '[data]\npath = "a.jsonl"\nchat_template = "{{ x }}"\ntemplate = "Q: {problem}"\n'
        'map = "my.rows:clean"\nfilter = "my.rows:easy"\n'
    )
    for eval_lines, wanted in (
        ("greedy = true", ("Q: {problem}", "my.rows:clean")),
        ('template = "{problem}"', ("{problem}", "")),
        ('prompt = "question"', ("", "")),
        ('messages = "chat"', ("", "")),
    ):
        text = (
            f'job = "sft"\nrun_dir = "r"\nsteps = 1\n{data}[eval]\npath = "b.jsonl"\n{eval_lines}\n'
        )
        text += '[model]\npath = "m"\n[[rewards]]\ntype = "math"\n'
        recipe = load_recipe(write(text=text))
        eval_set = recipe.eval.sets[0]
        assert (eval_set.template, eval_set.map) == wanted, eval_lines
        assert (eval_set.chat_template, eval_set.filter) == ("{{ x }}", "")


def test_tools_and_images_are_read_in_evaluation_as_in_training_unless_a_set_names_columns(
    write: Write,
) -> None:
    data = '[data]\npath = "a.jsonl"\ntools = "functions"\nimages = ""\n'
    for eval_lines, wanted in (
        ("greedy = true", ("functions", "")),
        ('tools = ""', ("", "")),
        ('messages = "chat"', ("tools", "images")),
    ):
        text = f'job = "sft"\nrun_dir = "r"\nsteps = 1\n{data}[eval]\npath = "b.jsonl"\n'
        text += f'{eval_lines}\n[model]\npath = "m"\n[[rewards]]\ntype = "math"\n'
        eval_set = load_recipe(write(text=text)).eval.sets[0]
        assert (eval_set.tools, eval_set.images) == wanted, eval_lines


def test_steps_are_judged_in_evaluation_as_they_are_written_in_training(write: Write) -> None:
    keys = {"completions": "steps", "labels": "ratings", "separator": "\n", "step_mark": "x",
            "neutral": 0.5}  # fmt: skip
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
    text = f'job = "reward"\nrun_dir = "r"\nsteps = 1\n[data]\npath = "a.jsonl"\n{lines}\n'
    text += '[eval]\npath = "b.jsonl"\n[model]\npath = "m"\n'
    text += '[algorithm]\ntype = "process_reward"\n'
    (eval_set,) = load_recipe(write(text=text)).eval.sets
    assert {key: getattr(eval_set, key) for key in keys} == keys
    (eval_set,) = load_recipe(write(text=text), ["--eval.separator", "|"]).eval.sets
    assert (eval_set.separator, eval_set.labels) == ("|", "ratings")


def test_several_evaluation_sets_have_names(write: Write) -> None:
    several = '[eval]\nevery = 5\n[[eval.sets]]\nname = "a"\n[[eval.sets]]\nname = "b"\nlimit = 3'
    path = write(('[eval]\nsplit = "test"\nevery = 5', several))
    assert [(eval_set.name, eval_set.limit) for eval_set in load_recipe(path).eval.sets] == [
        ("a", None),
        ("b", 3),
    ]
    twice = refused(write(('[eval]\nsplit = "test"\nevery = 5', several.replace('"b"', '"a"'))))
    assert "2 of [[eval.sets]] are called 'a'" in twice[0]


def test_the_reference_takes_what_it_leaves_out_from_the_policy(write: Write) -> None:
    recipe = load_recipe(write(), ["--model.dtype", "float32"])
    assert isinstance(recipe, RLRecipe)
    assert recipe.reference.model == recipe.model
    other = load_recipe(write(), ["--reference.model.path", "x", "--model.dtype", "float32"])
    assert isinstance(other, RLRecipe)
    assert (other.reference.model.path, other.reference.model.dtype) == ("x", "float32")


@pytest.mark.parametrize("path", SHIPPED, ids=NAMES)
def test_a_resolved_recipe_loads_again_to_the_same(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe_from_json(recipe.dump()) == recipe
    assert with_overrides(recipe, []) == recipe
    assert with_overrides(recipe, ["--learner.lr", "0.5"]).learner.lr == 0.5


@given(st.sampled_from(PLACES), ANYTHING)
def test_whatever_a_key_says_is_a_recipe_that_loads_again_or_one_message(
    where: tuple[Path, KeyPath], value: Any
) -> None:
    path, place = where
    try:
        recipe = parse_recipe(RESOLVED[path], overrides=[Override(place, value, "--flag")])
    except UsageError as error:
        assert str(error)  # noqa: PT017
    else:
        assert recipe_from_json(json.loads(json.dumps(recipe.dump(), allow_nan=False))) == recipe


@pytest.mark.parametrize("value", ["[]", "{}", "3"])
def test_a_value_of_no_kind_that_a_role_takes_is_named(write: Write, value: str) -> None:
    lines = refused(write(), "--reference.model.compile", value)
    assert any("reference.model.compile" in line for line in lines)


def test_a_recipe_without_a_data_section_says_so(write: Write) -> None:
    lines = refused(write(('[data]\npath = "rows.jsonl"\n', "")))
    assert any("data is missing: write a section that begins with [data]" in line for line in lines)


def test_data_without_a_path_says_so(write: Write) -> None:
    lines = refused(write(('path = "rows.jsonl"', "limit = 3"), ('split = "test"', 'path = "e"')))
    assert any("data.path: nothing to train on" in line for line in lines), lines


def test_a_stages_model_is_refused_outside_its_pipeline(write: Write) -> None:
    recipe = load_recipe(write(("some/model", "@sft")))
    with pytest.raises(UsageError, match=r"name the folder with pipeline\.toml"):
        require_runnable(recipe)


def test_an_algorithm_of_another_job_is_refused(write: Write) -> None:
    lines = refused(write(('type = "grpo"\nclip_high = 0.28', 'type = "sft"')))
    assert any("'sft' is not for this job; known: grpo, dr_grpo" in line for line in lines)


def test_sft_needs_no_algorithm(write: Write) -> None:
    text = 'job = "sft"\nrun_dir = "a"\nepochs = 1.5\n[model]\npath = "m"\n[data]\npath = "d"\n'
    recipe = load_recipe(write(text=text))
    assert isinstance(recipe, SFTRecipe)
    assert recipe.dump()["algorithm"] == {
        "type": "sft", "aggregation": "token", "loss": "nll", "neftune_noise_alpha": 0.0,
    }  # fmt: skip


def test_several_sets_of_data_take_what_they_leave_out_from_data(write: Write) -> None:
    several = (
        '[data]\nprompt = "problem"\nmax_len = 700\n[[data.sets]]\npath = "a.jsonl"\n'
        '[[data.sets]]\npath = "b.jsonl"\nprompt = "q"\nweight = 0.5'
    )
    path = write(('[data]\npath = "rows.jsonl"', several), ('split = "test"', 'path = "e.jsonl"'))
    recipe = load_recipe(path)
    assert [
        (data_set.path, data_set.prompt, data_set.weight, data_set.max_len)
        for data_set in recipe.data.sets
    ] == [
        ("a.jsonl", "problem", 1.0, 700),
        ("b.jsonl", "q", 0.5, 700),
    ]
    assert recipe_from_json(recipe.dump()) == recipe
    wrong = several.replace("weight = 0.5", "wieght = 0.5\nmax_len = 800")
    text = path.read_text("utf-8").replace(several, wrong)
    lines = refused(write(text=text))
    hint = "unknown key 'data.sets.1.wieght': did you mean 'data.sets.1.weight'?"
    assert any(hint in line for line in lines)


def test_a_set_longer_than_the_rest_of_the_recipe_is_sized_for_is_refused(write: Write) -> None:
    sets = '[data]\nmax_len = 700\n[[data.sets]]\npath = "a.jsonl"\nmax_len = 800'
    path = write(('[data]\npath = "rows.jsonl"', sets), ('split = "test"', 'path = "e.jsonl"'))
    assert "recipe.toml:12: data.sets.0.max_len: 800 tokens are more than" in refused(path)[0]


def test_no_set_is_longer_than_a_fresh_model_has_positions(write: Write) -> None:
    init = "[model.init]\nmax_position_embeddings = 1024"
    fresh = ('[model]\npath = "some/model"', init)
    load_recipe(write(fresh))
    lines = refused(write(fresh, ("every = 5", "every = 5\nmax_len = 1025")))
    assert lines == [
        "recipe.toml:14: eval.max_len: 1025 tokens are more than the model's positions: "
        "max_position_embeddings = 1024"
    ]


def test_rewards_are_checked_against_the_data_and_the_rollout(write: Write) -> None:
    routed = """[[rewards]]
type = "gsm8k"
datasets = ["rows.json", "rows.jsonl"]

[[rewards]]
type = "overlong"
buffer = 600
"""
    old = '[[rewards]]\ntype = "gsm8k"\n'
    assert refused(write((old, routed))) == [
        "recipe.toml:17: rewards.0.datasets: no dataset is called 'rows.json'; "
        "did you mean 'rows.jsonl'?",
        "recipe.toml:19: rewards.1: 'overlong': buffer = 600 is more than max_new_tokens = 512",
    ]
    fitting = write((old, routed.replace('"rows.json", ', "").replace("600", "500")))
    assert load_recipe(fitting).rewards[1].verifier_settings == {"buffer": 500}


def test_gates_and_routes_come_back_from_a_resolved_recipe(write: Write) -> None:
    routed = 'gate = true\ngate_at = 0.5\nwhen = { level = [1, 2], kind = "sum" }\n'
    recipe = load_recipe(write(('type = "gsm8k"\n', f'type = "gsm8k"\n{routed}')))
    assert recipe.rewards[0].when == {"level": (1, 2), "kind": "sum"}
    assert recipe_from_json(json.loads(json.dumps(recipe.dump()))) == recipe


RANKS = ("--cluster.type", "ray", "--learner.ranks", "8", "--learner.sharding", "zero2")
PPO = (*RANKS, "--algorithm.type", "ppo")
LORA = ("--model.lora.rank", "8")


def test_a_recipe_for_several_ranks_can_be_run(write: Write) -> None:
    recipe = load_recipe(write(), RANKS)
    assert recipe.parallel.ranks == 8
    require_runnable(recipe)


def test_what_divides_sequences_and_what_divides_matrices_can_be_run(write: Write) -> None:
    require_runnable(load_recipe(write(), (*RANKS, "--learner.context_parallel", "2")))
    recipe = load_recipe(write(), (*RANKS, "--learner.tensor_parallel", "2"))
    assert recipe.geometry(8).data_parallel_size == 4
    require_runnable(recipe)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--learner.shard_groups", "3"), r"learner\.shard_groups.*cannot be formed from 8"),
        (
            ("--learner.shard_groups", "4", "--learner.tensor_parallel", "4"),
            r"learner\.shard_groups.*cannot be formed from 2",
        ),
        (("--learner.offload", "true", "--learner.sharding", "none"), r"learner\.offload.*zero3"),
        (
            ("--learner.shard_groups", "2", "--learner.sharding", "none"),
            r"learner\.shard_groups.*zero3",
        ),
    ],
)
def test_groups_and_offload_need_state_that_is_divided_evenly(
    write: Write, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        load_recipe(write(), (*RANKS, *flags))


def test_with_one_rank_no_sharding_is_advised_for_offload(write: Write) -> None:
    with pytest.raises(UsageError, match=r"learner\.offload: true .*: with one rank leave it out$"):
        load_recipe(write(), ("--learner.offload", "true"))


SAMPLING = ("--learner.offload", "sampling")


@pytest.mark.parametrize(
    "flags",
    [
        (),
        (*RANKS, "--cluster.policy.colocate", "rollout"),
        (*RANKS, "--learner.sharding", "none", "--cluster.policy.colocate", "rollout"),
        ("--cluster.type", "ray"),  # a CPU's engine is in the first process
    ],
)
def test_a_learner_may_leave_its_device_to_an_engine_that_samples_there(
    write: Write, flags: tuple[str, ...]
) -> None:
    assert load_recipe(write(), (*flags, *SAMPLING)).learner.offload == "sampling"


@pytest.mark.parametrize("section", ["learner", "critic.learner"])
def test_it_is_refused_where_the_engines_have_gpus_of_their_own(write: Write, section: str) -> None:
    flags = (*RANKS, "--cluster.rollout.workers", "2", "--algorithm.type", "ppo")
    message = rf"{section}\.offload.*GPUs of their own.*leave it out"
    with pytest.raises(UsageError, match=message):
        load_recipe(write(), (*flags, f"--{section}.offload", "sampling"))


def test_it_is_refused_where_nothing_is_sampled(write: Write) -> None:
    with pytest.raises(UsageError, match=r"learner\.offload: \"sampling\": .*samples nothing"):
        load_recipe(ROOT / "recipes" / "hh_reward.toml", SAMPLING)


def test_ranks_of_another_role_stay_where_they_are(write: Write) -> None:
    recipe = load_recipe(write(), SAMPLING)
    assert recipe.learner.on_ranks(1).offload is False
    assert recipe.learner.on_ranks(2).offload is False


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--model.lora.rank", "4", "--model.lora.targets", '["q_proj", "experts"]'),
            r"adapter of experts that model.lora.targets names \('experts'\) is not divided",
        ),
        (("--learner.ranks", "7"), r"7 ranks do not divide into groups of 2 \(expert_parallel\)"),
        (
            ("--learner.shard_groups", "8"),
            r"groups of 16 \(expert_parallel \* shard_groups\).*multiple of 16 for learner.ranks",
        ),
        (
            ("--model.quantize", "4bit", "--learner.sharding", "none"),
            'experts beside weights in four bits.*model.quantize = "none"',
        ),
    ],
)
def test_what_does_not_go_with_shared_experts_is_named(
    write: Write, flags: tuple[str, ...], message: str
) -> None:
    sharing = (*RANKS, "--learner.expert_parallel", "2")
    require_runnable(load_recipe(write(), sharing))
    require_runnable(load_recipe(write(), (*sharing, "--learner.tensor_parallel", "2")))
    with pytest.raises(UsageError, match=rf"learner\.expert_parallel.*{message}"):
        load_recipe(write(), (*sharing, *flags))


@pytest.mark.parametrize("key", ["tensor_parallel", "context_parallel", "expert_parallel"])
def test_layers_that_ranks_share_may_be_compiled(write: Write, key: str) -> None:
    flags = (*RANKS, f"--learner.{key}", "2", "--model.compile")
    assert load_recipe(write(), (*flags, "true")).model.compile is True
    assert load_recipe(write(), (*flags, "auto")).model.compile == "auto"


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (("--model.lora.dora", "true"), "DoRA needs the lengths"),
        (
            ("--model.lora.init", "pissa"),
            r'begins with \(init = "pissa"\) is kept whole.*"kaiming"',
        ),
    ],
)
def test_adapters_that_need_whole_matrices_are_not_cut(
    write: Write, adapter: tuple[str, ...], message: str
) -> None:
    flags = (*RANKS, *adapter, "--learner.tensor_parallel")
    with pytest.raises(UsageError, match=rf"learner\.tensor_parallel: 2: .*{message}"):
        load_recipe(write(), (*flags, "2"))
    assert load_recipe(write(), (*flags, "1")).model.lora is not None


def test_a_run_goes_on_with_another_number_of_ranks_for_all_its_roles(write: Write) -> None:
    before = load_recipe(write(), (*PPO, "--critic.learner.lr", "1e-3"))
    flags = ["--learner.ranks", "4", "--learner.sharding", "zero3"]
    after = with_overrides(before, flags)
    assert isinstance(after, RLRecipe)
    assert (after.critic.learner.ranks, after.critic.learner.sharding) == (4, "zero3")
    assert compare(before, after, [], Path("run"))


def test_a_resolved_recipe_takes_another_dtype_for_all_its_models(write: Write) -> None:
    """All models compute in one dtype, and a role of a resolved recipe states it."""
    before = load_recipe(write(), ("--model.dtype", "float32"))
    after = with_overrides(before, ["--model.dtype", "bfloat16"])
    assert {model.dtype for model in after.model_tables.values()} <= {"bfloat16", "auto"}
    with pytest.raises(UsageError, match=r"critic\.model\.dtype: .*leave it out"):
        with_overrides(before, ["--model.dtype", "bfloat16", "--critic.model.dtype", "float32"])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("--model.gradient_checkpointing", "true"), ("--model.gradient_checkpointing", "offload")),
        (("--model.gradient_checkpointing", "true"), ("--model.gradient_checkpointing", "false")),
        (("--model.lora.rank", "8"), ("--model.lora.rank", "4")),
        ((), ("--model.lora.rank", "4", "--model.quantize", "4bit")),
        (("--model.freeze", '["router"]'), ("--model.freeze", "[]")),
        (("--model.router_dtype", "float32", *LORA), ("--model.router_dtype", "auto")),
    ],
)
def test_what_trains_the_policy_of_a_resolved_recipe_can_be_changed_alone(
    before: tuple[str, ...], after: tuple[str, ...], write: Write
) -> None:
    """A resolved reference states what it has taken over from the policy."""
    changed = with_overrides(load_recipe(write(), before), after)
    reference = changed.model_tables["reference", "model"]
    assert reference == changed.model
    assert changed.model == load_recipe(write(), (*before, *after)).model


def test_a_critic_cannot_be_on_other_ranks_than_its_policy(write: Write) -> None:
    with pytest.raises(UsageError, match=r"critic\.learner\.ranks.*2 beside the policy's 8"):
        load_recipe(write(), (*PPO, "--critic.learner.ranks", "2"))


def test_four_bits_are_not_divided_over_ranks(write: Write) -> None:
    four_bit_flags = ("--model.quantize", "4bit", "--model.lora.rank", "4")
    with pytest.raises(UsageError, match=r"learner\.sharding.*cannot be divided"):
        load_recipe(write(), (*RANKS, *four_bit_flags))
    with pytest.raises(UsageError, match=r"model\.compile.*see through"):
        load_recipe(write(), (*four_bit_flags, "--model.compile", "true"))
    load_recipe(write(), (*RANKS, *four_bit_flags, "--learner.sharding", "none"))
