"""Roles on ranks of their own: which card has what, and what is done at the same time, by hand."""

from collections.abc import Mapping
from typing import Any

import pytest

from plan.test_cases import planned
from plan.test_engines import IDEAL, device
from postgrad.models.known_shapes import any_shape, shape_of_model
from postgrad.plan import notes as notes_of_plans
from postgrad.plan.hardware import Hardware, parse_hardware
from postgrad.plan.held import PHASES, MemoryPhase
from postgrad.plan.lengths import RowLengths
from postgrad.plan.notes import plan_notes
from postgrad.plan.page import Page
from postgrad.plan.plan import Facts, RunPlan, make_plan
from postgrad.plan.splits import arrangements
from postgrad.recipe.load import parse_recipe, with_overrides
from postgrad.recipe.recipe import Recipe

# Qwen2.5-7B, whose output head is a matrix of its own, and with a score head in its place.
WHOLE = 7_615_616_512
HEAD = 152_064 * 3584
SCORING = WHOLE - HEAD + 3584
LAYERS, HIDDEN, INNER, QUERIES, KEYS, VOCAB = 28, 3584, 18_944, 3584, 512, 152_064
PROMPTS, ANSWERS, PROMPT, ANSWER = 64, 8, 100, 300
LAYOUT = (
    "--cluster.critic", "{ ranks = 2 }",
    "--cluster.reward_model", "{ colocate = 'critic' }",
    "--cluster.reference", "{ ranks = 1, offload = true }",
    "--cluster.rollout", "{ workers = 1 }",
)  # fmt: skip


def ppo(*flags: str) -> Recipe:
    """PPO of 7B with 7B for every role, on four ranks of the policy."""
    table: dict[str, Any] = {
        "job": "rl",
        "run_dir": "run",
        "steps": 100,
        "model": {"path": "Qwen/Qwen2.5-7B"},
        "data": {"path": "rows.jsonl", "max_len": 2048},
        "rewards": [{"type": "reward_model"}],
        "reward_model": {"model": {"path": "Qwen/Qwen2.5-7B"}},
        "algorithm": {"type": "ppo", "kl_coef": 0.05},
        "batch": {"rollout_batch_size": PROMPTS, "n_samples_per_prompt": ANSWERS},
        "rollout": {"max_new_tokens": 1024},
        "learner": {"ranks": 4, "sharding": "zero2"},
        "cluster": {"type": "ray"},
    }
    return with_overrides(parse_recipe(table), flags)


def lines(plan: RunPlan, group: int) -> dict[tuple[str, str], Mapping[MemoryPhase, int]]:
    return {(line.role, line.purpose): line.bytes for line in plan.cards[group].memory.lines}


def test_each_role_is_on_the_cards_that_the_recipe_gives_it() -> None:
    run_plan = planned(ppo(*LAYOUT), "8xH200")
    assert [(group.numbers, group.roles) for group in run_plan.cards] == [
        ("0-3", ("policy",)),
        ("4-5", ("critic", "reward_model")),
        ("6", ("reference",)),
        ("7", ("built-in engine",)),
    ]
    assert (run_plan.used_devices, run_plan.missing_devices, run_plan.idle_devices) == (8, 0, 0)
    for number, group in enumerate(run_plan.cards[:3]):
        of_models = {role for role, _ in lines(run_plan, number)} - {"run"}
        assert of_models == set(group.roles)


def test_memory_is_that_of_the_roles_on_each_card() -> None:
    """The critic's float32 shards and moments are halved on two ranks, the policy's divided by
    four. Frozen weights are whole under ZeRO-2: two bytes a weight. The reference is on its card
    where it is read and where it computes.
    """
    run_plan = planned(ppo(*LAYOUT), "8xH200")
    policy, critic, reference = (lines(run_plan, number) for number in range(3))
    assert policy["policy", "weights"]["update"] == 4 * WHOLE // 4
    assert policy["policy", "optimizer"]["update"] == 8 * WHOLE // 4
    assert critic["critic", "weights"]["update"] == 4 * SCORING // 2
    assert critic["critic", "optimizer"]["update"] == 8 * SCORING // 2
    assert critic["reward_model", "weights"] == dict.fromkeys(PHASES, 2 * SCORING)
    assert reference["reference", "weights"] == {"load": 2 * WHOLE, "score": 2 * WHOLE}
    assert ("policy", "gradients") in policy
    assert ("critic", "gradients") in critic
    assert not [purpose for role, purpose in reference if purpose == "gradients"]
    # Samples go to the reward model while others are drawn, to the critic and the reference after.
    assert critic["reward_model", "activations"].keys() == {"rollout"}
    assert reference["reference", "activations"].keys() == {"score"}
    assert "save" not in critic.get(("run", "weights on their way to the engine"), {})


def test_what_does_not_fit_is_named_with_its_role() -> None:
    run_plan = planned(ppo(*LAYOUT), "8xA100-40G")
    (critic,) = [problem for problem in run_plan.problems if "critic" in problem]
    assert critic.startswith("cards 4-5 (critic, reward_model): ")
    small = planned(ppo(*LAYOUT), "6xH200")
    assert small.missing_devices == 2
    assert "7 ranks and 1 for engines are 8 devices" in Page(small, ()).verdict()


def forward(ranks: int, *, head: bool, tokens: float, squares: float) -> float:
    """Seconds of a forward pass of 7B on `ranks` cards of 1e15 FLOPs and 1e12 bytes a second."""
    body = LAYERS * (2 * HIDDEN * (QUERIES + KEYS) + 3 * HIDDEN * INNER)
    flops = 2 * tokens * body + 2 * squares * QUERIES * LAYERS
    flops += 2 * PROMPTS * ANSWERS * ANSWER * VOCAB * HIDDEN * head
    moved = 6 * tokens * LAYERS * (5 * HIDDEN + 2 * (QUERIES + KEYS) + 4 * INNER) * 2
    return (flops / 1e15 + moved / 1e12) / ranks


def seconds(recipe: Recipe) -> Mapping[str, float]:
    """Of a step, on cards whose link takes no time."""
    lengths = RowLengths(prompt=PROMPT, answer=ANSWER, spread=1.0, source="here")
    hardware = Hardware(count=16, device=device(link=1e24))
    return make_plan(recipe, Facts(shape_of_model, hardware, lengths, IDEAL)).timing.step


def test_passes_on_ranks_of_their_own_are_at_the_same_time() -> None:
    """64 prompts of 100 tokens, each once for its 8 answers of 300."""
    tokens = PROMPTS * (PROMPT + ANSWERS * ANSWER)
    pairs = PROMPT**2 + ANSWERS * ((PROMPT + ANSWER) ** 2 - PROMPT**2)  # the prompt's are shared
    of = {"tokens": tokens, "squares": PROMPTS * pairs}
    reference = forward(1, head=True, **of) + 2 * WHOLE / 25e9  # copied from the host once
    critic, judge = forward(2, head=False, **of), forward(2, head=False, **of)
    apart = seconds(ppo(*LAYOUT))
    assert apart["score"] == pytest.approx(max(reference, critic), rel=1e-9)
    assert apart["reward"] == pytest.approx(judge, rel=1e-9)
    together = seconds(ppo())  # all roles on the four ranks, the policy's old logprobs too
    assert together["score"] == pytest.approx((2 * forward(1, head=True, **of) + 2 * critic) / 4)
    assert together["reward"] == pytest.approx(judge / 2)
    # An update is three passes, and 28 bytes a weight that are read and written by the optimizer.
    learned = 3 * critic + SCORING * 28 / 2 / 1e12
    policy = (3 * forward(1, head=True, **of) + WHOLE * 28 / 1e12) / 4
    assert apart["update"] == pytest.approx(max(learned, policy), rel=1e-9)
    assert together["update"] == pytest.approx(policy + learned / 2, rel=1e-9)


def test_a_reward_model_in_the_hosts_memory_is_copied_for_each_group() -> None:
    rests = "{ colocate = 'critic', offload = true }"
    here, there = seconds(ppo(*LAYOUT)), seconds(ppo(*LAYOUT, "--cluster.reward_model", rests))
    copies = PROMPTS * 2 * SCORING / 25e9
    assert there["reward"] - here["reward"] == pytest.approx(copies, rel=1e-9)


def test_the_time_table_names_the_cards_that_work() -> None:
    rows = {row[0]: row[3] for row in Page(planned(ppo(*LAYOUT), "8xH200"), ()).time_rows()}
    assert rows["sample, each step"] == "7"
    assert rows["reward, each step"] == "4-5"
    assert rows["score, each step"] == "0-6"
    assert rows["update, each step"] == "0-5"
    assert rows["publish, each step"] == "0-3, 7"


def test_cards_of_other_roles_stay_theirs_in_a_search() -> None:
    recipe = ppo(*LAYOUT)
    for flags in arrangements(recipe, 16, "zero2"):
        changed = planned(with_overrides(recipe, flags), "16xH200")
        assert changed.used_devices == 16
        assert changed.recipe.cluster.homes == {"critic": 2, "reference": 1}


def test_a_reference_of_its_own_has_the_weights_that_an_adapter_would_share() -> None:
    lora = ["--model.lora", "{ rank = 64, alpha = 64 }", "--critic.model.lora", "{}"]
    shared = planned(ppo(*lora), "8xH200")
    assert ("reference", "weights") not in lines(shared, 0)
    apart = planned(ppo(*lora, "--cluster.reference", "{ ranks = 1 }"), "8xH200")
    assert lines(apart, -1)["reference", "weights"]["score"] == 2 * WHOLE


def taught(job: str, *flags: str, teacher: bool = True) -> Recipe:
    """A student of 7B and a teacher of 7B on two ranks; without a teacher the plain algorithm."""
    kinds = {"rl": ("grpo", "on_policy_distillation"), "sft": ("sft", "distillation")}
    table: dict[str, Any] = {
        "job": job,
        "run_dir": "run",
        "steps": 100,
        "model": {"path": "Qwen/Qwen2.5-7B"},
        "data": {"path": "rows.jsonl", "max_len": 2048},
        "algorithm": {"type": kinds[job][teacher]},
        "learner": {"ranks": 2, "sharding": "zero2"},
        "cluster": {"type": "ray"},
    }
    if job == "rl":
        table |= {
            "rewards": [{"type": "exact_match"}],
            "batch": {"rollout_batch_size": PROMPTS},
            "rollout": {"max_new_tokens": 1024},
        }
    if teacher:
        table["teacher"] = {"model": {"path": "Qwen/Qwen2.5-7B"}}
    return with_overrides(parse_recipe(table), flags)


def test_a_plan_says_how_the_tokens_of_another_tokenizer_are_counted() -> None:
    counted = "as if it read as many tokens as the policy"
    for align in ("text", "tokens"):
        plan = planned(taught("rl", "--teacher.align", align), "8xH200")
        notes = " ".join(plan_notes(plan, ()))
        assert (counted in notes) == (align == "text")


def test_a_plan_with_more_threads_than_cpus_says_whose_times_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notes_of_plans, "usable_cpus", lambda: 2)
    plans = {
        (threads, hardware): planned(taught("rl", "--learner.threads", threads), hardware)
        for threads, hardware in (("3", "cpu"), ("2", "cpu"), ("3", "8xH200"))
    }
    notes = {place: " ".join(plan_notes(plan, ())) for place, plan in plans.items()}
    assert [place for place, text in notes.items() if "use 2 CPUs" in text] == [("3", "cpu")]


def test_a_teacher_that_grades_has_its_own_cards_and_its_forward_pass_is_a_score() -> None:
    places = "--cluster.rollout", "{ workers = 1 }"
    with_it = planned(taught("rl", *places, "--cluster.teacher", "{ ranks = 1 }"), "8xH200")
    assert [(group.numbers, group.roles) for group in with_it.cards] == [
        ("0-1", ("policy",)),
        ("2", ("teacher",)),
        ("3", ("built-in engine",)),
    ]
    assert lines(with_it, 1)["teacher", "weights"]["score"] == 2 * WHOLE
    without = planned(taught("rl", *places, teacher=False), "8xH200")
    assert with_it.timing.step["score"] > without.timing.step["score"] == 0.0


def test_the_policy_as_its_own_teacher_takes_a_forward_pass_more() -> None:
    """And the reference its weights too."""
    places = "--cluster.rollout", "{ workers = 1 }", "--data.hint", "{answer}"

    def graded(by: str, *flags: str) -> RunPlan:
        kind = f"{{ type = 'on_policy_distillation', graded_by = '{by}' }}"
        recipe = taught("rl", *places, "--algorithm", kind, *flags, teacher=False)
        return planned(recipe, "8xH200")

    by_policy, by_reference = graded("policy"), graded("reference")
    self_taught = planned(
        taught("rl", *places[:2], "--algorithm.old_logprobs", "sampled"), "8xH200"
    )
    assert by_policy.timing.step["score"] == pytest.approx(2 * self_taught.timing.step["score"])
    assert ("reference", "weights") not in lines(by_policy, 0)
    assert lines(by_reference, 0)["reference", "weights"]["score"] > 0
    kl = graded("reference", "--algorithm.kl_coef", "0.1")
    assert kl.timing.step["score"] == pytest.approx(1.5 * by_reference.timing.step["score"])


def test_a_teacher_beside_its_student_takes_memory_and_a_forward_pass_in_every_update() -> None:
    with_it, without = (planned(taught("sft", teacher=there), "8xH200") for there in (True, False))
    there = lines(with_it, 0)
    assert there["teacher", "weights"]["update"] == 2 * WHOLE
    tokens = with_it.sizes.micro_tokens
    assert there["policy", "hidden states of the teacher"]["update"] == 2 * tokens * HIDDEN
    update, plain = (run_plan.timing.step["update"] for run_plan in (with_it, without))
    assert 1.2 < update / plain < 1.4  # three passes and one more, beside the optimizer's step


def test_teachers_behind_servers_take_no_card_and_further_ones_lie_beside_the_first() -> None:
    places = "--cluster.rollout", "{ workers = 1 }"
    server = "--teacher", '{ server = { base_url = "http://h:1/v1" } }'
    behind = planned(taught("rl", *places, *server), "8xH200")
    plain = planned(taught("rl", *places, teacher=False), "8xH200")
    assert [group.roles for group in behind.cards] == [group.roles for group in plain.cards]
    beside = "--cluster.teacher", "{ ranks = 1 }"
    other = "{ datasets = ['b'], model = { path = 'Qwen/Qwen2.5-7B' } }"
    two = "--teacher.sets", f"[{other}]"
    one_teacher, both = (
        planned(taught("rl", *places, *beside, *more), "8xH200") for more in ((), two)
    )
    assert [group.roles for group in both.cards][1] == ("teacher", "teacher 2")
    assert lines(both, 1)["teacher 2", "weights"]["score"] == 2 * WHOLE
    assert both.timing.step["score"] == pytest.approx(
        one_teacher.timing.step["score"]
    )  # each of a half


def test_a_teacher_that_reads_the_rows_once_computes_in_no_update() -> None:
    live, stored = (planned(taught("sft", *f), "8xH200") for f in ((), ("--teacher.top_k", "64")))
    plain = planned(taught("sft", teacher=False), "8xH200")
    assert stored.timing.step["update"] == pytest.approx(plain.timing.step["update"])
    assert stored.timing.step["update"] < live.timing.step["update"]
    assert stored.timing.once["teacher"] > 0.0
    assert ("policy", "hidden states of the teacher") not in lines(stored, 0)
    weights = lines(stored, 0)["teacher", "weights"]
    assert weights == {"load": 2 * WHOLE, "score": 2 * WHOLE}  # it is freed before the updates


def test_what_a_teacher_said_of_the_rows_lies_in_a_file() -> None:
    """Of each token 64 ids, 64 log-probabilities and that of all others, of four bytes each. Rows
    of unknown length count as the longest, of 2048 tokens; an update has 32. The last 4 MiB are in
    memory.
    """
    recipe = taught(
        "sft", "--teacher.top_k", "64", "--learner.ranks", "1", "--learner.sharding", "none",
        "--cluster.type", "local", "--batch.train_batch_size", "32",
    )  # fmt: skip
    facts = Facts(shape_of_model, parse_hardware("CPU"), rows=100)
    run_plan = make_plan(recipe, facts)
    each = 4 * 129
    assert lines(run_plan, 0)["run", "what the teacher said"] == dict.fromkeys(
        ("rollout", "score", "update", "save"), 4 * 2**20
    )
    few = make_plan(recipe, Facts(shape_of_model, parse_hardware("CPU"), rows=1))
    assert set(lines(few, 0)["run", "what the teacher said"].values()) == {each * 2048}
    update = lines(run_plan, 0)["policy", "the teacher's tokens of an update"]
    assert update == {"update": 2 * each * 32 * 2048}
    assert any("106 MB in a file" in note for note in Page(run_plan, ()).notes())
    on_card = make_plan(recipe, Facts(shape_of_model, parse_hardware("H200")))
    assert ("run", "what the teacher said") not in lines(on_card, 0)  # it is the host's
    update = lines(on_card, 0)["policy", "the teacher's tokens of an update"]
    assert update == {"update": each * 32 * 2048}
    assert any("516 bytes a token" in note for note in Page(on_card, ()).notes())


def test_a_mixture_has_all_weights_in_memory_and_its_active_ones_in_products() -> None:
    """Mixtral 8x7B (arXiv:2401.04088, section 2.1): 47B parameters, of which a token uses 13B."""
    mixture = any_shape({"model_type": "mixtral"}, "mixtral")
    recipe = with_overrides(
        ppo(), ["--model.lora", "{ rank = 8 }", "--algorithm", "{ type = 'grpo' }"]
    )
    run_plan = make_plan(recipe, Facts(lambda _: mixture, parse_hardware("8xH200")))
    expert = 3 * 4096 * 14_336
    every = 32 * (8 * (expert + 4096) + 2 * 4096 * (4096 + 1024 + 1)) + 2 * 32_000 * 4096 + 4096
    page = Page(run_plan, ())
    sizes = page.to_json()["parameters"]["policy"]
    assert sizes["total"] == every
    assert sizes["active"] == every - 32 * 6 * expert
    assert 0 < sizes["trained"] < every / 100
    (note,) = [note for note in page.notes() if "mixture" in note]
    assert "with 46.7B parameters, of which a token uses 12.9B" in note
    role = run_plan.roles[0]
    flops = role.shape.flops(1.0, 0.0)
    inside = flops.body + flops.head  # norms and the look-up of an embedding are no products
    assert inside == 2 * (sizes["active"] - 32_000 * 4096 - 4096 - 32 * 2 * 4096)
    assert ("policy", "weights") in lines(run_plan, 0)
    assert lines(run_plan, 0)["policy", "weights"]["update"] >= 2 * every


def test_a_dense_model_is_no_mixture() -> None:
    page = Page(planned(ppo(), "8xH200"), ())
    assert not [note for note in page.notes() if "mixture" in note]
    sizes = page.to_json()["parameters"]
    assert sizes["policy"] == {"total": WHOLE, "active": WHOLE, "trained": WHOLE}
    assert sizes["critic"]["active"] == SCORING
    assert sizes["reference"]["trained"] == 0
