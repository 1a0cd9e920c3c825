"""Rows of preferences: every one is kept, cut, left out or lost, and the account says which."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postgrad.core.errors import UsageError
from postgrad.data.mixture import training_rows
from postgrad.data.overlap import HeldOut, held_out, ngrams
from postgrad.data.pairs import load_labelled, load_pairs
from postgrad.data.settings import DataSettings, MixedPairs, PairMixSettings, PairSettings

WriteRows = Callable[..., str]
FINE = {"prompt": "q", "chosen": "good", "rejected": "bad"}
# <|im_start|>, "user\nq", <|im_end|>, "\n", <|im_start|>, "assistant\n": 20 tokens, then the answer
PROMPT = 20


def load(path: str, tokenizer: Any, **more: Any) -> Any:
    return load_pairs(PairSettings(path=path, **more), tokenizer)


def fates(rows: list[dict[str, Any]], write_rows: WriteRows, tokenizer: Any, **more: Any) -> Any:
    return load(write_rows([FINE, *rows]), tokenizer, max_lost_fraction=1.0, **more).account.fates


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_answers_that_are_the_same_teach_nothing(write_rows: WriteRows, tokenizer: Any) -> None:
    same = "\n\nHuman: q\n\nAssistant: a"
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "a"},
        {"chosen": same, "rejected": f"{same}\n"},
        {"chosen": chat("q", "a"), "rejected": chat("q", "a")},
    ]
    assert fates(rows, write_rows, tokenizer) == {"kept": 1, "equal": 3}


def test_answers_that_the_template_writes_alike_are_the_same(
    write_rows: WriteRows, make_tokenizer: Callable[..., Any]
) -> None:
    trims = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] | trim + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    rows = [{"prompt": "q", "chosen": "a", "rejected": " a"}]
    assert fates(rows, write_rows, make_tokenizer(trims)) == {"kept": 1, "equal": 1}


def test_an_answer_without_text_or_that_is_missing_is_empty(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    rows = [
        {"prompt": "q", "chosen": "", "rejected": "bad"},
        {"prompt": "q", "chosen": "good", "rejected": " \n"},
        {"chosen": "\n\nHuman: q\n\nAssistant:", "rejected": "\n\nHuman: q\n\nAssistant: bad"},
        {"chosen": chat("q", "good"), "rejected": chat("q", "")},
        {"chosen": chat("q", "good", "and then?"), "rejected": chat("q", "bad")},
        {"chosen": chat("q", "good", "more", "x"), "rejected": chat("q", "", "more", "x")},
    ]
    assert fates(rows, write_rows, tokenizer) == {"kept": 1, "empty": 6}


def test_an_empty_turn_that_both_share_is_no_answer(write_rows: WriteRows, tokenizer: Any) -> None:
    row = {"chosen": chat("q", "", "r", "good"), "rejected": chat("q", "", "r", "bad")}
    assert fates([row], write_rows, tokenizer) == {"kept": 2}


def test_an_empty_turn_that_bears_no_loss_is_no_answer(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    others = [{"role": "assistant", "content": "", "weight": 0}, {"role": "user", "content": "r"}]
    better, worse = chat("q", "good")[1:], chat("q", "bad")[1:]
    row = {"prompt": "q", "chosen": [*others, *better], "rejected": [*others[:1], *worse]}
    assert fates([row], write_rows, tokenizer) == {"kept": 2}


def test_a_pair_of_which_one_goes_on_after_the_other_has_no_two_answers(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    row = {"chosen": chat("q", "a", "r", "b"), "rejected": chat("q", "a")}
    assert fates([row], write_rows, tokenizer) == {"kept": 1, "no_loss": 1}


@pytest.mark.parametrize("longer", ["chosen", "rejected"])
def test_a_pair_is_too_long_where_either_is(
    longer: str, write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows([FINE, {**FINE, longer: "x" * 20}])
    limit = PROMPT + 10
    dropped = load(path, tokenizer, max_len=limit)
    assert dropped.account.fates == {"kept": 1, "too_long": 1}
    why = f"{path}:2: a conversation of row 1 has {PROMPT + 21} tokens, data.max_len is {limit}"
    with pytest.raises(UsageError, match=why):
        load(path, tokenizer, max_len=limit, on_too_long="error")
    cut = load(path, tokenizer, max_len=limit, on_too_long="truncate")
    assert cut.account.fates == {"kept": 1, "truncated": 1}
    pair = cut.all()[1]
    ids, mask = getattr(pair, longer), getattr(pair, f"{longer}_mask")
    assert tokenizer.decode(ids[mask].tolist()) == "x" * 10
    assert (len(ids), len(mask)) == (limit, limit)
    other = pair.rejected if longer == "chosen" else pair.chosen
    assert tokenizer.decode(other.tolist()).endswith(
        ("bad" if longer == "chosen" else "good") + "<|im_end|>"
    )


def test_a_cut_that_leaves_no_difference_loses_the_pair(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    rows = [
        {**FINE, "chosen": "x" * 10 + "1", "rejected": "x" * 10 + "2"},  # cut before the difference
        {**FINE, "chosen": "x" * 9 + "12", "rejected": "x" * 9 + "21"},  # cut after it
        {**FINE, "prompt": "q" * 40},  # cut within the prompt
        {**FINE, "chosen": "x" * 10, "rejected": "x" * 12},  # both cut to the same ten tokens
    ]
    how = {"max_len": PROMPT + 10, "on_too_long": "truncate"}
    assert fates(rows, write_rows, tokenizer, **how) == {"kept": 1, "truncated": 1, "no_loss": 3}


def test_a_dataset_that_loses_too_many_pairs_stops_the_run(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows([FINE, *[{**FINE, "rejected": "good"}] * 2])
    why = "2 of 3 rows are lost, .*fix the rows, or leave them out with data.filter"
    with pytest.raises(UsageError, match=why):
        load(path, tokenizer)
    with pytest.raises(UsageError, match="no row of 1 is left to use"):
        load(write_rows([{**FINE, "chosen": ""}]), tokenizer)


def test_pairs_and_labels_that_repeat_a_row_are_left_out_across_sets(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    swapped = {"prompt": "q", "chosen": "bad", "rejected": "good"}
    first_path = write_rows([FINE, swapped, {**FINE, "id": 2}], "one.jsonl")
    second_path = write_rows([{**FINE, "chosen": "GOOD"}, {**FINE, "prompt": "r"}], "two.jsonl")
    sets = (MixedPairs(path=first_path), MixedPairs(path=second_path))
    mix = PairMixSettings(sets=sets, dedup="normalised")
    training_set = training_rows(load_pairs, mix, tokenizer, exclude=HeldOut())
    assert [account.fates for account in training_set.accounts] == [
        {"kept": 2, "duplicate": 1},
        {"kept": 1, "duplicate": 1},
    ]
    label = {"prompt": "q", "completion": "a", "label": True}
    rows = [label, {**label, "label": False}, label]
    mix = PairMixSettings(path=write_rows(rows), dedup="exact")
    labelled = training_rows(load_labelled, mix, tokenizer, exclude=HeldOut())
    assert labelled.accounts[0].fates == {"kept": 2, "duplicate": 1}


def test_several_sets_of_pairs_are_drawn_by_their_shares(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    first_path = write_rows([{**FINE, "prompt": f"a{i}"} for i in range(4)], "one.jsonl")
    second_path = write_rows([{**FINE, "prompt": f"b{i}"} for i in range(6)], "two.jsonl")
    mix = PairMixSettings(
        sets=(MixedPairs(path=first_path, weight=2.0), MixedPairs(path=second_path, count=3))
    )
    mixture = training_rows(load_pairs, mix, tokenizer, exclude=HeldOut())
    assert len(mixture) == 2 * 4 + 3
    drawn = [mixture.draw(ticket, 0) for ticket in range(11)]
    assert [pair.ticket for pair in drawn] == list(range(11))
    asked = [tokenizer.decode(pair.chosen.tolist()).split("<|im_end|>")[0][-2:] for pair in drawn]
    assert sorted(asked)[:8] == ["a0", "a0", "a1", "a1", "a2", "a2", "a3", "a3"]
    labelled = training_rows(load_labelled, mix, tokenizer, exclude=HeldOut())
    assert len(labelled) == 2 * 8 + 3
    assert [pair.ticket for pair in mixture.all()] == list(range(10))


def test_what_is_held_out_of_pairs_is_all_that_the_user_said_before_they_part(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    evaluation = write_rows(
        [
            {
                "chosen": chat("first", "a", "Held out?", "yes", "next", "x"),
                "rejected": chat("first", "a", "Held out?", "no", "other", "y"),
            }
        ],
        "eval.jsonl",
    )
    held = held_out([PairSettings(path=evaluation)])
    assert held.questions == {"first held out?"}
    rows = [
        FINE,
        {**FINE, "prompt": "FIRST  held out?"},
        {**FINE, "prompt": "held out?"},
        {
            "chosen": chat("First", "z", "held out?", "b"),
            "rejected": chat("First", "z", "held out?", "c"),
        },
    ]
    mix = PairMixSettings(path=write_rows(rows))
    training_set = training_rows(load_pairs, mix, tokenizer, exclude=held)
    assert training_set.accounts[0].fates == {"kept": 2, "excluded": 2}
    questions = write_rows([{"question": "q", "answer": "1"}], "questions.jsonl")
    training_set = training_rows(
        load_pairs, mix, tokenizer, exclude=held_out([DataSettings(path=questions)])
    )
    assert training_set.accounts[0].fates == {"kept": 3, "excluded": 1}


def test_of_two_episodes_the_question_is_their_prompt_wherever_they_part(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    held = held_out([PairSettings(path=write_rows([{**FINE, "prompt": "play"}], "eval.jsonl"))])
    answers = {
        name: chat("play", "4", "lower", last)[1:]
        for name, last in (("chosen", "3"), ("rejected", "2"))
    }
    mix = PairMixSettings(path=write_rows([FINE, {"prompt": "play", **answers}]))
    training_set = training_rows(load_pairs, mix, tokenizer, exclude=held)
    assert training_set.accounts[0].fates == {"kept": 1, "excluded": 1}


def test_shared_words_are_looked_for_in_all_that_is_said(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    rows = [
        FINE,
        {**FINE, "rejected": "say one two three"},
        {
            "chosen": chat("one two three", "a", "q", "b"),
            "rejected": chat("one two three", "a", "q", "c"),
        },
    ]
    held = HeldOut(frozenset({"z"}), 3, frozenset(ngrams("One, two, three", 3)))
    training_set = training_rows(
        load_pairs, PairMixSettings(path=write_rows(rows)), tokenizer, exclude=held
    )
    assert training_set.accounts[0].fates == {"kept": 1, "contaminated": 2}


ANSWER = st.sampled_from(["", "a", "b", "x" * 30, "x" * 30 + "y", "x" * 10])
ROW = st.fixed_dictionaries(
    {"prompt": st.sampled_from(["q", "held", "q" * 40]), "chosen": ANSWER, "rejected": ANSWER}
)


@pytest.mark.slow
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(ROW, max_size=12), how=st.sampled_from(["drop", "truncate"]))
def test_every_row_has_one_fate_and_labels_go_the_way_of_their_pair(
    rows: list[dict[str, str]], how: str, write_rows: WriteRows, tokenizer: Any
) -> None:
    """Against a count by hand, with 10 tokens of room for an answer to "q"."""
    path = write_rows([FINE, *rows])
    mix = PairMixSettings.model_validate(
        {
            "path": path,
            "max_len": PROMPT + 10,
            "on_too_long": how,
            "max_lost_fraction": 1.0,
            "dedup": "exact",
        }
    )
    held = HeldOut(frozenset({"held"}))
    pairs = training_rows(load_pairs, mix, tokenizer, exclude=held)
    wanted = {"kept": 1}
    seen: set[tuple[str, ...]] = set()
    for row in rows:
        fate = fate_of(row, how)
        if fate in ("kept", "truncated"):
            pair_text = (row["prompt"], row["chosen"], row["rejected"])
            fate = "duplicate" if pair_text in seen else fate
            seen.add(pair_text)
        wanted[fate] = wanted.get(fate, 0) + 1
    (account,) = pairs.accounts
    assert account.fates == wanted
    assert sum(account.fates.values()) == account.rows == len(rows) + 1
    assert len(pairs) == account.kept
    labelled = training_rows(load_labelled, mix, tokenizer, exclude=held)
    assert labelled.accounts[0].fates == wanted
    assert [label.desirable for label in labelled.all()] == [True, False] * len(pairs)
    for pair in pairs.all():
        assert max(len(pair.chosen), len(pair.rejected)) <= PROMPT + 10
        assert pair.chosen.tolist() != pair.rejected.tolist()


def fate_of(row: dict[str, str], how: str) -> str:
    chosen, rejected = row["chosen"], row["rejected"]
    if row["prompt"] == "held":  # a row of the other part is no loss of this one
        return "excluded"
    if chosen == rejected:
        return "equal"
    if not chosen or not rejected:
        return "empty"
    long = len(row["prompt"]) > 1 or max(len(chosen), len(rejected)) + 1 > 10
    if not long:
        return "kept"
    if how == "drop":
        return "too_long"
    cut = (f"{chosen}$"[:10], f"{rejected}$"[:10])  # $: the token that ends a turn
    return "truncated" if len(row["prompt"]) == 1 and cut[0] != cut[1] else "no_loss"


def test_labels_that_are_lost_are_counted_too(write_rows: WriteRows, tokenizer: Any) -> None:
    label = {"prompt": "q", "completion": "a", "label": True}
    rows = [label, {**label, "completion": " "}, {**label, "completion": "x" * 30}]
    rows.append({**label, "prompt": "q" * 40})
    path = write_rows(rows)
    how: dict[str, Any] = {"max_len": PROMPT + 10, "max_lost_fraction": 1.0}
    labels = load_labelled(PairSettings(path=path, **how), tokenizer)
    assert labels.account.fates == {"kept": 1, "empty": 1, "too_long": 2}
    labels = load_labelled(PairSettings(path=path, on_too_long="truncate", **how), tokenizer)
    assert labels.account.fates == {"kept": 1, "truncated": 1, "empty": 1, "no_loss": 1}
