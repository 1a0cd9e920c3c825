"""Trainers of TRL whose samples are graded token by token: MiniLLMTrainer by a teacher, SDFTTrainer
and SDPOTrainer by the policy itself, which reads more than it read as it sampled.
"""

from postgrad.core.errors import UsageError
from postgrad.translate import common
from postgrad.translate.draft import Draft
from postgrad.translate.rules import Options, decimal, flag
from postgrad.translate.tables.trl import LOSSES
from postgrad.translate.trl_advantages import clip, deviation

_OF_POLICY = ("loss_type", "importance_sampling_level", "scale_rewards", "epsilon", "epsilon_high")
_OF_AVERAGE = ("teacher_update_rate", "teacher_sync_steps")
_ROOM_FOR_TEXT = 64  # tokens of a hint beside the answer in it
_REWARDS = ("reward_funcs", "reward_model_name_or_path")
_ON_AVERAGE = "whose gradient is the same on average"


def grades(draft: Draft, options: Options, program: str) -> None:
    """[algorithm] of on-policy distillation, who grades, and what it reads."""
    if program == "minillm":
        _taught(draft, options)
        return
    share = decimal(options.take("distillation_weight", 1.0))
    if share == 0.0:
        raise UsageError(
            "distillation_weight = 0: SDPO is GRPO then: translate its settings as trl grpo"
        )
    _distance(draft, options)
    _grader(draft, options)
    draft.put("algorithm.aggregation", "sequence")
    if program == "sdft":
        _privileged(draft, options)
    else:
        _right_answers(draft, options)
    _rewarded(draft, options, share)


def _taught(draft: Draft, options: Options) -> None:
    """MiniLLMTrainer: a policy gradient whose reward is the difference of two logprobs, and beside
    it the reverse KL of each token's whole distribution. On average both have the same gradient.
    """
    draft.put("teacher.model.path", options.take("teacher_model_name_or_path"))
    sampled = flag(options.take("rkl_advantage"))
    exact = flag(options.take("single_step_decomposition"))
    if not (sampled or exact):
        raise UsageError(
            "rkl_advantage and single_step_decomposition are off: MiniLLM is GRPO then: translate "
            "its settings as trl grpo"
        )
    draft.put("algorithm.type", "on_policy_distillation", "a difference of logprobs has a gradient "
              "of its own there, which is 0 on average")  # fmt: skip
    if exact:
        draft.miss("single_step_decomposition", True, "a reverse KL of whole distributions, at "
                   f"padding too; here of each sampled token, {_ON_AVERAGE}")  # fmt: skip
    if sampled and exact:
        draft.put("algorithm.teacher_coef", 2.0, "the advantage, and whole distributions there")
    gamma = decimal(options.take("gamma", 0.0))
    normalised = options.take("length_normalization")
    if sampled:
        draft.miss("gamma", gamma, "a token is graded for itself, not for what follows it")
    if options.states("length_normalization"):
        draft.skip("length_normalization", normalised, "of a gamma above 0")
    warmth = decimal(options.take("kd_temperature", 1.0))
    if warmth != decimal(options.stated.get("temperature") or 1.0):
        draft.miss("kd_temperature", warmth, "policy and teacher have the sampling temperature")
    loss = str(options.take("loss_type"))
    kind, aggregation = LOSSES.get(loss, (loss, None))
    if kind == "grpo":
        draft.put("algorithm.aggregation", aggregation or "sequence", f"loss_type {loss}")
    elif loss == "dr_grpo":
        draft.put("algorithm.aggregation", "constant", f"loss_type {loss}")
    else:
        draft.miss("loss_type", loss, "on_policy_distillation has GRPO's clip")
    if (level := str(options.take("importance_sampling_level", "token"))) != "token":
        draft.miss("importance_sampling_level", level, "each token has a ratio of its own")
    clip(draft, options)
    if any(options.states(name) for name in _REWARDS):
        draft.put("algorithm.reward_coef", 1.0)
        deviation(draft, options)
    elif options.states("scale_rewards"):
        draft.skip("scale_rewards", options.take("scale_rewards"), "there are no rewards")


def _distance(draft: Draft, options: Options) -> None:
    """What is compared of two distributions, and the weights of a step's later updates."""
    mode = str(options.take("distillation_mode"))
    alpha, most = decimal(options.take("distillation_alpha")), options.take("distillation_topk")
    tail = options.take("distillation_add_tail")
    if mode == "sampled_token":
        draft.put("algorithm.type", "on_policy_distillation", "as distillation_mode sampled_token")
    else:
        kinds = {0.0: "forward KL", 1.0: "reverse KL"}
        kind = kinds.get(alpha, f"Jensen-Shannon divergence (distillation_alpha {alpha:g})")
        tokens = f"the {most} likeliest tokens" if mode == "topk_logits" else "all tokens"
        draft.miss("distillation_mode", mode, f"the {kind} over {tokens} there; here the reverse "
                   "KL of each sampled token")  # fmt: skip
    if options.states("distillation_add_tail"):
        draft.skip("distillation_add_tail", tail, "of distillation_mode topk_logits")
    bound, (_, updates) = options.take("distillation_is_clip"), common.per_step(draft)
    if updates > 1:
        draft.miss("distillation_is_clip", bound, "bounds the weight of a token's loss in a step's "
                   "later updates; here PPO's clip does")  # fmt: skip
    elif options.states("distillation_is_clip"):
        draft.skip("distillation_is_clip", bound, "of a step's later updates, and there are none")


def _grader(draft: Draft, options: Options) -> None:
    """teacher_model_kind: the policy, its start, or an average of its weights."""
    kind = str(options.take("teacher_model_kind"))
    draft.put("algorithm.graded_by", "policy" if kind == "live" else "reference", f"{kind} there")
    if kind == "live" and options.number("num_iterations") > 1:
        draft.put("algorithm.graded_by", "policy", "as before a step; there as in each update")
    rate, every = (decimal(options.take(name)) for name in _OF_AVERAGE)
    if kind == "ema" and draft.get("model.lora.rank"):
        draft.miss("teacher_model_kind", kind, "an adapter has no average here: the policy's start "
                   "grades; it begins at the base model's weights there too")  # fmt: skip
    elif kind != "ema":
        for name in _OF_AVERAGE:
            if options.states(name):
                draft.skip(name, options.take(name), "of teacher_model_kind ema")
    else:
        _, updates = common.per_step(draft)
        steps = max(1, round(every / updates))
        draft.put("reference.ema_decay", round(1.0 - rate, 9) or None, "1 - teacher_update_rate")
        often = f"teacher_sync_steps are updates, {updates} a step" if updates > 1 else ""
        draft.put("reference.refresh_steps", steps if steps > 1 or rate == 1.0 else None, often)
    if options.states("use_teacher_server"):
        why = "the policy's ranks grade, with the weights that they have"
        draft.skip("use_teacher_server", options.take("use_teacher_server"), why)


def _privileged(draft: Draft, options: Options) -> None:
    """SDFTTrainer: a column of the row."""
    column = str(options.take("privileged_context_column", "privileged_context"))
    template = str(options.take("teacher_prompt_template")).replace(
        "{privileged_context}", f"{{{column}}}"
    )
    _hint(draft, "teacher_prompt_template", template)
    draft.put("data.answer", "", "rows have no reference answers")
    why = "the policy samples without the hint"
    draft.miss("generate_from_teacher", flag(options.take("generate_from_teacher", False)), why)
    skipped = options.number("num_loss_tokens_to_skip", 0)
    draft.miss("num_loss_tokens_to_skip", skipped, "every token of an answer is graded")


def _hint(draft: Draft, name: str, template: str) -> None:
    """data.hint from a teacher's prompt. name: of the option that says it."""
    before, _, behind = template.partition("{prompt}")
    if before.strip() or "{prompt}" in behind:
        draft.miss(name, template, "data.hint stands behind the prompt, which is there once")
    parted = "" if behind.startswith("\n\n") else "behind an empty line; there without one"
    draft.put("data.hint", behind.lstrip("\n").replace("{prompt}", ""), parted)


def _right_answers(draft: Draft, options: Options) -> None:
    """SDPOTrainer: a right answer of the group, or a column of the row."""
    draft.put("algorithm.correct_at", decimal(options.take("success_reward_threshold")))
    prompt, new = options.number("max_prompt_length"), options.number("max_completion_length")
    reprompt, template = options.number("max_reprompt_len"), str(options.take("reprompt_template"))
    shows_answers = flag(options.take("use_successful_as_teacher"))
    has_feedback = flag(options.take("include_environment_feedback", False))
    hint = min(reprompt, prompt + new + _ROOM_FOR_TEXT) if shows_answers else reprompt
    of_hint = "prompt, a right answer of the group" if shows_answers else "prompt and feedback"
    draft.put("data.max_len", hint + new, f"{of_hint}, and the answer")
    column = str(options.take("feedback_column", "privileged_context"))
    texts = {
        "solution": str(options.take("solution_template")).replace(
            "{successful_previous_attempt}", "{group.answer}"
        ),
        "feedback": str(options.take("feedback_template")).replace(
            "{feedback_raw}", f"{{{column}}}"
        ),
    }
    read = {"solution": shows_answers, "feedback": has_feedback and not shows_answers}
    for place, text in texts.items():
        template = template.replace(f"{{{place}}}", text if read[place] else "")
    _hint(draft, "reprompt_template", template)
    if has_feedback and shows_answers:
        draft.miss("include_environment_feedback", True, "a hint with a right answer is shown "
                   "alone, and a sample without one is not graded")  # fmt: skip
    if not flag(options.take("dont_reprompt_on_self_success")):
        why = "a sample is never shown its own answer"
        draft.miss_always("dont_reprompt_on_self_success", False, why)
    cut = flag(options.take("remove_thinking_from_demonstration", False))
    draft.miss("remove_thinking_from_demonstration", cut, "an answer is shown with its thoughts")
    alone = options.take("environment_feedback_only_without_solution")
    if options.states("environment_feedback_only_without_solution"):
        why = "of include_environment_feedback"
        draft.skip("environment_feedback_only_without_solution", alone, why)
    if options.states("beta"):
        draft.skip("beta", options.take("beta"), "SDPOTrainer does not read it")


def _rewarded(draft: Draft, options: Options, share: float) -> None:
    """The part of rewards. share: of the grades."""
    if share == 1.0:
        for name in _OF_POLICY:
            if options.states(name):
                draft.skip(name, options.take(name), "rewards are not trained on")
        return
    loss, level = str(options.take("loss_type")), str(options.take("importance_sampling_level"))
    apart = "" if loss == "grpo" else f"; rewards there as loss_type {loss} has it"
    draft.put("algorithm.teacher_coef", share, "distillation_weight")
    draft.put("algorithm.reward_coef", round(1.0 - share, 9), "1 - distillation_weight")
    draft.put("algorithm.aggregation", "sequence", f"of grades, as there{apart}")
    if level == "sequence":
        draft.miss("importance_sampling_level", level, "each token has a ratio of its own")
    deviation(draft, options)
    clip(draft, options, "of rewards and grades; there of rewards")
