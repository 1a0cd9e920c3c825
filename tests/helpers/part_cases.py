"""Models on disk that ranks load in parts, and whole, as they did before."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from helpers.chat import chat_tokenizer
from helpers.rank_cases import Case, algorithm, experience
from postgrad.checkpoint.parts import Part, part_name, write_part
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.learner import Learner
from postgrad.learner.optimizer import UPDATES as NUMBER
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.score import ScoreLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update
from postgrad.models import load as loading
from postgrad.models import probe as probe_module
from postgrad.models import stored
from postgrad.models.adapter_files import write_adapter
from postgrad.models.adapters import add_adapter
from postgrad.models.load import load_model
from postgrad.models.score import load_score_model
from postgrad.models.settings import LoraSettings
from postgrad.parallel.ranks import ALONE, Grid, Ranks
from postgrad.parallel.sharding import WHOLE

LORA = LoraSettings(rank=4, alpha=8)
UPDATES = 2


class Parts(NamedTuple):
    """type: of the model. kept: the dtype of its file; dtype: what it computes in. kind: of the
    algorithm. headed: the file has a score head. adapted: the directory is an adapter's. shard: the
    most bytes of one file.
    """

    type: str = "qwen3"
    stage: str = "zero3"
    kept: str = "float32"
    dtype: str = "float32"
    kind: str = "grpo"
    lora: bool = False
    dora: bool = False
    tied: bool = True
    headed: bool = False
    adapted: bool = False
    offload: bool = False
    shard: str = "50GB"
    grid: Grid = Grid()

    @property
    def name(self) -> str:
        return "-".join(str(field) for field in self).replace(" ", "")


def write_model(case: Parts, folder: Path) -> Path:
    """The directory of a case's model, drawn with numbers that no two ranks have alike."""
    size = {
        "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_labels": 1,
        "initializer_range": 0.1, "tie_word_embeddings": case.tied, "pad_token_id": 0,
    }  # fmt: skip
    if "moe" in case.type or case.type == "mixtral":
        size |= {"num_experts": 6, "num_local_experts": 6, "moe_intermediate_size": 24}
        size["num_experts_per_tok"] = 2
    torch.manual_seed(0)
    kind = AutoModelForSequenceClassification if case.headed else AutoModelForCausalLM
    lm = kind.from_config(AutoConfig.for_model(case.type, **size)).to(getattr(torch, case.kept))
    for name, parameter in lm.named_parameters():
        if parameter.ndim == 1:  # norms and biases, which are all alike in a fresh model
            torch.manual_seed(len(name))
            parameter.data += 0.1 * torch.randn(parameter.shape).to(parameter.dtype)
    to = folder / case.name
    lm.save_pretrained(to, max_shard_size=case.shard)
    chat_tokenizer().save_pretrained(to)
    if not case.adapted:
        return to
    adapter = add_adapter(load_model(str(to), dtype=torch.float32).lm, LORA, seed=1)
    weights = {n: torch.randn(p.shape) * 0.1 for n, p in adapter.parameters().items()}
    write_adapter(weights, LORA, str(to), folder / f"{case.name}-adapter")
    return folder / f"{case.name}-adapter"


def load(case: Parts, path: Path, ranks: Ranks, *, unsharded: bool) -> Backbone:
    """The backbone of a case, divided. whole: every rank loads all of the model first."""
    how: dict[str, Any] = {
        "dtype": getattr(torch, case.dtype),
        "ranks": ALONE if unsharded else ranks,
    }
    source = load_score_model if case.kind == "reward" else load_model
    backbone = Backbone(source(str(path), **how).lm, torch.device("cpu"), MicroBatch(max_tokens=64))
    if case.lora:
        lora = LORA.model_copy(update={"dora": case.dora})
        backbone.adapter = add_adapter(backbone.lm, lora, seed=1)
    backbone.divide(ranks, case.stage, offload=case.offload)  # type: ignore[arg-type]
    return backbone


def trained(case: Parts, backbone: Backbone) -> Learner[Any]:
    """A learner on the backbone after a few updates."""
    settings = LearnerSettings(lr=1e-2)
    if case.kind == "reward":
        learner: Learner[Any] = ScoreLearner("reward_model", backbone, "at", settings, 100)
    else:
        learner = PolicyLearner(backbone, settings, 100)
    like = Case(case.stage, kind=case.kind)
    for number in range(UPDATES):
        drawn = experience(like, number)
        how: Any = algorithm(like)
        learner.update(Update(drawn, np.arange(len(drawn))), how).result()
    return learner


def save(learner: Any, ranks: Ranks, folder: Path) -> None:
    """As fleet/worker.py writes a checkpoint."""
    for stem, named in learner.tensors().items():
        parts: dict[str, Part] = {}
        for name, held in named.items():
            if name == NUMBER:
                piece = replace(WHOLE, first=ranks.rank == 0)
            else:
                piece = learner.pieces.get(name) or learner.pieces[name.rpartition(".")[0]]
            if piece.first:
                parts[name] = Part(held, piece.shape, piece.offsets)
        write_part(folder / part_name(stem, ranks.rank, ranks.size), parts)


class Watched:
    """Within it, what is read from files is counted, and `look` called after each block. What the
    probe of an untested type reads is not counted.
    """

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self.bytes = 0
        self._look = look

    def __enter__(self) -> "Watched":
        self._from_file, self._block = stored._from_file, stored.StoredTensor.block
        self._probe = probe_module.require_same_outputs

        def from_file(*where: Any) -> Any:
            read = self._from_file(*where)

            def counted(box: Any) -> torch.Tensor:
                block = read(box)
                self.bytes += block.nbytes
                return block

            return counted

        def block(tensor: Any, box: Any) -> torch.Tensor:
            numbers = self._block(tensor, box)
            self._look()
            return numbers

        def probe(*model: Any) -> None:
            before = self.bytes
            self._probe(*model)
            self.bytes = before

        stored._from_file, stored.StoredTensor.block = from_file, block  # type: ignore[assignment]
        loading.require_same_outputs = probe  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        stored._from_file, stored.StoredTensor.block = self._from_file, self._block
        loading.require_same_outputs = self._probe  # type: ignore[attr-defined]


def weight_bytes(path: Path) -> int:
    """Bytes of all tensors in a model's files."""
    files = sorted(path.glob("*.safetensors"))
    return sum(t.nbytes for t in stored.stored_tensors(files, torch.device("cpu")).values())
