"""What may change in a run that goes on, and what makes it another run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from postgrad.core.errors import UsageError
from postgrad.recipe.compare import compare, differences, require_known
from postgrad.recipe.load import load_recipe, with_overrides

Write = Callable[..., Path]
RUN = Path("runs/a")
CHOICES = ["threads", "dtype"]
SFT = """job = "sft"
run_dir = "runs/a"
steps = 10

[model]
path = "some/model"

[data]
path = "rows.jsonl"
max_len = {max_len}
system = "{system}"

[eval]
path = "held.jsonl"
"""


def test_differences_are_dotted_keys() -> None:
    before = {"a": 1, "b": {"c": [1, 2], "d": 3}, "e": 5}
    after = {"a": 1, "b": {"c": [1, 3], "d": 4}, "f": 6}
    assert list(differences(before, after)) == ["b.c", "b.d", "e", "f"]
    assert list(differences(before, before)) == []


def test_tables_of_a_list_differ_under_their_numbers() -> None:
    before = {"sets": [{"a": 1, "b": 2}, {"a": 3}]}
    assert list(differences(before, {"sets": [{"a": 1, "b": 2}, {"a": 4}]})) == ["sets.1.a"]
    assert list(differences(before, {"sets": [{"a": 1, "b": 2}]})) == ["sets"]


@pytest.mark.parametrize(
    "change",
    [
        ["--steps", "99"],
        ["--epochs", "3"],
        ["--checkpoint.save_steps", "7"],
        ["--eval.every", "2"],
        ["--data.cache", "false"],
        ["--scoring.workers", "1"],
        ["--sentinels.stall.action", "stop"],
    ],
)
def test_how_long_and_what_is_watched_may_change(change: list[str], write: Write) -> None:
    before = load_recipe(write())
    assert compare(before, with_overrides(before, change), [], RUN)


def test_whatever_decides_a_weight_may_not_unless_it_is_allowed(write: Write) -> None:
    before = load_recipe(write())
    after = with_overrides(before, ["--learner.lr", "0.5", "--batch.rollout_batch_size", "8"])
    with pytest.raises(UsageError) as refused:
        compare(before, after, [], RUN)
    assert "  learner.lr: 1e-06 there, 0.5 here" in str(refused.value)
    assert "  batch.rollout_batch_size: 16 there, 8 here" in str(refused.value)
    with pytest.raises(UsageError, match=r"batch\.rollout_batch_size"):
        compare(before, after, ["learner.lr"], RUN)
    changed = compare(before, after, ["learner", "batch.rollout_batch_size"], RUN)
    assert sorted(changed) == ["batch.rollout_batch_size", "learner.lr"]


def test_a_key_that_would_allow_nothing_is_named(write: Write) -> None:
    recipe = load_recipe(write())
    require_known(["learner", "learner.lr", "data.path", "threads"], recipe, recipe, CHOICES)
    for key, hint in {
        "lr": r"did you mean .*learner\.lr",
        "learner.rl": r"did you mean learner\.lr\?",
        "learner.lr.x": "has such a key",
        "thread": r"did you mean threads\?",
    }.items():
        with pytest.raises(UsageError, match=rf"--allow-change {key}: .*{hint}"):
            require_known([key], recipe, recipe, CHOICES)


def test_a_key_of_data_is_named_once_though_evaluation_takes_it_over(write: Write) -> None:
    before = load_recipe(write(text=SFT.format(max_len=512, system="x" * 500)))
    after = load_recipe(write(text=SFT.format(max_len=256, system="y" * 500)))
    with pytest.raises(UsageError) as refused:
        compare(before, after, [], RUN)
    lines = str(refused.value).splitlines()
    assert lines[1].startswith("  data.system: 'xxx")
    assert len(lines[1]) < 160
    assert lines[2] == "  data.max_len: 512 there, 256 here"
    assert lines[3].endswith("with --allow-change data.system --allow-change data.max_len")
    assert compare(before, after, ["data.max_len", "data.system"], RUN) == [
        "data.system",
        "data.max_len",
        "eval.sets.0.system",
        "eval.sets.0.max_len",
    ]


def test_a_key_of_an_evaluation_set_alone_has_its_own_name(write: Write) -> None:
    before = load_recipe(write(text=SFT.format(max_len=512, system="x")))
    after = load_recipe(write(text=SFT.format(max_len=512, system="x") + "max_len = 128\n"))
    with pytest.raises(UsageError, match=r"  eval\.sets\.0\.max_len: 512 there, 128 here"):
        compare(before, after, ["data"], RUN)
    for allowed in ("eval.sets.0.max_len", "eval.sets", "eval"):
        assert compare(before, after, [allowed], RUN) == ["eval.sets.0.max_len"]


def test_a_key_of_the_policy_is_named_once_though_the_critic_takes_it_over(write: Write) -> None:
    ppo = ('type = "grpo"', 'type = "ppo"')
    more = "[learner]\nlr = {}\n[critic.learner]\nwarmup_updates = 5\n"
    text = write(ppo).read_text("utf-8")
    before, after = (load_recipe(write(text=text + more.format(lr))) for lr in (0.1, 0.5))
    with pytest.raises(UsageError) as refused:
        compare(before, after, [], RUN)
    assert str(refused.value).endswith("with --allow-change learner.lr")
    assert compare(before, after, ["learner.lr"], RUN) == ["learner.lr", "critic.learner.lr"]


def test_a_model_that_takes_nothing_over_is_allowed_by_its_own_name_alone(write: Write) -> None:
    """The reward model has a path of its own, which may be the policy's by chance."""
    asked = ('type = "gsm8k"', 'type = "reward_model"')
    text = write(asked).read_text("utf-8") + '[reward_model.model]\npath = "some/model"\n'
    before = load_recipe(write(text=text))
    after = load_recipe(write(text=text.replace("some/model", "another/model")))
    with pytest.raises(UsageError, match=r"--allow-change reward_model\.model\.path"):
        compare(before, after, ["model"], RUN)


def test_what_estimates_alone_read_may_change(write: Write) -> None:
    game = '[environment]\ntype = "guess_number"\n'
    before, after, other = (
        load_recipe(write(("[algorithm]", f"{game}{key}\n\n[algorithm]")))
        for key in ("reply_tokens = 9", "reply_tokens = 12", "max_turns = 9")
    )
    assert compare(before, after, [], RUN) == ["environment.sets.0.reply_tokens"]
    with pytest.raises(UsageError, match=r"--allow-change environment\.sets\.0\.max_turns"):
        compare(after, other, [], RUN)


def test_inputs_of_layers_may_move_to_the_hosts_memory_and_back(write: Write) -> None:
    """Layers are computed again with and without: the bits are the same."""
    original = load_recipe(write())
    key = "model.gradient_checkpointing"
    there, elsewhere = (with_overrides(original, [f"--{key}", way]) for way in ("true", "offload"))
    assert compare(there, elsewhere, [], RUN)[0] == key
    assert compare(elsewhere, there, [], RUN)[0] == key
    for kept, again in ((original, there), (original, elsewhere), (elsewhere, original)):
        with pytest.raises(UsageError, match=f"--allow-change {key}"):
            compare(kept, again, [], RUN)
