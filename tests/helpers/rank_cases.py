"""What several ranks train, and one: the same small models on the same updates."""

from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from postgrad.algorithms.base import Algorithm
from postgrad.algorithms.bradley_terry import BradleyTerry
from postgrad.algorithms.grpo import GRPO
from postgrad.algorithms.gspo import GSPO
from postgrad.algorithms.kto import KTO
from postgrad.algorithms.reinforce_pp import ReinforcePP
from postgrad.algorithms.sft import SFT
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.layout.tree import MIN_SHARED
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.learner import Learner
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.reference import MovingReference
from postgrad.learner.score import ScoreLearner, ScoreRole
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update
from postgrad.models import linear
from postgrad.models.adapters import add_adapter
from postgrad.models.attention import ATTENTION_NAME
from postgrad.models.embedding_noise import EmbeddingNoise
from postgrad.models.frozen_parts import freeze_parts
from postgrad.models.linear import speed_up
from postgrad.models.recompute import recompute_activations
from postgrad.models.routers import Routers
from postgrad.models.score import _draw, in_float32
from postgrad.models.settings import LoraSettings, ModelSettings, Recompute
from postgrad.models.states import carry_states
from postgrad.ops.advantages import whitened
from postgrad.parallel.ranks import Grid, Ranks
from postgrad.parallel.sharding import whole_tensor

VOCABULARY = 37
UPDATES = 4  # each takes several exchanges between ranks
MANY = 10  # of cases that show that errors do not grow
LARGE = linear.LARGE_WEIGHT


class Case(NamedTuple):
    """kind: of the algorithm. groups: prompts of an update, 4 samples each; with one, most ranks
    have a part of it or nothing. beside: a frozen or following role works on the same ranks, under
    the learner's adapter where it has one. large: on several ranks every weight counts as one whose
    gradient is added in place.
    """

    stage: str
    kind: str = "grpo"
    lora: bool = False
    checkpointing: Recompute = False
    tied: bool = True
    dtype: str = "float32"
    groups: int = 3
    optimizer: str = "adamw"  # "adamw in 8bit": its moments
    type: str = "qwen3"
    offload: bool = False
    beside: bool = False
    large: bool = False
    compiled: bool = False
    saved: bool = False  # embeddings and output head train whole beside the adapter
    targets: str = ""  # of the adapter, with + between them; it has no dropout then
    frozen: bool = False  # the routers are
    updates: int = UPDATES
    ratio: float = 1.0  # loraplus_lr_ratio
    ranked: bool = False  # a layer's adapter has a rank of its own
    init: str = "kaiming"  # of the adapter, which has no dropout otherwise
    grid: Grid | None = None  # None: that of the test's ranks

    @property
    def name(self) -> str:
        grid = "" if self.grid is None else "x".join(map(str, astuple(self.grid)))
        return "-".join(str(part) for part in (*self[:-1], grid))


DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def model(case: Case, **changes: int) -> Any:
    """The fresh model of a case. changes: of its config."""
    experts = EXPERTS if case.type.endswith("_moe") else {}
    if case.type == "gpt_oss":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    if case.type == "qwen3_5_text":
        experts = DELTA
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "initializer_range": 0.1, "tie_word_embeddings": case.tied, "num_labels": 1,
        "pad_token_id": 0,
    }  # fmt: skip
    config = AutoConfig.for_model(case.type, **{**sizes, **experts, **changes})
    torch.manual_seed(0)
    kind = AutoModelForSequenceClassification if case.kind == "reward" else AutoModelForCausalLM
    lm = kind.from_config(config).to(getattr(torch, case.dtype))
    lm.set_attn_implementation(ATTENTION_NAME)
    if case.kind == "reward":
        _draw(lm.score, 0)
        in_float32(lm.score)
    carry_states(lm)
    if not case.compiled:  # as on CUDA
        speed_up(lm, torch.device("cpu"))
    if case.checkpointing:
        recompute_activations(lm, case.checkpointing)
        lm.train()
    else:
        lm.eval()
    return lm


def experience(case: Case, number: int) -> Experience:
    """The samples of update `number`: the same on every rank."""
    rng = np.random.default_rng(number)
    size = 2 if case.kind == "reward" else 4
    tokens, masks, group, advantages, old = [], [], [], [], []
    for prompt in range(case.groups):
        opening = rng.integers(0, VOCABULARY, 9 + prompt)
        for _ in range(size):
            answer = rng.integers(0, VOCABULARY, rng.integers(2, 9))
            mask = np.arange(len(opening) + len(answer)) >= len(opening)
            tokens.append(np.concatenate([opening, answer]))
            masks.append(mask)
            group.append(prompt)
            advantages.append(mask * np.float32(rng.normal()))
            old.append(mask * np.float32(-3.6))
    sequences = Sequences(
        Ragged.of(tokens, np.int32), Ragged.of(masks, np.bool_), np.array(group, np.int64)
    )
    if case.kind == "reward":
        return BradleyTerry().experience(sequences, np.zeros(len(sequences) // 2))
    columns = {
        "advantages": Ragged.of(advantages, np.float32),
        "old_logprobs": Ragged.of(old, np.float32),
    }
    if case.kind in ("sft", "weighted", "noisy"):
        columns = {}
    if case.kind == "noisy":  # rows of SFT are groups of their own
        sequences = replace(sequences, group=np.arange(len(sequences)))
    if case.kind == "weighted":  # what each token counts
        counts = [mask * np.float32(number % 3 + 0.25) for number, mask in enumerate(masks)]
        sequences = replace(sequences, loss_weights=Ragged.of(counts, np.float32))
    if case.kind == "kto":
        alone = replace(sequences, group=np.arange(len(sequences)))
        desirable, crossed = rng.random(len(alone)) < 0.4, rng.normal(0.5, 1.0, len(alone))
        return KTO().experience(alone, desirable, columns["old_logprobs"], crossed)
    if case.kind == "reinforce_pp":
        mask = sequences.loss_mask
        columns["advantages"] = mask.like(
            (whitened(columns["advantages"].values, mask.values) * mask.values).astype(np.float32)
        )
    if case.kind == "gspo":  # some tokens and some responses are far from the sampler
        waves = (0.3 * np.sin(np.arange(len(mask)) + mask.sum()) * mask for mask in masks)
        sampled = [row + wave for row, wave in zip(old, waves, strict=True)]
        columns["sampled_logprobs"] = Ragged.of(sampled, np.float32)
    drawn = Experience(sequences, columns, np.ones(len(sequences), np.bool_))
    return with_replies(drawn) if case.kind == "echo" else drawn


def with_replies(drawn: Experience) -> Experience:
    """Behind the first token of each answer an environment wrote every second one."""
    mask = drawn.sequences.loss_mask
    starts = mask.like(np.concatenate([np.arange(len(row)) - row.argmax() for row in mask]))
    read = mask.values & (starts.values % 2 == 1)
    sequences = replace(drawn.sequences, loss_mask=mask.like(mask.values & ~read))
    return replace(drawn, sequences=sequences, replies=mask.like(0.5 * read.astype(np.float32)))


def algorithm(case: Case) -> Algorithm:
    if case.kind == "gspo":
        rejection: dict[Any, Any] = {"token": (0.77, 1.3), "mean_k3": 0.022}
        return GSPO(correction="tis", correction_level="sequence", rejection=rejection)
    kinds: dict[str, type[Algorithm]] = {
        "grpo": GRPO, "echo": GRPO, "sft": SFT, "weighted": SFT, "reward": BradleyTerry, "kto": KTO,
        "reinforce_pp": ReinforcePP, "noisy": SFT,
    }  # fmt: skip
    return kinds[case.kind]()


def backbone_of(case: Case, lm: Any) -> Backbone:
    with_gradients = "eager" if case.lora else "aot_eager"  # which traces adapters for minutes
    compiler = with_gradients if case.compiled else None
    backbone = Backbone(lm, torch.device("cpu"), MicroBatch(max_tokens=64), compiler=compiler)
    backbone.min_shared = MIN_SHARED  # of hybrids too, whose prompts are as short here
    return backbone


def learner(case: Case, ranks: Ranks, **settings: Any) -> Learner[Any]:
    lm = model(case)
    backbone = backbone_of(case, lm)
    if case.lora:
        saved = ("embed_tokens", "lm_head") if case.saved else ()
        targets = tuple(case.targets.split("+")) if case.targets else ()
        lora = LoraSettings(
            rank=4, alpha=8, modules_to_save=saved, targets=targets, init=case.init,
            dropout=0.0 if targets or case.init != "kaiming" else 0.1,
            rank_pattern={"layers.0.self_attn.k_proj": 2} if case.ranked else {},
        )  # fmt: skip
        backbone.adapter = add_adapter(lm, lora, seed=1)
    if case.frozen:
        freeze_parts(lm, ModelSettings(freeze=("router",)))
    if case.type.endswith(("_moe", "_oss")):
        backbone.routers = Routers(lm, balance=0.5, z=0.01)
    backbone.divide(ranks, case.stage, offload=case.offload)  # type: ignore[arg-type]
    if case.kind == "noisy":
        backbone.noise = EmbeddingNoise(lm, 5.0, seed=3)
    wanted = {"lr": 1e-2, "eps": 1e-6, "ema_decay": 0.5}
    moments = case.optimizer == "adamw in 8bit"
    wanted |= {"optimizer_state": "8bit"} if moments else {"optimizer": case.optimizer}
    wanted |= {"loraplus_lr_ratio": case.ratio, **settings}
    all_settings = LearnerSettings(**wanted)
    if case.kind == "reward":
        return ScoreLearner("reward_model", backbone, "at", all_settings, 100)
    return PolicyLearner(backbone, all_settings, 100)


def other(case: Case, learner_of_case: Learner[Any], ranks: Ranks) -> Any:
    """Another role beside the learner: under its adapter, or on weights of its own."""
    if case.lora:
        assert isinstance(learner_of_case, PolicyLearner | ScoreLearner)
        return learner_of_case.under_adapter()
    backbone = backbone_of(case, model(case))
    backbone.lm.requires_grad_(False)
    if case.kind == "reward":
        backbone.divide(ranks, "zero3" if case.stage == "zero3" else "none", offload=case.offload)
        return ScoreRole(backbone, "at")
    backbone.divide(ranks, case.stage, offload=case.offload)  # type: ignore[arg-type]
    return MovingReference(
        backbone, 1.0, refresh_steps=0, ema_decay=0.9, policy=learner_of_case.weights()
    )


def gathered(trained_learner: Learner[Any]) -> dict[str, torch.Tensor]:
    """The whole weights and their average."""
    pieces = trained_learner.optimizer.pieces
    tensors = {n: whole_tensor(t, pieces[n]).clone() for n, t in trained_learner.weights().items()}
    assert trained_learner.average is not None
    for name, tensor in trained_learner.average.weights.items():
        tensors[f"ema.{name}"] = whole_tensor(tensor, pieces[name]).clone()
    return tensors


def train(ranks: Ranks, folder: Path, cases: list[Case]) -> None:
    """Trains every case and writes its weights, outputs and metrics, from rank 0."""
    for case in cases:
        if case.grid is not None and ranks.size > 1:
            ranks = ranks.arranged(case.grid)
        linear.LARGE_WEIGHT = 2**8 if case.large and ranks.size > 1 else LARGE
        policy, how = learner(case, ranks), algorithm(case)
        beside = other(case, policy, ranks) if case.beside else None
        numbers: dict[str, torch.Tensor] = {}
        for number in range(case.updates):
            drawn = experience(case, number)
            result = policy.update(Update(drawn, np.arange(len(drawn))), how).result()
            for name, value in result.metrics.items():
                numbers[f"metric.{number}.{name}"] = torch.tensor(value)
            numbers[f"output.{number}"] = torch.from_numpy(result.outputs.copy())
            if isinstance(beside, MovingReference):
                assert isinstance(policy, PolicyLearner)
                beside.after_step(number, policy)
        if isinstance(policy, PolicyLearner):
            logprobs = policy.logprobs(experience(case, 99).sequences).result()
            numbers["logprobs"] = torch.from_numpy(logprobs.values.copy())
        if beside is not None:
            sequences = experience(case, 98).sequences
            read_role = beside.scores if isinstance(beside, ScoreRole) else beside.logprobs
            numbers["beside"] = torch.from_numpy(read_role(sequences).result().values.copy())
        weights = gathered(policy)
        merged = {f"whole.{name}": tensor.clone() for name, tensor in policy.hub_weights()}
        if ranks.rank == 0:
            save_file({**weights, **numbers, **merged}, folder / f"{case.name}.safetensors")


def distance(name: str, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Relative norm of the difference of all tensors whose name begins so."""
    names = [n for n in first if n.startswith(name)]
    assert names
    assert first.keys() == second.keys()
    pairs = [(first[n].double().nan_to_num(), second[n].double().nan_to_num()) for n in names]
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    return (apart / sum(float(a.square().sum()) for a, _ in pairs)) ** 0.5
