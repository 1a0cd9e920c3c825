"""What follows from a decoder's config alone: number of weights, arithmetic, size of the cache.

Free of torch and transformers, so that a plan loads it fast. The formulas are those of the tested
model types; a test compares them with the weights of the real models.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from postgrad.core.errors import UsageError
from postgrad.layout.tree import MIN_CONTINUED, MIN_SHARED, NO_SHARING
from postgrad.models.flops import MULTIPLY_ADD, ForwardFlops
from postgrad.models.matrices import MatrixGroup
from postgrad.models.settings import ROUTER, ModelInit, ModelType
from postgrad.models.towers import TowerShape

TYPES = tuple("gemma3_text" if name == "gemma3" else name for name in get_args(ModelType))
QK_NORM = ("qwen3", "gemma3_text")  # a norm on every head's query and on every head's key
FOUR_NORMS = ("gemma2", "gemma3_text")  # before and after attention and feed-forward
WINDOWED = ("mistral", "gemma2", "gemma3_text")  # others only with use_sliding_window
# transformers' defaults for keys that a config.json may leave out.
KV_HEADS = {"qwen2": 32, "qwen3": 32, "mistral": 8, "gemma": 16, "gemma2": 4, "gemma3_text": 4}
HEAD_DIM = {"qwen3": 128, "gemma": 256, "gemma2": 256, "gemma3_text": 256}


SOFT_CAPPED, WITH_SINKS = 2, 1  # ModelShape.scores: of tanh and softmax, of softmax
OUTSIDE = -1  # stands for a layer's number where a matrix of the decoder is in none of its layers


@dataclass(frozen=True, slots=True)
class KeptByLayers:
    """Bytes of a token that layers keep for the backward pass, but for attention (models.kept)."""

    width: int  # bytes of a number of what computes
    trains: bool  # whether the weights train; frozen ones keep no inputs
    all: int  # of all layers together
    largest: int  # of the layer that keeps most
    mixtures: int  # of `all`, what blocks with experts keep
    attended: int  # what attention returns, not in `all`, where others keep it: on a GPU it is
    # attention's own too


@dataclass(frozen=True, slots=True)
class AdaptableLayers:
    """What adapters may stand on in decoder layers that have the same of it, or outside of them."""

    numbers: tuple[int, ...]  # of the layers, from 0; or OUTSIDE alone
    linears: tuple[tuple[str, int, int], ...]  # (name, inputs, outputs) of their linear modules
    # (name, experts, inputs, outputs) of the weights of all experts, and of the router, of 1
    stacks: tuple[tuple[str, int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class CountedWeights:
    """Weights of a model whose type has no formulas here, counted (models.counted)."""

    parameters: int  # all of them, a shared matrix once
    layers: int  # of all decoder layers together
    matrices: int  # of these, those in matrix products: linear layers' and experts'
    active: int  # of these, those that one token is multiplied with: of experts only a few
    largest: int  # of the largest weight
    adaptable: tuple[AdaptableLayers, ...]  # by kinds of layers, in the order of their first
    attending: int  # layers that have keys and values
    states: int  # numbers that the other layers keep of a sequence, however long it is
    continued: bool = False  # several tokens at once go on from them (models.states.continues)
    balance: float = 0.0  # the config's coefficient of the routers' balance loss; 0: none
    chosen: int = 1  # experts that a token is sent to
    routed: int = 0  # of the matrices, those of routed experts that ranks can share
    choices: int = 0  # to how many experts a token is sent, those of all layers together
    experts: int = 0  # routed experts of a layer; 0 of a dense model
    routers: int = 0  # weights of the routers of all layers
    packed: int = 0  # of the matrices, those that four bits hold (models.four_bits.packable)
    matrix_groups: tuple[MatrixGroup, ...] = ()  # the matrices of the whole model
    kept: tuple[KeptByLayers, ...] = ()  # of each width, trained and frozen; (): not counted


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a causal language model; names are those of Hugging Face's configs, shortened.
    Example values: Qwen3-0.6B.
    """

    model_type: str  # "qwen3"
    vocab_size: int  # rows of the embedding matrix: 151936
    hidden_size: int  # width of the residual stream: 1024
    intermediate_size: int  # width of an MLP: 3072
    layers: int  # 28
    heads: int  # of queries: 16
    kv_heads: int  # of keys and values: 8
    head_dim: int  # width of a head: 128
    tied: bool  # the output head is the embedding matrix
    qkv_bias: bool = False  # biases of the query, key and value projections
    o_bias: bool = False  # bias of attention's output projection
    mlp_bias: bool = False  # biases of the MLP's three projections
    qk_norm: bool = False  # norms on queries and keys, two weights [head_dim] a layer
    norms: int = 2  # other norms of a layer, [hidden_size] each
    # Tokens; None: no layer has a window. Learner and engine compute and keep what lies outside of
    # it too, masked.
    sliding_window: int | None = None
    # Of a type without formulas: its weights; intermediate_size is then that of the feed-forwards
    # that one token passes, experts' together, as a mean over layers. None: formulas give them.
    counted: CountedWeights | None = None
    scores: int = 0  # copies of its scores that attention keeps on a CPU: soft-caps, sinks
    latent: int = 0  # numbers that a token's keys and values are cached as (models/latent.py)
    tower: TowerShape | None = None  # of a model that reads images; its weights are in `counted`

    @property
    def query_size(self) -> int:
        """Numbers in all heads' queries of one token."""
        return self.heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Numbers in all heads' keys of one token, and in their values."""
        return self.kv_heads * self.head_dim

    @property
    def attending(self) -> int:
        """Layers that have keys and values: in a hybrid some carry a state instead."""
        return self.layers if self.counted is None else self.counted.attending

    @property
    def min_shared(self) -> int:
        """Tokens of the shortest prompt that the learner computes once for its answers, as
        models.attention.min_shared_of says of the loaded model.
        """
        if self.counted is None or not self.counted.states:
            return MIN_SHARED
        return MIN_CONTINUED if self.counted.continued else NO_SHARING

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence, in float32."""
        return 0 if self.counted is None else 4 * self.counted.states

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding matrix."""
        return self.vocab_size * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Weights of an output head of its own: none where it is tied to the embedding."""
        return 0 if self.tied else self.vocab_size * self.hidden_size

    @property
    def attention_parameters(self) -> int:
        """Weights and biases of the four projections of one layer's attention."""
        outputs = self.query_size + 2 * self.key_size
        matrices = self.hidden_size * (outputs + self.query_size)
        return matrices + self.qkv_bias * outputs + self.o_bias * self.hidden_size

    @property
    def mlp_parameters(self) -> int:
        """Weights and biases of the three projections of one layer's feed-forward."""
        biases = 2 * self.intermediate_size + self.hidden_size
        return 3 * self.hidden_size * self.intermediate_size + self.mlp_bias * biases

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """The shapes [outputs, inputs] of all matrices that states are multiplied with: those of a
        layer, those that the engine joins (queries, keys and values; gate and up), and the head's.
        """
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.query_size, self.key_size
        outputs = queries, keys, queries + 2 * keys, inner, 2 * inner, self.vocab_size
        return list(
            dict.fromkeys([*((n, hidden) for n in outputs), (hidden, queries), (hidden, inner)])
        )

    @property
    def norm_parameters(self) -> int:
        """Weights of the norms of one layer."""
        return self.norms * self.hidden_size + self.qk_norm * 2 * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Weights of one decoder layer; where layers differ, their mean."""
        if self.counted is not None:
            return self.counted.layers // self.layers
        return self.attention_parameters + self.mlp_parameters + self.norm_parameters

    @property
    def layer_matrix_parameters(self) -> int:
        """Weights of one decoder layer that stand in matrix products: no biases, no norms."""
        if self.counted is not None:
            return self.counted.matrices // self.layers
        attention = 2 * self.hidden_size * (self.query_size + self.key_size)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def packed_parameters(self) -> int:
        """Weights of all decoder layers that model.quantize holds in four bits."""
        if self.counted is not None:
            return self.counted.packed
        return self.layers * self.layer_matrix_parameters

    @property
    def active_matrix_parameters(self) -> int:
        """Those of layer_matrix_parameters that one token is multiplied with."""
        if self.counted is not None:
            return self.counted.active // self.layers
        return self.layer_matrix_parameters

    @property
    def unused_parameters(self) -> int:
        """Weights of the routed experts of all layers that one token is not sent to; 0 of a dense
        model.
        """
        return 0 if self.counted is None else self.counted.matrices - self.counted.active

    @property
    def largest_parameters(self) -> int:
        """Numbers in the largest weight."""
        if self.counted is not None:
            return self.counted.largest
        return max(self.embedding_parameters, self.hidden_size * self.intermediate_size)

    @property
    def matrix_parameters(self) -> int:
        """Weights in matrix products of a token that reaches the output head, tied or not."""
        return self.layers * self.layer_matrix_parameters + self.embedding_parameters

    def parameters(self) -> int:
        """All weights of the causal language model, a shared matrix once."""
        if self.counted is not None:
            return self.counted.parameters
        body = self.layers * self.layer_parameters + self.hidden_size  # the last norm
        return self.embedding_parameters + body + self.head_parameters

    @property
    def matrix_groups(self) -> tuple[MatrixGroup, ...]:
        """All matrices, embeddings and output head among them."""
        if self.counted is not None:
            return self.counted.matrix_groups
        hidden, inner, heads = self.hidden_size, self.intermediate_size, self.query_size
        layer = ((heads, hidden), 1), ((self.key_size, hidden), 2), ((hidden, heads), 1)
        layer += ((inner, hidden), 2), ((hidden, inner), 1)
        ends = 1 if self.tied else 2
        return (
            *(MatrixGroup(shape, n * self.layers, "", hidden=True) for shape, n in layer),
            MatrixGroup((self.vocab_size, hidden), ends, "", hidden=False),
        )

    def frozen(self, part: str) -> int:
        """How many weights a part has that model.freeze names; 0 where the model lacks it."""
        if part == ROUTER:
            return 0 if self.counted is None else self.counted.routers
        return 0 if self.tower is None else self.tower.frozen((part,))

    def flops(
        self, tokens: float, squares: float, head_tokens: float | None = None
    ) -> ForwardFlops:
        """Operations of one forward pass over sequences of `tokens` tokens in all.

        squares: the sum of the sequences' squared lengths. A token attends to itself and those
        before it, on average half of the sequence, so attention is two products over squares / 2
        pairs: 2 x 2 x squares / 2 x heads x head_dim a layer. Kernels that compute the masked half
        too take twice that. head_tokens: tokens that reach the output head; None: all.
        """
        reach = tokens if head_tokens is None else head_tokens
        return ForwardFlops(
            body=MULTIPLY_ADD * tokens * self.layers * self.active_matrix_parameters,
            attention=2 * MULTIPLY_ADD * squares / 2 * self.query_size * self.attending,
            head=MULTIPLY_ADD * reach * self.embedding_parameters,
        )

    def cache_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes that keys and values of one token take in all layers."""
        return self.attending * (self.latent or 2 * self.key_size) * dtype_bytes

    @property
    def cache_heads(self) -> int:
        """Heads that ranks can divide a cache by: a latent is of all heads together."""
        return 1 if self.latent else self.kv_heads


def shape_of(config: Mapping[str, Any], source: str = "this config") -> ModelShape:
    """The shape of a model from the object in its config.json. source: its name in messages.

    Raises UsageError for a model type without formulas here, and for a config that lacks a size.
    """
    kind = _trained_type(config, source)
    heads = _size(config, "num_attention_heads", source)
    hidden = _size(config, "hidden_size", source)
    bias = bool(config.get("attention_bias")) and kind not in ("qwen2", "mistral")
    return ModelShape(
        model_type=kind,
        vocab_size=_size(config, "vocab_size", source),
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size", source),
        layers=_size(config, "num_hidden_layers", source),
        heads=heads,
        kv_heads=_optional(config, "num_key_value_heads", KV_HEADS.get(kind, heads)) or heads,
        head_dim=_optional(config, "head_dim", HEAD_DIM.get(kind)) or hidden // heads,
        tied=bool(config.get("tie_word_embeddings", kind.startswith("gemma"))),
        qkv_bias=bias or kind == "qwen2",
        o_bias=bias,
        mlp_bias=kind == "llama" and bool(config.get("mlp_bias")),
        qk_norm=kind in QK_NORM,
        norms=4 if kind in FOUR_NORMS else 2,
        scores=SOFT_CAPPED if config.get("attn_logit_softcapping", kind == "gemma2") else 0,
        sliding_window=_window(config, kind),
    )


def shape_of_init(init: ModelInit) -> ModelShape:
    """The shape of the fresh model that `init` makes (models.fresh).

    A "bpe" tokenizer trained on little text may have fewer tokens than vocab_size allows: the
    vocabulary is then smaller than this shape's.
    """
    tokenizer = init.tokenizer
    config = init.model_dump(exclude={"type", "tokenizer"}) | {
        "model_type": init.type,
        "head_dim": init.hidden_size // init.num_attention_heads,
        "vocab_size": tokenizer.vocab_size if tokenizer.kind == "bpe" else _characters(init),
    }
    if init.type == "gemma3":
        config |= {"model_type": "gemma3_text", "layer_types": ["full_attention"]}
    return shape_of(config, "model.init")


def _characters(init: ModelInit) -> int:
    """Tokens of a "characters" vocabulary: printable ASCII, new line, 3 special ones, phrases."""
    printable = {"\n", *map(chr, range(32, 127))}
    return 3 + len(printable | set(init.tokenizer.phrases))


def stated_type(config: Mapping[str, Any], source: str) -> str:
    """The model_type of a config.json. Raises UsageError where it has none."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise UsageError(f"{source} names no model_type: it is not the config.json of a model")
    return kind


def _trained_type(config: Mapping[str, Any], source: str) -> str:
    kind = stated_type(config, source)
    if kind in TYPES and "text_config" not in config:
        return kind
    reason = "whose sizes cannot be computed here"
    if "text_config" in config or "vision_config" in config:
        reason = "which reads more than text: take the text model of the family"
    elif config.get("is_encoder_decoder"):
        reason = "an encoder with a decoder: only decoders that predict the next token are trained"
    raise UsageError(f"{source} is a {kind} model, {reason}. Known shapes: {', '.join(TYPES)}")


def _size(config: Mapping[str, Any], key: str, source: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(
            f"{source}: {key} is {value!r}; it has to be a whole number, 1 or more: take the "
            "config.json that belongs to the weights"
        )
    return value


def _optional(config: Mapping[str, Any], key: str, default: int | None) -> int | None:
    """The default of the model type stands in for an absent key, not for null."""
    return config.get(key, default)


def _window(config: Mapping[str, Any], kind: str) -> int | None:
    kinds = config.get("layer_types")
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    if kind in WINDOWED or config.get("use_sliding_window"):
        return config.get("sliding_window", 4096)
    return None
