"""Low-rank adapters on the weights of a mixture that are no linear layers: those of all experts of
a layer, which are one tensor, and a router's.

PEFT calls them `target_parameters`. It makes a merged copy of the weight in every forward pass, and
a gradient of its size in every backward pass. Here the weight that the model's own code reads is
replaced, while its module runs, by a `ChangedWeight`: each product with it is x W + scale (x L) R.
So every way in which transformers computes experts, grouped products or a loop, stays as it is.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from postgrad.core.errors import UsageError
from postgrad.models.settings import EXPERTS, ROUTER, LoraSettings
from postgrad.models.supported import experts_of

PREFIX = "adapted_"  # of the name of the child that has a weight's adapters
ALIGNED = 16  # bytes; grouped products take rows that are a multiple of it


def mixture_weights(lm: Any) -> dict[str, str]:
    """The weights that adapters may stand on, by their names in the model: EXPERTS where one
    is [E, ., .] of a module `experts`, ROUTER where it is [E, hidden] of one that chooses.
    """
    decoder, experts = lm.get_decoder(), experts_of(lm.config.get_text_config())
    prefix = next(name for name, module in lm.named_modules() if module is decoder)
    weights: dict[str, str] = {}
    for module_name, module in decoder.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) or not module_name:
            continue
        last = module_name.rpartition(".")[2]
        for name, weight in module.named_parameters(recurse=False):
            full = f"{prefix}.{module_name}.{name}"
            if weight.ndim == 3 and last == EXPERTS and name.endswith("_proj"):
                weights[full] = EXPERTS
            elif weight.ndim == 2 and name == "weight" and weight.shape[0] == experts > 0:
                weights[full] = ROUTER
    return weights


def attach(lm: Any, names: Iterable[str], adapter: str, settings: LoraSettings) -> None:
    """Puts an adapter without weights of its own on these weights of a model, by name."""
    kinds = mixture_weights(lm)
    for name in names:
        owner_name, _, end = name.rpartition(".")
        owner = lm.get_submodule(owner_name)
        if not hasattr(owner, PREFIX + end):
            owner.add_module(PREFIX + end, AdaptedWeight(owner, end, lm.config.model_type))
        adapted: Any = owner.get_submodule(PREFIX + end)
        adapted.add(
            adapter, settings.rank_of(name, kinds[name]), settings.scale_of(name, kinds[name])
        )


def frozen_name(layer_name: str, layer: nn.Module) -> str:
    """The name in the model of the weight under the adapters of a layer."""
    if isinstance(layer, AdaptedWeight):
        return f"{layer_name.rpartition('.')[0]}.{layer.end}"
    return f"{layer_name}.weight"


def in_peft(owner: str, later: int) -> str:
    """PEFT's name of what wraps one weight of a module. Wrappers of a module's weights are nested,
    that of the last weight outside. later: how many of the module's adapted weights come after it.
    """
    return owner + ".base_layer" * later


def names_in_files(lm: nn.Module, adapter: str) -> dict[str, str]:
    """By name in the model, the parameters of an adapter on experts and routers, with its name, as
    PEFT names them.
    """
    owners: dict[str, list[str]] = {}
    for name, layer in lm.named_modules():
        if isinstance(layer, AdaptedWeight) and adapter in layer.lora_A:
            owners.setdefault(name.rpartition(".")[0], []).append(name)
    names: dict[str, str] = {}
    for owner, layers in owners.items():
        ends = [name for name, _ in lm.get_submodule(owner).named_parameters(recurse=False)]
        layers.sort(key=lambda name: ends.index(name.rpartition(".")[2].removeprefix(PREFIX)))
        for later, name in enumerate(reversed(layers)):
            for letter in "AB":
                end = f".lora_{letter}.{adapter}.weight"
                names[name + end] = in_peft(owner, later) + end
    return names


class AdaptedWeight(nn.Module):
    """The adapters of one weight, a child of the module that has it. Methods and attributes are
    those of PEFT's layers that models.adapters uses; A and B have the shapes of PEFT's files.

    Of experts [E, outputs, inputs], or [E, inputs, outputs] where the module says `is_transposed`,
    A is [E rank, inputs] and B [outputs, rank E]; of a router [E, inputs] A is [rank, inputs] and B
    [E, rank].
    """

    def __init__(self, owner: nn.Module, end: str, kind: str) -> None:
        super().__init__()
        weight = getattr(owner, end)
        self.end = end
        self.experts: int = weight.shape[0] if weight.ndim == 3 else 1
        self.transposed = weight.ndim == 3 and bool(getattr(owner, "is_transposed", False))
        outputs, inputs = weight.shape[-2:]
        self.in_features, self.out_features = (
            (outputs, inputs) if self.transposed else (inputs, outputs)
        )
        self._kind = kind
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.lora_magnitude_vector = nn.ModuleDict()  # DoRA's, which these never have
        self.r: dict[str, int] = {}
        self.scaling: dict[str, float] = {}
        self.active_adapters: list[str] = []
        self.disable_adapters = False
        # Hooks and not a forward of their own: models.routers replaces that of a router.
        owner.register_forward_pre_hook(self._replace)
        owner.register_forward_hook(self._put_back, always_call=True)

    def add(self, name: str, rank: int, scale: float) -> None:
        """One more adapter; whoever calls this gives it weights."""
        self.lora_A[name], self.lora_B[name] = nn.Module(), nn.Module()
        self.r[name], self.scaling[name] = rank, scale
        self.active_adapters = self.active_adapters or [name]

    def set_adapter(self, names: list[str]) -> None:
        self.active_adapters = names

    def enable_adapters(self, enabled: bool) -> None:
        self.disable_adapters = not enabled

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of A and of B."""
        stacked = self.experts * rank
        return (stacked, self.in_features), (self.out_features, stacked)

    def merge(self, a: Tensor, b: Tensor, scale: float) -> Callable[[Tensor], Tensor]:
        """What makes the changed weight of the frozen one."""
        return partial(changed_stack, (b, a), scale, 1.0, transposed=self.transposed)

    def _replace(self, owner: nn.Module, _: Any) -> None:
        name = self.active_adapters[0]
        if self.disable_adapters or name not in self.lora_A:
            return
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        weight: Any = owner._parameters[self.end]
        a, b = a.to(weight.dtype), b.to(weight.dtype)  # as in adapter_layers
        left, right = low_rank(a, b, self.experts, transposed=self.transposed)
        if weight.ndim == 2:
            left, right = left[0], right[0]
        # an attribute of the object is read before its parameter of this name
        owner.__dict__[self.end] = ChangedWeight(
            weight, left, right, self.scaling[name], self._kind
        )

    def _put_back(self, owner: nn.Module, *_: Any) -> None:
        owner.__dict__.pop(self.end, None)


def low_rank(a: Any, b: Any, experts: int, *, transposed: bool) -> tuple[Tensor, Tensor]:
    """L [E, rows, rank] and R [E, rank, columns] of A and B as PEFT stacks them: expert e has
    the rows e rank ... of A, and every E-th column of B from e on. rows, columns: of the weight.
    """
    stacked_a = a.view(experts, -1, a.shape[-1])
    stacked_b = b.view(b.shape[0], -1, experts).permute(2, 0, 1)
    if transposed:
        return stacked_a.mT, stacked_b.mT
    return stacked_b, stacked_a


def changed_stack(
    factors: tuple[Tensor, Tensor],
    scale: float,
    share: float,
    weight: Tensor,
    *,
    transposed: bool,
) -> Tensor:
    """weight + share * scale * what the adapter changes, in float32. factors: B and A, as PEFT
    stacks them. weight: [E, rows, columns], or of a router [E, columns].
    """
    b, a = (factor.float().to(weight.device) for factor in factors)
    experts = weight.shape[0] if weight.ndim == 3 else 1
    left, right = low_rank(a, b, experts, transposed=transposed)
    stack = weight.float() if weight.ndim == 3 else weight.float()[None]
    return torch.baddbmm(stack, left, right, alpha=share * scale).view(weight.shape)


class ChangedWeight:
    """Stands for W + scale L R in products, without that sum. weight: [..., rows, columns]. left:
    [..., rows, rank], right: [..., rank, columns], of the dtype of the weight.

    Products, transposes, experts by number and casts are what the code of mixtures asks of a
    weight. Anything else is an error that names it.
    """

    def __init__(self, weight: Tensor, left: Tensor, right: Tensor, scale: float, kind: str):
        self._weight = weight
        self._left = left
        self._right = right
        self._scale = scale
        self._kind = kind

    @property
    def shape(self) -> torch.Size:
        return self._weight.shape

    @property
    def ndim(self) -> int:
        return self._weight.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    @property
    def device(self) -> torch.device:
        return self._weight.device

    @property
    def T(self) -> "ChangedWeight":  # torch's name
        return self.transpose(-2, -1)

    mT = T

    def t(self) -> "ChangedWeight":
        return self.transpose(-2, -1)

    def size(self, dim: int) -> int:
        return self._weight.shape[dim]

    def data_ptr(self) -> int:
        return self._weight.data_ptr()

    def transpose(self, first: int, second: int) -> "ChangedWeight":
        ndim = self.ndim
        if {first % ndim, second % ndim} != {ndim - 2, ndim - 1}:
            raise self.unknown(f"transpose({first}, {second})")
        return self._with(self._weight.mT, self._right.mT, self._left.mT)

    def __getitem__(self, index: Any) -> "ChangedWeight":
        """The weight of one expert, or of one for each row."""
        if self.ndim != 3 or isinstance(index, tuple | slice):
            raise self.unknown("an index")
        return self._with(self._weight[index], self._left[index], self._right[index])

    def to(self, *where: Any, **named: Any) -> "ChangedWeight":
        parts = (self._weight, self._left, self._right)
        return self._with(*(part.to(*where, **named) for part in parts))

    def type(self, dtype: torch.dtype) -> "ChangedWeight":
        return self.to(dtype)

    def float(self) -> "ChangedWeight":
        return self.to(torch.float32)

    def _with(self, weight: Tensor, left: Tensor, right: Tensor) -> "ChangedWeight":
        return ChangedWeight(weight, left, right, self._scale, self._kind)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.unknown(name)

    def unknown(self, asked: str) -> UsageError:
        return UsageError(
            f"model.lora.targets: the experts or routers of a {self._kind} model compute in a way "
            f"that adapters do not follow ({asked}): name linear layers alone, or leave "
            "[model.lora] out"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Tensor:
        named = dict(kwargs or {})
        changed = next(a for a in (*args, *named.values()) if isinstance(a, ChangedWeight))
        name = getattr(func, "__name__", str(func))
        product = _PRODUCTS.get(name)
        if product is None:
            raise changed.unknown(name)
        return product(*args, **named)

    def after(self, x: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """x W with what is changed, where `multiply` gives products with one of W, L and R."""
        result = multiply(x, self._weight)
        rows = multiply(x, self._left)
        return self._sum(result, multiply(rows, self._right))

    def rows(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias with what is changed."""
        inner = x @ self._right.mT
        return self._sum(nn.functional.linear(x, self._weight, bias), inner @ self._left.mT)

    def before(self, x: Tensor) -> Tensor:
        """W x with what is changed."""
        rows = self._right @ x
        return self._sum(self._weight @ x, self._left @ rows)

    def grouped(self, x: Tensor, offs: Tensor, multiply: Callable[..., Tensor]) -> Tensor:
        """x W, where expert e has the rows of x up to offs[e]."""
        left, right = self._padded()
        rows = multiply(x, left, offs=offs)
        return self._sum(multiply(x, self._weight, offs=offs), multiply(rows, right, offs=offs))

    def _padded(self) -> tuple[Tensor, Tensor]:
        """L and R with a rank that grouped products take, by zeros, and in one order in memory."""
        rank, step = self._left.shape[-1], ALIGNED // self._left.element_size()
        more = -(-rank // step) * step - rank
        left = nn.functional.pad(self._left, (0, more))
        return left.contiguous(), nn.functional.pad(self._right, (0, 0, 0, more)).contiguous()

    def _sum(self, result: Tensor, change: Tensor) -> Tensor:
        return torch.add(result, change, alpha=self._scale)


def _matmul(x: Any, weight: Any) -> Tensor:
    return x.before(weight) if isinstance(x, ChangedWeight) else weight.after(x, torch.matmul)


def _linear(input: Tensor, weight: ChangedWeight, bias: Tensor | None = None) -> Tensor:
    return weight.rows(input, bias)


def _grouped(
    input: Tensor, weight: ChangedWeight, offs: Tensor, bias: None = None, out_dtype: None = None
) -> Tensor:
    if bias is not None or out_dtype is not None:
        raise weight.unknown("grouped_mm with a bias or a dtype")
    return weight.grouped(input, offs, nn.functional.grouped_mm)


def _looped(input: Tensor, weight: ChangedWeight, offs: Tensor) -> Tensor:
    """transformers' loop over experts, where a device has no grouped products."""
    return weight.grouped(input, offs, torch.ops.transformers.grouped_mm_fallback)


_PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "__matmul__": _matmul,
    "__rmatmul__": lambda weight, x: _matmul(x, weight),
    "grouped_mm": _grouped,
    "_grouped_mm": _grouped,
    "grouped_mm_fallback": _looped,
}
