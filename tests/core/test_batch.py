"""Batch numbers against numbers worked by hand; what does not fit names what would."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.batch import BatchSettings, Parallel, RolloutBatchSettings, RunLength
from postgrad.core.errors import UsageError
from postgrad.core.geometry import derive, geometry


def rl(length: RunLength | None = None, parallel: Parallel | None = None, **settings: int):
    return geometry(RolloutBatchSettings(**settings), length or RunLength(steps=10), parallel)


def problem(
    length: RunLength | None = None, parallel: Parallel | None = None, **settings: int
) -> str:
    with pytest.raises(UsageError) as refused:
        rl(length, parallel, **settings)
    return str(refused.value)


def test_every_number_follows_from_those_that_are_stated() -> None:
    sizes = rl(
        RunLength(total_episodes=100_000),
        rollout_batch_size=64,
        n_samples_per_prompt=8,
        train_batch_size=128,
        epochs_per_rollout=2,
        micro_train_batch_size=16,
    )
    assert sizes.samples_per_step == 512
    assert sizes.num_mini_batches == 4
    assert sizes.updates_per_step == 8
    assert sizes.gradient_accumulation == 8
    assert sizes.steps == 195
    assert sizes.total_updates == 1560
    assert sizes.total_episodes == 99_840
    assert sizes.left_over == 160


def test_an_update_left_unsaid_takes_all_samples_of_a_step() -> None:
    sizes = rl(rollout_batch_size=16, n_samples_per_prompt=4)
    assert (sizes.train_batch_size, sizes.updates_per_step) == (64, 1)
    sft = geometry(BatchSettings(), RunLength(steps=5))
    assert (sft.train_batch_size, sft.samples_per_step, sft.updates_per_step) == (64, 64, 1)


def test_ten_million_episodes_of_224_samples_are_44642_steps_and_192_left_over() -> None:
    """Open-Instruct's way: 7 learner GPUs with 32 samples each."""
    sizes = rl(
        RunLength(total_episodes=10_000_000),
        Parallel(ranks=7),
        rollout_batch_size=224,
        n_samples_per_prompt=1,
        local_mini_batch_size=32,
    )
    assert (sizes.train_batch_size, sizes.steps, sizes.left_over) == (224, 44_642, 192)
    assert sizes.data_parallel_size == 7


def test_mini_batches_state_the_update_by_its_share_of_a_step() -> None:
    sizes = rl(rollout_batch_size=16, n_samples_per_prompt=8, num_mini_batches=4)
    assert (sizes.train_batch_size, sizes.updates_per_step) == (32, 4)


def test_accumulation_divides_by_the_replicas_too() -> None:
    sizes = rl(
        None,
        Parallel(ranks=8, tensor_parallel=2),
        rollout_batch_size=16,
        n_samples_per_prompt=8,
        micro_train_batch_size=4,
    )
    assert sizes.data_parallel_size == 4
    assert sizes.gradient_accumulation == 128 // (4 * 4)
    assert sizes.local_mini_batch_size == 32


def test_epochs_become_steps_once_the_rows_are_known() -> None:
    settings = BatchSettings(train_batch_size=64)
    assert geometry(settings, RunLength(epochs=1)).steps is None
    assert geometry(settings, RunLength(epochs=1, rows=7473)).steps == 117  # 116.77 rounded up
    assert geometry(settings, RunLength(epochs=0.5, rows=640)).steps == 5
    sizes = rl(RunLength(epochs=2, rows=100), rollout_batch_size=10, n_samples_per_prompt=4)
    assert sizes.steps == 20


def test_a_budget_of_less_than_a_step_is_one_step() -> None:
    sizes = rl(RunLength(total_episodes=10), rollout_batch_size=16, n_samples_per_prompt=4)
    assert (sizes.steps, sizes.left_over) == (1, 0)


def test_ratios_that_are_not_whole_name_the_nearest_values_that_work() -> None:
    message = problem(rollout_batch_size=16, n_samples_per_prompt=8, train_batch_size=48)
    assert "batch.train_batch_size: 128 samples of a step" in message
    assert "nearest train_batch_size that works: 32 or 64" in message
    message = problem(rollout_batch_size=16, n_samples_per_prompt=8, num_mini_batches=5)
    assert "nearest that work: 4 or 8" in message
    message = problem(rollout_batch_size=16, n_samples_per_prompt=8, micro_train_batch_size=48)
    assert message.endswith("nearest that work: micro_train_batch_size 32 or 64")
    message = problem(rollout_batch_size=18, n_samples_per_prompt=8, micro_train_batch_size=32)
    assert message.endswith("nearest that work: micro_train_batch_size 24 or 36")
    message = problem(
        rollout_batch_size=18,
        n_samples_per_prompt=8,
        train_batch_size=36,
        micro_train_batch_size=24,
    )
    assert message.endswith("micro_train_batch_size 18 or 36, or train_batch_size 24 or 48")
    message = problem(
        None,
        Parallel(ranks=4),
        rollout_batch_size=3,
        n_samples_per_prompt=4,
        local_mini_batch_size=2,
    )
    assert "nearest local_mini_batch_size that works: 1 or 3" in message


def test_a_quantity_stated_twice_is_an_error_where_the_two_disagree() -> None:
    message = problem(
        rollout_batch_size=16, n_samples_per_prompt=8, train_batch_size=64, num_mini_batches=4
    )
    assert "train_batch_size makes it 64 but num_mini_batches makes it 32" in message
    agreed = rl(
        rollout_batch_size=16, n_samples_per_prompt=8, train_batch_size=32, num_mini_batches=4
    )
    assert agreed.train_batch_size == 32
    message = problem(micro_train_batch_size=4, micro_train_tokens=100)
    assert "stated in samples and in tokens" in message


def test_a_run_says_its_length_one_way() -> None:
    assert "nothing says how long to run" in problem(RunLength())
    assert "steps and epochs are both stated" in problem(RunLength(steps=1, epochs=1.0))


def test_ranks_that_do_not_divide_are_told_with_every_other_problem() -> None:
    sizes, problems = derive(
        RolloutBatchSettings(), RunLength(), Parallel(ranks=6, tensor_parallel=4)
    )
    assert sizes is None
    assert len(problems) == 2
    assert problems[0][0] == "steps"
    assert "6" in problems[1][1]


def test_lines_say_every_number_with_unit_and_formula() -> None:
    text = "\n".join(
        rl(
            RunLength(total_episodes=1000),
            rollout_batch_size=8,
            n_samples_per_prompt=8,
            train_batch_size=32,
        ).lines()
    )
    assert "rollout_batch_size            8  prompts per step" in text
    assert "updates_per_step              2  optimizer steps = num_mini_batches *" in text
    assert "samples = steps * samples_per_step; 40 of the budget left over" in text
    assert "at start  tokens per replica" in text


def test_sft_names_sizes_around_the_stated_one() -> None:
    with pytest.raises(UsageError) as refused:
        geometry(BatchSettings(train_batch_size=64, micro_train_batch_size=24), RunLength(steps=1))
    assert str(refused.value).endswith(
        "micro_train_batch_size 16 or 32, or train_batch_size 48 or 72"
    )


def test_a_size_said_in_another_number_is_not_answered_with_train_batch_size() -> None:
    message = problem(
        None,
        Parallel(ranks=2),
        rollout_batch_size=6,
        n_samples_per_prompt=3,
        num_mini_batches=2,
        micro_train_batch_size=2,
    )
    assert message.endswith("2 samples on 2 replicas; no micro-batch works with it")


def test_numbers_far_too_large_are_answered_at_once() -> None:
    message = problem(
        rollout_batch_size=10**6, n_samples_per_prompt=10**6, train_batch_size=10**9 - 1
    )
    assert message.endswith("nearest train_batch_size that works: 976562500 or 1000000000")


def test_the_example_of_the_docs_is_what_is_printed() -> None:
    printed = rl(
        RunLength(total_episodes=100_000),
        rollout_batch_size=64,
        n_samples_per_prompt=8,
        train_batch_size=128,
        epochs_per_rollout=2,
        micro_train_batch_size=16,
    ).lines()
    page = Path(__file__).parent.parent.parent / "docs" / "batches.md"
    assert "\n".join(printed) in page.read_text("utf-8")


NAMED = re.compile(
    r"(train_batch_size|micro_train_batch_size)(?: that works:)? (\d+)(?: or (\d+))?"
)


@given(
    prompts=st.integers(1, 64),
    samples=st.integers(1, 16),
    train=st.integers(1, 200),
    micro=st.integers(1, 64),
    ranks=st.integers(1, 8),
)
def test_what_is_accepted_is_whole_and_what_is_named_works(
    prompts: int, samples: int, train: int, micro: int, ranks: int
) -> None:
    stated = {"train_batch_size": train, "micro_train_batch_size": micro}

    def tried(**other: int):
        settings = RolloutBatchSettings(
            rollout_batch_size=prompts, n_samples_per_prompt=samples, **{**stated, **other}
        )
        return derive(settings, RunLength(steps=3), Parallel(ranks=ranks))

    per_step = prompts * samples
    sizes, problems = tried()
    assert (not problems) == (per_step % train == 0 and train % (micro * ranks) == 0)
    if not problems:
        assert sizes is not None
        assert sizes.num_mini_batches is not None
        assert sizes.gradient_accumulation is not None
        assert sizes.num_mini_batches * train == per_step
        assert sizes.gradient_accumulation * micro * ranks == train
    for key, message in problems:
        for name, *values in NAMED.findall(message.rpartition("; ")[2]):
            for value in filter(None, values):
                left = [other for other, _ in tried(**{name: int(value)})[1]]
                possible = any(
                    per_step % size == 0 and size % (micro * ranks) == 0
                    for size in range(1, per_step + 1)
                )
                assert left == [] or (key not in left and not possible)
