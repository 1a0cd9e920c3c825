"""Adapters in every job: one base held once, what trains and what is published, and resume."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.jobs import write_pairs
from helpers.runs import assert_same_run, lines, tensors, train_until_killed
from helpers.tiny_runs import MODEL
from postgrad.core.errors import RunError, UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.fleet.choices import choose
from postgrad.fleet.loading import frozen_reward_model
from postgrad.fleet.local import LocalFleet
from postgrad.learner.backbone import Backbone
from postgrad.learner.policy import Policy
from postgrad.learner.score import ScoreRole
from postgrad.models.fresh import make_fresh
from postgrad.models.load import load_model
from postgrad.models.settings import ModelInit
from postgrad.observe.console import Console
from postgrad.rollout.local.engine import LocalEngine
from postgrad.tools.export import export
from postgrad.training import rl
from postgrad.training.pairs import PreferenceJob
from postgrad.training.rl import RLJob
from postgrad.training.sft import SFTJob
from postgrad.training.start import resume, train

LORA = {"rank": 4, "alpha": 8, "dropout": 0.2}
GRPO = {"type": "grpo", "kl_coef": 0.05}


def adapted(models: Any, seed: int = 0, **lora: Any) -> dict[str, Any]:
    return {"path": models(seed), "init": None, "lora": {**LORA, **lora}}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The parts of every RL job that was made."""
    parts_seen: list[Any] = []
    original_init = RLJob.__init__

    def keep(self: RLJob, run: Any, parts: Any) -> None:
        parts_seen.append(parts)
        original_init(self, run, parts)

    monkeypatch.setattr(rl.RLJob, "__init__", keep)
    return parts_seen


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a fresh model whose output head is a matrix of its own."""
    path = tmp_path_factory.mktemp("untied") / "model"
    init = {**MODEL["init"], "initializer_range": 0.2, "tie_word_embeddings": False}
    make_fresh(ModelInit.model_validate(init), [], 0, path)
    return str(path)


def saving(base: str, **more: Any) -> dict[str, Any]:
    """[model] with an adapter beside which embeddings and output head train whole."""
    lora = {**LORA, "modules_to_save": ["embed_tokens", "lm_head"]}
    return {"path": base, "init": None, "lora": lora, **more}


def some_sequences() -> Sequences:
    rows = [[5, 6, 7, 8, 9], [5, 6, 10, 11]]
    mask = [[False, True, True, True, True], [False, True, True, True]]
    return Sequences(Ragged.of(rows, np.int32), Ragged.of(mask, np.bool_), np.zeros(2, np.int64))


def pointers(lm: Any) -> set[int]:
    return {parameter.data_ptr() for parameter in lm.parameters()}


@pytest.mark.slow
def test_policy_and_reference_hold_one_copy_of_the_base(
    make_recipe: Any, console: Console, models: Any, seen: list[Any]
) -> None:
    recipe = make_recipe("rl", model=adapted(models), algorithm=GRPO, learner={"lr": 0.1})
    train(recipe, console)
    policy, reference = seen[0].roles.policy, seen[0].roles.reference
    assert type(reference) is Policy
    assert pointers(reference.backbone.lm) == pointers(policy.backbone.lm)
    sequences = some_sequences()
    logprobs = reference.logprobs(sequences).result()
    lm: Any = load_model(models(0), dtype=torch.float32).lm
    plain = Policy(Backbone(lm, torch.device("cpu"), policy.backbone.micro))
    wanted = plain.logprobs(sequences).result()
    assert logprobs.values.tobytes() == wanted.values.tobytes()  # the base, bit for bit
    moved = policy.logprobs(sequences).result()
    assert np.abs(moved.values - wanted.values).max() > 1e-3


def test_training_changes_the_adapter_alone(
    make_recipe: Any, console: Console, models: Any, seen: list[Any]
) -> None:
    recipe = make_recipe("rl", model=adapted(models), algorithm=GRPO)
    train(recipe, console)
    policy = seen[0].roles.policy
    base = dict(load_model(models(0), dtype=torch.float32).lm.named_parameters())
    frozen = dict(policy.backbone.adapter.frozen())
    assert frozen.keys() == base.keys()
    assert all(torch.equal(frozen[name], base[name]) for name in base)
    names = [name for name in tensors(recipe.run_dir, 3) if name.startswith("policy.weights/")]
    assert names
    assert all("lora_" in name for name in names)  # no base in a checkpoint
    b = [t for n, t in policy.weights().items() if "lora_B" in n]
    assert all(tensor.abs().max() > 0 for tensor in b)


@pytest.mark.slow
def test_b_at_a_rate_of_its_own_goes_on_with_the_same_bits_after_a_kill(
    make_recipe: Any, console: Console, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B is zero at the start, so that the first update moves it alone, by the rate of B."""
    learner = {"lr": 1e-3, "loraplus_lr_ratio": 8.0, "threads": 1}
    same = {"model": adapted(models), "checkpoint": {"save_steps": 1, "max_ckpt_num": 9}}
    uninterrupted = make_recipe("sft", "whole", learner=learner, **same)
    killed = make_recipe("sft", "killed", learner=learner, **same)
    plain = make_recipe("sft", "plain", learner=learner | {"loraplus_lr_ratio": 1.0}, **same)
    train(uninterrupted, console)
    train(plain, console)
    train_until_killed(monkeypatch, SFTJob, 1, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(uninterrupted, killed, 3)
    first, other = tensors(uninterrupted.run_dir, 1), tensors(plain.run_dir, 1)
    for name in (name for name in first if name.startswith("policy.weights/")):
        ratio = 8.0 if "lora_B" in name else 1.0
        torch.testing.assert_close(first[name], other[name] * ratio)
    assert {line["policy/lr"] for line in lines(Path(uninterrupted.run_dir) / "metrics.jsonl")} == {
        1e-3
    }


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_the_engine_samples_with_the_merged_weights(
    dora: bool, make_recipe: Any, console: Console, models: Any, seen: list[Any]
) -> None:
    """After each publish engine and learner agree, and the policy has moved."""
    model = adapted(models, dora=dora)
    recipe = make_recipe("rl", model=model, algorithm=GRPO, learner={"lr": 0.05})
    train(recipe, console)
    engine, policy = seen[0].engine, seen[0].roles.policy
    assert isinstance(engine, LocalEngine)
    merged = dict(policy.hub_weights())
    base = dict(load_model(models(0), dtype=torch.float32).lm.named_parameters())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(merged[name], base[name])
    tokens = list(some_sequences().tokens)
    got = np.concatenate([token_logprobs[1:] for token_logprobs in engine.logprobs(tokens, 1.0)])
    policy.temperature = 1.0
    wanted = policy.logprobs(some_sequences()).result()
    np.testing.assert_allclose(got, wanted.values[some_sequences().loss_mask.values], atol=1e-4)
    metric_lines = lines(Path(recipe.run_dir) / "metrics.jsonl")
    assert all(line["sentinel/publish_difference"] < 1e-4 for line in metric_lines)
    assert any(line["sentinel/policy_moved"] > 1e-3 for line in metric_lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "kind", "changes"),
    [
        ("sft", SFTJob, {}),
        ("rl", RLJob, {"algorithm": GRPO}),
        ("rl", RLJob, {"algorithm": GRPO, "dora": True}),
        ("rl", RLJob, {"algorithm": {"type": "ppo", "kl_coef": 0.05}}),
        ("preference", PreferenceJob, {"algorithm": {"type": "dpo"}}),
        ("preference", PreferenceJob, {"algorithm": {"type": "kto"}}),
    ],
    ids=["sft", "grpo", "grpo-dora", "ppo", "dpo", "kto"],
)
def test_a_killed_run_with_dropout_ends_with_the_same_bits(
    job: str,
    kind: type,
    changes: dict[str, Any],
    make_recipe: Any,
    console: Console,
    models: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = dict(changes)
    model = adapted(models, dora=changes.pop("dora", False))
    uninterrupted = make_recipe(job, "whole", model=model, **changes, checkpoint={"save_steps": 1})
    killed = make_recipe(job, "killed", model=model, **changes, checkpoint={"save_steps": 1})
    train(uninterrupted, console)
    train_until_killed(monkeypatch, kind, 2, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(uninterrupted, killed, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{}, {"quantize": "4bit"}, {"dtype": "bfloat16"}], ids=["float32", "4bit", "bfloat16"]
)
def test_pissa_has_the_base_as_its_reference_goes_on_after_a_kill_and_is_exported_for_it(
    more: dict[str, Any],
    make_recipe: Any,
    console: Console,
    models: Any,
    seen: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    lora = {"dropout": 0.0, "init": "pissa", "rank_pattern": {"layers.0.mlp.down_proj": 2}}
    model = adapted(models, **lora) | more
    changes = {"algorithm": GRPO, "checkpoint": {"save_steps": 1}, "learner": {"lr": 1e-3}}
    uninterrupted = make_recipe("rl", "whole", model=model, **changes)
    killed = make_recipe("rl", "killed", model=model, **changes)
    train(uninterrupted, console)
    reference, policy = seen[0].roles.reference, seen[0].roles.policy
    assert pointers(reference.backbone.lm) == pointers(policy.backbone.lm)
    if not more:
        lm: Any = load_model(models(0), dtype=torch.float32).lm
        plain = Policy(Backbone(lm, torch.device("cpu"), policy.backbone.micro))
        logprobs, wanted = (role.logprobs(some_sequences()).result() for role in (reference, plain))
        assert logprobs.values.tobytes() == wanted.values.tobytes()  # the base, bit for bit
    kl = [line["policy/kl"] for line in lines(Path(uninterrupted.run_dir) / "metrics.jsonl")]
    assert kl[0] < 1e-3 < kl[-1]
    train_until_killed(monkeypatch, RLJob, 2, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(uninterrupted, killed, 3)
    export(Path(uninterrupted.run_dir), "latest", tmp_path / "adapter", adapter=True)
    export(Path(uninterrupted.run_dir), "latest", tmp_path / "merged")
    of_adapter, merged = (
        dict(load_model(str(tmp_path / name), dtype=torch.float32).lm.named_parameters())
        for name in ("adapter", "merged")
    )
    for name, weight in merged.items():
        if "quantize" not in more:  # which is merged into the weights that four bits stand for
            torch.testing.assert_close(of_adapter[name], weight, rtol=1e-2, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype",
    [
        "bfloat16",
        pytest.param("float32", marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param("float16", marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
@pytest.mark.parametrize(
    ("job", "kind", "changes"),
    [("sft", SFTJob, {}), ("rl", RLJob, {"algorithm": GRPO})],
    ids=["sft", "grpo"],
)
def test_a_killed_run_that_trains_modules_whole_ends_with_the_same_bits(
    job: str,
    kind: type,
    changes: dict[str, Any],
    dtype: str,
    make_recipe: Any,
    console: Console,
    untied: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = saving(untied, dtype=dtype)
    uninterrupted = make_recipe(job, "whole", model=model, **changes, checkpoint={"save_steps": 1})
    killed = make_recipe(job, "killed", model=model, **changes, checkpoint={"save_steps": 1})
    train(uninterrupted, console)
    train_until_killed(monkeypatch, kind, 2, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(uninterrupted, killed, 3)
    saved = tensors(uninterrupted.run_dir, 3)
    base = load_file(Path(untied) / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weight = saved[f"policy.weights/base_model.model.{name}"]
        assert weight.dtype == torch.float32
        assert not torch.equal(weight, base[name].float())
        assert f"policy.optimizer/base_model.model.{name}.exp_avg" in saved


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"quantize": "4bit"}], ids=["float32", "4bit"])
def test_the_engine_samples_with_modules_that_were_trained_whole(
    more: dict[str, Any],
    make_recipe: Any,
    console: Console,
    untied: str,
    seen: list[Any],
    tmp_path: Path,
) -> None:
    """So do readers of both exports; the reference is the base."""
    recipe = make_recipe(
        "rl", model=saving(untied, **more), algorithm=GRPO, learner={"lr": 0.05},
        checkpoint={"save_steps": 1},
    )  # fmt: skip
    train(recipe, console)
    engine, policy, reference = seen[0].engine, seen[0].roles.policy, seen[0].roles.reference
    tokens, mask = list(some_sequences().tokens), some_sequences().loss_mask.values
    got = np.concatenate([row[1:] for row in engine.logprobs(tokens, 1.0)])
    policy.temperature = reference.temperature = 1.0
    wanted = policy.logprobs(some_sequences()).result().values[mask]
    np.testing.assert_allclose(got, wanted, atol=1e-4)
    before = reference.logprobs(some_sequences()).result().values[mask]
    assert np.abs(wanted - before).max() > 1e-3
    metrics = lines(Path(recipe.run_dir) / "metrics.jsonl")
    assert all(line["sentinel/publish_difference"] < 1e-4 for line in metrics)
    run = Path(recipe.run_dir)
    exports = [export(run, "latest", tmp_path / "merged")]
    if not more:  # whoever reads an adapter puts it on the base in full precision
        exports.append(export(run, "latest", tmp_path / "adapter", adapter=True))
    for path in exports:
        lm: Any = load_model(str(path), dtype=torch.float32).lm
        plain = Policy(Backbone(lm, torch.device("cpu"), policy.backbone.micro))
        read = plain.logprobs(some_sequences()).result().values[mask]
        np.testing.assert_allclose(read, wanted, atol=1e-4)


def test_modules_of_a_model_that_ties_them_are_refused(
    make_recipe: Any, console: Console, models: Any
) -> None:
    recipe = make_recipe("sft", model=saving(models(0)))
    with pytest.raises(UsageError, match="tie_word_embeddings"):
        train(recipe, console)


def test_reference_logprobs_of_a_preference_are_those_of_the_base(
    make_recipe: Any, console: Console, models: Any
) -> None:
    """With an adapter and without, the first step has one loss and no distance."""
    first_lines: list[dict[str, Any]] = []
    for run, model in (("whole", {"path": models(1), "init": None}), ("lora", adapted(models, 1))):
        recipe = make_recipe("preference", run, model=model, data={"max_len": 64, "cache": False})
        write_pairs(Path(recipe.data.path))
        train(recipe, console)
        first_lines.append(lines(Path(recipe.run_dir) / "metrics.jsonl")[0])
    for line in first_lines:
        assert line["policy/loss"] == pytest.approx(np.log(2), rel=1e-6)
        assert line["policy/kl"] == 0.0
    logprobs = [line["policy/logprob_chosen"] for line in first_lines]
    assert logprobs[0] == pytest.approx(logprobs[1], rel=1e-6)


@pytest.mark.slow
def test_critic_and_reward_model_share_one_backbone_where_their_base_is_the_same(
    make_recipe: Any,
    console: Console,
    models: Any,
    seen: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reward = make_recipe("reward", "rm", model={"path": models(0), "init": None})
    train(reward, console)
    path = str(export(Path(reward.run_dir), "latest", tmp_path / "reward-model"))
    scorers: list[ScoreRole] = []
    load = LocalFleet.frozen_reward_model

    def keep(fleet: LocalFleet, path: str) -> ScoreRole:
        scorers.append(load(fleet, path))
        return scorers[-1]

    monkeypatch.setattr(LocalFleet, "frozen_reward_model", keep)
    recipe = make_recipe(
        "rl",
        model=adapted(models),
        algorithm={"type": "ppo", "kl_coef": 0.05},
        rewards=[{"type": "reward_model"}],
        reward_model={"model": {"path": path}},
        eval={"correct_at": 0.0, "greedy": False},
        learner={"lr": 0.05},
    )
    train(recipe, console)
    critic, (scorer,) = seen[0].roles.critic, scorers
    assert scorer.backbone is critic.backbone
    last = some_sequences()
    mask = np.zeros(len(last.tokens.values), bool)
    mask[last.tokens.offsets[1:] - 1] = True
    marked = Sequences(last.tokens, last.tokens.like(mask), last.group)
    before = scorer.scores(marked).result()
    alone = frozen_reward_model(recipe, recipe.reward_model.model, path, choose(recipe, {}))
    assert alone.scores(marked).result().values.tobytes() == before.values.tobytes()
    assert "critic.weights/base_model.model.score.weight" in tensors(recipe.run_dir, 3)


@pytest.mark.slow
def test_a_base_that_changed_under_its_adapter_stops_the_resume(
    make_recipe: Any, console: Console, models: Any, tmp_path: Path
) -> None:
    base = shutil.copytree(models(0), tmp_path / "base")
    recipe = make_recipe("sft", model={**adapted(models), "path": str(base)})
    train(recipe, console)
    weights = load_file(base / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, base / "model.safetensors")
    with pytest.raises(RunError, match=r"\(policy\) is not the one"):
        resume(Path(recipe.run_dir), ["--steps", "4"], [], console)
