"""TRL's losses beside RL: those of SFT, reward models of answers and of steps, distillation, and
DPOTrainer, KTOTrainer, CPOTrainer and ORPOTrainer.
"""

import json
from collections.abc import Mapping, Sequence

from postgrad.translate import trl_engines, trl_rl
from postgrad.translate.draft import Draft
from postgrad.translate.reader import SourceCommand
from postgrad.translate.rules import Options, decimal, flag

_LOSSES = {  # of DPOTrainer, as algorithm.loss
    "sigmoid": "sigmoid",
    "hinge": "hinge",
    "robust": "robust",
    "exo_pair": "exo",
    "discopop": "discopop",
    "nca_pair": "nca",
    "bco_pair": "bco",
    "sppo_hard": "sppo",
    "apo_zero": "apo_zero",
    "apo_down": "apo_down",
    "sigmoid_norm": "sigmoid",
}
_SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")  # they read label_smoothing
_SORTED = ("aot", "aot_unpaired")
_OF_RATIOS = (*_SORTED, "apo_zero", "sft")  # they do not read f_divergence_type
_DIVERGENT = ("sigmoid", "hinge", "robust", "exo_pair", "discopop", *_OF_RATIOS)
_ALONE = ("ipo", *_SORTED)  # algorithms here, which have no other loss beside them
_ALL_TOKENS = "over all chosen tokens; here the mean over answers of each one's mean"
_BOTH = "of the samples and of both distributions, as there"


def losses(draft: Draft, options: Options, program: str, source: SourceCommand) -> None:
    """[algorithm] of everything but RL; of distillation also who teaches and who samples."""
    kinds = options.texts("loss_type")
    trl_rl.followed(draft, options)
    if program == "prm":
        _steps(draft, options)
    elif program == "reward":
        why = "rows with a column margin are trained with it there: algorithm.margin, data.margin"
        draft.put("algorithm.type", "bradley_terry", why)
    if program == "dpo":
        _pair_losses(draft, options)
    elif program == "cpo":
        _cpo_loss(draft, options)
    elif program == "kto":
        _kto_loss(draft, "".join(kinds))
    elif program == "orpo":
        _orpo_loss(draft, options)
    elif program in ("distillation", "gkd"):
        _distilled(draft, options, program, source)
    elif kinds == ["dft"]:
        draft.put("algorithm.loss", "dft")
    elif kinds and kinds[0] not in ("nll", "chunked_nll"):
        draft.miss("loss_type", kinds[0], f"{program} does not have this loss here")


def _steps(draft: Draft, options: Options) -> None:
    """PRMTrainer: texts of steps, whose last token is the separator's, and what is judged there."""
    draft.put("algorithm.type", "process_reward", "a mean over an update's steps, and one row of a "
              "head; there over each micro-batch's, and two rows, whose difference moves twice as "
              "far")  # fmt: skip
    separator = str(options.take("step_separator"))
    draft.put("data.separator", separator)
    begin = "{% if loop.first %}{{ bos_token or '' }}{% endif %}"
    end = f"{{% if message['role'] == 'assistant' %}}{{{{ {json.dumps(separator)} }}}}{{% endif %}}"
    template = f"{{% for message in messages %}}{begin}{{{{ message['content'] }}}}{end}"
    draft.put("data.chat_template", f"{template}{{% endfor %}}", "the text of a row as it is there")
    why = "data.max_len bounds prompt and steps together"
    draft.miss("max_completion_length", options.take("max_completion_length"), why)
    why = "every step with a label is learned: data.map may take labels away"
    last = flag(options.take("train_on_last_step_only", False))
    draft.miss("train_on_last_step_only", last, why)


def _distilled(draft: Draft, options: Options, program: str, source: SourceCommand) -> None:
    """DistillationTrainer, whose student answers every row itself, and GKDTrainer, whose student
    answers a share of them.
    """
    draft.put("teacher.model.path", options.take("teacher_model_name_or_path"))
    draft.put("teacher.model.revision", options.take("teacher_model_revision"))
    beta = decimal(options.take("beta"))
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    draft.put("algorithm.divergence", kind, f"beta {beta:g} there")
    draft.put("algorithm.beta", beta if kind == "jsd" else None)
    share, new = decimal(options.take("lmbda", 1.0)), options.number("max_new_tokens")
    if program == "distillation":
        new = options.number("max_completion_length")
        draft.put("algorithm.temperature", decimal(options.take("temperature")), _BOTH)
        draft.put("rollout.temperature", decimal(options.take("temperature")))
    elif flag(options.take("seq_kd", False)):
        draft.miss("seq_kd", True, "the teacher writes no rows in a run: postgrad generate does")
    comment = "of the rows" if program == "distillation" else "lmbda: there of the micro-batches"
    unread = "; rows of a prompt alone need one: data.map appends any, which is not read"
    draft.put("algorithm.on_policy", share, f"{comment}{unread if share == 1.0 else ''}")
    if share:
        draft.put("rollout.max_new_tokens", new)
        trl_engines.engines(draft, options, source, program)
    else:
        draft.skip("temperature", options.take("temperature"), "of answers, and there are none")


def _pair_losses(draft: Draft, options: Options) -> None:
    """Settings of DPOTrainer's losses: one, or several with their weights; "sft" is the NLL."""
    losses, weights = options.texts("loss_type"), options.numbers("loss_weights")
    weighted = dict(zip(losses, weights or [1.0] * len(losses), strict=False))
    _smoothing(draft, options, losses)
    _divergence(draft, options, losses)
    tau = decimal(options.take("discopop_tau", 0.05))
    if "discopop" in losses:
        draft.put("algorithm.discopop_tau", tau if tau != 0.05 else None)
    elif options.states("discopop_tau"):
        draft.skip("discopop_tau", tau, "of the loss discopop")
    weighing = flag(options.take("use_weighting", False))
    nll = weighted.pop("sft", None)
    if nll is not None and not weighted:
        draft.miss("loss_type", "sft", 'alone it is no preference: job = "sft" on chosen answers')
        return
    if len(weighted) == 1 and (name := next(iter(weighted))) in _ALONE:
        _alone(draft, name, weighted[name], nll)
        if weighing:
            draft.miss("use_weighting", True, f"wpo weighs losses of dpo, and {name} is none")
        return
    draft.put("algorithm.nll_coef", nll, f"sft there, {_ALL_TOKENS}")
    if weighing:
        draft.put("algorithm.type", "wpo", "weights of pairs are at most 1; there without a bound")
    _several(draft, weighted)


def _alone(draft: Draft, name: str, weight: float, nll: float | None) -> None:
    """IPO and AOT, which are algorithms of their own."""
    if name == "ipo":
        draft.put("algorithm.type", "ipo")
    else:
        draft.put("algorithm.type", "aot", "pairs of a whole update are sorted; there those of a "
                  "micro-batch, on each device")  # fmt: skip
        draft.put("algorithm.paired", False if name == "aot_unpaired" else None)
    if weight != 1.0:
        draft.miss("loss_weights", weight, f"{name} has weight 1 here, and an NLL has its share: "
                   "AdamW's steps are the same but for eps and learner.max_grad_norm")  # fmt: skip
    if nll is not None:
        draft.put("algorithm.nll_coef", round(nll / weight, 9), f"sft there, {_ALL_TOKENS}")


def _several(draft: Draft, weighted: Mapping[str, float]) -> None:
    """algorithm.loss of DPO: one name, or a table of weights."""
    if lost := [loss for loss in weighted if loss not in _LOSSES]:
        beside = f" beside others: {', '.join(_LOSSES)} are" if len(weighted) > 1 else ""
        draft.miss("loss_type", ", ".join(lost), f"not here{beside}")
    if "sigmoid_norm" in weighted and len(weighted) > 1:
        draft.miss("loss_type", "sigmoid_norm", "lengths are normalised in all losses or in none")
    elif "sigmoid_norm" in weighted:
        draft.put("algorithm.length_normalised", True, "sigmoid_norm there")
    kept = {_LOSSES[loss]: weight for loss, weight in weighted.items() if loss in _LOSSES}
    if list(kept.values()) == [1.0]:
        (name,) = kept
        draft.put("algorithm.loss", None if name == "sigmoid" else name)
    elif kept:
        draft.put("algorithm.loss", kept)


def _smoothing(draft: Draft, options: Options, losses: Sequence[str]) -> None:
    """label_smoothing, which DPOTrainer has not read in "sigmoid" since its version 1."""
    smoothing = decimal(options.take("label_smoothing", 0.0))
    if any(loss in _SMOOTHED for loss in losses):
        also = "the loss sigmoid reads it here too" if "sigmoid" in losses else ""
        draft.put("algorithm.label_smoothing", smoothing or None, also)
    elif smoothing:
        why = f"{', '.join(losses)} does not read it; cDPO is algorithm.label_smoothing"
        draft.miss("label_smoothing", smoothing, why)


def _divergence(draft: Draft, options: Options, losses: Sequence[str]) -> None:
    """f_divergence_type, which some losses do not read, and others only here."""
    kind = str(options.take("f_divergence_type", "reverse_kl"))
    share = decimal(options.take("f_alpha_divergence_coef", 0.5))
    if kind != "alpha_divergence" and options.states("f_alpha_divergence_coef"):
        draft.skip("f_alpha_divergence_coef", share, "of alpha_divergence")
    if kind == "alpha_divergence" and share in (0.0, 1.0):  # its limits
        kind = "reverse_kl" if share else "forward_kl"
    names = {"forward_kl": "forward_kl", "js_divergence": "js", "alpha_divergence": "alpha"}
    if kind == "reverse_kl":
        return
    of_share = kind == "alpha_divergence"
    if kind not in names or (of_share and not 0 < share < 1):
        value = f"{kind} {share:g}" if of_share else kind
        draft.miss("f_divergence_type", value, f"here are {', '.join(names)}, its alpha in 0 to 1")
    elif all(loss in _OF_RATIOS for loss in losses):
        draft.skip("f_divergence_type", kind, f"{', '.join(losses)} does not read it")
    elif any(loss not in _DIVERGENT or loss == "apo_zero" for loss in losses):
        read = "sigmoid, hinge, robust, exo and discopop read another divergence"
        draft.miss("f_divergence_type", kind, f"{read}: {', '.join(losses)} has reverse_kl here")
    else:
        draft.put("algorithm.divergence", names[kind])
        if of_share:
            alpha = round(1.0 - share, 9)
            draft.put("algorithm.divergence_alpha", alpha, "1 - the coefficient there")


def _cpo_loss(draft: Draft, options: Options) -> None:
    """CPOTrainer: sigmoid and simpo are algorithms here; alphapo is simpo without an NLL."""
    loss = str(options.take("loss_type"))
    smoothing = decimal(options.take("label_smoothing", 0.0))
    if loss in ("simpo", "alphapo"):
        draft.put("algorithm.type", "simpo", f"loss_type {loss}")
        ratio = decimal(options.take("simpo_gamma", 0.5))
        draft.put("algorithm.gamma", ratio, "simpo_gamma there")
    elif loss != "sigmoid":
        draft.miss("loss_type", loss, "of its losses sigmoid and simpo are here")
    draft.put("algorithm.label_smoothing", smoothing or None)
    nll = 0.0 if loss == "alphapo" else decimal(options.take("cpo_alpha", 1.0))
    draft.put("algorithm.nll_coef", nll, f"cpo_alpha there, {_ALL_TOKENS}" if nll else "cpo_alpha")
    draft.miss("alpha", decimal(options.take("alpha", 0.0)), "rewards are logprobs, not AlphaPO's")


def _orpo_loss(draft: Draft, options: Options) -> None:
    """ORPOTrainer, whose NLL is the language model's on the whole text."""
    draft.put("algorithm.odds_coef", decimal(options.take("beta")), "beta there")
    draft.put("algorithm.nll_coef", 1.0, f"there over prompts too, and {_ALL_TOKENS}")


def _kto_loss(draft: Draft, loss: str) -> None:
    """KTOTrainer, whose loss without a reference point is APO's."""
    if loss == "apo_zero_unpaired":
        draft.put("algorithm.loss", "apo_zero")
    elif loss in ("", "kto"):
        draft.put("algorithm.type", "kto", "its reference point z is a mean over an update; there "
                  "over a micro-batch")  # fmt: skip
    else:
        draft.miss("loss_type", loss, "kto does not have this loss here")
