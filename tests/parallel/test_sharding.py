"""How a model is divided when it is loaded, and written: nobody ever holds all of it."""

import ctypes
import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.chat import chat_tokenizer
from helpers.part_cases import Parts, Watched, write_model
from helpers.ranks import run_ranks
from postgrad.checkpoint.parts import Part, Reader, part_name, write_part
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.optimizer import UPDATES
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.models.adapters import add_adapter
from postgrad.models.export import export_hf
from postgrad.models.load import load_model
from postgrad.models.score import load_score_model
from postgrad.models.settings import LoraSettings
from postgrad.parallel import sharding
from postgrad.parallel.ranks import Ranks
from postgrad.parallel.sharding import local

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc"),
]
THRESHOLD = -3, 65536  # M_MMAP_THRESHOLD: larger tensors go back to the system when they are freed


def own_bytes() -> int:
    """Memory that this process shares with no other: not the file, which is mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def configured(kind: str = "plain") -> Any:
    more = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
    return AutoConfig.for_model(
        "qwen3_moe" if kind == "mixture" else "qwen3",
        vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=10,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
        pad_token_id=0, **(more if kind == "mixture" else {}),
    )  # fmt: skip


def write(folder: Path, kind: str, kept: torch.dtype) -> Any:
    """Writes the model of a case, which it returns."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(configured(kind)).to(kept)
    lm.save_pretrained(folder / "model")
    chat_tokenizer().save_pretrained(folder / "model")
    return lm


def write_checkpoint(folder: Path, weights: Mapping[str, torch.Tensor], ranks: int) -> Reader:
    """The files of a run that has divided weights and moments over so many ranks."""
    moments = {
        f"{name}.{moment}": torch.full_like(weight, 0.5)
        for name, weight in weights.items()
        for moment in ("exp_avg", "exp_avg_sq")
    }
    folder.mkdir()
    for stem, tensors in (("policy.weights", weights), ("policy.optimizer", moments)):
        for rank in range(ranks):
            parts: dict[str, Part] = {}
            if stem == "policy.optimizer" and rank == 0:
                parts[UPDATES] = Part(torch.tensor(3), (), ())
            for name, tensor in tensors.items():
                rows = torch.tensor_split(tensor.detach(), ranks)
                start = sum(map(len, rows[:rank]))
                parts[name] = Part(
                    rows[rank], tuple(tensor.shape), (start,) + (0,) * (tensor.ndim - 1)
                )
            write_part(folder / part_name(stem, rank, ranks), parts)
    return Reader(folder, frozenset(file.name for file in folder.iterdir()))


def divide(ranks: Ranks, folder: Path, kind: str, dtype: torch.dtype, saved: Any = None) -> None:
    ctypes.CDLL(None).mallopt(*THRESHOLD)
    before, most = own_bytes(), 0
    shard: Any = sharding.fully_shard

    def look() -> None:
        nonlocal most
        most = max(most, own_bytes() - before)

    def measured(*args: Any, **how: Any) -> Any:
        module = shard(*args, **how)
        look()
        return module

    sharding.fully_shard = measured
    with Watched(look):
        source = load_score_model if kind == "score" else load_model
        lm: Any = source(str(folder / "model"), dtype=dtype, ranks=ranks).lm
        largest = dtype.itemsize * max(parameter.numel() for parameter in lm.parameters())
        backbone = Backbone(lm, torch.device("cpu"), MicroBatch(max_tokens=64))
        if kind == "adapter":
            backbone.adapter = add_adapter(lm, LoraSettings(rank=64, alpha=8), seed=1)
        look()
        held = [
            tensor
            for tensor in gc.get_objects()
            if type(tensor) in (torch.Tensor, torch.nn.Parameter)
        ]
        assert max((t.numel() for t in held if t.device.type == "cpu"), default=0) < 2**14
        # kernels that torch made for the probe of a mixture are not its weights
        before = own_bytes()
        backbone.divide(ranks, "zero3")
        # torch's compiler would take the numbers of modules with FSDP2's mark for dynamic ones
        assert not any(getattr(module, sharding.MANAGED, False) for module in lm.modules())
        torch.distributed.barrier()  # a rank that ends early takes the store of the groups with it
        if saved is not None:
            learner = PolicyLearner(backbone, LearnerSettings(), 100)
            learner.load(saved)
    look()
    part = sum(local(parameter).nbytes for parameter in lm.parameters())
    model_bytes = dtype.itemsize * sum(parameter.numel() for parameter in lm.parameters())
    if saved is not None:
        (moments,) = (t for stem, t in learner.tensors().items() if stem == "policy.optimizer")
        assert all(bool((m == 0.5).all()) for name, m in moments.items() if name != UPDATES)
        part += sum(moment.nbytes for moment in moments.values())
        model_bytes *= 3
    assert part < most < part + 2 * largest, f"{most:,} bytes: {part:,} of its part, {largest:,}"
    assert (
        part + 2 * largest < 0.6 * model_bytes or dtype == torch.bfloat16
    )  # or it would prove nothing


@pytest.mark.parametrize(
    ("kind", "kept", "dtype"),
    [
        ("plain", torch.float32, torch.float32),
        ("plain", torch.bfloat16, torch.float32),
        ("plain", torch.float32, torch.bfloat16),
        ("plain", torch.bfloat16, torch.bfloat16),
        ("adapter", torch.bfloat16, torch.float32),
        ("score", torch.bfloat16, torch.float32),
        ("mixture", torch.bfloat16, torch.float32),
    ],
)
def test_a_rank_that_loads_a_model_holds_its_part_and_two_tensors(
    kind: str, kept: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    write(tmp_path, kind, kept)
    run_ranks(4, divide, tmp_path, kind, dtype)


def exported(ranks: Ranks, folder: Path, small: Path, saved: Reader) -> None:
    ctypes.CDLL(None).mallopt(*THRESHOLD)
    tiny = dict(load_model(str(small), dtype=torch.float32).lm.named_parameters())
    export_hf(tiny, str(small), folder / "tiny", dtype=torch.float32)  # imports, tokenizers
    base, largest = str(folder / "model"), 4096 * 512 * 4  # in float32, as the checkpoint has it
    before, most = 0, 0

    def look() -> None:
        nonlocal most
        most = max(most, own_bytes() - before)

    for dtype in (torch.float32, torch.bfloat16):
        before, most = own_bytes(), 0
        with Watched(look):
            export_hf(saved("policy.weights"), base, folder / f"to-{dtype}", dtype=dtype)
        assert largest < most < 2 * largest, f"{most:,} bytes: {largest:,} are of one tensor"


def test_a_resume_holds_its_part_and_two_tensors_and_an_export_two(tmp_path: Path) -> None:
    """From a checkpoint that three ranks wrote."""
    lm = write(tmp_path, "plain", torch.float32)
    saved = write_checkpoint(tmp_path / "saved", dict(lm.named_parameters()), 3)
    run_ranks(4, divide, tmp_path, "plain", torch.float32, saved)
    run_ranks(1, exported, tmp_path, write_model(Parts(), tmp_path), saved)
    for dtype in (torch.float32, torch.bfloat16):
        read: Any = AutoModelForCausalLM.from_pretrained(tmp_path / f"to-{dtype}", dtype=dtype)
        parameters = dict(read.named_parameters())
        for name, weight in lm.named_parameters():
            assert torch.equal(parameters[name], weight.to(dtype))
