"""Master weights and their optimizers, AdamW and Muon. All state is named tensors."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from postgrad.core.errors import AS_IT_BEGAN, Diverged, RunError, UsageError
from postgrad.learner import eight_bits, loss_scale
from postgrad.learner.loss_scale import LossScale
from postgrad.learner.settings import LearnerSettings, rate_ratio
from postgrad.models.linear import add_narrow, sum_gradients_in
from postgrad.models.matrices import is_hidden_matrix, is_matrix
from postgrad.ops.orthogonal import orthogonalised
from postgrad.parallel.ranks import ALONE, Ranks
from postgrad.parallel.sharding import WHOLE, TensorPiece, local, piece_of, whole_tensor

Gather = Callable[[str, Tensor], tuple[Tensor, TensorPiece]]  # by name; see MasterOptimizer

ADAMW_RMS = 0.2  # root mean square of AdamW's step, in learning rates (Liu et al., 2025, sec. 2.2)

UPDATES = "updates"  # a number of the state, which belongs to no weight
ADAMW, MUON = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)


class Muon:
    """Momentum, orthogonalised (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/),
    with the decay and the step size of Liu et al., 2025 (Muon is Scalable, arXiv:2502.16982): a
    matrix moves by 0.2 * sqrt(max(rows, columns)) * rate times what `orthogonalised` gives. That is
    about as far as AdamW would move it, so that both use one learning rate.

    Not torch.optim.Muon, which iterates in bfloat16: a rounding of 1e-6 in the gradient changes its
    step by 1% (here by 2e-6), so that micro-batches and ranks would change the update.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        settings: LearnerSettings,
        gather: Gather | None = None,
    ) -> None:
        """gather: gives the whole matrix from this rank's part; None where nothing is divided."""
        self.weights = weights
        self._settings = settings
        self._gather = gather
        self.momentum: dict[str, Tensor] = {}  # by name; from the first step on

    @torch.no_grad()
    def step(self, rate: float, *, moving: bool = True) -> None:
        """One update at `rate`; every weight has a gradient.

        moving: False for an update without any gradient. Momentum and weights decay as always, but
        no step is taken: orthogonalised, even a momentum that has almost decayed gives a full step.
        """
        settings = self._settings
        for name, weight in self.weights.items():
            assert weight.grad is not None
            if name not in self.momentum:
                self.momentum[name] = torch.zeros_like(weight)
            momentum = self.momentum[name].lerp_(weight.grad, 1.0 - settings.muon_momentum)
            own_rate = rate * rate_ratio(settings, name)
            weight.mul_(1.0 - own_rate * settings.weight_decay)
            if moving:
                ahead = momentum
                if settings.muon_nesterov:
                    ahead = weight.grad.lerp(momentum, settings.muon_momentum)
                matrix, piece = self._gather(name, ahead) if self._gather else (ahead, WHOLE)
                size = ADAMW_RMS * math.sqrt(max(matrix.shape))
                direction = piece.of(orthogonalised(matrix, settings.muon_ns_steps))
                weight.add_(direction, alpha=-own_rate * size)


class MasterOptimizer:
    """AdamW on float32 weights, whatever the model computes in; Muon on those of `is_hidden_matrix`
    where the settings say so.

    Where the model computes in float32, the master weights are its parameters. Otherwise gradients
    are added up in float32 as they appear in each micro-batch, and after an update the parameters
    are rounded from the master weights, so that small steps are not lost in the narrow format.

    `model` is a module or its weights by name; those that require a gradient are trained. Raises
    UsageError where the settings ask for Muon and there is no matrix for it.

    Weights may be divided over several ranks: then masters, gradients and state are this rank's
    parts, `pieces` says where they lie in the whole tensors, and all ranks have to step together.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Parameter],
        settings: LearnerSettings,
        ranks: Ranks = ALONE,
        scale: LossScale | None = None,
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self.scale = scale  # of the loss that gradients are of
        named = model.named_parameters() if isinstance(model, nn.Module) else model.items()
        self._working = {name: p for name, p in named if p.requires_grad}
        self.pieces = {name: piece_of(name, p, ranks) for name, p in self._working.items()}
        self.master = {name: self._master_of(p) for name, p in self._working.items()}
        matrices = {name: p for name, p in self.master.items() if is_hidden_matrix(name, p.ndim)}
        if settings.optimizer == "muon" and not matrices:
            raise UsageError(
                'learner.optimizer = "muon" finds no matrix in a decoder layer to train among '
                f'{sorted(self.master)[:3]}...: take "adamw"'
            )
        self._muon = Muon(matrices if settings.optimizer == "muon" else {}, settings, self._gather)
        named = self.master if settings.optimizer_state == "8bit" else {}
        quantized = {n: p for n, p in named.items() if eight_bits.is_quantized(n, self.pieces[n])}
        self._eight_bits = eight_bits.EightBitAdamW(quantized, settings)
        self._moments = dict.fromkeys(self.master, ADAMW)
        self._moments |= dict.fromkeys(self._muon.weights, MUON)
        self._moments |= dict.fromkeys(quantized, eight_bits.STATE)
        rest = {name: p for name, p in self.master.items() if self._moments[name] == ADAMW}
        groups: dict[tuple[bool, float], list[nn.Parameter]] = {(True, 1.0): []}
        for name, p in rest.items():
            kind = is_matrix(name, p.ndim), rate_ratio(settings, name)
            groups.setdefault(kind, []).append(p)
        decay = {True: settings.weight_decay, False: 0.0}  # norms and biases do not decay
        self._adamw = torch.optim.AdamW(
            [
                {"params": params, "weight_decay": decay[matrices], "ratio": ratio}
                for (matrices, ratio), params in groups.items()
            ],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )
        self.updates = 0
        self.has_moments = any(master.device.type == "cuda" for master in self.master.values())
        if self.has_moments:
            self._make_moments()

    def _make_moments(self) -> None:
        """Makes the zeros that the first step would make. On a GPU it would make them among
        gradients and activations, and they would keep the pages that those leave.
        """
        self._eight_bits.make_state()
        for name, master in self.master.items():
            if self._moments[name] == MUON:
                self._muon.momentum[name] = torch.zeros_like(master)
            elif self._moments[name] == ADAMW:
                zeros = {moment: torch.zeros_like(master) for moment in ADAMW}
                self._adamw.state[master] = zeros | {"step": torch.zeros((), device=master.device)}

    @staticmethod
    def _master_of(working: nn.Parameter) -> nn.Parameter:
        if isinstance(working, DTensor):  # float32 already; FSDP2 rounds what it gathers
            return nn.Parameter(local(working))
        if working.dtype == torch.float32:
            return working
        master = nn.Parameter(working.detach().float())

        def add(parameter: Tensor) -> None:
            if parameter.grad is None:  # the output head has added its own to the master already
                return
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                add_narrow(master.grad, parameter.grad)
            parameter.grad = None

        working.register_post_accumulate_grad_hook(add)
        sum_gradients_in(master, working)
        return master

    def step(self, rate: float) -> float:
        """One update at `rate` from the gradients gathered so far; returns their norm before
        clipping. A norm that is not finite is a RunError and changes nothing; with a loss scale it
        lowers that, and no update is made.

        Clipping scales all gradients alike, those of Muon's matrices too, before they enter the
        momentum. It does not change the length of Muon's step, but limits how much one outlier
        decides the direction of the next twenty steps.
        """
        self._take_gradients()
        if self.scale is not None:
            self.scale.unscale(self.master.values())
        limit = self._settings.max_grad_norm or float("inf")
        norm = self._clip(limit)
        if not norm < float("inf") and self.scale is not None:
            self.scale.skipped(self.updates + 1)
            self._forget_gradients()
            return norm
        if not norm < float("inf"):
            raise Diverged(
                f"the gradient of update {self.updates + 1} is not finite (norm {norm}): lower "
                "learner.lr, or start from a model whose outputs are finite"
            )
        for group in self._adamw.param_groups:
            group["lr"] = rate * group["ratio"]
        self._adamw.step()
        if self._eight_bits.weights:
            self._eight_bits.step(rate, self.updates + 1)
        ratio = (self._settings.muon_lr or self._settings.lr) / self._settings.lr
        self._muon.step(rate * ratio, moving=norm > 0.0)
        self._forget_gradients()
        self._publish()
        self.updates += 1
        if self.scale is not None:
            self.scale.taken()
        return norm

    def _forget_gradients(self) -> None:
        for master in self.master.values():
            master.grad = None

    def _take_gradients(self) -> None:
        """Moves gradients to the master weights, summed over all ranks. FSDP2 has already summed
        those of weights that it divides; the others are summed here.
        """
        lacking: dict[Any, list[Tensor]] = {}
        for name, master in self.master.items():
            working, piece = self._working[name], self.pieces[name]
            if piece.sharded and working.grad is not None:
                master.grad, working.grad = local(working.grad), None
            if master.grad is None:  # an update without any gradient still decays and counts
                master.grad = torch.zeros_like(master)
            if piece.lacks is not None:
                lacking.setdefault(piece.lacks, []).append(master.grad)
        for group, gradients in lacking.items():
            self._ranks.sum_(gradients, group)

    def _clip(self, limit: float) -> float:
        """Clips all gradients to the norm `limit`; returns their norm before, over all ranks."""
        masters = list(self.master.values())
        if not any(piece.divided for piece in self.pieces.values()):
            return float(nn.utils.clip_grad_norm_(masters, limit))
        by_copies: dict[tuple[int, torch.device], list[Tensor]] = {}
        for name, master in self.master.items():
            assert master.grad is not None
            if master.grad.numel():  # a rank may have no row of a short matrix
                place = self.pieces[name].copies, master.grad.device
                by_copies.setdefault(place, []).append(master.grad)
        squares = torch.zeros((), dtype=torch.float64, device=masters[0].device)
        for (copies, _), gradients in by_copies.items():
            norms = torch._foreach_norm(gradients, 2, dtype=torch.float64)  # pyright: ignore[reportPrivateImportUsage]
            squares += (torch.stack(norms).square().sum() / copies).to(squares.device)
        self._ranks.sum_([squares])
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(masters, limit, norm.float())
        return float(norm)  # the only wait

    def _gather(self, name: str, part: Tensor) -> tuple[Tensor, TensorPiece]:
        """A divided weight's whole tensor, and where this rank's part of it lies."""
        return whole_tensor(part, self.pieces[name]), self.pieces[name]

    @torch.no_grad()
    def _publish(self) -> None:
        for name, working in self._working.items():
            if working is not self.master[name] and not self.pieces[name].sharded:
                working.copy_(self.master[name])

    def weights(self) -> dict[str, Tensor]:
        """The master weights by hub name: this rank's parts."""
        return {name: p.detach() for name, p in self.master.items()}

    def state(self) -> dict[str, Tensor]:
        """The number of updates (int64, "updates"), and after the first one the moments: AdamW's as
        NAME.exp_avg and NAME.exp_avg_sq, of eight bits with NAME.exp_avg_scale and
        NAME.exp_avg_sq_scale, Muon's as NAME.momentum_buffer.
        """
        state = {UPDATES: torch.tensor(self.updates)} | (self.scale.state() if self.scale else {})
        by_name = {name: self._adamw.state.get(master, {}) for name, master in self.master.items()}
        by_name |= {name: {MUON[0]: tensor} for name, tensor in self._muon.momentum.items()}
        for name, kept in (by_name | self._eight_bits.state).items() if self.updates else ():
            state |= {f"{name}.{moment}": kept[moment] for moment in self._moments[name]}
        return state

    def held(self) -> Iterator[Tensor]:
        """The moments that there are, on a GPU before the first update too, and AdamW's steps."""
        yield from self._muon.momentum.values()
        for kept in (*self._adamw.state.values(), *self._eight_bits.state.values()):
            yield from kept.values()

    @property
    def scale_pieces(self) -> dict[str, TensorPiece]:
        """Where this rank's parts of the scales of moments in eight bits lie, by name in `state`.
        Those of other moments lie as their weights' do.
        """
        return {
            f"{name}.{part}": eight_bits.piece_of_state(part, self.pieces[name])
            for name in self._eight_bits.weights
            for part in eight_bits.STATE
            if part not in eight_bits.MOMENTS
        }

    def parts_of(self, kind: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of whole tensors by hub name. Other names or shapes are a RunError.
        kind: what the message calls the tensors, "moving average".
        """
        shapes = {name: torch.Size(piece.shape) for name, piece in self.pieces.items()}
        _check(kind, weights, shapes)
        return {name: piece.of(weights[name]) for name, piece in self.pieces.items()}

    def state_bytes(self) -> int:
        """Bytes of weights() and state() after the first update; of parts that several ranks hold,
        only on the first of them.
        """
        kept = torch.int64.itemsize * (1 if self.scale is None else 3)
        for name, master in self.master.items():
            if self.pieces[name].first:
                kept += master.nbytes
                for piece, dtype in self._state_of(name).values():
                    kept += math.prod(piece.sizes) * dtype.itemsize
        return kept

    def _state_of(self, name: str) -> dict[str, tuple[TensorPiece, torch.dtype]]:
        """Of a weight's state by name: where this rank's part lies, and its dtype."""
        moments, piece = self._moments[name], self.pieces[name]
        if moments == eight_bits.STATE:
            return {
                part: (eight_bits.piece_of_state(part, piece), eight_bits.state_type(part))
                for part in moments
            }
        return dict.fromkeys(moments, (piece, torch.float32))

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Takes over what weights() and state() gave earlier. Names or shapes of another model or
        optimizer are a RunError; nothing is changed then.
        """
        shapes = {name: torch.Size(self.pieces[name].shape) for name in self.master}
        _check("weights", weights, shapes)
        updates = _updates_of(state)
        moments = {
            f"{name}.{moment}": (torch.Size(piece.shape), dtype)
            for name in self.master
            for moment, (piece, dtype) in self._state_of(name).items()
            if updates
        }
        sizes = {name: shape for name, (shape, _) in moments.items()}
        numbers = (UPDATES, *loss_scale.NUMBERS) if self.scale is not None else (UPDATES,)
        _check("optimizer state", state, {**dict.fromkeys(numbers, torch.Size(())), **sizes})
        for name, (_, dtype) in moments.items():
            if state[name].dtype != dtype:
                raise RunError(
                    f"{name!r} of the checkpoint's optimizer state is {state[name].dtype}, here it "
                    f"is {dtype}: learner.optimizer_state has to stay as it was"
                )
        if self.scale is not None:
            self.scale.load(state)
        for name, master in self.master.items():
            piece = self.pieces[name]
            master.copy_(piece.of(weights[name]))
            if not updates:
                continue
            saved = {
                moment: torch.empty(part.sizes, dtype=dtype, device=master.device).copy_(
                    part.of(state[f"{name}.{moment}"])
                )
                for moment, (part, dtype) in self._state_of(name).items()
            }
            if self._moments[name] == MUON:
                self._muon.momentum[name] = saved[MUON[0]]
            elif self._moments[name] == eight_bits.STATE:
                self._eight_bits.state[name] = saved
            else:
                step = torch.tensor(float(updates), device=master.device)
                self._adamw.state[master] = {"step": step, **saved}
        self._publish()
        self.updates = updates


def _updates_of(state: Mapping[str, Tensor]) -> int:
    saved = state.get(UPDATES)
    if saved is None or saved.dtype != torch.int64 or saved.ndim or int(saved) < 0:
        raise RunError(
            f"the checkpoint's optimizer state has no number of {UPDATES!r}: it was written by "
            "another version, or not by this program"
        )
    return int(saved)


def _check(kind: str, have: Mapping[str, Tensor], want: Mapping[str, torch.Size]) -> None:
    if have.keys() != want.keys():
        missing, unknown = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys())
        raise RunError(
            f"the checkpoint's {kind} are of another model or optimizer: missing {missing[:3]}, "
            f"unknown {unknown[:3]}; {AS_IT_BEGAN}"
        )
    for name, shape in want.items():
        if have[name].shape != shape:
            raise RunError(
                f"{name!r} of the checkpoint's {kind} has shape {tuple(have[name].shape)}, "
                f"the model's has {tuple(shape)}; {AS_IT_BEGAN}"
            )
