"""Pairs and labelled answers: each shape of row, and exactly which tokens bear loss."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.data.mixture import dataset_texts
from postgrad.data.pairs import load_labelled, load_pairs
from postgrad.data.settings import PairSettings
from postgrad.models.fresh import PRINTABLE

WriteRows = Callable[..., str]
USER = {"role": "user", "content": "q"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}
PROMPT = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


def load(path: str, tokenizer: Any, **more: Any) -> Any:
    return load_pairs(PairSettings(path=path, **more), tokenizer)


def runs(tokenizer: Any, ids: NDArray[np.int32], mask: NDArray[np.bool_]) -> list[str]:
    """The runs of marked tokens, decoded."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    pairs = edges.reshape(-1, 2).tolist()
    return [tokenizer.decode(ids[start:end].tolist()) for start, end in pairs]


SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "whole conversations": (
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        "1 row: pairs of whole conversations",
    ),
    "whole conversations beside their prompt": (
        {"prompt": "something else", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        "1 row: pairs of whole conversations",
    ),
    "messages after a text": (
        {"prompt": "q", "chosen": [GOOD], "rejected": [BAD]},
        "1 row: pairs of messages that answer 'prompt'",
    ),
    "messages after messages": (
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        "1 row: pairs of messages that answer 'prompt'",
    ),
    "messages after messages with an empty last turn": (
        {"prompt": [USER, {**GOOD, "content": ""}], "chosen": [GOOD], "rejected": [BAD]},
        "1 row: pairs of messages that answer 'prompt'",
    ),
    "texts after a text": (
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        "1 row: pairs of texts that answer 'prompt'",
    ),
    "texts after messages": (
        {"prompt": [USER], "chosen": "good", "rejected": "bad"},
        "1 row: pairs of texts that answer 'prompt'",
    ),
    "texts after a transcript": (
        {"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": " good", "rejected": " bad"},
        "1 row: pairs of texts that answer 'prompt'",
    ),
    "transcripts": (
        {
            "chosen": "\n\nHuman: q\n\nAssistant: good",
            "rejected": "\n\nHuman: q\n\nAssistant: bad",
        },
        "1 row: pairs of transcripts (Human:, Assistant:)",
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_pair_is_read_as_the_same_two_conversations(
    shape: str, write_rows: WriteRows, tokenizer: Any
) -> None:
    row, note = SHAPES[shape]
    pairs = load(write_rows([row]), tokenizer)
    assert pairs.account.notes == (note,)
    (pair,) = pairs.all()
    assert (pair.ticket, pair.row, pair.margin) == (0, 0, 0.0)
    assert tokenizer.decode(pair.chosen.tolist()) == f"{PROMPT}good<|im_end|>"
    assert tokenizer.decode(pair.rejected.tolist()) == f"{PROMPT}bad<|im_end|>"
    assert runs(tokenizer, pair.chosen, pair.chosen_mask) == ["good<|im_end|>"]
    assert runs(tokenizer, pair.rejected, pair.rejected_mask) == ["bad<|im_end|>"]
    assert (pair.chosen.dtype, pair.chosen_mask.dtype) == (np.int32, np.bool_)


def test_columns_and_speakers_have_the_names_that_the_recipe_says(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    rows = [
        {"question": "q", "best": "good", "worst": "bad"},
        {"question": "unread", "best": "Q: q\n\nA: good", "worst": "Q: q\n\nA: bad"},
    ]
    names = {"chosen": "best", "rejected": "worst", "prompt": "question", "speakers": ("Q", "A")}
    pair, other_pair = load(write_rows(rows), tokenizer, **names).all()
    assert tokenizer.decode(pair.chosen.tolist()) == f"{PROMPT}good<|im_end|>"
    assert other_pair.chosen.tolist() == pair.chosen.tolist()


def test_system_and_strip_are_as_in_any_other_conversation(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows([{"prompt": " q", "chosen": "good ", "rejected": " bad"}])
    pair = load(path, tokenizer, system="s", strip=True).all()[0]
    before = f"<|im_start|>system\ns<|im_end|>\n{PROMPT}"
    assert tokenizer.decode(pair.chosen.tolist()) == f"{before}good<|im_end|>"
    assert tokenizer.decode(pair.rejected.tolist()) == f"{before}bad<|im_end|>"


def test_rewardbench_rows_keep_their_subset_and_a_margin_is_read_from_its_column(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    row = {"prompt": "q", "chosen": "good", "rejected": "bad", "subset": "alpacaeval-easy", "id": 3}
    path = write_rows([{**row, "by": "2.0"}])  # text, as CSV has it
    assert load(path, tokenizer, margin="by").all()[0].margin == 2.0
    path = write_rows([{**row, "by": 2}])
    pair = load(path, tokenizer, margin="by").all()[0]
    assert pair.metadata == {"subset": "alpacaeval-easy", "id": 3}
    assert pair.margin == 2.0
    assert load(path, tokenizer).all()[0].metadata == {
        "subset": "alpacaeval-easy",
        "id": 3,
        "by": 2,
    }


def test_a_pair_that_parts_inside_a_turn_bears_loss_on_all_of_it_and_on_every_answer_after_it(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    before = "\n\nHuman: q\n\nAssistant: shared\n\nHuman: more\n\nAssistant: "
    row = {
        "chosen": before + "I can\n\nHuman: c\n\nAssistant: well",
        "rejected": before + "I cannot\n\nAssistant: no",
    }
    pairs = load(write_rows([row]), tokenizer)
    assert (
        pairs.account.notes[1] == "1 pairs differ within a turn: the loss covers all of that turn"
    )
    pair = pairs.all()[0]
    assert runs(tokenizer, pair.chosen, pair.chosen_mask) == ["I can<|im_end|>", "well<|im_end|>"]
    assert runs(tokenizer, pair.rejected, pair.rejected_mask) == [
        "I cannot<|im_end|>",
        "no<|im_end|>",
    ]


def test_rows_of_another_loss_are_told_with_that_loss(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    labelled = {"prompt": "q", "completion": "a", "label": True}
    with pytest.raises(UsageError, match=r"which only algorithm\.type = \"kto\" of job"):
        load_pairs(PairSettings(path=write_rows([labelled])), tokenizer)
    with pytest.raises(UsageError, match=r"neither an answer with a label \('completion', 'label'"):
        load_labelled(PairSettings(path=write_rows([{"question": "q", "good": "a"}])), tokenizer)
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    account = load_labelled(PairSettings(path=write_rows([pair, labelled])), tokenizer).account
    assert any('algorithm.type = "dpo" compares the two' in note for note in account.notes)


def test_labels_of_one_kind_alone_are_told(write_rows: WriteRows, tokenizer: Any) -> None:
    rows = [{"prompt": "q", "completion": answer, "label": True} for answer in "ab"]
    labels = load_labelled(PairSettings(path=write_rows(rows)), tokenizer)
    note = "all labels are true: there is no answer of the other kind"
    assert labels.account.notes[-1] == note


def test_a_label_says_whether_an_answer_is_desirable(write_rows: WriteRows, tokenizer: Any) -> None:
    rows = [
        {"prompt": "q", "completion": "good", "label": True},
        {"prompt": [USER], "completion": [BAD], "label": "0"},
        {"completion": [USER, GOOD, USER, BAD], "label": False},
    ]
    labels = load_labelled(PairSettings(path=write_rows(rows)), tokenizer)
    assert labels.account.notes == (
        "1 row: labelled texts that answer 'prompt'",
        "1 row: labelled messages that answer 'prompt'",
        "1 row: labelled whole conversations",
    )
    assert [(label.ticket, label.row, label.desirable) for label in labels.all()] == [
        (0, 0, True),
        (1, 1, False),
        (2, 2, False),
    ]
    marked = [runs(tokenizer, label.token_ids, label.loss_mask) for label in labels.all()]
    assert marked == [["good<|im_end|>"], ["bad<|im_end|>"], ["bad<|im_end|>"]]
    for label in labels.all():
        assert not label.loss_mask[: label.prompt_tokens].any()
        assert label.loss_mask[label.prompt_tokens :].all()


def test_a_pair_gives_a_desirable_and_an_undesirable_sample(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows([SHAPES["transcripts"][0], SHAPES["texts after a text"][0]])
    labels = load_labelled(PairSettings(path=path), tokenizer)
    assert labels.account.fates == {"kept": 2}
    assert [(label.row, label.desirable) for label in labels.all()] == [
        (0, True),
        (0, False),
        (1, True),
        (1, False),
    ]
    pair = load(path, tokenizer).all()[0]
    good, bad = labels.all()[:2]
    assert good.token_ids.tolist() == pair.chosen.tolist()
    assert bad.token_ids.tolist() == pair.rejected.tolist()
    assert tokenizer.decode(good.token_ids[: good.prompt_tokens].tolist()) == PROMPT


def test_a_row_with_both_answers_is_a_pair_whatever_else_it_has(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    settings = PairSettings(
        path=write_rows([{**SHAPES["texts after a text"][0], "completion": "other"}])
    )
    assert list(dataset_texts(settings)) == ["q", "good", "bad"]
    assert len(load_labelled(settings, tokenizer)) == 2
    assert load_pairs(settings, tokenizer).all()[0].metadata == {"completion": "other"}


def test_the_texts_of_pairs_are_what_they_share_once_and_both_answers(
    write_rows: WriteRows,
) -> None:
    rows = [SHAPES["transcripts"][0], {"prompt": "p", "completion": "c", "label": True}]
    path = write_rows(rows)
    assert list(dataset_texts(PairSettings(path=path, system="s"))) == [
        *("s", "q", "good", "bad"),
        *("s", "p", "c"),
    ]


UNREADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "a column is missing": (
        {"choosen": "a", "rejected": "b"},
        r"row 0 has no column 'chosen' \(data.chosen\); did you mean 'choosen'",
    ),
    "nothing is asked": (
        {"chosen": "a", "rejected": "b"},
        "text that does not begin with 'Human:' .data.speakers., and there is no column",
    ),
    "one is no transcript": (
        {"chosen": "Human: a\n\nAssistant: b", "rejected": "b"},
        "text that does not begin with 'Human:'",
    ),
    "answers alone": (
        {"chosen": [GOOD], "rejected": [BAD]},
        "begin with the assistant, and there is no column of what it answers",
    ),
    "one answer alone": (
        {"prompt": "q", "chosen": [GOOD], "rejected": [USER, BAD]},
        "of 'chosen' and 'rejected' one begins with the assistant, the other does not",
    ),
    "two kinds": (
        {"prompt": "q", "chosen": "a", "rejected": [BAD]},
        "'chosen' is str, 'rejected' is list; an answer is text or a list of messages",
    ),
    "no text": ({"prompt": "q", "chosen": "a", "rejected": None}, "'rejected' is null"),
    "no messages": (
        {"chosen": [USER, {"role": "assistant"}], "rejected": [USER, BAD]},
        r"column 'chosen' of row 0 is no conversation: .* \(data.chosen\)",
    ),
    "another question": (
        {"chosen": [USER, GOOD], "rejected": [{**USER, "content": "p"}, BAD]},
        "part at message 0, which is of the user and of the user: both have to answer the same "
        "messages; put these into a column of their own .data.prompt. where an environment said",
    ),
    "no question in the messages": (
        {"prompt": [{**GOOD, "content": " "}], "chosen": "a", "rejected": "b"},
        r"row 0 has no message to answer \(data.prompt\)",
    ),
    "a prompt of no kind": (
        {"prompt": 3, "chosen": "a", "rejected": "b"},
        r"column 'prompt' of row 0 is no conversation: .* \(data.prompt\)",
    ),
    "a label of no kind": (
        {"prompt": "q", "completion": "a", "label": "yes"},
        "column 'label' of row 0 is 'yes'; a label is true for a desirable answer",
    ),
    "no label": ({"prompt": "q", "completion": "a"}, r"no column 'label' \(data.label\)"),
    "a margin of no kind": (
        {"prompt": "q", "chosen": "a", "rejected": "b", "by": True},
        r"column 'by' of row 0 is True, not a number \(data.margin\)",
    ),
    "a character that the tokenizer lacks": (
        {"prompt": "q", "chosen": "a", "rejected": "\u4e00"},
        "row 0 has a character that the tokenizer lacks",
    ),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_row_that_cannot_be_read_is_named_with_what_is_wrong(
    case: str, write_rows: WriteRows, tokenizer: Any
) -> None:
    row, why = UNREADABLE[case]
    path = write_rows([row])
    how = PairSettings(path=path, margin="by" if "by" in row else "")
    with pytest.raises(UsageError, match=why) as refused:
        (load_labelled if "completion" in row else load_pairs)(how, tokenizer)
    assert str(refused.value).startswith(f"{path}:1: ")


def test_a_named_prompt_has_to_be_there_where_it_is_needed(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows([SHAPES["texts after a text"][0]])
    with pytest.raises(UsageError, match=r"no column 'promt' \(data.prompt\); did you mean"):
        load(path, tokenizer, prompt="promt")
    with pytest.raises(UsageError, match="there is no column of what it answers"):
        load(path, tokenizer, prompt="")


def test_a_template_that_rewrites_the_answer_is_refused_with_its_row(
    write_rows: WriteRows, make_tokenizer: Callable[..., Any]
) -> None:
    upper = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] | upper + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    path = write_rows([SHAPES["transcripts"][0]])
    with pytest.raises(UsageError, match=r"tokens of row 0 cannot be marked: .*drops text"):
        load(path, make_tokenizer(upper))


TEXT = st.text(alphabet=PRINTABLE, min_size=1).map(str.strip).filter(lambda t: t and "<|" not in t)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shared=st.lists(st.tuples(TEXT, TEXT), max_size=2),
    question=TEXT,
    chosen=st.lists(TEXT, min_size=1, max_size=3),
    rejected=st.lists(TEXT, min_size=1, max_size=3),
    stem=st.text(alphabet="ab", max_size=3),
)
def test_masks_are_exactly_the_turns_that_differ_and_the_prompts_tokens_are_shared(
    shared: list[tuple[str, str]],
    question: str,
    chosen: list[str],
    rejected: list[str],
    stem: str,
    write_rows: WriteRows,
    tokenizer: Any,
) -> None:
    """After the first answer of each, its user says "?" before each further answer."""
    prompt = [text for turn in shared for text in turn] + [question]
    ways = [
        [f"{stem}{number}{text}" for text in way] for number, way in enumerate((chosen, rejected))
    ]
    dialogues = [[*prompt, *[t for text in way for t in (text, "?")][:-1]] for way in ways]
    chats = [
        [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(dialogue)]
        for dialogue in dialogues
    ]
    pair = load(write_rows([{"chosen": chats[0], "rejected": chats[1]}]), tokenizer).all()[0]
    start = int(np.argmax(pair.chosen_mask))
    assert int(np.argmax(pair.rejected_mask)) == start
    assert pair.chosen[:start].tolist() == pair.rejected[:start].tolist()
    prompt_text = tokenizer.apply_chat_template(
        chats[0][: len(prompt)], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(pair.chosen[:start].tolist()) == prompt_text
    for way, ids, mask in (
        (ways[0], pair.chosen, pair.chosen_mask),
        (ways[1], pair.rejected, pair.rejected_mask),
    ):
        assert runs(tokenizer, ids, mask) == [f"{text}<|im_end|>" for text in way]
        assert mask[-1]
