"""A response in two models' tokens: where both end at one byte, and what is not read."""

import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Prompt, Sequences
from postgrad.data.settings import DataSettings
from postgrad.data.text_segments import (
    UNREAD,
    Segments,
    TextReader,
    common_segments,
    token_shares,
)
from postgrad.models.tokenizer import BYTE_OF, NO_TEXT, SpelledText, Spelling

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}[{{ m['role'] }}] {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %} </s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TEXTS = [
    "Natalia sold 48 clips, then half as many: 48 / 2 = 24. The answer is 72.",
    "Weng earns $12 an hour; for 50 minutes that is 12 * 50 / 60 = 10 dollars.",
    "größer, naïve, déjà vu, 数学, мир, 👩‍👩‍👧 and e\u0301",
]


def texts() -> list[str]:
    """Questions and answers of GSM8K where they are there."""
    folder = os.environ.get("POSTGRAD_TEST_DATA")
    if folder is None:
        return TEXTS * 20
    rows = (Path(folder) / "gsm8k.jsonl").read_text("utf-8").splitlines()[:300]
    return [*TEXTS, *(json.loads(row)["question"] for row in rows)]


def wrapped(tokenizer: Tokenizer, template: str, end: str) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, chat_template=template,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


@cache
def byte_level(size: int, *, digits: bool = True) -> Any:
    """Byte-level BPE, as of Qwen and Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return wrapped(tokenizer, CHATML, "<|im_end|>")


def merging(*merges: tuple[str, str]) -> Any:
    """Byte-level BPE with these merges alone."""
    marks = ["<|im_start|>", "<|im_end|>"]
    tokens = [*marks, *sorted(BYTE_OF), *(left + other for left, other in merges)]
    model = models.BPE({token: number for number, token in enumerate(tokens)}, [*merges])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(marks)
    return wrapped(tokenizer, CHATML, marks[1])


SOLD = (("s", "o"), ("so", "l"), ("sol", "d"))
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def sentence_piece(*, prepends: bool = True) -> Any:
    """BPE over characters, other bytes alone, and a space before the first word: as of Llama 2;
    without that space as of Gemma.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    spaces = normalizers.Replace(" ", "▁")
    ahead = [normalizers.Prepend("▁")] if prepends else []
    tokenizer.normalizer = normalizers.Sequence([*ahead, spaces])  # pyright: ignore[reportAttributeAccessIssue]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if prepends else []
    tokenizer.decoder = decoders.Sequence([*steps, *strip])  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", "<s>", "</s>", *BYTES], show_progress=False,
        limit_alphabet=70,
    )  # fmt: skip
    words = [word for text in texts() for word in text.replace(" ", " ▁").split(" ")]
    tokenizer.train_from_iterator(words, trainer)
    spelled = json.loads(tokenizer.to_str())
    listed = [each for each in spelled["added_tokens"] if each["content"] not in BYTES]
    return wrapped(
        Tokenizer.from_str(json.dumps({**spelled, "added_tokens": listed})), PLAIN, "</s>"
    )


@cache
def unigram() -> Any:
    """Unigram with bytes to fall back on and Metaspace."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    pieces = [(piece, score) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]]
    backend = Tokenizer(
        models.Unigram([*pieces, *((byte, -50.0) for byte in BYTES)], 0, byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    steps = [decoders.ByteFallback(), decoders.Metaspace()]
    backend.decoder = decoders.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens(["<unk>", "</s>"])
    return wrapped(backend, PLAIN, "</s>")


KINDS: dict[str, Callable[[], Any]] = {
    "small": lambda: byte_level(300),
    "large": lambda: byte_level(900, digits=False),
    "llama 2": sentence_piece,
    "gemma": lambda: sentence_piece(prepends=False),
    "unigram": unigram,
}
unicode = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(texts())
kinds = st.sampled_from([*KINDS])


def ids_of(tokenizer: Any, text: str) -> Any:
    encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True)
    return np.array(encoded["input_ids"], np.int32)


def test_the_bytes_of_byte_level_tokens_are_those_of_the_tokenizers_library() -> None:
    assert {*BYTE_OF} == {*pre_tokenizers.ByteLevel.alphabet()}
    assert sorted(BYTE_OF.values()) == list(range(256))
    assert [BYTE_OF[char] for char in "AĠĊ"] == [65, 32, 10]


@given(kinds, unicode)
def test_the_bytes_of_a_text_s_tokens_join_to_the_text(kind: str, text: str) -> None:
    """Of any Unicode, in tokens that end within characters too."""
    tokenizer = KINDS[kind]()
    ids = ids_of(tokenizer, text)
    spelled = Spelling.of(tokenizer).spelled(ids)
    assert spelled.text.decode() in (text, f" {text}")
    assert len(spelled.ends) == len(ids)
    if len(ids):
        assert spelled.ends[-1] == len(spelled.text)


@given(kinds, st.data())
def test_the_bytes_of_sampled_tokens_join_to_what_their_decoder_gives(
    kind: str, data: st.DataObject
) -> None:
    """Of any tokens, which need not be those of a text."""
    tokenizer = KINDS[kind]()
    spelling = Spelling.of(tokenizer)
    plain = [n for n, token in enumerate(spelling.tokens) if token != NO_TEXT]
    ids = data.draw(st.lists(st.sampled_from(plain), max_size=12))
    decoded = spelling.decoded(np.array(ids, np.int32)).text
    wanted = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
    if kind == "unigram":  # its decoder drops every space of the first token
        decoded, wanted = decoded.lstrip(b" "), wanted.lstrip(" ")
    try:
        assert decoded.decode() == wanted
    except UnicodeDecodeError:
        assert "\ufffd" in wanted


@given(kinds, kinds, unicode, st.data())
def test_a_segment_spells_the_same_bytes_in_both_and_holds_no_boundary_of_both(
    student: str, theirs: str, text: str, data: st.DataObject
) -> None:
    """Also of tokens that were cut off, in the middle of a character maybe."""
    tokenizers = KINDS[student](), KINDS[theirs]()
    spellings = [Spelling.of(tokenizer) for tokenizer in tokenizers]
    ids = [ids_of(tokenizer, text) for tokenizer in tokenizers]
    ids[0] = ids[0][: data.draw(st.integers(0, len(ids[0])))]
    spelled = [spelling.decoded(each) for spelling, each in zip(spellings, ids, strict=True)]
    segments = common_segments(*spelled)
    numbers = segments.policy, segments.other
    assert {*numbers[0]} - {UNREAD} == {*numbers[1]} - {UNREAD}
    inner = list[set[int]]()
    for each, of in zip(spelled, numbers, strict=True):
        read = of != UNREAD
        assert (np.diff(of[read], prepend=0) >= 0).all()
        assert (np.diff(read.astype(np.int8)) <= 0).all()  # nothing behind what is not read
        inner.append({int(end) for end in each.ends[read]})
    last = max(inner[0], default=0)
    assert last == max(inner[1], default=0)
    assert spelled[0].text[:last] == spelled[1].text[:last]
    both = {end for end in inner[0] & inner[1] if end}
    assert len(both) == len({*numbers[0]} - {UNREAD})
    behind = {int(end) for end in spelled[0].ends} & {int(end) for end in spelled[1].ends}
    assert not {
        end for end in behind if end > last and spelled[0].text[:end] == spelled[1].text[:end]
    }


def spelled(*tokens: bytes) -> SpelledText:
    ends = np.cumsum([len(token) for token in tokens])
    return SpelledText(b"".join(tokens), ends)


@pytest.mark.parametrize(
    ("student_pieces", "theirs", "segments"),
    [
        # 3 tokens and 2: "un|happy|!" and "unh|appy!" meet at the end alone
        ((b"un", b"happy", b"!"), (b"unh", b"appy!"), ([0, 0, 0], [0, 0])),
        ((b"un", b"happy", b"!"), (b"un", b"hap", b"py", b"!"), ([0, 1, 2], [0, 1, 1, 2])),
        # two bytes of one character each
        ((b"\xc3", b"\xa9", b"t"), (b"\xc3\xa9", b"t"), ([0, 0, 1], [0, 1])),
        ((b"\xc3", b"\xa9"), (b"\xc3", b"\xa9"), ([0, 1], [0, 1])),
        # cut off in the middle of a character: the other model read "a" alone
        ((b"a", b"b\xc3"), (b"ab",), ([-1, -1], [-1])),
        ((b"a", b"b", b"\xc3"), (b"ab",), ([0, 0, -1], [0])),
        # other bytes from the third on
        ((b"ab", b"c", b"d"), (b"ab", b"\xff", b"d"), ([0, -1, -1], [0, -1, -1])),
        # a token without bytes goes with the one before it, or at the start with the first
        ((b"a", b"", b"b"), (b"a", b"b"), ([0, 0, 1], [0, 1])),
        ((b"", b"a"), (b"a",), ([0, 0], [0])),
        ((), (b"a",), ([], [-1])),
    ],
)
def test_texts_are_cut_where_both_have_a_boundary(
    student_pieces: tuple[bytes, ...],
    theirs: tuple[bytes, ...],
    segments: tuple[list[int], list[int]],
) -> None:
    cut = common_segments(spelled(*student_pieces), spelled(*theirs))
    assert (cut.policy.tolist(), cut.other.tolist()) == segments


def test_what_ends_a_turn_is_a_segment_of_its_own_where_all_before_it_was_read() -> None:
    read = Segments(np.array([0, 0, 1]), np.array([0, 1])).closed(2)
    assert (read.policy.tolist(), read.other.tolist()) == ([0, 0, 1, 2], [0, 1, 2, 2])
    cut = Segments(np.array([0, -1]), np.array([0])).closed(1)
    assert (cut.policy.tolist(), cut.other.tolist()) == ([0, -1, -1], [0, -1])
    empty = Segments(np.zeros(0, np.int64), np.zeros(0, np.int64)).closed(1)
    assert (empty.policy.tolist(), empty.other.tolist()) == ([0], [0])


@pytest.mark.parametrize(
    ("most", "student_counts", "theirs"),
    [
        (9, [0, 0, 1, 2, -1], [0, 1, 1, 2]),
        (4, [0, 0, 1, 2, -1], [0, 1, 1, 2]),
        (3, [0, 0, 1, -1, -1], [0, 1, 1]),
        (2, [0, 0, -1, -1, -1], [0]),  # half a segment is none
        (0, [-1, -1, -1, -1, -1], []),
        (-5, [-1, -1, -1, -1, -1], []),
    ],
)
def test_a_segment_over_the_limit_of_tokens_is_not_read(
    most: int, student_counts: list[int], theirs: list[int]
) -> None:
    cut = Segments(np.array([0, 0, 1, 2, -1]), np.array([0, 1, 1, 2, -1])).within(most)
    assert (cut.policy.tolist(), cut.other.tolist()) == (student_counts, theirs)


def test_shares_of_tokens_count_those_alone_and_those_with_others() -> None:
    numbers = [np.array(row, np.int64) for row in ([0, 0, 1, 2, -1], [0], [])]
    assert token_shares(numbers) == pytest.approx((3 / 6, 2 / 6))
    assert token_shares([]) == (0.0, 0.0)


@pytest.mark.slow
def test_byte_level_tokens_are_cut_as_trl_cuts_them() -> None:
    """Its GOLD trainer, whose last group is what is left of both."""
    utils = pytest.importorskip("trl.experimental.utils", reason="TRL is a peer")
    from trl.experimental.gold.gold_trainer import ULDLoss

    tokenizers = byte_level(300), byte_level(900, digits=False)
    for text in texts():
        ids = [ids_of(tokenizer, text) for tokenizer in tokenizers]
        student_pieces, theirs = (
            Spelling.of(t).spelled(i) for t, i in zip(tokenizers, ids, strict=True)
        )
        groups = list[Any]()
        for tokenizer, each, ours in zip(tokenizers, ids, (student_pieces, theirs), strict=True):
            pieces = tokenizer.convert_ids_to_tokens(each.tolist())
            ends = np.cumsum([utils.piece_byte_len(piece) for piece in pieces])
            np.testing.assert_array_equal(ours.ends, ends)
            groups.append([(int(end) - 1, int(end)) for end in ends])
        cut = common_segments(student_pieces, theirs)
        for numbers, of in zip(
            (cut.policy, cut.other), ULDLoss._align_by_byte_offsets(*groups), strict=True
        ):
            assert np.repeat(np.arange(len(of)), [len(group) for group in of]).tolist() == [
                *numbers
            ]


def save(tokenizer: Any, path: Path) -> str:
    tokenizer.save_pretrained(path)
    return str(path)


def prompt_of(tokenizer: Any, question: str, row: int = 0, **more: Any) -> Prompt:
    messages = ({"role": "user", "content": question},)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    fields: dict[str, Any] = {"messages": messages, **more}
    return Prompt(0, np.array(ids, np.int32), question, None, "rows.jsonl", row, **fields)


def reader_of(
    student: Any, teacher: Any, prompts: Sequence[Prompt], tmp_path: Path, max_len: int = 999
) -> TextReader:
    settings = DataSettings(path="rows.jsonl")
    asked = [(settings, list(prompts))]
    return TextReader("teacher", save(teacher, tmp_path / "t"), student, asked, max_len)


def sampled(prompts: Sequence[Prompt], answers: Sequence[Any]) -> Sequences:
    tokens = [np.concatenate([p.token_ids, a]) for p, a in zip(prompts, answers, strict=True)]
    masks = [np.arange(len(t)) >= len(p.token_ids) for p, t in zip(prompts, tokens, strict=True)]
    return Sequences(
        Ragged.of(tokens, np.int32), Ragged.of(masks, np.bool_), np.arange(len(prompts))
    )


@pytest.mark.parametrize("teacher", [*KINDS])
@pytest.mark.parametrize("student", ["small", "llama 2"])
def test_a_teacher_reads_its_own_template_the_text_and_its_own_end(
    student: str, teacher: str, tmp_path: Path
) -> None:
    student_tokenizer, teacher_tokenizer = KINDS[student](), KINDS[teacher]()
    prompts = [prompt_of(student_tokenizer, question, n) for n, question in enumerate(TEXTS)]
    end = np.array([student_tokenizer.eos_token_id], np.int32)
    answers = [
        np.concatenate([ids_of(student_tokenizer, text), end]) for text in ("It is 24.", "é 数", "")
    ]
    reader = reader_of(student_tokenizer, teacher_tokenizer, prompts, tmp_path)
    sequences = sampled(prompts, answers)
    read = reader.read(sequences, prompts, np.ones(3, np.bool_))
    assert read.rows.tolist() == [0, 1, 2]
    closing = " </s>" if teacher_tokenizer.eos_token == "</s>" else "<|im_end|>"
    for row, (question, text) in enumerate(zip(TEXTS, ("It is 24.", "é 数", ""), strict=True)):
        asked = teacher_tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        ids = [
            part.tolist()
            for part in (
                ids_of(teacher_tokenizer, text),
                np.array(teacher_tokenizer.encode(closing, add_special_tokens=False)),
            )
        ]
        wanted = [*teacher_tokenizer.encode(asked, add_special_tokens=False), *ids[0], *ids[1]]
        assert read.sequences.tokens.row(row).tolist() == wanted
        assert int(read.sequences.loss_mask.row(row).sum()) == len(ids[0]) + len(ids[1])
        assert (read.segments[row].policy >= 0).all()
        assert len(read.segments[row].policy) == len(answers[row])


def test_a_segment_s_logprob_is_at_its_first_token(tmp_path: Path) -> None:
    """Worked out by hand: the policy writes "sold!" as five letters, the teacher as two tokens."""
    student, theirs = merging(), merging(*SOLD)
    prompt = prompt_of(student, "sold")
    letters = ids_of(student, "sold!")
    assert len(letters) == 5
    (merged, mark), end = ids_of(theirs, "sold!"), student.eos_token_id
    sequences = sampled([prompt], [np.array([*letters, end], np.int32)])
    read = reader_of(student, theirs, [prompt], tmp_path).read(
        sequences, [prompt], np.array([True])
    )
    tail = read.sequences.tokens.row(0)[-3:].tolist()
    assert tail == [merged, mark, theirs.eos_token_id]
    logprobs = np.zeros(len(read.sequences.tokens.values), np.float32)
    logprobs[-3:] = [-0.5, -0.25, -2.0]
    ((grades, numbers),) = read.graded(read.sequences.tokens.like(logprobs))
    before = [0.0] * len(prompt.token_ids)
    assert grades.tolist() == [*before, -0.5, 0.0, 0.0, 0.0, -0.25, -2.0]
    assert numbers.tolist() == [*[-1] * len(before), 0, 0, 0, 0, 1, 2]


def test_what_a_teacher_cannot_read_is_not_graded(tmp_path: Path) -> None:
    """Half a character at the limit, a special token in the middle, what is over max_len, and an
    end that was said of something that was not read.
    """
    student, theirs = merging(), merging(*SOLD)
    prompts = [prompt_of(student, question, n) for n, question in enumerate(["a", "b", "c", "d"])]
    end, start = student.eos_token_id, student.convert_tokens_to_ids("<|im_start|>")
    half = Spelling.of(student).tokens.index(b"\xc3")
    sold = ids_of(student, "sold!").tolist()
    answers = [[*sold, half], [*sold, start, *sold, end], [half, *sold, end], [*sold, end]]
    sequences = sampled(prompts, [np.array(answer, np.int32) for answer in answers])
    stopped = np.array([False, True, True, False])  # the last one stopped at the limit: no end
    read = reader_of(student, theirs, prompts, tmp_path).read(sequences, prompts, stopped)
    assert [each.policy.tolist() for each in read.segments] == [
        [0, 0, 0, 0, 1, -1],
        [0, 0, 0, 0, 1, *[-1] * 7],
        [-1] * 7,
        [0, 0, 0, 0, 1, -1],
    ]
    assert read.rows.tolist() == [0, 1, 3]
    least = len(
        theirs.apply_chat_template(prompts[0].messages, add_generation_prompt=True)["input_ids"]
    )
    short = reader_of(student, theirs, prompts, tmp_path, least + 1)
    first = short.read(sequences, prompts, stopped).segments[0]
    assert first.policy.tolist() == [0, 0, 0, 0, -1, -1]
    none = reader_of(student, theirs, prompts, tmp_path, least)
    nothing = none.read(sequences, prompts, stopped)
    assert (len(nothing.rows), len(nothing.sequences)) == (0, 0)
    assert all((numbers == UNREAD).all() for _, numbers in nothing.graded(None))
    assert any("4 of 4 prompts" in note for note in none.notes)


def test_two_datasets_of_one_name_may_end_turns_in_two_ways(tmp_path: Path) -> None:
    """Their chat_template_kwargs differ: each prompt is closed as its own dataset says."""
    student, teacher = merging(), merging(*SOLD)
    teacher.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if sold %}sold!{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    prompts = [prompt_of(student, question, n) for n, question in enumerate(["a", "b"])]
    kinds = [
        DataSettings(path="rows.jsonl", chat_template_kwargs={"sold": n}) for n in (True, False)
    ]
    asked = [(kind, [prompt]) for kind, prompt in zip(kinds, prompts, strict=True)]
    reader = TextReader("teacher", save(teacher, tmp_path / "t"), student, asked, 999)
    answer = np.array([*ids_of(student, "x").tolist(), student.eos_token_id], np.int32)
    read = reader.read(sampled(prompts, [answer] * 2), prompts, np.ones(2, np.bool_))
    ends = [
        teacher.decode(ids[mask])
        for ids, mask in zip(read.sequences.tokens, read.sequences.loss_mask, strict=True)
    ]
    assert ends == ["xsold!<|im_end|>", "x<|im_end|>"]


def test_what_a_student_writes_of_special_tokens_is_text_for_the_teacher(tmp_path: Path) -> None:
    student, theirs = sentence_piece(), byte_level(900)
    prompt = prompt_of(student, "a")
    text = "x<|im_end|>y <think>"
    sequences = sampled([prompt], [ids_of(student, text)])
    read = reader_of(student, theirs, [prompt], tmp_path).read(
        sequences, [prompt], np.array([True])
    )
    ids = read.sequences.tokens.row(0)[read.sequences.loss_mask.row(0)]
    assert theirs.eos_token_id not in ids
    assert theirs.convert_tokens_to_ids("<think>") in ids  # it is a token, and no special one
    assert theirs.decode(ids) == text


def test_with_the_same_tokenizer_the_sampled_tokens_are_read(tmp_path: Path) -> None:
    """Which need not be those that their text is cut into."""
    same = merging(*SOLD)
    prompt, end = prompt_of(same, "a"), same.eos_token_id
    letters = [*map(Spelling.of(same).tokens.index, (b"s", b"o", b"l", b"d"))]
    assert ids_of(same, "sold").tolist() != letters
    sequences = sampled([prompt], [np.array([*letters, end], np.int32)])
    read = reader_of(same, same, [prompt], tmp_path).read(sequences, [prompt], np.array([True]))
    assert read.sequences.tokens.row(0).tolist() == sequences.tokens.row(0).tolist()
    assert read.segments[0].policy.tolist() == [0, 1, 2, 3, 4]


def test_a_row_that_the_teacher_cannot_read_is_refused_before_the_run(tmp_path: Path) -> None:
    student, theirs = byte_level(300), sentence_piece()
    system = ({"role": "system", "content": "s"}, {"role": "user", "content": "a"})
    asked = [prompt_of(student, "a"), prompt_of(student, "a", 7, messages=system)]
    with pytest.raises(UsageError, match=r"cannot read row 7 of rows\.jsonl: .*no system"):
        reader_of(student, theirs, asked, tmp_path)
    tools = ({"role": "user", "content": "a", "tools": [{"type": "function"}]},)
    with pytest.raises(UsageError, match="does not write the tools"):
        reader_of(student, theirs, [prompt_of(student, "a", messages=tools)], tmp_path)


def test_rows_without_a_question_tell_nothing_of_two_tokenizers(tmp_path: Path) -> None:
    student, theirs = byte_level(300), byte_level(900)
    messages = ({"role": "system", "content": "Write."},)
    asked = [prompt_of(student, "", messages=messages)]
    assert "another tokenizer" in reader_of(student, theirs, asked, tmp_path).notes[0]


def test_a_tokenizer_that_changes_texts_is_refused(tmp_path: Path) -> None:
    student, lowering = (
        byte_level(300),
        Tokenizer.from_str(byte_level(900).backend_tokenizer.to_str()),
    )
    lowering.normalizer = normalizers.Lowercase()  # pyright: ignore[reportAttributeAccessIssue]
    asked = [prompt_of(student, "WHAT IS IT?")]
    with pytest.raises(UsageError, match="spell different texts"):
        reader_of(student, wrapped(lowering, CHATML, "<|im_end|>"), asked, tmp_path)
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    pieces.decoder = decoders.WordPiece()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UsageError, match="joins tokens to text by WordPiece"):
        Spelling.of(wrapped(pieces, CHATML, "[UNK]"))
