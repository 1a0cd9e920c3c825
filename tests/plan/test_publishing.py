"""What a publish takes: bytes and seconds by hand, and vLLM's room for an adapter."""

from typing import Any

import pytest

from plan.test_engines import IDEAL, device
from postgrad.models.known_shapes import shape_of_model
from postgrad.plan.engines import VLLMShare
from postgrad.plan.hardware import Hardware, catalogue
from postgrad.plan.lengths import RowLengths
from postgrad.plan.page import Page
from postgrad.plan.plan import Facts, RunPlan, make_plan
from postgrad.plan.publishing import publish_bytes
from postgrad.recipe.load import parse_recipe

# Qwen2.5 0.5B: tied embeddings, 24 layers of 896 and 4 864, keys and values of 128
WEIGHTS = 151936 * 896 + 24 * (
    2 * 896 * 896 + 2 * 896 * 128 + (896 + 2 * 128) + 3 * 896 * 4864 + 2 * 896
) + 896  # fmt: skip
ADAPTER = 24 * 16 * (2 * (896 + 896) + 2 * (896 + 128) + 2 * (896 + 4864) + (4864 + 896))
READ, SENT = 1e12, 1e9  # bytes a second of the card's memory, and of its link
HOST = 25e9  # to or from the host's memory


def planned(learner: dict[str, Any], cluster: dict[str, Any], **more: Any) -> RunPlan:
    raw: dict[str, Any] = {
        "job": "rl",
        "run_dir": "run",
        "steps": 10,
        "model": {"path": "Qwen/Qwen2.5-0.5B", "dtype": "bfloat16", **more.pop("model", {})},
        "data": {"path": "nowhere.jsonl", "max_len": 1024},
        "rewards": [{"type": "math"}],
        "algorithm": {"type": "grpo"},
        "batch": {"rollout_batch_size": 64, "n_samples_per_prompt": 8},
        "rollout": {"max_new_tokens": 512, **more},
        "learner": learner,
    }
    if cluster:
        raw["cluster"] = {"type": "ray", **cluster}
    lengths = RowLengths(prompt=100, answer=200, spread=1.0, source="here")
    hardware = Hardware(count=16, device=device(SENT))
    return make_plan(
        parse_recipe(raw), Facts(shape_of_model, hardware, lengths=lengths, efficiency=IDEAL)
    )


def seconds(of: RunPlan) -> float:
    return of.timing.step["publish"]


def test_an_engine_that_reads_the_learners_weights_takes_nothing() -> None:
    assert seconds(planned({}, {})) == 0.0


def test_weights_on_one_card_are_packed_and_checked_where_they_lie() -> None:
    of = planned({"ranks": 4}, {"policy": {"colocate": "rollout"}})
    assert seconds(of) == pytest.approx(4 * 2 * WEIGHTS / READ)


def test_divided_weights_are_gathered_and_ranks_share_out_the_engines() -> None:
    """Four ranks, 8 engines: each rank sends to two of them."""
    of = planned({"ranks": 4, "sharding": "zero3"}, {"rollout": {"workers": 8}})
    gathered = 4 * WEIGHTS * 3 / 4 / SENT
    by_hand = gathered + 4 * 2 * WEIGHTS / READ + 2 * 2 * WEIGHTS / SENT
    assert seconds(of) == pytest.approx(by_hand)
    few = planned({"ranks": 4, "sharding": "zero3"}, {"rollout": {"workers": 4}})
    assert seconds(of) - seconds(few) == pytest.approx(2 * WEIGHTS / SENT)


def test_through_the_host_a_copy_goes_up_and_one_comes_down() -> None:
    of = planned({"ranks": 2}, {"rollout": {"workers": 2}}, transport="memory")
    assert seconds(of) == pytest.approx(4 * 2 * WEIGHTS / READ + 2 * 2 * WEIGHTS / HOST)


def test_ways_of_a_publish_to_a_card_without_peer_access_are_those_by_hand() -> None:
    """An RTX 4090 copies 25.6 GB/s to its host (0.8 of 32), and sends 20.8 GB/s through it to
    another (0.65). One engine: 0.99 GB go in 47.5 ms at once, or up and then down in 77.2.
    """
    recipe = planned({}, {"rollout": {"workers": 1}}).recipe
    card = catalogue({"POSTGRAD_HARDWARE": "/dev/null"})["RTX-4090"]
    of = make_plan(recipe, Facts(shape_of_model, Hardware(count=2, device=card)))
    packed = 4 * 2 * WEIGHTS / (1.008e12 * 0.5)
    publish = of.timing.publish
    assert publish is not None
    assert publish.way == "nccl"
    assert publish.seconds == pytest.approx(packed + 2 * WEIGHTS / 20.8e9)
    assert publish.host_seconds == pytest.approx(packed + 2 * 2 * WEIGHTS / 25.6e9)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_no_card_sends_weights_faster_through_its_host_than_to_another_card(workers: int) -> None:
    """With an engine for each rank or fewer: then the host gets no copy for several engines."""
    recipe = planned({"ranks": 4}, {"rollout": {"workers": workers}}).recipe
    for card in catalogue({"POSTGRAD_HARDWARE": "/dev/null"}).values():
        if card.is_cpu:
            continue
        of = make_plan(recipe, Facts(shape_of_model, Hardware(count=4 + workers, device=card)))
        publish = of.timing.publish
        assert publish is not None
        assert publish.way == "nccl"
        assert publish.seconds < publish.host_seconds, card.name


def test_an_adapter_alone_is_a_hundredth_of_the_bytes() -> None:
    model = {"lora": {"rank": 16}}
    vllm = {"type": "vllm", "vllm": {"lora": "adapter"}}
    of = planned({"ranks": 2}, {"rollout": {"workers": 2}}, model=model, **vllm)
    assert publish_bytes(of.recipe, of.roles[0], cpu=False) == 4 * ADAPTER  # type: ignore[arg-type]
    assert seconds(of) == pytest.approx(4 * 4 * ADAPTER / READ + 2 * 4 * ADAPTER / HOST)
    merged = planned({"ranks": 2}, {"rollout": {"workers": 2}}, model=model, type="vllm")
    assert publish_bytes(merged.recipe, of.roles[0], cpu=False) == 2 * WEIGHTS  # type: ignore[arg-type]
    assert seconds(of) < seconds(merged) / 10


def test_a_plan_says_the_way_and_the_seconds_that_falling_back_to_the_host_costs() -> None:
    """Two ranks, two engines: 0.99 GB up to the host and down, at 25 GB/s, beside the packing."""
    packed, host = 4 * 2 * WEIGHTS / READ, 2 * 2 * WEIGHTS / 25e9
    link = 2 * WEIGHTS / SENT
    ways = {
        "ipc": ({"policy": {"colocate": "rollout"}}, {}, 0.0),
        "nccl": ({"rollout": {"workers": 2}}, {}, link),
        "memory": ({"rollout": {"workers": 2}}, {"transport": "memory"}, host),
    }
    for way, (cluster, more, sent) in ways.items():
        of = planned({"ranks": 2}, cluster, **more)
        publish = Page(of, ()).to_json()["publish"]
        assert (publish["way"], publish["bytes"]) == (way, 2 * WEIGHTS)
        assert publish["seconds"] == pytest.approx(packed + sent, abs=1e-6)
        assert publish["host_memory_seconds"] == pytest.approx(packed + host, abs=1e-6)
        assert seconds(of) == pytest.approx(packed + sent)
    assert Page(planned({}, {}), ()).to_json()["publish"]["way"] == "none"


def test_the_way_of_a_publish_is_a_sentence_of_the_plan() -> None:
    """2 x 494 032 768 weights: 0.00395 s of packing, 0.0790 through the host, 0.988 by link."""
    colocated = planned({"ranks": 2}, {"policy": {"colocate": "rollout"}})
    (note,) = (note for note in Page(colocated, ()).notes() if note.startswith("a publish"))
    assert note == (
        "a publish sends 1.0 GB to each engine by CUDA IPC: 0.00395 s of a step; where versions "
        "or drivers do not allow that, through the host's memory: 0.083 s"
    )
    by_host = planned({"ranks": 2}, {"rollout": {"workers": 2}}, transport="memory")
    (note,) = (note for note in Page(by_host, ()).notes() if note.startswith("a publish"))
    assert note.endswith("to each engine through the host's memory: 0.083 s of a step")
    assert not [note for note in Page(planned({}, {}), ()).notes() if "a publish" in note]


def test_vllm_keeps_room_for_an_adapter_of_the_next_rank_that_it_knows() -> None:
    """Rank 12 has the room of rank 16, in the engine's dtype."""
    vllm = {"type": "vllm", "vllm": {"lora": "adapter"}}
    of = planned({}, {}, model={"lora": {"rank": 12}}, **vllm)
    merged = planned({}, {}, model={"lora": {"rank": 12}}, type="vllm")
    card = device()

    def weights(plan: RunPlan) -> int:
        rollout = plan.recipe.rollout_settings
        assert rollout is not None
        return VLLMShare.of(rollout, plan.roles[0], card, 1024).weights

    assert weights(merged) == 2 * WEIGHTS
    assert weights(of) == 2 * WEIGHTS + 2 * ADAPTER
