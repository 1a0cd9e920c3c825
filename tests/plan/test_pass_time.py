"""Time of a role's forward passes and updates counts what its ranks compute and send."""

from types import SimpleNamespace
from typing import Any

from helpers.model_types import config_of
from postgrad.models.known_shapes import any_shape
from postgrad.plan.hardware import Hardware, catalogue
from postgrad.plan.lengths import RowLengths
from postgrad.plan.pass_time import Samples, rank_passes
from postgrad.plan.plan import Facts, make_plan
from postgrad.plan.sizes import Sharing, Sizes
from postgrad.recipe.load import parse_recipe


def test_the_balance_loss_of_a_mixture_costs_a_forward_pass_of_each_update() -> None:
    """Left out, the coefficient is that of the model's config."""
    shape = any_shape(config_of("qwen3_moe", 37).to_dict(), "mixture")
    assert shape.counted is not None
    assert shape.counted.balance == 0.001
    lengths, one_core = (
        RowLengths(500, 500, 1.0, "here"),
        Hardware(count=1, device=catalogue({})["CPU-BF16"]),
    )
    seconds: dict[float | None, float] = {}
    for coefficient in (0.0, 0.5, None):
        model = {"path": "mixture", "router_aux_loss_coef": coefficient}
        table = {
            "job": "sft",
            "run_dir": "run",
            "steps": 1,
            "model": {name: value for name, value in model.items() if value is not None},
            "data": {"path": "rows.jsonl", "max_len": 2048},
            "batch": {"train_batch_size": 64, "micro_train_tokens": 2048},
        }
        facts = Facts(lambda _: shape, one_core, lengths)
        seconds[coefficient] = make_plan(parse_recipe(table), facts).timing.step["update"]
    assert seconds[None] == seconds[0.5]
    assert 1.25 < seconds[0.5] / seconds[0.0] < 1.5  # 4 passes for 3, and gathers of 3 for 2


def test_ranks_that_share_sequences_make_a_micro_batch_together() -> None:
    """16 384 tokens on two replicas in micro-batches of 2 048, of which each of 4 ranks has 512."""
    sharing = Sharing(
        replicas=2, tensor=1, context=4, divided=8, scatters=True, gathers=True
    )  # of a ZeRO-3 run, which gathers all weights in each of these passes
    samples = Samples(tokens=16_384, squares=0.0, learned=0.0)
    costs: Any = SimpleNamespace(sharing=sharing)
    assert rank_passes(samples, Sizes(512, 2048), costs) == 4
