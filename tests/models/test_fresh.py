"""Fresh models: the same arguments, the same bytes; text goes through a tokenizer unharmed."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from postgrad.core.errors import RunError, UsageError
from postgrad.models.fresh import PRINTABLE, make_fresh
from postgrad.models.save import directory_hash
from postgrad.models.settings import ModelInit, ModelType, TokenizerInit
from postgrad.models.tokenizer import load_tokenizer
from postgrad.recipe.load import load_recipe

ROOT = Path(__file__).parent.parent.parent
PHRASE = "Spell this word backward: "
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXTS = ["She sold 48 clips in April, then half as many in May.", "#### 72", "naïve café ≥ 10 €"]


def tiny(kind: str) -> ModelInit:
    return ModelInit(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tokenizer=TokenizerInit(kind=kind, vocab_size=320, phrases=(PHRASE,)),  # pyright: ignore[reportArgumentType]
    )


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("fresh")
    for kind in ("bpe", "characters"):
        make_fresh(tiny(kind), TEXTS if kind == "bpe" else [], 0, folder / kind)
    return {kind: load_tokenizer(str(folder / kind)) for kind in ("bpe", "characters")}


@pytest.mark.parametrize("kind", ["bpe", "characters"])
def test_the_same_arguments_give_the_same_bytes(kind: str, tmp_path: Path) -> None:
    texts = TEXTS[:2]
    torch.manual_seed(1)
    make_fresh(tiny(kind), texts, 0, tmp_path / "one")
    drawn = torch.rand(1)
    torch.manual_seed(1)
    make_fresh(tiny(kind), texts, 0, tmp_path / "two")
    assert torch.rand(1) == drawn  # nobody else's random numbers are touched
    make_fresh(tiny(kind), texts, 1, tmp_path / "other")
    hashes = [directory_hash(tmp_path / name) for name in ("one", "two", "other")]
    assert hashes[0] == hashes[1] != hashes[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other", "two"]


@pytest.mark.parametrize("kind", ["bpe", "characters"])
@pytest.mark.parametrize("model_type", get_args(ModelType))
def test_texts_of_every_type_come_back_whole_or_the_type_is_refused(
    model_type: str, kind: str, tmp_path: Path
) -> None:
    """As Qwen2Tokenizer, which transformers takes for the type, characters had no blanks."""
    init = tiny(kind).model_copy(update={"type": model_type})
    if (model_type, kind) == ("qwen2", "characters"):
        with pytest.raises(UsageError, match=r"reads tokenizers of type .* as Qwen2Tokenizer"):
            make_fresh(init, [], 0, tmp_path / "model")
        assert not (tmp_path / "model").exists()
        return
    make_fresh(init, [], 0, tmp_path / "model")
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    assert tokenizer.decode(tokenizer(PRINTABLE).input_ids) == PRINTABLE


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.text() | st.sampled_from([PHRASE, *SPECIAL])))
def test_byte_level_text_comes_back_as_it_was(parts: list[str], tokenizers: dict[str, Any]) -> None:
    """Phrases and special tokens between other text too."""
    tokenizer = tokenizers["bpe"]
    text = "".join(parts).encode("utf-8", "replace").decode("utf-8")  # no lone surrogates
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.text(alphabet=PRINTABLE) | st.sampled_from([PHRASE, *SPECIAL])))
def test_characters_come_back_as_they_were(parts: list[str], tokenizers: dict[str, Any]) -> None:
    text = "".join(parts)
    tokenizer = tokenizers["characters"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_characters_are_one_token_each_and_phrases_one(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["characters"]
    assert len(tokenizer) == 3 + 96 + 1  # specials, printable ASCII with newline, the phrase
    assert len(tokenizer.encode(f"{PHRASE}sun", add_special_tokens=False)) == 4


def test_a_word_of_many_letters_is_learned_from_in_pieces(tmp_path: Path) -> None:
    """Whole, a word of 300 000 letters would keep the trainer busy for minutes."""
    word = "".join(chr(97 + i * i % 23) for i in range(300_000))
    make_fresh(tiny("bpe"), [f"a {word} b"], 0, tmp_path / "fresh")
    tokenizer: Any = load_tokenizer(str(tmp_path / "fresh"))
    assert tokenizer.decode(tokenizer.encode(word[:5000])) == word[:5000]
    assert len(tokenizer.tokenize(word[:500])) < 400  # letters were joined


def test_digits_stand_alone(tokenizers: dict[str, Any]) -> None:
    tokens = tokenizers["bpe"].tokenize("4872")
    assert tokens == ["4", "8", "7", "2"]


def test_the_end_of_a_turn_ends_a_sequence_and_padding_is_another_token(
    tokenizers: dict[str, Any],
) -> None:
    for tokenizer in tokenizers.values():
        assert tokenizer.eos_token == "<|im_end|>"
        assert tokenizer.pad_token_id != tokenizer.eos_token_id
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "sun"}], tokenize=False, add_generation_prompt=True
        )
        assert text == "<|im_start|>user\nsun<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("kind", get_args(ModelType))
def test_a_model_of_every_type_has_the_sizes_that_were_asked_for(kind: str, tmp_path: Path) -> None:
    init = tiny("bpe" if kind == "qwen2" else "characters")
    init = init.model_copy(update={"type": kind, "rope_theta": 500.0})
    make_fresh(init, [], 0, tmp_path / "model")
    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    config = read.config
    assert config.model_type == ("gemma3_text" if kind == "gemma3" else kind)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (16, 1, 2)
    assert (config.num_key_value_heads, config.max_position_embeddings) == (1, 2048)
    assert config.vocab_size == len(load_tokenizer(str(tmp_path / "model")))
    assert read.lm_head.weight is read.model.embed_tokens.weight
    assert {p.dtype for p in read.parameters()} == {torch.float32}
    # the slowest rotation of a head of 8: theta ** (-6 / 8)
    rotations = [b for name, b in read.named_buffers() if name.endswith("inv_freq")]
    assert rotations
    assert all(r[-1] == pytest.approx(500.0**-0.75) for r in rotations)
    ids = (read.generation_config.eos_token_id, read.generation_config.pad_token_id)
    assert ids == (config.eos_token_id, config.pad_token_id) == (2, 0)


def test_a_directory_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("mine", "utf-8")
    with pytest.raises(RunError, match="not empty"):
        make_fresh(tiny("characters"), [], 0, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["mine.txt"]


def test_a_character_that_the_tokenizer_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="text 2 of the training data holds 'é'"):
        make_fresh(tiny("characters"), TEXTS, 0, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["quickstart", "game"])
def test_a_shipped_recipes_prompt_keeps_its_tokens_without_the_white_space_at_its_end(
    name: str, tmp_path: Path
) -> None:
    """Test harnesses for multiple choice move that white space over to the choice."""
    recipe = load_recipe(ROOT / "recipes" / name / "sft.toml")
    assert recipe.model.init is not None
    small = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 1}
    make_fresh(recipe.model.init.model_copy(update=small), [], 0, tmp_path / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    turn = [{"role": "user", "content": "users assist"}]
    prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert prompt != prompt.rstrip()
    start = tokenizer(prompt.rstrip(), add_special_tokens=False)["input_ids"]
    joint_ids = tokenizer(prompt + "abc", add_special_tokens=False)["input_ids"]
    assert joint_ids[: len(start)] == start
    assert tokenizer.convert_ids_to_tokens(joint_ids[len(start) :]) == ["\n", "a", "b", "c"]
    letters = tokenizer(turn[0]["content"], add_special_tokens=False)["input_ids"]
    assert len(letters) == len(turn[0]["content"])  # roles are tokens at a turn's start only
