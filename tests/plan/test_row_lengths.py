"""Lengths of rows without a template: those that training will see, or nearly."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from postgrad.data.conversations import load_conversations
from postgrad.data.pairs import load_labelled, load_pairs
from postgrad.data.prompts import load_prompts
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit, TokenizerInit
from postgrad.models.tokenizer import load_tokenizer
from postgrad.plan import lengths as module
from postgrad.plan.lengths import RowLengths, row_lengths
from postgrad.recipe.recipe import JOBS, Recipe

TEXT = "The cat sat on 12 mats, and 7 dogs saw it there. Why did nobody tell them?"
WORDS = TEXT.split()
CHARACTERS = {"tokenizer": {"kind": "characters"}}


def text(number: int, words: int) -> str:
    return " ".join(WORDS[(number + i) % len(WORDS)] for i in range(words))


def rows(count: int = 40) -> list[dict[str, Any]]:
    return [
        {
            "question": text(i, 3 + i % 7),
            "answer": text(i + 3, 5 + i % 11),
            "prompt": text(i, 4 + i % 5),
            "chosen": text(i + 2, 6 + i % 3),
            "rejected": text(i + 5, 2 + i % 9),
        }
        for i in range(count)
    ]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()), "utf-8")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer splits into single characters."""
    model_folder = tmp_path_factory.mktemp("model") / "model"
    make_fresh(
        ModelInit(hidden_size=16, tokenizer=TokenizerInit(kind="characters")), [], 0, model_folder
    )
    return model_folder


def recipe(job: str, data: Mapping[str, Any], **more: Any) -> Recipe:
    table = {"run_dir": "run", "steps": 2, "model": {"init": CHARACTERS}, "data": data, **more}
    return JOBS[job].model_validate_json(json.dumps(table))


def lengths(job: str, data: Mapping[str, Any], **more: Any) -> RowLengths:
    lengths_read = row_lengths(recipe(job, data, **more))
    assert lengths_read is not None
    return lengths_read


def assert_means(
    lengths_read: RowLengths, prompt: Sequence[float], answer: Sequence[float]
) -> None:
    sums = np.add(prompt, answer)
    assert lengths_read.prompt == pytest.approx(np.mean(prompt))
    assert lengths_read.answer == pytest.approx(np.mean(answer))
    assert lengths_read.spread == pytest.approx(np.mean(sums**2) / np.mean(sums) ** 2)
    assert lengths_read.rows == len(prompt)


def test_the_part_that_is_held_out_is_no_part_of_an_epoch(data: Path) -> None:
    part = {"path": str(data), "eval_fraction": 0.25}
    assert lengths("sft", part, eval={"every": 1, "sets": [part]}).rows == 30


def test_a_lone_row_that_may_be_held_out_is_planned_as_trained_on(data: Path) -> None:
    part = {"path": str(data), "limit": 1, "eval_fraction": 0.5}  # half a row, which rounds to none
    assert lengths("sft", part, eval={"every": 1, "sets": [part]}).rows == 1


@pytest.mark.parametrize("max_len", [1000, 110])
def test_conversations_are_as_long_as_training_reads_them(
    max_len: int, data: Path, model: Path
) -> None:
    read_lengths = lengths("sft", {"path": str(data), "max_len": max_len})
    settings = recipe("sft", {"path": str(data), "max_len": max_len}).data.sources[0]
    kept = load_conversations(settings, load_tokenizer(str(model))).all()  # pyright: ignore[reportArgumentType]
    before = [int(np.argmax(conversation.loss_mask)) for conversation in kept]
    assert_means(
        read_lengths,
        before,
        [len(conversation.token_ids) - n for conversation, n in zip(kept, before, strict=True)],
    )
    assert read_lengths.source == "40 rows of the data, counted in characters"


def test_prompts_are_as_long_as_the_policy_reads_them(data: Path, model: Path) -> None:
    more = {"rollout": {"max_new_tokens": 30}, "rewards": [{"type": "gsm8k"}]}
    table = {"path": str(data), "max_len": 90}
    read_lengths = lengths("rl", table, algorithm={"type": "grpo"}, **more)
    settings: Any = recipe("rl", table, algorithm={"type": "grpo"}, **more).data.sources[0]
    kept = load_prompts(settings, load_tokenizer(str(model)), max_prompt_tokens=60).all()
    assert 0 < len(kept) < 40
    assert_means(read_lengths, [len(prompt.token_ids) for prompt in kept], [30] * len(kept))


def test_a_phrase_of_a_fresh_tokenizer_is_counted_as_the_token_that_it_is(
    data: Path, tmp_path: Path
) -> None:
    """The longest that stands at a place, as the tokenizer reads it."""
    tokens: Any = {"kind": "characters", "phrases": ["cat", "cat sat on ", "did "]}
    init: Any = {"hidden_size": 16, "tokenizer": tokens}
    make_fresh(ModelInit.model_validate(init), [], 0, tmp_path / "model")
    read_lengths = row_lengths(recipe("sft", {"path": str(data)}, model={"init": init}))
    settings: Any = recipe("sft", {"path": str(data)}).data.sources[0]
    kept = load_conversations(settings, load_tokenizer(str(tmp_path / "model"))).all()
    before = [int(np.argmax(conversation.loss_mask)) for conversation in kept]
    answers = [len(c.token_ids) - n for c, n in zip(kept, before, strict=True)]
    assert read_lengths is not None
    assert_means(read_lengths, before, answers)


def test_a_pairs_answers_count_by_their_mean(data: Path, model: Path) -> None:
    read_lengths = lengths("reward", {"path": str(data)})
    settings: Any = recipe("reward", {"path": str(data)}).data.sources[0]
    kept = load_pairs(settings, load_tokenizer(str(model))).all()
    before = [int(np.argmax(pair.chosen_mask)) for pair in kept]
    answers = [(len(pair.chosen) + len(pair.rejected)) / 2 for pair in kept]
    assert_means(read_lengths, before, list(np.subtract(answers, before)))


def test_labelled_answers_are_samples_of_their_own(data: Path, model: Path) -> None:
    read_lengths = lengths("preference", {"path": str(data)}, algorithm={"type": "kto"})
    settings: Any = recipe("preference", {"path": str(data)}).data.sources[0]
    kept = load_labelled(settings, load_tokenizer(str(model))).all()
    assert len(kept) == 80
    answers = [len(sample.token_ids) - sample.prompt_tokens for sample in kept]
    assert_means(read_lengths, [sample.prompt_tokens for sample in kept], answers)


def test_the_models_own_tokenizer_counts_where_it_is_at_hand(data: Path, model: Path) -> None:
    at_hand = lengths("sft", {"path": str(data)}, model={"path": str(model)})
    assert at_hand.source == "40 rows of the data, counted with the model's tokenizer"
    assert (at_hand.prompt, at_hand.answer) == pytest.approx(
        [getattr(lengths("sft", {"path": str(data)}), part) for part in ("prompt", "answer")]
    )


def test_tokens_are_guessed_from_words_where_no_tokenizer_is_at_hand(data: Path) -> None:
    read_lengths = lengths("sft", {"path": str(data)}, model={"path": "nobody/nothing"})
    words = [len(row["question"].split()) for row in rows()]
    assert "guessed from words" in read_lengths.source
    assert np.mean(words) < read_lengths.prompt < 2 * np.mean(words) + 10


def test_cut_rows_are_kept_at_their_limit(data: Path) -> None:
    read_lengths = lengths("sft", {"path": str(data), "max_len": 60, "on_too_long": "truncate"})
    assert read_lengths.rows == 40
    assert read_lengths.prompt + read_lengths.answer <= 60


def test_sets_count_by_their_draws(data: Path, tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps(rows()[0] | {"answer": "x" * 300}), "utf-8")
    sets = [{"path": str(data), "weight": 0.5}, {"path": str(tmp_path / "long.jsonl"), "count": 60}]
    read_lengths = lengths("sft", {"sets": sets})
    alone = lengths("sft", {"path": str(data)})
    assert read_lengths.rows == 20 + 60
    assert read_lengths.answer == pytest.approx((20 * alone.answer + 60 * 302) / 80)


def test_draws_of_sets_are_those_of_the_samples_that_are_kept(data: Path, tmp_path: Path) -> None:
    """A row has two labelled answers: half of 9 rows' are 9, not twice half of the rows. And
    `count` is of those that are not too long.
    """
    (tmp_path / "nine.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows(9)), "utf-8"
    )
    sets = [{"path": str(tmp_path / "nine.jsonl"), "weight": 0.5}, {"path": str(data), "count": 10}]
    assert lengths("preference", {"sets": sets}, algorithm={"type": "kto"}).rows == 9 + 10
    short = lengths("sft", {"sets": [sets[1] | {"max_len": 60}]})
    assert short.rows == 10
    assert short.prompt + short.answer < 60


def test_rows_that_only_a_run_can_leave_out_are_told_to_be_counted(data: Path) -> None:
    rewards = {"rewards": [{"type": "gsm8k"}], "algorithm": {"type": "grpo"}}
    keys = {"path": str(data), "on_unreadable": "drop", "dedup": "exact"}
    among = "; rows that data.dedup and data.on_unreadable will leave out are among them"
    assert lengths("rl", keys, **rewards).source.endswith(among)
    assert "among them" not in lengths("rl", {"path": str(data)}, **rewards).source


def test_rows_that_are_too_long_are_no_part_of_an_epoch(data: Path) -> None:
    every, short = (lengths("sft", {"path": str(data), "max_len": most}) for most in (999, 90))
    assert every.rows == 40
    assert short.rows is not None
    assert 0 < short.rows < 40


def test_large_data_is_not_read_whole(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", 100)
    monkeypatch.setattr(module, "SAMPLE", 5)
    read_lengths = lengths("sft", {"path": str(data)})
    assert read_lengths.rows is None
    assert read_lengths.source.startswith("5 rows of the data")


def test_data_that_is_not_on_this_machine_has_no_lengths(data: Path) -> None:
    assert row_lengths(recipe("sft", {"path": "openai/gsm8k"})) is None
    assert row_lengths(recipe("sft", {"path": str(data), "max_len": 5})) is None  # no row fits


def test_neither_torch_nor_transformers_is_imported(data: Path, model: Path) -> None:
    code = (
        "import sys; from postgrad.recipe.load import load_recipe; "
        "from postgrad.plan.lengths import row_lengths; "
        f"row_lengths(load_recipe('recipes/gsm8k_sft.toml', ['--data.path', {str(data)!r}, "
        f"'--data.split', 'train', '--model.path', {str(model)!r}])); "
        "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_answers_that_do_not_share_a_prompt_compute_it_each() -> None:
    """Prompts of 3 tokens and two answers of 2: 2 * 5 tokens, and 2 * 25 squared ones."""
    lengths = RowLengths(prompt=3.0, answer=2.0, spread=1.0, source="", shared=False)
    assert lengths.computed(2) == 10.0
    assert lengths.squares(2) == 50.0
