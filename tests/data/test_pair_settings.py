"""What a recipe may say about preferences."""

import pytest
from pydantic import ValidationError

from postgrad.data.settings import (
    DataSettings,
    MixedPairs,
    MixSettings,
    PairMixSettings,
    PairSettings,
)


@pytest.mark.parametrize("key", ["answer", "messages", "template", "loss_turns", "choosen"])
def test_keys_of_questions_are_none_of_preferences(key: str) -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        PairSettings.model_validate({"path": "a", key: "all"})


def test_both_kinds_of_data_say_the_same_of_where_rows_are_and_of_long_ones() -> None:
    shared = set(PairSettings.model_fields) & set(DataSettings.model_fields)
    assert {"path", "name", "split", "filter", "map", "max_len", "on_too_long"} <= shared
    for name in shared - {"prompt"}:
        assert PairSettings.model_fields[name].default == DataSettings.model_fields[name].default
    mixes = set(PairMixSettings.model_fields) - set(PairSettings.model_fields)
    assert mixes == set(MixSettings.model_fields) - set(DataSettings.model_fields)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"rejected": "chosen"}, "two of its columns have one name"),
        ({"prompt": "label"}, "two of its columns have one name"),
        ({"speakers": ["A", "A"]}, "speakers are two different names"),
        ({"speakers": ["A", " "]}, "speakers are two different names"),
        ({"filter": "short"}, "a function is named as"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        PairSettings.model_validate({"path": "a", **settings})


def test_one_set_is_read_as_it_is_and_several_each_with_their_share() -> None:
    settings = PairMixSettings(path="a")
    assert settings.sources == (settings,)
    several = PairMixSettings(sets=(MixedPairs(path="a", weight=0.5), MixedPairs(path="b")))
    assert [source.path for source in several.sources] == ["a", "b"]
    assert several.sets[0].draws(10) == 5
