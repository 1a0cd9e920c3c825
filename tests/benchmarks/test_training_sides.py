"""Training sides of benchmarks/speed: how a loop is stepped, and that work is the same."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from benchmarks.speed.grpo.task import NEVER, endless, points, questions
from benchmarks.speed.rounds import Counts, Ended, Fastest, Rounds
from benchmarks.speed.side import Options
from benchmarks.speed.tokens import MAX_LEN, read_tokens, write_tokens
from benchmarks.speed.workload import make_model, make_tokenizer, write_rows

ROWS = [
    {"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"}
    for n in range(8)
]
ASKED = "\n\nHuman: is it?\n\nAssistant:"
PAIRS = [{"chosen": f"{ASKED} {'yes ' * 600}", "rejected": f"{ASKED} no, {n}"} for n in range(2)]
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder with a tiny model."""
    workspace = tmp_path_factory.mktemp("work")
    tokenizer = make_tokenizer(ROWS, PAIRS)
    tokenizer.save_pretrained(workspace / "model")
    make_model(SHAPE, 4096, tokenizer).save_pretrained(workspace / "model")
    write_rows(workspace / "questions.jsonl", ROWS)
    write_rows(workspace / "pairs.jsonl", PAIRS)
    return workspace


def test_a_loop_stands_still_between_rounds() -> None:
    done: list[int] = []

    def loop(ended: Ended) -> None:
        for number in range(3):
            done.append(number)
            ended({"number": number})

    rounds = Rounds(loop)
    assert done == []
    assert rounds() == {"number": 0}
    assert done == [0]
    assert rounds() == {"number": 1}
    assert done == [0, 1]


def test_what_a_loop_raises_reaches_whoever_asked() -> None:
    def loop(ended: Ended) -> None:
        ended({})
        raise ValueError("the loss is gone")

    rounds = Rounds(loop)
    rounds()
    with pytest.raises(ValueError, match="the loss is gone"):
        rounds()


def test_a_loop_that_ends_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="come to its end"):
        Rounds(lambda ended: None)()


def test_the_fastest_way_is_kept() -> None:
    def busy(turns: int) -> Callable[[], Callable[[], Counts]]:
        return lambda: lambda: {"sum": sum(range(turns)) and turns}

    fastest = Fastest({"slow": busy(3_000_000), "quick": busy(10)})
    assert fastest() == {"sum": 10}
    assert fastest.chosen == "quick"
    assert fastest.seconds["slow"] > fastest.seconds["quick"]


def test_half_of_the_groups_get_equal_rewards(folder: Path) -> None:
    every = questions(folder, Options("float32", 1))
    half = questions(folder, Options("float32", 1, {"without_gradient": 0.5}))
    assert [row["equal"] for row in every] == [False] * 8
    assert [row["equal"] for row in half] == [False, True] * 4
    assert points("this", True) == points("that", True)
    assert points("this", False) != points("that", False)


def test_no_token_of_the_model_ends_a_sample(folder: Path) -> None:
    path = endless(folder)
    size = AutoConfig.from_pretrained(path).vocab_size
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.eos_token == NEVER
    assert tokenizer.eos_token_id == size
    assert GenerationConfig.from_pretrained(path).eos_token_id == size
    before = AutoTokenizer.from_pretrained(folder / "model")
    messages = [{"role": "user", "content": ROWS[0]["question"]}]
    ids = [each.apply_chat_template(messages, return_dict=False) for each in (tokenizer, before)]
    assert ids[0] == ids[1]


def test_tokens_are_those_that_the_job_reads(folder: Path) -> None:
    write_tokens(folder)
    pairs, conversations = (read_tokens(folder, kind) for kind in ("pairs", "conversations"))
    assert len(pairs) == len(PAIRS)
    assert {len(chosen) for chosen, _ in pairs} == {MAX_LEN}
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids, mask = conversations[3]
    borne = [token for token, bears in zip(ids, mask, strict=True) if bears]
    assert tokenizer.decode(borne) == f"{ROWS[3]['answer']}<|im_end|>"
    assert json.loads((folder / "tokens.json").read_text("utf-8"))["pairs"] == pairs


def test_packs_of_an_update_keep_its_conversations_whole() -> None:
    pytest.importorskip("trl")
    from benchmarks.speed.sft.trl import labelled, packed

    def rows(lengths: list[int]) -> list[dict[str, list[int]]]:
        return [labelled([n] * n, [True] * n) for n in lengths]

    updates = packed([rows([600, 500, 300, 200]), rows([100, 90, 80, 70])])
    assert [len(packs) for packs in updates] == [2, 2]
    lengths = [sorted(n for pack in packs for n in pack["seq_lengths"]) for packs in updates]
    assert lengths == [[200, 300, 500, 600], [70, 80, 90, 100]]
    for pack in (pack for packs in updates for pack in packs):
        assert pack["input_ids"] == [n for n in pack["seq_lengths"] for _ in range(n)]
