"""What torch refuses on CUDA in deterministic mode, by the operations that a CPU run shows too.

The callers are those that the binaries of torch 2.11 and 2.13 have (helpers/alerts.py reads them;
tests/gpu/stub/results.json keeps them), and two that documentations of torch name although neither
binary refuses them. tests/gpu/stub asks both for every sample.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from helpers.dispatched import Call

BACKWARDS = (  # of layers for images and sounds: an operation of this name, whatever it is given
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward",
    "avg_pool3d_backward",
    "fractional_max_pool2d_backward",
    "fractional_max_pool3d_backward",
    "max_pool3d_with_indices_backward",
    "grid_sampler_2d_backward",
    "grid_sampler_3d_backward",
    "cudnn_grid_sampler_backward",
    "reflection_pad1d_backward",
    "reflection_pad3d_backward",
    "replication_pad1d_backward",
    "replication_pad2d_backward",
    "replication_pad3d_backward",
    "upsample_linear1d_backward",
    "upsample_bilinear2d_backward",
    "_upsample_bilinear2d_aa_backward",
    "upsample_bicubic2d_backward",
    "_upsample_bicubic2d_aa_backward",
    "upsample_trilinear3d_backward",
    "_ctc_loss_backward",
    "_embedding_bag_dense_backward",
    "_embedding_bag_backward",
)
NEVER_REACHED = {"scatter_cuda_", "quantized_resize_cpu_"}  # deterministic mode takes another way


def always(_: Call) -> bool:
    return True


@dataclass(frozen=True)
class Rule:
    """operation: without its overload. caller: the name in torch's refusal; None where only the
    documentation refuses. samples: calls of it on a device, each refused, or each not.
    """

    operation: str
    caller: str | None
    samples: Mapping[str, Callable[[torch.device], Any]] = field(default_factory=dict)
    when: Callable[[Call], bool] = always

    def refuses(self, call: Call) -> bool:
        name = call.operation.removeprefix("aten.").split(".")[0].rstrip("_")
        return name == self.operation.rstrip("_") and self.when(call)


def _f(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.zeros(*shape, device=device)


def _i(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int64, device=device)


def _floats(call: Call) -> bool:
    return any(dtype.is_floating_point for dtype in call.reads)


REFUSED = (
    Rule("put", "put_", {"put_": lambda d: _f(d, 9).put_(_i(d, 2), _f(d, 2))}),
    Rule(
        "bincount",
        "_bincount_cuda",
        {"bincount with weights": lambda d: _i(d, 9).bincount(_f(d, 9))},
        when=lambda call: len(call.reads) == 2,
    ),
    Rule(
        "histc",
        "_histc_cuda with floating point input",
        {"histc of floats": lambda d: _f(d, 9).histc()},
        when=_floats,
    ),
    Rule(
        "median",
        "median CUDA with indices output",
        {"median of a dimension": lambda d: _f(d, 9, 3).median(0)},
        when=lambda call: len(call.gives) == 2,
    ),
    Rule(
        "nanmedian",
        "median CUDA with indices output",
        {"nanmedian of a dimension": lambda d: _f(d, 9, 3).nanmedian(0)},
        when=lambda call: len(call.gives) == 2,
    ),
    Rule(
        "nll_loss2d_forward",
        "nll_loss2d_forward_out_cuda_template",
        {"cross_entropy of images": lambda d: F.cross_entropy(_f(d, 2, 3, 4), _i(d, 2, 4))},
    ),
    Rule(
        "index_reduce",
        "index_reduce_cuda",
        {"index_reduce": lambda d: _f(d, 9, 4).index_reduce_(0, _i(d, 5), _f(d, 5, 4), "amax")},
    ),
    Rule(
        "scatter_reduce",
        "scatter_reduce_cuda_prod_",
        {
            "scatter_reduce by prod": lambda d: _f(d, 9).scatter_reduce_(
                0, _i(d, 5), _f(d, 5), "prod"
            )
        },
        when=lambda call: "prod" in call.words,
    ),
    Rule(
        "scatter",
        "scatter_reduce_cuda_kernel",
        {
            "scatter by multiply": lambda d: _f(d, 9).scatter_(
                0, _i(d, 5), _f(d, 5), reduce="multiply"
            )
        },
        when=lambda call: "multiply" in call.words,
    ),
    Rule("max_unpool2d", "max_unpooling2d_forward_out"),
    Rule("max_unpool3d", "max_unpooling3d_forward_out"),
    *(Rule(name, name.lstrip("_").removesuffix("_backward")) for name in BACKWARDS),
    Rule(
        "cumsum",
        None,
        {
            "cumsum of float32": lambda d: _f(d, 3, 9).cumsum(-1),
            "cumsum of float64": lambda d: _f(d, 3, 9).cumsum(-1, dtype=torch.float64),
            "cumsum of float64 in one dimension": lambda d: _f(d, 9).double().cumsum(0),
        },
        when=lambda call: call.gives[0].is_floating_point,
    ),
    Rule("kthvalue", None, {"kthvalue": lambda d: _f(d, 9, 3).kthvalue(1, 0)}),
)


def refused(calls: list[Call]) -> list[Call]:
    """Those of `calls` that deterministic mode refuses on CUDA, in some version of torch."""
    return [call for call in calls if any(rule.refuses(call) for rule in REFUSED)]


def covers(caller: str) -> bool:
    """Whether a rule is for the operation whose refusal bears this name."""
    plain = caller.replace("ctc_loss_backward_gpu", "ctc_loss").replace("_aa_backward", "_aa")
    names = {rule.caller for rule in REFUSED if rule.caller}
    return caller in NEVER_REACHED or any(plain.startswith(name) for name in names)
