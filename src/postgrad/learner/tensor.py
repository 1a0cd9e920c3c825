"""Tensor parallelism: a decoder whose matrices are cut over the ranks of a tensor group.

Megatron's tensor parallelism (arXiv:1909.08053) with its sequence parallelism (arXiv:2205.05198).
Outside attention and MLP a rank has a run of the rows, as in learner/context.py, so that norms,
residuals, embeddings and the output head are computed once, not on every rank. Before each of the
two blocks the ranks gather all rows (all-gather); inside it each has some heads or inner features;
after it the partial sums are added and the rows divided again (reduce-scatter). So the gradient of
a weight that is not cut covers only this rank's rows or features, and is added over all ranks like
that of any other weight.

torch's DTensor styles support neither our autograd functions (products, norms) nor PEFT's layers;
to plain tensors they would add just these two exchanges.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from postgrad.core.errors import UsageError
from postgrad.learner.context import require_heads
from postgrad.learner.experts import require_experts
from postgrad.learner.settings import LearnerSettings
from postgrad.models.adapter_dropout import CounterDropout
from postgrad.models.load import load_config
from postgrad.parallel.exchange import rows_from_sums, rows_of_all
from postgrad.parallel.ranks import Grid, Ranks
from postgrad.parallel.sharding import BY_INPUTS, BY_OUTPUTS, cut_dim

# What transformers' plan for a decoder may hold beside our cuts: norms of queries and keys, whose
# gradients we add over all ranks.
REPLICATED = ("replicated_with_grad_allreduce", "sequence_parallel")


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


def require_shareable(config: Any, grid: Grid, *, compiled: bool, stateful: bool) -> None:
    """Raises UsageError where ranks cannot share the layers of a model of this config as `grid`
    says. stateful: they carry a state along each sequence.
    """
    if compiled and grid.sharers * grid.expert > 1:
        raise UsageError(
            "model.compile: layers whose rows, matrices or experts are shared by ranks "
            "(learner.tensor_parallel, learner.context_parallel, learner.expert_parallel) are not "
            "compiled: use 1 for each, or --model.compile false (at a resume with --allow-change "
            "model.compile)"
        )
    if stateful and grid.sharers > 1:
        raise UsageError(
            f"a {config.model_type} model carries a state along each sequence, whose rows and "
            "matrices ranks cannot share: use learner.tensor_parallel = 1 and "
            "learner.context_parallel = 1"
        )
    _require_parts(config, grid)


def _require_parts(config: Any, grid: Grid) -> None:
    require_matrices(config, grid.tensor)
    require_heads(config, grid.context, grid.tensor)
    require_experts(config, grid.expert)


def require_matrices(config: Any, size: int) -> None:
    """Raises UsageError where a model of this config cannot have its matrices cut in `size`."""
    if size == 1:
        return
    where = f"learner.tensor_parallel = {size}"
    _require_plan(config, where)
    counts = {
        "attention heads": config.num_attention_heads,
        "key heads": config.num_key_value_heads,
        "inner features (intermediate_size)": config.intermediate_size,
    }
    for feature, count in counts.items():
        if count % size:
            fitting = [n for n in range(1, count + 1) if not any(c % n for c in counts.values())]
            raise UsageError(
                f"{where}: {count} {feature} of this {config.model_type} model cannot be cut into "
                f"{size} equal parts; what works: {', '.join(map(str, fitting))}"
            )


def _require_plan(config: Any, where: str) -> None:
    """Raises UsageError unless transformers' plan for the model type cuts the matrices as we do."""
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    cuts = {
        name.rpartition(".")[2]: style
        for name, style in plan.items()
        if name.startswith(("layers.*.self_attn.", "layers.*.mlp."))
        and name.count(".") == 3
        and style not in REPLICATED
    }
    wanted = dict.fromkeys(BY_OUTPUTS, "colwise") | dict.fromkeys(BY_INPUTS, "rowwise")
    others = [name for name in plan if name.startswith("layers.*.") and name.count(".") > 3]
    if cuts != wanted or others:
        raise UsageError(
            f"{where}: a {config.model_type} model has no plan for it, or one with other matrices "
            f'than {", ".join((*BY_OUTPUTS, *BY_INPUTS))}: use 1, and sharding = "zero3"'
        )
    if getattr(config, "mlp_bias", False) or getattr(config, "attention_bias", False):
        raise UsageError(
            f"{where}: this {config.model_type} model has a bias after attention or MLP "
            "(attention_bias, mlp_bias), which every rank would add: use 1"
        )


def cut_matrices(lm: Any, ranks: Ranks) -> None:
    """Replaces each matrix of a model, and the adapters on it, by this rank's part, and hooks the
    exchanges of rows into its blocks. To be called before an optimizer takes the weights.
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
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, CounterDropout) and cut_by_inputs:
            module.cut(ranks.tensor_rank, size)
    group = ranks.groups.tensor
    for layer in lm.get_decoder().layers:
        for block, last in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
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
