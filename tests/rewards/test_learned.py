"""A reward model of this process among the components of a reward."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.image_directories import picture
from postgrad.core.errors import RunError, UsageError
from postgrad.core.media import image_store, images_kept_in
from postgrad.core.records import PlacedImage, Turn
from postgrad.rewards.scorer import Scorer
from postgrad.rewards.settings import RewardSettings, ScoringSettings


class FakeLearned:
    """Scores a sequence as it is told by its last token; keeps what it was given."""

    mean: float | None = 1.0
    std: float | None = 4.0
    separator: str | None = None

    def __init__(self, values=None, error=None):
        self.calls, self.shown = [], []
        self.values, self.error = values or {}, error

    def score(self, sequences, images):
        if self.error is not None:
            raise self.error
        self.calls.append([token_ids.tolist() for token_ids in sequences])
        self.shown.append(list(images))
        return np.array(
            [self.values.get(int(token_ids[-1]), float(token_ids[-1])) for token_ids in sequences]
        )


@pytest.fixture
def ending(make_rollouts):
    """ending(*last tokens): samples of two turns, of which the first is the policy's."""

    def make(*tokens):
        samples = make_rollouts(["#### 7"] * len(tokens))
        return [
            replace(
                sample,
                turns=(turn("policy", 7, 8), turn("environment", 9), turn("policy", last)),
            )
            for sample, last in zip(samples, tokens, strict=True)
        ]

    return make


def turn(author, *ids):
    return Turn(author, np.array(ids, np.int32), np.zeros(len(ids), np.float32))


def scorer_of(learned, *rewards, **settings):
    learned_reward = RewardSettings(type="reward_model", **settings)
    return Scorer(
        [learned_reward, *rewards],
        ScoringSettings(workers=1),
        learned={learned_reward.name or learned_reward.type: learned},
    )


def test_a_group_is_scored_in_one_call_on_the_tokens_of_prompt_and_response(make_prompt, ending):
    learned = FakeLearned()
    with scorer_of(learned, weight=0.5) as scorer:
        scorer.submit(make_prompt(), ending(3, 5))
        (group,) = scorer.completed(wait=False)
    assert learned.calls == [[[0, 1, 2, 7, 8, 9, 3], [0, 1, 2, 7, 8, 9, 5]]]
    assert group.rewards["reward_model"].tolist() == [3.0, 5.0]
    assert group.total.tolist() == [1.5, 2.5]
    assert group.kept.all()
    assert group.details == {}


def test_it_sees_the_images_of_the_prompt(make_prompt, ending, tmp_path):
    learned = FakeLearned()
    with images_kept_in(tmp_path), scorer_of(learned) as scorer:
        image = PlacedImage(image_store().add(picture(1, 8, 8)), np.array([1]))
        scorer.score([(replace(make_prompt(), images=(image,)), ending(3, 5))])
    assert learned.shown == [[(image,), (image,)]]


def test_it_sees_the_images_of_replies(make_prompt, ending, tmp_path):
    learned = FakeLearned()
    with images_kept_in(tmp_path), scorer_of(learned) as scorer:
        prompt = make_prompt()
        image = PlacedImage(image_store().add(picture(1, 8, 8)), np.array([0]))
        (sample,) = ending(3)
        first_turn, reply, last = sample.turns
        shown = replace(sample, turns=(first_turn, replace(reply, images=(image,)), last))
        scorer.score([(prompt, [shown])])
    ((seen,),) = learned.shown[0]
    assert (seen.digest, seen.at.tolist()) == (image.digest, [len(prompt.token_ids) + 2])


def test_it_is_mixed_with_verifiers_as_any_component(make_prompt, ending):
    gsm8k = RewardSettings(type="gsm8k", weight=10.0)
    longer = RewardSettings(type="overlong", buffer=2, max_new_tokens=3, multiply=True)
    with scorer_of(FakeLearned(), gsm8k, longer, name="taste") as scorer:
        assert scorer.names == ["taste", "gsm8k", "overlong"]
        assert scorer.check([make_prompt(answer="seven")])[0][1].startswith("gsm8k: ")
        (group,) = scorer.score([(make_prompt(), ending(4))])
    assert group.rewards["taste"].tolist() == [4.0]
    assert group.rewards["gsm8k"].tolist() == [1.0]
    assert group.rewards["overlong"].tolist() == [-0.5]  # turns of 2 and 1 tokens, 1 is free
    assert group.total.tolist() == [-7.0]


def test_a_gate_holds_for_it_too(make_prompt, ending):
    with scorer_of(FakeLearned(), gate=True, gate_at=4.0, gate_value=-9.0) as scorer:
        (group,) = scorer.score([(make_prompt(), ending(3, 4))])
    assert group.total.tolist() == [-9.0, 4.0]


def test_it_goes_by_dataset_and_column(make_prompt, ending):
    learned = FakeLearned()
    gsm8k = RewardSettings(type="gsm8k")
    with scorer_of(learned, gsm8k, when={"kind": "chat"}) as scorer:
        pairs = [(make_prompt(0, kind="sum"), ending(3)), (make_prompt(1, kind="chat"), ending(3))]
        first, second = scorer.score(pairs)
    assert set(first.rewards) == {"gsm8k"}
    assert set(second.rewards) == {"gsm8k", "reward_model"}
    assert len(learned.calls) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_a_recorded_failure(make_prompt, ending, bad):
    learned = FakeLearned({4: bad})
    with scorer_of(learned) as scorer:
        (group,) = scorer.score([(make_prompt(), ending(3, 4, 5))])
        np.testing.assert_array_equal(group.total, [3.0, np.nan, 5.0])
        assert group.kept.tolist() == [True, False, True]
        (failure,) = group.failures
        assert (failure.sample, failure.component, failure.cause) == (1, "reward_model", "error")
        assert failure.message == f"the reward model returned {bad}, which is no score"
    with scorer_of(learned, on_failure="score", failure_score=-1.0) as scorer:
        (group,) = scorer.score([(make_prompt(), ending(3, 4))])
        assert group.total.tolist() == [3.0, -1.0]
    with (
        scorer_of(learned, on_failure="stop_run") as scorer,
        pytest.raises(RunError, match="'reward_model' is stop_run"),
    ):
        scorer.submit(make_prompt(), ending(3, 4))
    with (
        scorer_of(learned) as scorer,
        pytest.raises(RunError, match="failed on 1 of 2 scored samples"),
    ):
        scorer.require_scored(scorer.score([(make_prompt(), ending(3, 4))]))


def test_what_the_model_raises_is_raised(make_prompt, ending):
    with (
        scorer_of(FakeLearned(error=RuntimeError("out of memory"))) as scorer,
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        scorer.submit(make_prompt(), ending(3))


def test_a_wrong_number_of_scores_is_raised(make_prompt, ending):
    learned = FakeLearned()
    learned.score = lambda sequences, images: np.zeros(len(sequences) + 1)
    with (
        scorer_of(learned) as scorer,
        pytest.raises(ValueError, match=r"scores of shape \(3,\) for 2 sequences"),
    ):
        scorer.submit(make_prompt(), ending(3, 4))


def test_normalised_scores_use_what_is_kept_with_the_model(make_prompt, ending):
    with scorer_of(FakeLearned({6: np.nan}), normalise=True) as scorer:
        (group,) = scorer.score([(make_prompt(), ending(3, 6))])
    assert group.rewards["reward_model"][0] == (3.0 - 1.0) / 4.0
    assert group.details["reward_model"] == ({"raw": 3.0}, None)
    assert len(group.failures) == 1


@pytest.mark.parametrize(("mean", "std"), [(None, 1.0), (1.0, None), (0.0, 0.0), (np.nan, 1.0)])
def test_normalising_needs_mean_and_std(mean, std):
    learned = FakeLearned()
    learned.mean, learned.std = mean, std
    with pytest.raises(UsageError, match="normalise = true, and its model says mean"):
        scorer_of(learned, normalise=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cpu_seconds", 1.0),
        ("wall_seconds", 1.0),
        ("waits", False),
        ("after", "</think>"),
        ("special_tokens", True),
        ("sandbox", True),
        ("env", ("KEY",)),
    ],
)
def test_settings_of_workers_are_refused(key, value):
    with pytest.raises(UsageError, match=f"{key}: .* and in no worker, .*leave it out"):
        scorer_of(FakeLearned(), **{key: value})


def test_a_recipe_that_was_written_down_says_every_default(make_prompt, ending):
    dumped = RewardSettings(type="reward_model").model_dump(mode="json", exclude={"type"})
    with scorer_of(FakeLearned(), **dumped) as scorer:
        assert scorer.score([(make_prompt(), ending(3))])[0].total.tolist() == [3.0]


def test_without_a_model_it_is_refused():
    with pytest.raises(UsageError, match="'reward_model' needs a reward model and there is none"):
        Scorer([RewardSettings(type="reward_model")], ScoringSettings())
    with pytest.raises(UsageError, match="did you mean 'normalise'"):
        scorer_of(FakeLearned(), normalize=True)


def test_alone_it_starts_no_worker(make_prompt, ending, monkeypatch):
    monkeypatch.setattr("postgrad.rewards.pool.WorkerProcess", None)
    with scorer_of(FakeLearned()) as scorer:
        assert scorer.check([make_prompt(answer=None)]) == []
        assert scorer.score([(make_prompt(), ending(3))])[0].total.tolist() == [3.0]
