"""Loss masks: exactly what the assistant wrote, or an error that says why not."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postgrad.data.answer_spans import Rendered, Unmarkable
from postgrad.data.chat_format import LossTurns
from postgrad.data.loss_masks import tokenise
from postgrad.data.templates import (
    CHUNK,
    Unencodable,
    render,
    render_conversation,
    turn_ends,
)
from postgrad.models.fresh import PRINTABLE, _tokenizer, _wrapped
from postgrad.models.settings import TokenizerInit

LLAMA = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim"
    " + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA_SPECIAL = ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n'"
    " + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA_SPECIAL = ("<end_of_turn>", "<bos>", "<start_of_turn>")
THINKS = (  # begins every last answer with an empty thought, as Qwen3's does
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if loop.last and m['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
]


def rendered_of(
    tokenizer: Any, messages: list[dict[str, str]], turns: LossTurns = "all"
) -> Rendered:
    ends = turn_ends(tokenizer)
    return render_conversation(tokenizer, messages, ends=ends, turns=turns, variables={})


def marked(tokenizer: Any, messages: list[dict[str, str]], turns: LossTurns = "all") -> list[str]:
    """The runs of tokens that bear loss, decoded."""
    rendered = rendered_of(tokenizer, messages, turns)
    (marked_text,) = tokenise(tokenizer, [rendered])
    if isinstance(marked_text, Unmarkable):
        raise marked_text
    ids, mask, _ = marked_text
    assert tokenizer.decode(ids.tolist()) == rendered.text
    runs: list[list[int]] = []
    for i, token in enumerate(ids.tolist()):
        if mask[i] and (i == 0 or not mask[i - 1]):
            runs.append([])
        if mask[i]:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


def test_loss_lies_on_answers_and_the_token_that_ends_them(tokenizer: Any) -> None:
    assert marked(tokenizer, CHAT) == ["2<|im_end|>", "It is 4.<|im_end|>"]
    assert marked(tokenizer, CHAT, "last") == ["It is 4.<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "special"),
    [(LLAMA, LLAMA_SPECIAL), (GEMMA, GEMMA_SPECIAL)],
    ids=["llama", "gemma"],
)
def test_other_families_are_marked_without_generation_marks(
    template: str, special: tuple[str, ...], make_tokenizer: Callable[..., Any]
) -> None:
    end = special[0]
    assert marked(make_tokenizer(template, special), CHAT) == [f"2{end}", f"It is 4.{end}"]


def test_what_a_template_writes_before_an_answer_is_learned_with_it(
    make_tokenizer: Callable[..., Any],
) -> None:
    assert marked(make_tokenizer(THINKS), CHAT[:2]) == ["<think>\n\n</think>\n\n2<|im_end|>"]


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(alphabet=PRINTABLE).filter(lambda t: "<|" not in t), min_size=1))
def test_any_conversation_is_marked_exactly(texts: list[str], tokenizer: Any) -> None:
    messages = [
        {"role": "assistant" if i % 2 else "user", "content": text}
        for i, text in enumerate([*texts, "end"] if len(texts) % 2 else texts)
    ]
    wanted = [f"{m['content']}<|im_end|>" for m in messages if m["role"] == "assistant"]
    assert marked(tokenizer, messages) == wanted


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}"
            "{{ m['role'] + ':' + m['content'] + '\n' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}",
            "writes an answer differently when more messages follow",
        ),
        (
            "{% for m in messages %}{{ m['role'] + ':' + m['content'] | upper + '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}",
            "drops text of message 3: 'It is 4.'",
        ),
        (
            "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}model:{% endif %}",
            "does not begin message 1 with its generation prompt",
        ),
        (
            "{% if not add_generation_prompt %}"
            "{% for m in messages %}{{ m['content'] }}{% endfor %}{% endif %}",
            "writes nothing before message 1",
        ),
        ("{{ raise_exception('no system role') }}", "the chat template refuses it"),
        ("{{ 1 / 0 }}", "the chat template refuses it: division by zero"),
        (
            "{{ 'a' }}\n{% for",
            "the chat template refuses it: its line 2 is no Jinja: unexpected 'end of template'",
        ),
    ],
    ids=["rewrites", "drops", "begins otherwise", "begins nowhere", "raises", "divides", "broken"],
)
def test_a_template_that_cannot_mark_the_assistant_says_why(
    template: str, why: str, make_tokenizer: Callable[..., Any]
) -> None:
    with pytest.raises(Unmarkable, match=why.replace("(", r"\(")):
        marked(make_tokenizer(template), CHAT)


def test_a_conversation_without_an_assistant_has_nothing_to_learn(tokenizer: Any) -> None:
    with pytest.raises(Unmarkable, match="no message to learn from"):
        marked(tokenizer, CHAT[:1])


def test_a_conversation_that_the_assistant_begins_answers_nothing(tokenizer: Any) -> None:
    with pytest.raises(Unmarkable, match="it begins with the assistant"):
        marked(tokenizer, CHAT[1:])
    assert marked(tokenizer, CHAT[1:], "last") == ["It is 4.<|im_end|>"]


def test_a_turn_that_is_rewritten_later_can_be_left_to_the_last(
    make_tokenizer: Callable[..., Any],
) -> None:
    tokenizer = make_tokenizer(THINKS)
    with pytest.raises(Unmarkable, match="differently when more messages follow"):
        marked(tokenizer, CHAT)
    assert marked(tokenizer, CHAT, "last") == ["<think>\n\n</think>\n\nIt is 4.<|im_end|>"]


def test_a_turn_ends_at_a_special_token_that_has_no_name(
    make_tokenizer: Callable[..., Any],
) -> None:
    """Llama 3 and Gemma 3 type: the end of a turn is neither eos nor a named special token."""
    tokenizer = make_tokenizer(GEMMA, ("<eos>", "<bos>", "<start_of_turn>"))
    tokenizer.backend_tokenizer.add_special_tokens(["<end_of_turn>"])
    assert "<end_of_turn>" not in tokenizer.all_special_tokens
    assert marked(tokenizer, CHAT) == ["2<end_of_turn>", "It is 4.<end_of_turn>"]


def test_of_two_special_tokens_at_one_place_the_longer_ends_the_turn(
    make_tokenizer: Callable[..., Any],
) -> None:
    tokenizer = make_tokenizer(GEMMA, ("<end", "<end_of_turn>", "<bos>", "<start_of_turn>"))
    assert turn_ends(tokenizer).findall("a<end_of_turn>b<end") == ["<end_of_turn>", "<end"]


def test_without_a_special_token_a_turn_ends_with_its_text(
    make_tokenizer: Callable[..., Any],
) -> None:
    plain = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    assert marked(make_tokenizer(plain), CHAT) == ["2\n", "It is 4.\n"]


def test_a_prompt_ends_where_the_answer_begins(tokenizer: Any) -> None:
    rendered = rendered_of(tokenizer, CHAT[:2])
    assert rendered.prompt == render(tokenizer, CHAT[:1], generation=True, variables={})
    assert rendered.text == f"{rendered.prompt}2<|im_end|>\n"


def test_variables_reach_the_template(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer("{{ mood }}{% if add_generation_prompt %}>{% endif %}")
    assert render(tokenizer, CHAT, generation=True, variables={"mood": "calm"}) == "calm>"


PARTS = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>", "user", "\n", "a", " ", "<|im", "_end|>", "ab"]),
    max_size=6,
).map("".join)


@given(prompt=PARTS, answer=PARTS.filter(bool))
def test_the_first_tokens_are_accepted_where_they_are_those_of_the_prompt_alone(
    prompt: str, answer: str, byte_pairs: Any
) -> None:
    """The check encodes the end of a prompt only; here the whole prompt is."""
    text = prompt + answer
    (tokens,) = tokenise(byte_pairs, [Rendered(text, ((len(prompt), len(text)),), prompt)])
    encoded = byte_pairs(text, add_special_tokens=False, return_offsets_mapping=True)
    inside = [start >= len(prompt) for start, _ in encoded["offset_mapping"]]
    first = inside.index(True) if any(inside) else len(inside)
    alone = byte_pairs(prompt, add_special_tokens=False)["input_ids"]
    accepted = not isinstance(tokens, Unmarkable)
    assert accepted == (encoded["input_ids"][:first] == alone)


@pytest.fixture(scope="module")
def byte_pairs() -> Any:
    """A tokenizer that merges a line break with what follows it, and "ab"."""
    init = TokenizerInit(kind="bpe", vocab_size=400)
    return _wrapped(_tokenizer(init, ["ab\nab a\na user\n"] * 50), 512)


def test_a_character_that_the_tokenizer_lacks_is_named_by_its_place_in_all(tokenizer: Any) -> None:
    good = Rendered("ab", ((1, 2),), "a")
    with pytest.raises(Unencodable) as refused:
        list(tokenise(tokenizer, [*[good] * CHUNK, Rendered("a\u4e00", ((1, 2),), "a")]))
    assert refused.value.place == CHUNK
