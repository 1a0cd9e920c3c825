"""What a recipe from TRL says of its rows: those in files at hand are looked at."""

import json
from pathlib import Path
from typing import Any

import pytest

from postgrad.translate.translate import Translation, translate

TALK = [{"role": "user", "content": "2 + 2?"}]
ANSWER = [{"role": "assistant", "content": "4"}]
PAIR = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}


def of(path: object, *flags: str, program: str = "sft") -> Translation:
    translation = translate(
        "trl", [program, "--model_name_or_path", "m", "--dataset_name", str(path), *flags]
    )
    assert translation.problem is None
    return translation


def data_of(path: object, *flags: str, program: str = "sft") -> dict[str, Any]:
    data = dict(of(path, *flags, program=program).recipe["data"])
    for key in ("path", "max_len", "on_too_long"):
        data.pop(key, None)
    return data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def write(path: Path, row: dict[str, Any]) -> Path:
    path.write_text(json.dumps(row) + "\n", "utf-8")
    return path


def test_a_prompt_that_is_a_text_has_no_chat_template(path: Path) -> None:
    write(path, {"prompt": "2 + 2?", "completion": "4"})
    assert data_of(path) == {"chat_template": "plain"}
    write(path, PAIR)
    for program in ("dpo", "reward", "cpo"):
        assert data_of(path, program=program) == {"chat_template": "plain"}
    assert '{{ bos_token }}{% include "plain" %}' in of(path, program="dpo").text


def test_a_prompt_of_messages_has_the_model_s_template(path: Path) -> None:
    write(path, {"prompt": TALK, "completion": ANSWER})
    assert data_of(path) == {}
    write(path, {"prompt": TALK, "chosen": ANSWER, "rejected": ANSWER})
    assert data_of(path, program="dpo") == {}


def test_the_prompt_of_rl_is_a_text_or_messages(path: Path) -> None:
    flags = ("--reward_funcs", "accuracy_reward")
    write(path, {"prompt": "2 + 2?", "solution": "4"})
    text = data_of(path, *flags, program="grpo")
    assert text == {"chat_template": "plain", "prompt": "prompt", "answer": "solution"}
    write(path, {"prompt": TALK, "solution": "4"})
    messages = data_of(path, *flags, program="grpo")
    assert messages == {"messages": "prompt", "answer": "solution"}


@pytest.mark.parametrize(
    ("flags", "turns"),
    [
        ((), "everything"),
        (("--completion_only_loss", "true"), "everything"),  # of prompts and completions
        (("--completion_only_loss", "false"), "everything"),
        (("--assistant_only_loss", "true"), None),
    ],
)
def test_all_of_a_conversation_has_a_loss_unless_the_assistant_s_alone_is_wanted(
    path: Path, flags: tuple[str, ...], turns: str | None
) -> None:
    for name in ("messages", "conversations"):
        write(path, {name: [*TALK, *ANSWER]})
        assert data_of(path, *flags).get("loss_turns") == turns


def test_a_column_text_is_plain_text_unless_there_is_a_prompt_or_messages(path: Path) -> None:
    write(path, {"text": "2 + 2 = 4"})
    assert data_of(path) == {"text": "text"}
    for flags in ((), ("--dataset_text_field", "text")):
        write(path, {"text": "2 + 2 = 4", "prompt": "2 + 2?", "completion": "4"})
        assert data_of(path, *flags) == {"chat_template": "plain"}
        write(path, {"text": "2 + 2 = 4", "messages": [*TALK, *ANSWER]})
        assert data_of(path, *flags) == {"loss_turns": "everything"}


def test_a_text_field_that_rows_do_not_have_is_not_their_column(path: Path) -> None:
    write(path, {"messages": [*TALK, *ANSWER]})
    assert data_of(path, "--dataset_text_field", "text") == {"loss_turns": "everything"}
    write(path, {"body": "2 + 2 = 4"})
    assert data_of(path, "--dataset_text_field", "body") == {"text": "body"}


def test_of_rows_that_are_not_at_hand_a_comment_says_what_depends_on_them(tmp_path: Path) -> None:
    for place in ("someone/rows", tmp_path / "missing.jsonl"):
        translation = of(place)
        assert translation.recipe["data"].keys() == {"path", "max_len", "on_too_long"}
        assert 'add chat_template = "plain"' in translation.text
        assert "there all tokens, as with data.loss_turns" in translation.text


def test_pairs_without_a_prompt_may_be_either(path: Path) -> None:
    write(path, {"chosen": [*TALK, *ANSWER], "rejected": [*TALK, *ANSWER]})
    translation = of(path, program="reward")
    assert "chat_template" not in translation.recipe["data"]
    assert 'add chat_template = "plain"' in translation.text


def test_rows_of_several_files_are_looked_at_where_they_have_the_same_columns(
    tmp_path: Path,
) -> None:
    names = [str(write(tmp_path / name, PAIR)) for name in ("a.jsonl", "b.jsonl")]
    config = tmp_path / "config.yaml"
    lines = [f"  - path: json\n    data_files: {name}\n" for name in names]
    config.write_text("model_name_or_path: m\ndatasets:\n" + "".join(lines), "utf-8")
    translation = translate("trl", ["dpo", "--config", str(config)])
    assert translation.recipe["data"]["chat_template"] == "plain"
    write(tmp_path / "b.jsonl", {"messages": TALK})
    unlike = translate("trl", ["dpo", "--config", str(config)])
    assert "chat_template" not in unlike.recipe["data"]
    assert 'add chat_template = "plain"' in unlike.text


def test_length_desensitising_changes_nothing_at_one_and_is_lost_below() -> None:
    for alpha, lost in (("1.0", set[str]()), ("0.5", {"ld_alpha"}), ("0.0", {"ld_alpha"})):
        translation = of("someone/rows", "--ld_alpha", alpha, program="dpo")
        assert {option.name for option in translation.draft.missing} == lost
