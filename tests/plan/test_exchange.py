"""What a plan says of ranks that share the experts of a mixture: Mixtral 8x7B, by hand."""

from typing import Any

import pytest

from helpers.model_types import config_of
from postgrad.core.errors import UsageError
from postgrad.models.known_shapes import any_shape, find_shape
from postgrad.plan.exchange import layer_weights, rows_bytes, sent_bytes
from postgrad.plan.hardware import parse_hardware
from postgrad.plan.lengths import RowLengths
from postgrad.plan.page import Page
from postgrad.plan.plan import Facts, RunPlan, make_plan
from postgrad.plan.sizes import Sharing
from postgrad.recipe.load import parse_recipe

LAYERS, HIDDEN, TOKENS = 32, 4096, 64 * 1000
EXPERTS = LAYERS * 8 * 3 * HIDDEN * 14_336  # weights
MIXTRAL = any_shape({"model_type": "mixtral"}, "mixtral")
MIXTRAL_BALANCED = any_shape({"model_type": "mixtral", "router_aux_loss_coef": 0.02}, "mixtral")


def planned(model: dict[str, Any] | None = None, shape: Any = MIXTRAL, **learner: Any) -> RunPlan:
    table = {
        "job": "sft",
        "run_dir": "run",
        "steps": 1,
        "model": {"path": "mixture", "router_aux_loss_coef": 0.0, **(model or {})},
        "data": {"path": "rows.jsonl", "max_len": 2048},
        "batch": {"train_batch_size": 64, "micro_train_tokens": 2048},
        "learner": {"ranks": 8, **learner},
        "cluster": {"type": "ray"},
    }
    lengths = RowLengths(500, 500, 1.0, "here")
    return make_plan(parse_recipe(table), Facts(lambda _: shape, parse_hardware("8xH200"), lengths))


def of_policy(plan: RunPlan, purpose: str) -> int:
    lines = [line for line in plan.memory.lines if (line.role, line.purpose) == ("policy", purpose)]
    return sum(line.bytes.get("update", 0) for line in lines)


def test_the_experts_of_a_mixture_and_how_often_a_token_is_sent_are_counted() -> None:
    assert MIXTRAL.counted is not None
    counted = MIXTRAL.counted
    assert (counted.routed, counted.choices, counted.experts) == (EXPERTS, 2 * LAYERS, 8)
    glm = any_shape(config_of("glm4_moe", 37).to_dict(), "glm").counted  # a first dense layer
    assert glm is not None
    assert (glm.choices, glm.experts) == (2, 4)


def test_a_step_exchanges_rows_there_and_back_forward_and_backward() -> None:
    """Each rank has 8 000 tokens, each goes to 2 experts of 32 layers, 3 of 4 of them elsewhere."""
    rows = TOKENS / 8 * 2 * LAYERS * HIDDEN * 2 * 3 / 4  # bytes in bfloat16, one exchange
    plan = planned(expert_parallel=4, sharding="zero3")
    assert plan.timing.exchanged == pytest.approx(4 * rows)
    assert plan.timing.to_json()["exchanged_bytes"] == round(4 * rows)
    again = planned({"gradient_checkpointing": True}, expert_parallel=4, sharding="zero3")
    balanced = planned({"router_aux_loss_coef": 0.1}, expert_parallel=4, sharding="zero3")
    assert again.timing.exchanged == balanced.timing.exchanged == pytest.approx(6 * rows)
    (note,) = [note for note in Page(plan, ()).notes() if "expert_parallel" in note]
    assert f"each rank sends {4 * rows / 1e9:.3g} GB of hidden states and gradients" in note
    assert f"all 8 ranks together {32 * rows / 1e9:.3g} GB" in note


def test_frozen_routers_do_not_train_and_have_no_balance_loss() -> None:
    """32 routers of 8 x 4096. Each weight that trains has 8 bytes of moments, and a gradient."""
    routers = 32 * 8 * 4096
    plain, frozen = planned(ranks=1), planned({"freeze": ["router"]}, ranks=1)
    for plan, trained in ((plain, MIXTRAL.parameters()), (frozen, MIXTRAL.parameters() - routers)):
        assert plan.roles[0].trained == trained
        assert of_policy(plan, "optimizer") == 8 * trained
        assert of_policy(plan, "gradients") == 4 * trained
    unset_balance: dict[str, Any] = {"router_aux_loss_coef": None}  # that of the config
    balanced = MIXTRAL_BALANCED
    assert planned(unset_balance, balanced).roles[0].balances
    assert not planned({**unset_balance, "freeze": ["router"]}, balanced).roles[0].balances
    assert planned({"router_aux_loss_coef": 0.1, "freeze": ["router"]}).roles[0].balances


def test_a_plan_refuses_to_freeze_what_a_model_does_not_have() -> None:
    dense = find_shape("Qwen/Qwen3-0.6B")
    with pytest.raises(UsageError, match=r'freeze: "router": this qwen3 model is no mixture'):
        planned({"freeze": ["router"]}, dense)


def test_exchanges_take_time_and_fewer_weights_are_gathered() -> None:
    """Each of four micro-batches gathers 47B weights twice; the exchange is a fortieth of that."""
    apart, shared = planned(sharding="zero3"), planned(sharding="zero3", expert_parallel=8)
    assert apart.timing.exchanged == 0
    assert not [note for note in Page(apart, ()).notes() if "expert_parallel" in note]
    assert shared.timing.step["update"] < apart.timing.step["update"]
    few = planned(sharding="none"), planned(sharding="none", expert_parallel=2)
    role, sharing = few[1].roles[0], Sharing.of(few[1].recipe.learner)
    assert sent_bytes(role, 8.0, 2, sharing) == 2 * rows_bytes(role, 1.0, 2) / 2


def test_whole_weights_of_a_rank_are_those_of_its_experts_and_shards_stay_as_large() -> None:
    every = MIXTRAL.parameters()
    plain, shared = planned(sharding="none"), planned(sharding="none", expert_parallel=4)
    left = every - EXPERTS * 3 / 4
    for purpose, each in (("weights", 2), ("master weights", 4), ("optimizer", 8)):
        assert of_policy(plain, purpose) == pytest.approx(each * every, rel=1e-6)
        assert of_policy(shared, purpose) == pytest.approx(each * left, rel=1e-6)
    assert of_policy(shared, "gradients") == pytest.approx(4 * left, rel=1e-6)
    sharded = planned(sharding="zero3"), planned(sharding="zero3", expert_parallel=4)
    assert of_policy(sharded[0], "weights") == of_policy(sharded[1], "weights")
    lacks = of_policy(sharded[0], "gathered weights") - of_policy(sharded[1], "gathered weights")
    assert lacks == pytest.approx(2 * 2 * EXPERTS / LAYERS * 3 / 4, rel=1e-6)  # of two layers
    assert of_policy(sharded[1], "tokens that ranks exchange") == 4 * 2048 * 2 * HIDDEN * 2
    role = shared.roles[0]
    assert layer_weights(role, Sharing.of(plain.recipe.learner)) == MIXTRAL.layer_parameters


def test_matrices_of_attention_are_divided_beside_experts() -> None:
    """Attention has 4 matrices of a layer: queries and outputs of 4096, keys and values of 1024. On
    eight ranks experts are sharded over all of them, other weights over four.
    """
    every, attention = MIXTRAL.parameters(), LAYERS * 2 * HIDDEN * (HIDDEN + 1024)
    both: dict[str, Any] = {"tensor_parallel": 2, "expert_parallel": 4}
    unsharded = planned(sharding="none", **both)
    left = every - attention / 2 - EXPERTS * 3 / 4
    for purpose, each in (("weights", 2), ("optimizer", 8), ("gradients", 4)):
        assert of_policy(unsharded, purpose) == pytest.approx(each * left, rel=1e-6)
    sharded, alone = planned(sharding="zero3", **both), planned(sharding="zero3", tensor_parallel=2)
    shard = (every - attention / 2 - EXPERTS / 2) / 4
    assert of_policy(sharded, "weights") == pytest.approx(4 * shard, rel=1e-6)
    assert of_policy(alone, "weights") == pytest.approx(every - attention / 2, rel=1e-6)
    rows = TOKENS / 8 * 2 * LAYERS * HIDDEN * 2 * 3 / 4  # of each rank, as without
    assert sharded.timing.exchanged == pytest.approx(4 * rows)
    assert of_policy(sharded, "tokens that ranks exchange") == 4 * 1024 * 2 * HIDDEN * 2


def test_ranks_do_not_share_rows_or_matrices_of_layers_that_carry_a_state() -> None:
    hybrid = any_shape(config_of("qwen3_next", 37).to_dict(), "hybrid")
    planned(shape=hybrid)
    for key in ("tensor_parallel", "context_parallel"):
        with pytest.raises(UsageError, match="a qwen3_next model carries a state"):
            planned(None, hybrid, **{key: 2})


def test_ranks_cannot_share_what_does_not_divide_or_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"8 experts of this mixtral .* what works: 1, 2, 4, 8"):
        planned(expert_parallel=16, ranks=16)
    with pytest.raises(UsageError, match="this qwen3 model has no experts that ranks can share"):
        planned(expert_parallel=2, shape=find_shape("Qwen/Qwen3-0.6B"))
