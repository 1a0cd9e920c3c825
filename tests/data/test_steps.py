"""Rows with labelled steps: the four layouts, what is refused, and where steps end in tokens."""

from typing import Any

import numpy as np
import pytest

from postgrad.core.errors import UsageError
from postgrad.data.rows import Row
from postgrad.data.settings import PairSettings
from postgrad.data.step_ends import step_ends
from postgrad.data.step_tokens import load_steps
from postgrad.data.steps import is_stepwise, steps_of

PLAIN = (  # TRL's layout: a separator behind every step, the last one too
    "{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '\n\n' }}{% endif %}{% endfor %}"
)
TRL = {"prompt": "1+1+1?", "completions": ["1+1=2", "2+1=4"], "labels": [True, False]}
SHEPHERD = {
    "input": "Add 2 and 3. Step 1: 2+3=5 ки\nStep 2: The answer is: 5 ки",
    "label": "Add 2 and 3. Step 1: 2+3=5 +\nStep 2: The answer is: 5 -",
    "task": "GSM8K",
}
BENCHMARK = {"problem": "1+1?", "steps": ["a", "b", "c"], "label": 1}
RATED = {
    "question": {"problem": "1+1?"},
    "label": {
        "steps": [
            {
                "completions": [{"text": "a", "rating": 1}, {"text": "x", "rating": -1}],
                "human_completion": None,
                "chosen_completion": 0,
            },
            {
                "completions": [{"text": "y", "rating": 0}],
                "human_completion": {"text": "b", "rating": None},
                "chosen_completion": None,
            },
            {
                "completions": [{"text": "c", "rating": -1}, {"text": "z", "rating": None}],
                "human_completion": None,
                "chosen_completion": None,
            },
        ]
    },
}


def read(values: dict[str, Any], **settings: Any) -> list[tuple[tuple[str, ...], tuple[Any, ...]]]:
    row = steps_of(Row(3, values, "rows.jsonl:4"), PairSettings(path="x", **settings))
    return [(path.steps, path.labels) for path in row.paths]


def test_each_layout_is_known_by_its_columns() -> None:
    assert read(TRL) == [(("1+1=2", "2+1=4"), (1.0, 0.0))]
    assert read(SHEPHERD) == [(("Step 1: 2+3=5", "Step 2: The answer is: 5"), (1.0, 0.0))]
    assert read(BENCHMARK) == [(("a", "b", "c"), (1.0, 0.0, None))]
    assert read(BENCHMARK | {"label": -1}) == [(("a", "b", "c"), (1.0, 1.0, 1.0))]


def test_each_label_of_prm800k_is_there_once() -> None:
    assert read(RATED, neutral=0.5) == [
        (("a", "b", "c"), (1.0, 1.0, 0.0)),
        (("x",), (0.0,)),
        (("a", "y"), (None, 0.5)),
    ]


def test_marked_steps_may_have_a_list_of_labels() -> None:
    """The rows that OpenRLHF's train_prm reads: signs, or numbers."""
    text = {"text": SHEPHERD["input"]}
    ((_, signs),) = read(text | {"label": ["+", "-"]}, prompt="text")
    ((_, numbers),) = read(text | {"value": [0.75, 0]}, prompt="text", label="value")
    assert (signs, numbers) == ((1.0, 0.0), (0.75, 0.0))


def test_labels_may_be_soft_or_absent() -> None:
    assert read(TRL | {"labels": [0.25, None]}) == [(("1+1=2", "2+1=4"), (0.25, None))]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "row 3 has prompt, chosen; rows with labelled steps"),
        (TRL | {"labels": [True]}, r"column 'labels' of row 3 .* 2 labels .*data\.labels"),
        (TRL | {"labels": [True, 1.5]}, r"number from 0 to 1.*data\.labels"),
        (TRL | {"labels": [True, "+"]}, r"number from 0 to 1.*data\.labels"),
        (TRL | {"completions": "a"}, r"steps are a list of texts \(data\.completions\)"),
        ({"completions": ["a"], "labels": [True]}, r"what they answer \(data\.prompt\)"),
        (SHEPHERD | {"label": "Add 2 and 3. Step 1: 2+3=6 +"}, r"behind step 1 it parts"),
        (SHEPHERD | {"input": "Step 1: 2 ки", "label": "Step 1: 2 +"}, "the question stands"),
        (SHEPHERD | {"input": "Q Step 1: 2", "label": "Q Step 1: 2"}, "ends with the mark"),
        (BENCHMARK | {"label": 3}, "index of one of 3 steps is expected, or -1"),
        (RATED | {"label": {"steps": [{"completions": []}]}}, r"steps\[0\] of column 'label'"),
        (RATED | {"question": {}}, "`problem` is a text"),
    ],
)
def test_what_cannot_be_read_is_refused_with_row_and_key(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as error:
        read(values)
    assert "rows.jsonl:4" in str(error.value)


def test_rows_of_pairs_are_not_taken_for_steps() -> None:
    settings = PairSettings(path="x")
    assert is_stepwise(Row(0, TRL, "a:1"), settings)
    assert not is_stepwise(Row(0, TRL | {"chosen": "a", "rejected": "b"}, "a:1"), settings)


def test_a_step_ends_with_its_separator_and_the_last_one_with_the_turn(
    tokenizer: Any, write_rows: Any
) -> None:
    (answer,) = load_steps(PairSettings(path=write_rows([TRL])), tokenizer).all()
    ends = np.flatnonzero(answer.loss_mask)
    begin = answer.prompt_tokens
    parts = np.split(answer.token_ids[begin:], ends[:-1] + 1 - begin)
    assert [tokenizer.decode(part) for part in parts] == [
        "1+1=2\n\n",
        f"2+1=4{tokenizer.eos_token}",
    ]
    assert answer.labels[ends].tolist() == [1.0, 0.0]
    assert ends[-1] == len(answer.token_ids) - 1


def test_a_sample_of_the_same_tokens_ends_its_steps_at_the_same_places(
    tokenizer: Any, write_rows: Any
) -> None:
    rows = [TRL, TRL | {"completions": ["a b\n", " c\n\n\n", "d"], "labels": [True] * 3}]
    for answer in load_steps(PairSettings(path=write_rows(rows)), tokenizer).all()[:1]:
        sampled = answer.token_ids[answer.prompt_tokens :]
        ends = answer.prompt_tokens + step_ends(tokenizer, sampled, "\n\n")
        assert ends.tolist() == np.flatnonzero(answer.loss_mask).tolist()


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("a\n\nb", [2, 3]),
        ("a\n\n", [2]),
        ("\n\na\n\n\n\nb", [4, 7]),  # nothing written: no step
        ("a", [0]),
        ("\n\n", [1]),  # an answer has a step at least
        ("", []),
    ],
)
def test_samples_are_cut_where_a_separator_is_complete(
    tokenizer: Any, text: str, ends: list[int]
) -> None:
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    assert step_ends(tokenizer, ids, "\n\n").tolist() == ends


def test_tokens_and_labels_are_those_of_trl_s_trainer(make_tokenizer: Any, write_rows: Any) -> None:
    """PRMTrainer.tokenize_row of TRL 1.0: prompt, steps and separators are encoded one by one, with
    a label at the last token of each separator. TRL 1.16 has that trainer no more.
    """
    tokenizer = make_tokenizer(PLAIN)
    (answer,) = load_steps(PairSettings(path=write_rows([TRL])), tokenizer).all()

    def encoded(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ids, labels = encoded(TRL["prompt"]), [-100] * len(encoded(TRL["prompt"]))
    for step, label in zip(TRL["completions"], TRL["labels"], strict=True):
        tokens = encoded(step) + encoded("\n\n")
        ids += tokens
        labels += [-100] * (len(tokens) - 1) + [int(label)]
    assert answer.token_ids.tolist() == ids
    assert np.where(answer.loss_mask, answer.labels, -100).tolist() == labels


def test_openrlhf_s_layout_writes_the_text_of_the_row(make_tokenizer: Any, write_rows: Any) -> None:
    """With the template and separator that `translate openrlhf` gives."""
    template = (
        "{% for m in messages %}{% if not loop.first %}{{ ' ' }}{% endif %}{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}{{ ' +' }}{% endif %}{% endfor %}"
    )
    row = {key: text.replace("ки", "+") for key, text in SHEPHERD.items()} | {"label": [1, 0]}
    row["input"] = row["input"].replace("2+3", "2 and 3")
    tokenizer = make_tokenizer(template)
    settings = PairSettings(path=write_rows([row]), step_mark="+", separator=" +\n")
    (answer,) = load_steps(settings, tokenizer).all()
    assert tokenizer.decode(answer.token_ids) == row["input"]
    assert [tokenizer.decode(token) for token in answer.token_ids[answer.loss_mask]] == ["\n", "+"]


def test_a_cut_answer_loses_the_steps_behind_the_limit(tokenizer: Any, write_rows: Any) -> None:
    long = TRL | {"completions": ["1", "2" * 60], "prompt": "?"}
    rows = write_rows(
        [TRL, long, long | {"completions": ["1" * 60, "2"]}, long | {"completions": ["", "2"]}]
    )
    settings = PairSettings(path=rows, max_len=45, on_too_long="truncate")
    loaded = load_steps(settings, tokenizer)
    assert dict(loaded.account.fates) == {"kept": 1, "truncated": 1, "empty": 1, "no_loss": 1}
    assert [int(answer.loss_mask.sum()) for answer in loaded.all()] == [2, 1]
    dropped = load_steps(
        settings.model_copy(update={"on_too_long": "drop", "max_lost_fraction": 1.0}), tokenizer
    )
    assert dict(dropped.account.fates) == {"kept": 1, "empty": 1, "too_long": 2}
    with pytest.raises(UsageError, match="a conversation of row 1 has"):
        load_steps(settings.model_copy(update={"on_too_long": "error"}), tokenizer)


def test_answers_of_a_row_know_what_is_labelled(tokenizer: Any, write_rows: Any) -> None:
    loaded = load_steps(PairSettings(path=write_rows([RATED])), tokenizer).all()
    assert [answer.gaps for answer in loaded] == [False, False, True]
    assert [int(answer.loss_mask.sum()) for answer in loaded] == [3, 1, 1]
