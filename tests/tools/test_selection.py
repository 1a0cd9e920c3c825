"""Rows that are selected from generated samples, by hand-made groups."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from helpers.tiny_runs import MakeRecipe
from postgrad.core.errors import UsageError
from postgrad.data.messages import prompt_of
from postgrad.data.rows import Row
from postgrad.data.settings import DataSettings
from postgrad.tools.selection import RowSelection, select, selection_for

QUESTION = [{"role": "user", "content": "1 + 1?"}]


def sample(number: int, total: float | None, ticket: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "ticket": ticket, "sample": number, "dataset": "sums", "row": 10 + ticket,
        "question": "1 + 1?", "answer": "2", "metadata": {"level": 3}, "messages": QUESTION,
        "text": f"text {number}", "finish_reason": "stop", "total": total,
        "rewards": {"exact": total},
    } | more  # fmt: skip


def rows(tmp_path: Path, groups: list[list[dict[str, Any]]], **wanted: Any) -> list[dict[str, Any]]:
    select(groups, RowSelection(**wanted), tmp_path / "rows.jsonl", "abc")
    return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()]


def answers(selected: list[dict[str, Any]]) -> list[str]:
    return [row["messages"][-1]["content"] for row in selected]


def test_the_best_answers_become_conversations(tmp_path: Path) -> None:
    group = [sample(0, 0.5), sample(1, 1.0), sample(2, 1.0), sample(3, None)]
    (best,) = rows(tmp_path, [group], kind="best")
    assert best["messages"] == [*QUESTION, {"role": "assistant", "content": "text 1"}]
    assert (best["reward"], best["sample"], best["dataset"], best["row"]) == (1.0, 1, "sums", 10)
    assert best["generated"] == "abc"
    two = rows(tmp_path, [group], kind="best", top=2)
    assert answers(two) == ["text 1", "text 2"]
    assert answers(rows(tmp_path, [group], kind="best", top=3, threshold=0.6)) == answers(two)
    assert answers(rows(tmp_path, [group], kind="above", threshold=0.5)) == [
        "text 1", "text 2", "text 0"
    ]  # fmt: skip
    assert len(rows(tmp_path, [group], kind="all")) == 4


def test_pairs_have_the_better_answer_first(tmp_path: Path) -> None:
    group = [sample(0, 0.2), sample(1, 0.9), sample(2, 0.0), sample(3, 0.2)]
    (pair,) = rows(tmp_path, [group], kind="pairs")
    assert pair["prompt"] == QUESTION
    assert pair["chosen"] == [{"role": "assistant", "content": "text 1"}]
    assert pair["rejected"] == [{"role": "assistant", "content": "text 2"}]
    assert pair["margin"] == pytest.approx(0.9)
    every = rows(tmp_path, [group], kind="pairs", pairs="all")
    assert [row["samples"] for row in every] == [[1, 0], [1, 3], [1, 2], [0, 2], [3, 2]]
    wide = rows(tmp_path, [group], kind="pairs", pairs="all", margin=0.5)
    assert [row["samples"] for row in wide] == [[1, 0], [1, 3], [1, 2]]
    (drawn,) = rows(tmp_path, [group], kind="pairs", pairs="random", seed=4)
    assert drawn["samples"] in [row["samples"] for row in every]
    assert rows(tmp_path, [group], kind="pairs", pairs="random", seed=4) == [drawn]


def test_of_equal_rewards_the_sample_with_the_lower_number_is_in_the_pair(tmp_path: Path) -> None:
    group = [sample(0, 0.0), sample(1, 1.0), sample(2, 1.0), sample(3, 0.0)]
    (pair,) = rows(tmp_path, [group], kind="pairs")
    assert pair["samples"] == [1, 0]


@pytest.mark.parametrize("end", ["length", "dead_end"])
def test_a_truncated_answer_is_rejected_and_never_chosen(end: str, tmp_path: Path) -> None:
    group = [sample(0, 1.0, finish_reason=end), sample(1, 0.5), sample(2, 0.0)]
    assert answers(rows(tmp_path, [group], kind="best")) == ["text 1"]
    (pair,) = rows(tmp_path, [group], kind="pairs")
    assert pair["samples"] == [1, 2]
    (kept,) = rows(tmp_path, [group], kind="pairs", keep_truncated=True)
    assert kept["samples"] == [0, 2]
    cut = [sample(0, 0.0, finish_reason=end), sample(1, 0.5)]
    assert rows(tmp_path, [cut], kind="pairs")[0]["samples"] == [1, 0]


def test_difficulty_gives_the_prompt_again_with_its_pass_rate(tmp_path: Path) -> None:
    easy = [sample(n, 1.0, ticket=0) for n in range(4)]
    half = [sample(n, float(n % 2), ticket=1) for n in range(4)]
    (row,) = rows(tmp_path, [easy, half], kind="difficulty", pass_rate=(0.1, 0.9))
    assert row == {
        "level": 3, "question": "1 + 1?", "answer": "2", "pass_rate": 0.5, "mean_reward": 0.5,
        "samples": 4, "dataset": "sums", "row": 11, "generated": "abc",
    }  # fmt: skip


def test_a_prompt_of_several_messages_is_read_again_as_it_was_sampled_from(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Say a number."}
    turns = [*QUESTION, {"role": "assistant", "content": "2"}, {"role": "user", "content": "+ 1?"}]
    function = {"type": "function", "function": {"name": "add"}}
    able = [{**QUESTION[0], "tools": [function]}]
    for messages in ([system, *QUESTION], turns, [system, *turns], able):
        group = [sample(n, float(n), messages=messages) for n in range(2)]
        (row,) = rows(tmp_path, [group], kind="difficulty")
        assert prompt_of(Row(0, row, ""), DataSettings(path="")) == messages
    group = [sample(n, float(n), messages=[system, *QUESTION]) for n in range(2)]
    (row,) = rows(tmp_path, [group], kind="difficulty", systems=("Say a number.",))
    assert row["question"] == "1 + 1?"  # the recipe has the system message


def test_a_column_that_rewards_are_chosen_by_is_kept(tmp_path: Path) -> None:
    metadata = {"dataset": "gsm8k", "row": "a", "generated": "before", "samples": 1}
    group = [sample(n, float(n), metadata=metadata) for n in range(2)]
    (row,) = rows(tmp_path, [group], kind="difficulty")
    assert (row["dataset"], row["row"]) == ("gsm8k", "a")
    assert (row["generated"], row["samples"]) == ("abc", 2)


def test_a_recipe_names_its_system_messages_to_the_selection(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("rl", data={"system": "Say a number."})
    assert selection_for(recipe).systems == ("Say a number.",)
    assert selection_for(make_recipe("rl")).systems == ()


def test_the_folder_of_the_rows_is_made_where_it_is_missing(tmp_path: Path) -> None:
    to = tmp_path / "new" / "folder" / "rows.jsonl"
    assert select([[sample(0, 1.0)]], RowSelection(), to, "abc").counts["rows"] == 1
    assert to.read_text("utf-8").count("\n") == 1


def test_every_prompt_is_accounted_for(tmp_path: Path) -> None:
    groups = [
        [sample(0, 1.0, 0), sample(1, 0.0, 0)],
        [sample(0, 1.0, 1), sample(1, 1.0, 1)],
        [sample(0, None, 2), sample(1, None, 2)],
        [sample(0, 1.0, 3, finish_reason="length")],
    ]
    selected = select(groups, RowSelection(kind="pairs"), tmp_path / "rows.jsonl", "abc")
    assert selected.counts == {
        "prompts": 4,
        "samples": 7,
        "rows": 1,
        "samples without a reward": 2,
        "prompts without a row: no two rewards differ by more than the margin": 1,
        "prompts without a row: no sample has a reward": 1,
        "prompts without a row: every answer was truncated": 1,
    }
    assert selected.table()[2] == ("rows", "1")


@given(st.lists(st.one_of(st.none(), st.floats(-2, 2)), min_size=1, max_size=6), st.floats(0, 1))
def test_pairs_always_differ_by_more_than_the_margin(
    totals: list[float | None], margin: float
) -> None:
    from tempfile import TemporaryDirectory

    group = [sample(n, total) for n, total in enumerate(totals)]
    with TemporaryDirectory() as folder:
        for pair in rows(Path(folder), [group], kind="pairs", pairs="all", margin=margin):
            assert pair["chosen_reward"] - pair["rejected_reward"] > margin


def test_rows_are_written_as_parquet_too(tmp_path: Path) -> None:
    group = [sample(0, 0.5), sample(1, 1.0)]
    select([group], RowSelection(kind="pairs"), tmp_path / "rows.parquet", "abc")
    (row,) = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert row["chosen"] == [{"role": "assistant", "content": "text 1"}]
    mixed = [[sample(0, 1.0, metadata={"level": 3})], [sample(0, 1.0, 1, metadata={"level": "x"})]]
    with pytest.raises(UsageError, match="a column has values of several types"):
        select(mixed, RowSelection(kind="difficulty"), tmp_path / "other.parquet", "abc")
    assert not (tmp_path / "other.parquet").exists()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"kind": "bets"}, "--select bets: did you mean best?"),
        ({"pairs": "worst"}, "--pairs worst: did you mean best_worst?"),
        ({"kind": "above"}, "--select above needs --threshold"),
        ({"pass_rate": (0.9, 0.1)}, "--pass-rate 0.9 0.1: two shares"),
        ({"top": 0}, "--top 0: 1 or more"),
        ({"margin": float("nan")}, "--margin nan"),
    ],
)
def test_a_selection_of_nothing_is_refused(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        RowSelection(**wanted)
    assert message in str(raised.value)


def test_each_conversation_of_an_episode_is_a_row_of_its_own(tmp_path: Path) -> None:
    assistant_message = {"role": "assistant", "content": "a"}
    tools = [{"type": "function", "function": {"name": "look"}}]
    held = [
        {"messages": [*QUESTION, assistant_message], "tools": tools},
        {
            "messages": [
                *QUESTION,
                {**assistant_message, "weight": 0},
                *QUESTION,
                assistant_message,
            ],
            "tools": [],
        },
        {
            "messages": [*QUESTION, {**assistant_message, "weight": 0}, *QUESTION],
            "tools": [],
        },  # not answered
    ]
    group = [sample(0, 1.0, conversations=held), sample(1, 0.0, conversations=held[:1])]
    first, second = rows(tmp_path, [group], kind="best")
    assert (first["messages"], first["tools"], first["reward"]) == (
        held[0]["messages"], tools, 1.0
    )  # fmt: skip
    assert (second["messages"], "tools" in second) == (held[1]["messages"], False)
    assert (first["sample"], second["sample"]) == (0, 0)
    assert len(rows(tmp_path, [group], kind="all")) == 3


def test_answers_that_the_prompt_has_already_bear_no_loss(tmp_path: Path) -> None:
    shots = [*QUESTION, {"role": "assistant", "content": "2"}, *QUESTION]
    (row,) = rows(tmp_path, [[sample(0, 1.0, messages=shots)]], kind="best")
    assert [message.get("weight") for message in row["messages"]] == [None, 0, None, None]


def test_episodes_of_an_earlier_version_are_no_rows(tmp_path: Path) -> None:
    turns = [{"author": "policy", "text": "a"}]
    group = [sample(number, float(number), turns=turns) for number in range(2)]
    for kind in ("best", "pairs"):
        with pytest.raises(UsageError, match=r"row 10 of sums was .* its samples are neither rows"):
            rows(tmp_path, [group], kind=kind)
    assert rows(tmp_path, [group], kind="difficulty")[0]["pass_rate"] == 0.5


def test_answers_that_say_the_same_are_no_pair(tmp_path: Path) -> None:
    group = [sample(0, 1.0, text="same"), sample(1, 0.0, text="same"), sample(2, 0.5)]
    (pair,) = rows(tmp_path, [group], kind="pairs")
    assert pair["samples"] == [0, 2]
    every = rows(tmp_path, [group], kind="pairs", pairs="all")
    assert [row["samples"] for row in every] == [[0, 2], [2, 1]]


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"rows are written as \.jsonl or \.parquet"):
        select([], RowSelection(), tmp_path / "rows.csv", "abc")
