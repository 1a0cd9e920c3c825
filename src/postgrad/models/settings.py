"""The recipe's settings of one set of weights. Free of torch, so that plans load it quickly."""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from postgrad.core.errors import UsageError
from postgrad.core.hub import REVISION, at_revision, split_revision
from postgrad.core.settings import Settings
from postgrad.models.config_check import LIMITS

# Types whose layers are Llama's, with or without biases and norms of queries and keys: rollout uses
# LayeredDecoder, and training on a CPU FusedRMSNorm.
LLAMA_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# Layers of one block that read the same input: adapters on them share a product
# (models/adapter_layers.py).
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# What adapters may stand on; the last two are weights of a mixture, and targets by these names.
LINEAR, EXPERTS, ROUTER = "linear", "experts", "router"
KAIMING = "kaiming"  # where an adapter begins that does not change the base at first, to the bit
# Types that read images, by the type of the model, and the types of its decoder.
IMAGE_TYPES = {
    "gemma3": ("gemma3_text",),
    "idefics3": LLAMA_TYPES,
    "internvl": LLAMA_TYPES,
    "llava": LLAMA_TYPES,
    "llava_next": LLAMA_TYPES,
    "llava_onevision": LLAMA_TYPES,
    "mistral3": ("mistral", "ministral3"),
    "qwen2_5_vl": ("qwen2_5_vl_text",),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "qwen3_vl": ("qwen3_vl_text",),
    "qwen3_vl_moe": ("qwen3_vl_moe_text",),
    "smolvlm": ("llama",),
    "vipllava": LLAMA_TYPES,
}
# The types of their towers, where a config chooses one.
SQUARES, ANY_SIZE = ("clip_vision_model", "siglip_vision_model"), "pixtral"  # what these read
TOWERS = {
    "llava": (*SQUARES, ANY_SIZE),
    "llava_next": SQUARES,
    "llava_onevision": SQUARES,
    "mistral3": (ANY_SIZE,),
    "vipllava": SQUARES[:1],
}
# Parts that `freeze` names, and what is said of a model that does not have one.
ModelPart = Literal["vision", "projector", "router"]
Recompute = bool | Literal["offload"]  # model.gradient_checkpointing
RouterDtype = Literal["auto", "float32"]
# Keys of [model] that say how weights are loaded: where they differ, so do the numbers.
OF_LOADING = ("router_dtype", "quantize")
_LACKS: dict[str, str] = {
    "vision": "reads text alone, and has no tower",
    "projector": "reads text alone, and has no projector",
    ROUTER: "is no mixture of experts, and has no routers",
}
RankOrAlpha = Annotated[int, Field(ge=1, lt=2**31)]
LayerNumber = Annotated[int, Field(ge=0)]
ModelType = Literal["qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2", "gemma3"]


class TokenizerInit(Settings):
    """A fresh tokenizer, made from the texts of the recipe's data.

    "bpe": byte-level BPE with single digits, trained to `vocab_size`. "characters": printable ASCII
    and the `phrases`, each one token.
    """

    kind: Literal["bpe", "characters"] = "bpe"  # how it cuts text
    vocab_size: int = Field(default=4096, ge=300, le=LIMITS["vocab_size"])  # of "bpe"
    phrases: tuple[str, ...] = ()  # texts that are one token each


class ModelInit(Settings):
    """A fresh small model, its weights drawn from the recipe's seed. Names are Hugging Face's."""

    type: ModelType = "qwen3"  # the architecture
    # Width of the residual stream.
    hidden_size: int = Field(default=256, ge=8, le=LIMITS["hidden_size"])
    # Width of the MLPs.
    intermediate_size: int = Field(default=768, ge=8, le=LIMITS["intermediate_size"])
    # Of the decoder.
    num_hidden_layers: int = Field(default=6, ge=1, le=LIMITS["num_hidden_layers"])
    # Of queries; divides hidden_size.
    num_attention_heads: int = Field(default=4, ge=1, le=LIMITS["num_attention_heads"])
    # Divides num_attention_heads.
    num_key_value_heads: int = Field(default=2, ge=1, le=LIMITS["num_key_value_heads"])
    # Tokens of the longest sequence.
    max_position_embeddings: int = Field(default=2048, ge=16, le=LIMITS["max_position_embeddings"])
    tie_word_embeddings: bool = True  # the output head is the embedding matrix
    rope_theta: float = Field(default=10_000.0, gt=1.0)  # smaller for short sequences
    initializer_range: float = Field(default=0.02, gt=0.0)  # standard deviation of fresh weights
    tokenizer: TokenizerInit = TokenizerInit()

    @model_validator(mode="after")
    def _divide(self) -> "ModelInit":
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if self.hidden_size % heads:
            raise ValueError(
                f"num_attention_heads = {heads} does not divide hidden_size = {self.hidden_size}"
            )
        if heads % groups:
            raise ValueError(
                f"num_key_value_heads = {groups} does not divide num_attention_heads = {heads}"
            )
        return self


class LoraSettings(Settings):
    """A low-rank adapter: W + (alpha / rank) B A on linear layers, by choice on experts and routers
    too, the rest frozen (Hu et al. 2021, arXiv:2106.09685).

    The output head and embeddings get no adapter; `modules_to_save` trains them whole.
    """

    rank: RankOrAlpha = 64  # columns of B and rows of A
    alpha: RankOrAlpha = 64  # B A is multiplied by alpha / rank
    # By alpha / sqrt(rank) instead (Kalajdzievski 2023, arXiv:2312.03732): for high ranks.
    rslora: bool = False
    # The rows of the sum get lengths of their own, which are trained too (DoRA, Liu et al. 2024,
    # arXiv:2402.09353).
    dora: bool = False
    # Where A and B begin: "kaiming", A drawn and B zero; "pissa", the part of the weights along
    # their largest singular values (Meng et al. 2024, arXiv:2404.02948); "pissa_niter_16", nearly
    # that, after 16 rounds of subspace iteration, which are much faster on large matrices.
    init: str = Field(default=KAIMING, pattern=r"^(kaiming|pissa(_niter_[1-9]\d{0,3})?)$")
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)  # chance that an input of A is zeroed
    # Linear layers by the ends of their names, as in PEFT ("q_proj", "mlp.down_proj"); (): every
    # one of the decoder. Of a mixture also "experts" and "router", or weights of experts and
    # modules of routers by name ("experts.down_proj", "gate"): without dropout and dora.
    targets: tuple[str, ...] = ()
    # Embeddings and output head by the ends of their names ("embed_tokens", "lm_head"): each that
    # is named trains whole, as a copy beside the frozen one. Not where a model ties the two.
    modules_to_save: tuple[str, ...] = ()
    # Other ranks, by the same ends of names: { down_proj = 16, "layers.0.mlp.down_proj" = 8 }. Of
    # several that fit, the longest holds.
    rank_pattern: dict[str, RankOrAlpha] = {}
    alpha_pattern: dict[str, RankOrAlpha] = {}  # other alphas, likewise
    layers_to_transform: tuple[LayerNumber, ...] = ()  # numbers of layers with adapters; (): all
    exclude_modules: tuple[str, ...] = ()  # of the targets, those without an adapter, by name ends

    @property
    def keeps_start(self) -> bool:
        """Whether the adapter's first A and B stay beside it (models/adapter_start.py)."""
        return self.init != KAIMING

    @property
    def start_rounds(self) -> int | None:
        """Rounds of subspace iteration that PiSSA takes; None: all singular values, exactly."""
        rounds = self.init.rpartition("_niter_")[2]
        return int(rounds) if rounds.isdecimal() else None

    @property
    def product_ranks(self) -> int:
        """How many times its rank its products have: those of PiSSA read both A and the first A."""
        return 2 if self.keeps_start else 1

    @property
    def linear_alone(self) -> tuple[str, ...]:
        """Keys that are set here and that adapters on experts and routers do not have."""
        stated = {"dropout": self.dropout, "dora": self.dora, "init": self.keeps_start}
        return tuple(key for key, value in stated.items() if value)

    def adapts(self, name: str, kind: str = LINEAR) -> bool:
        """Whether an adapter stands on the linear layer `name`, or the weight of a mixture."""
        targeted = any(is_target(target, name, kind) for target in self.targets)
        if not targeted and (self.targets or kind != LINEAR):
            return False
        if any(is_target(excluded, name, kind) for excluded in self.exclude_modules):
            return False
        number = re.search(r"\.(\d+)\.", f".{name}")  # of the decoder's layer, as PEFT reads it
        layers = self.layers_to_transform
        return not layers or (number is not None and int(number[1]) in layers)

    def rank_of(self, name: str, kind: str = LINEAR) -> int:
        """Columns of B and rows of A on the linear layer `name`, or the weight of a mixture."""
        return _fitting(self.rank_pattern, name, kind, self.rank)

    @property
    def largest_rank(self) -> int:
        """Of all layers, whichever have adapters."""
        return max(self.rank, *self.rank_pattern.values(), 0)

    def scale_of(self, name: str, kind: str = LINEAR) -> float:
        """What B A is multiplied by there."""
        rank = self.rank_of(name, kind)
        alpha = _fitting(self.alpha_pattern, name, kind, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def plain(self) -> "LoraSettings":
        """Those of an adapter without a start of its own that changes the base as one of these by
        PiSSA: of twice the rank, and a scale of 1, which is in B (Adapter.plain_weights).
        """
        ranks = {name: 2 * rank for name, rank in self.rank_pattern.items()}
        both = {"rank": 2 * self.rank, "rank_pattern": ranks}
        scales = {"alpha": 2 * self.rank, "alpha_pattern": ranks, "rslora": False}
        return self.model_copy(update={**both, **scales, "init": KAIMING})

    @field_validator("targets", "modules_to_save", "exclude_modules")
    @classmethod
    def _are_names(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        _require_names(targets)
        _require_once(targets)
        return targets

    @model_validator(mode="after")
    def _starts_whole(self) -> "LoraSettings":
        if self.keeps_start and self.dropout:
            raise ValueError(
                f'dropout = {self.dropout:g} beside init = "{self.init}" would drop the main part '
                "of the weights, not a change of them: use 0"
            )
        return self

    @field_validator("layers_to_transform")
    @classmethod
    def _are_once(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        _require_once(layers)
        return layers

    @field_validator("rank_pattern", "alpha_pattern")
    @classmethod
    def _are_by_name(cls, pattern: dict[str, int]) -> dict[str, int]:
        _require_names(pattern)
        return pattern


class ModelSettings(Settings):
    """Where weights come from and how they compute. `init` is used only where no `path` is given.

    dtype: "float32"; "bfloat16" computes in bfloat16 over float32 master weights, "float16" in
    float16 with a scaled loss; "auto" is bfloat16 on CUDA, but float32 on GPUs before compute
    capability 8.0 (T4, V100), and on a CPU what a short measurement at the start of a run says.
    quantize: "4bit" holds the frozen weights under an adapter in four bits (QLoRA,
    arXiv:2305.14314), those of the layers' matrices.
    """

    # Hugging Face directory, hub id, or "@NAME": a stage of a pipeline
    path: str | None = Field(default=None, min_length=1)
    # Branch, tag or commit of a hub id; left out, main as it is when the run begins.
    revision: str | None = Field(default=None, pattern=REVISION)
    init: ModelInit | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    attention: Literal["auto", "sdpa", "flex"] = "auto"  # "flex": on CUDA only
    # Decoder layers by torch.compile: true on CUDA only; "auto" is true there with flex attention,
    # for the tested types. One graph for all layers and lengths, compiled in the first step.
    compile: bool | Literal["auto"] = False
    # Compute activations again in the backward pass, layer by layer; "offload" also keeps what each
    # layer reads in the host's memory meanwhile. On a CPU that is one copy more and saves nothing.
    gradient_checkpointing: Recompute = False
    # Of a mixture of experts: the weight of its balance loss; left out, that of the model's config,
    # or 0 where its routers are frozen.
    router_aux_loss_coef: float | None = Field(default=None, ge=0.0)
    router_z_loss_coef: float = Field(default=0.0, ge=0.0)  # of the squared log Z of router logits
    # What its routers compute in, here and in the built-in engine. "auto": as the type's own code
    # does, in `dtype` or, in some types, in float32.
    router_dtype: RouterDtype = "auto"
    # Parts that are not trained: of a model that reads images its tower, and what brings the
    # tower's outputs to the decoder's width; of a mixture of experts its routers, without a balance
    # loss then unless one is stated. With an adapter none of them is trained anyway.
    freeze: tuple[ModelPart, ...] = ()
    # Special tokens that end an answer, beside those that the tokenizer and generation_config.json
    # name: "<|im_end|>" of a base model that learns ChatML. An export has them in its
    # generation_config.json.
    eos_token: tuple[str, ...] = ()
    lora: LoraSettings | None = None
    quantize: Literal["none", "4bit"] = "none"

    @field_validator("eos_token", mode="before")
    @classmethod
    def _several(cls, eos_token: Any) -> Any:
        several = [eos_token] if isinstance(eos_token, str) else eos_token
        return tuple(several) if isinstance(several, list) else several

    @property
    def source(self) -> str | None:
        """The path to load, with the revision of a hub id: "org/name@REVISION"; None if unset."""
        return None if self.path is None else at_revision(self.path, self.revision)

    def loads_as(self, other: "ModelSettings") -> bool:
        """Whether the same files are loaded to the same weights by both."""
        return all(getattr(self, key) == getattr(other, key) for key in OF_LOADING)


def is_target(target: str, name: str, kind: str) -> bool:
    """Whether a name in an adapter's settings means the LINEAR layer `name`, or the weight `name`
    of a mixture, of EXPERTS or a ROUTER. Names of experts' weights have to say so ("experts",
    "experts.down_proj"): "down_proj" is a linear layer. A router's module has the name that
    transformers gives it ("gate"), and always the name "router".
    """
    if kind == LINEAR:
        return f".{name}".endswith(f".{target}")
    owner = name.rpartition(".")[0]
    ends = f".{owner}".endswith(f".{target}"), f".{name}".endswith(f".{target}")
    if kind == EXPERTS:
        return any(ends) and EXPERTS in target.split(".")
    return target == ROUTER or (any(ends) and target != "weight")


def longest_first(pattern: Mapping[str, int]) -> dict[str, int]:
    """A pattern of an adapter as PEFT has it, where the first name that fits a layer holds."""
    return dict(sorted(pattern.items(), key=lambda entry: (-len(entry[0]), entry[0])))


def _fitting(pattern: Mapping[str, int], name: str, kind: str, default: int) -> int:
    """The value of the longest name in a pattern that means a layer."""
    fitting = [end for end in pattern if is_target(end, name, kind)]
    return pattern[max(fitting, key=len)] if fitting else default


def _require_names(names: Iterable[str]) -> None:
    for name in names:
        if not re.fullmatch(r"\w+(\.\w+)*", name, re.ASCII):
            raise ValueError(f"{name!r} is not the end of a layer's name, such as q_proj")


def _require_once(values: Sequence[Any]) -> None:
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise ValueError(f"{', '.join(map(str, twice))}: named twice")


def no_such_part(part: str, kind: str, key: str = "model.freeze") -> UsageError:
    """What is said where a model of the type `kind` does not have a part that is to be frozen."""
    return UsageError(f'{key}: "{part}": this {kind} model {_LACKS[part]}: leave it out')


def looks_local(path: str) -> bool:
    """True where a path cannot be a hub id ("name" or "owner/name", also with "@REVISION")."""
    path, _ = split_revision(path)
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or os.path.exists(path)  # noqa: PTH110  # False for a name too long
