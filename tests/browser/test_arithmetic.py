"""Numbers that the page computes itself, against values worked out by hand."""

from collections.abc import Iterator
from typing import Any

import pytest

from postgrad.observe.report.page import program


@pytest.fixture(scope="module")
def called(chromium: Any) -> Iterator[Any]:
    """called(module, text of a function of its exports) gives what the function returns."""
    page = chromium.new_page()
    modules = program().split('modules["main.js"]')[0]
    yield lambda name, body: page.evaluate(
        f'() => {{ {modules} return ({body})(modules["{name}.js"]); }}'
    )
    page.close()


def test_a_histogram_spreads_a_part_over_the_bins_it_covers(called: Any) -> None:
    parts = "[[0, 0, 1], [1, 1, 1], [0.25, 0.75, 2]]"
    bins = "{ low: 0, high: 1, bins: 4 }"
    shares = called("strips", f"(s) => s.binned({parts}, {bins})")
    assert shares == pytest.approx([0.25, 0.25, 0.25, 0.25])
    assert called("strips", f"(s) => s.binned([], {bins})") == [0, 0, 0, 0]


def test_a_quantile_is_the_value_below_which_its_part_of_the_weight_lies(called: Any) -> None:
    points = "[[3, 3, 1], [1, 1, 1], [2, 2, 1]]"
    assert called("strips", f"(s) => [0, 0.5, 1].map((q) => s.quantile({points}, q))") == [1, 2, 3]
    assert called("strips", "(s) => s.quantile([[0, 10, 4]], 0.25)") == 2.5
    assert called("strips", "(s) => s.quantile([], 0.5)") is None


def test_a_zoomed_curve_counts_the_line_where_it_is_cut(called: Any) -> None:
    values = called("series", "(s) => s.within([0, 10, 20], [0, 1, 3], 5, 15)")
    assert sorted(values) == pytest.approx([0.5, 1, 2])
    assert called("series", "(s) => s.within([0, 10], [2, 4], 4, 6)") == pytest.approx([2.8, 3.2])


STEP = (
    "{ sample_seconds: 3, train_seconds: 4, publish_seconds: 1, log_seconds: 0.5, "
    'other_seconds: 0.25, "engine_x": 9%s }'
)


def lanes(called: Any, more: str, first: str = "false") -> dict[str, list[Any]]:
    timeline = called("timeline", f"(t) => t.lanes({STEP % more}, {first})")
    assert timeline["seconds"] == 8.75
    timed = {name: [lane for lane in parts if lane[1] > 0] for name, parts in timeline["lanes"]}
    assert all(sum(part[1] for part in parts) == 8.75 for parts in timed.values())
    return timed


def test_engine_and_learner_take_turns_in_a_synchronous_step(called: Any) -> None:
    assert lanes(called, "") == {
        "engine": [["sampling", 3], ["waiting", 4], ["publishing", 1], ["waiting", 0.75]],
        "learner": [["waiting", 3], ["learning", 4], ["publishing", 1], ["other", 0.75]],
    }


def test_samples_drawn_beside_learning_are_told_from_waiting(called: Any) -> None:
    slow_engine = ', "overlap/sample_seconds": 4, "overlap/engine_wait_seconds": 0'
    assert lanes(called, slow_engine) == {
        "engine": [["sampling", 4], ["sampling", 3], ["publishing", 1], ["waiting", 0.75]],
        "learner": [["learning", 4], ["waiting", 3], ["publishing", 1], ["other", 0.75]],
    }
    fast_engine = ', "overlap/sample_seconds": 1, "overlap/engine_wait_seconds": 3'
    assert lanes(called, fast_engine)["engine"][:2] == [["sampling", 4], ["waiting", 3]]
    assert lanes(called, slow_engine, "true")["learner"][0] == ["waiting", 3]


def test_an_engine_is_busy_no_longer_than_samples_were_drawn(called: Any) -> None:
    timed = lanes(called, ', "engine/0/busy_seconds": 2, "engine/1/busy_seconds": 9')
    assert timed["engine 0"][:2] == [["sampling", 2], ["waiting", 5]]
    assert timed["engine 1"][:2] == [["sampling", 3], ["waiting", 4]]


RUN = '{ evaluations: [%s], names: () => ["reward"], column: (n) => n === "step" ? [1, 2, 3] : %s }'


def test_the_runs_are_ranked_by_their_last_evaluation_or_by_recent_steps(called: Any) -> None:
    line = "{ step: %d, set: null, accuracy: %s, accuracy_low: 0.1, accuracy_high: 0.9, loss: %s }"
    worse = RUN % (f"{line % (0, '0.9', '9')}, {line % (5, '0.4', '1')}", "[1, 2, 3]")
    better = RUN % (line % (5, "0.5", "2"), "[NaN, 1, 1]")
    body = f"""(l) => {{
        const runs = [{worse}, {better}];
        return l.measures(runs).map((one) => [one.name, ...l.ranked(runs, one).map(({{ run, value, low, high }}) => [runs.indexOf(run), value, low, high])]);
    }}"""  # noqa: E501
    accuracy, loss, reward = called("leader", body)
    assert accuracy == ["eval/accuracy", [1, 0.5, 0.1, 0.9], [0, 0.4, 0.1, 0.9]]
    assert [loss[0], loss[1][:2], loss[2][:2]] == ["eval/loss", [0, 1], [1, 2]]  # less is better
    margin = 1.96 / 3**0.5  # values 1, 2, 3: deviation 1, standard error 1 / sqrt(3)
    assert reward[:1] == ["reward"]
    assert reward[1] == pytest.approx([0, 2, 2 - margin, 2 + margin])
    assert reward[2][:2] == [1, 1]


def test_intervals_of_one_quantity_share_a_scale_and_those_of_another_do_not(called: Any) -> None:
    accuracy = "{ set: null, step: %d, accuracy: %s, accuracy_low: %s, accuracy_high: %s, %s }"
    loss = "loss: 3, loss_low: 2, loss_high: 4"
    hard = '"accuracy/hard": 0.2, "accuracy_low/hard": 0.1, "accuracy_high/hard": 0.3'
    first_run = f"{{ name: 'a', evaluations: [{accuracy % (0, 0.4, 0.3, 0.5, loss)}] }}"
    other = f"{{ name: 'b', evaluations: [{accuracy % (0, 0.8, 0.7, 0.9, hard)}] }}"
    body = f"""(t) => [{first_run}, {other}].map((run, place, runs) =>
        t.evaluationTables(run, true, runs).map((table) =>
            [...table.querySelectorAll(".whisker")].map((path) =>
                path.getAttribute("d").match(/[0-9.]+/g).map(Number))))"""
    # 54 pixels from 3 on: accuracies of both runs lie between 0.1 and 0.9, the loss between 2 and 4
    (one_table,), (other_table,) = called("tables", body)
    assert one_table == [pytest.approx([16.5, 5, 30]), pytest.approx([3, 5, 57])]
    assert other_table == [pytest.approx([43.5, 5, 57]), pytest.approx([3, 5, 16.5])]
