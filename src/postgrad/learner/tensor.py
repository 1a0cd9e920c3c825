"""Tensor parallelism: a decoder whose matrices are cut over the ranks of a tensor group.

Megatron's tensor parallelism (arXiv:1909.08053) with its sequence parallelism (arXiv:2205.05198).
Outside attention and MLP a rank has a run of the rows, as in learner/context.py, so that norms,
residuals, embeddings and the output head are computed once, not on every rank. Before each of the
two blocks the ranks gather all rows (all-gather); inside it each has some heads or inner features;
after it the partial sums are added and the rows divided again (reduce-scatter). So the gradient of
a weight that is not cut covers only this rank's rows or features, and is added over all ranks like
that of any other weight.

A mixture of experts takes the place of a layer's MLP. Each rank computes it, router and shared
experts too, for its run of the rows, without a gather: so its experts stay whole on each rank, or
are divided by expert parallelism (learner/experts.py), whose ranks may be those of a tensor group.

torch's DTensor styles support neither our autograd functions (products, norms) nor PEFT's layers;
to plain tensors they would add just these two exchanges.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

from torch import Tensor, nn

from postgrad.core.errors import UsageError
from postgrad.learner.context import require_heads
from postgrad.learner.experts import require_experts
from postgrad.learner.settings import LearnerSettings, require_no_sharers
from postgrad.models.adapter_dropout import CounterDropout
from postgrad.models.attention import layers_of
from postgrad.models.config import load_config
from postgrad.models.supported import LAYER_KEYS, STATE_LAYERS
from postgrad.parallel.exchange import rows_from_sums, rows_of_all
from postgrad.parallel.ranks import Grid, Ranks
from postgrad.parallel.sharding import BY_INPUTS, BY_OUTPUTS, cut_dim

# What transformers' plan for a decoder may hold beside our cuts: norms of queries and keys, whose
# gradients we add over all ranks.
REPLICATED = ("replicated_with_grad_allreduce", "sequence_parallel")
LAYER = "layers.*."  # where a plan's names of what is in each layer begin
WHOLE = ("mlp.experts", "mlp.shared_expert")  # where those begin that no rank has a part of
# Types without a plan whose layers are those of a type that has one (Qwen3).
LIKE_OTHERS = ("qwen3_vl_text",)
BLOCKS = {  # of a layer, with how a plan cuts their matrices
    "self_attn": {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise"), "o_proj": "rowwise"},
    "mlp": {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"},
}
BIASES = ("attention_bias", "mlp_bias", "use_bias")  # in configs: behind a block too


def require_divisible(learner: LearnerSettings, path: str) -> None:
    """Raises UsageError, before a weight is read, where the heads, matrices and experts of the
    model at `path` cannot be divided over ranks.
    """
    if learner.tensor_parallel * learner.context_parallel * learner.expert_parallel > 1:
        _require_parts(load_config(path), grid_of(learner))


def grid_of(learner: LearnerSettings) -> Grid:
    """How the settings arrange ranks."""
    return Grid(
        learner.context_parallel,
        learner.tensor_parallel,
        learner.shard_groups,
        learner.expert_parallel,
    )


def require_shareable(config: Any, grid: Grid, *, stateful: bool) -> None:
    """Raises UsageError where ranks cannot share the layers of a model of this config as `grid`
    says. stateful: they carry a state along each sequence.
    """
    if stateful:
        require_no_sharers(config.model_type, grid.sharers)
    _require_parts(config, grid)


def _require_parts(config: Any, grid: Grid) -> None:
    text = config.get_text_config()
    if STATE_LAYERS in (getattr(text, LAYER_KEYS[0], None) or ()):
        require_no_sharers(config.model_type, grid.sharers)
    require_matrices(text, grid.tensor)
    require_heads(text, grid.context, grid.tensor)
    require_experts(text, grid.expert)


def require_matrices(config: Any, size: int) -> None:
    """Raises UsageError where a decoder of this config cannot have its matrices cut in `size`."""
    if size == 1:
        return
    where = f"learner.tensor_parallel = {size}"
    blocks = _blocks_to_cut(config, where)
    counts = {
        "attention heads": config.num_attention_heads,
        "key heads": config.num_key_value_heads,
    }
    if "mlp" in blocks:
        counts["inner features (intermediate_size)"] = config.intermediate_size
    for feature, count in counts.items():
        if count % size:
            fitting = [n for n in range(1, count + 1) if not any(c % n for c in counts.values())]
            raise UsageError(
                f"{where}: {count} {feature} of this {config.model_type} model cannot be cut into "
                f"{size} equal parts; what works: {', '.join(map(str, fitting))}"
            )


def _blocks_to_cut(config: Any, where: str) -> Collection[str]:
    """The blocks of a layer whose matrices are cut: "self_attn", and "mlp" unless all layers are
    mixtures. Raises UsageError unless transformers' plan for the type cuts them as we do.
    """
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    names = {name.removeprefix(LAYER): how for name, how in plan.items() if LAYER in name}
    inside = {name: how for name, how in names.items() if not name.startswith(WHOLE)}
    cuts: dict[str, dict[str, str]] = {}
    for name, how in inside.items():
        block, _, matrix = name.partition(".")
        if block in ("self_attn", "mlp") and matrix and how not in REPLICATED:
            cuts.setdefault(block, {})[matrix] = how
    if config.model_type in LIKE_OTHERS:
        cuts = BLOCKS
    wanted = BLOCKS if "mlp" in cuts or inside == names else {"self_attn": BLOCKS["self_attn"]}
    one_width = isinstance(getattr(config, "intermediate_size", 0), int)  # of all layers
    if cuts != wanted or not one_width or any(name.count(".") > 1 for name in inside):
        raise UsageError(
            f"{where}: a {config.model_type} model has no plan for it, or one with other matrices "
            f'than {", ".join((*BY_OUTPUTS, *BY_INPUTS))}: use 1, and sharding = "zero3"'
        )
    if any(getattr(config, key, False) for key in BIASES):
        raise UsageError(
            f"{where}: this {config.model_type} model has a bias after attention or MLP "
            f"({', '.join(BIASES)}), which every rank would add: use 1"
        )
    return cuts


def cut_matrices(lm: Any, ranks: Ranks) -> None:
    """Replaces each matrix of a decoder, and the adapters on it, by this rank's part, and hooks the
    exchanges of rows into its blocks. To be called before an optimizer takes the weights. Raises
    UsageError for dropout of adapters on what is not cut.
    """
    size = ranks.grid.tensor
    if size == 1:
        return
    for name, parameter in list(lm.named_parameters()):
        if (dim := cut_dim(name)) is None:
            continue
        length = parameter.shape[dim] // size
        part = parameter.detach().narrow(dim, ranks.tensor_rank * length, length).clone()
        owner, _, attribute = name.rpartition(".")
        setattr(lm.get_submodule(owner), attribute, nn.Parameter(part, parameter.requires_grad))
    for name, module in lm.named_modules():
        cut_by_inputs = any(f".{matrix}." in name for matrix in BY_INPUTS)
        if hasattr(module, "out_features") and cut_dim(f"{name}.weight") is not None:
            features: Any = module  # an adapted layer has them too
            features.out_features, features.in_features = features.weight.shape
        elif isinstance(module, CounterDropout):
            if cut_dim(f"{name.partition('.lora_')[0]}.weight") is None:
                raise UsageError(
                    f"model.lora.dropout on {name}: its masks are those of the rows of all ranks, "
                    f"and with learner.tensor_parallel = {size} it reads a run of them: use 0, or "
                    "model.lora.targets of attention alone"
                )
            if cut_by_inputs:
                module.cut(ranks.tensor_rank, size)
    group, layers = ranks.groups.tensor, list[Any](layers_of(lm))
    for layer in layers:
        for block, last in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
            if not hasattr(block, last):  # a mixture: each rank's run of the rows is enough
                continue
            block.register_forward_pre_hook(partial(_all_rows, group), with_kwargs=True)
            getattr(block, last).register_forward_hook(partial(_own_rows, group))


def _all_rows(
    group: Any, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a block: its first argument, this rank's rows [1, L, hidden], becomes all rows."""
    if args:
        return (rows_of_all(args[0], group), *args[1:]), named
    return args, {**named, "hidden_states": rows_of_all(named["hidden_states"], group)}


def _own_rows(group: Any, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
    """After a block's last matrix: adds the outputs of all ranks; gives this rank's rows."""
    return rows_from_sums(output, group)
