"""OpenRLHF (openrlhf.cli.train_*): its options as recipes.

Its batch numbers count over all GPUs but for the micro-batch, as ours do; what differs is what it
does where nothing is said.
"""

import re
from pathlib import PurePosixPath
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.translate import common
from postgrad.translate.draft import Draft
from postgrad.translate.reader import SourceCommand
from postgrad.translate.rules import Options, apply, decimal, flag
from postgrad.translate.tables.openrlhf import DEFAULTS, ESTIMATORS, RULES, SHARED, canonical

JOBS = {
    "train_sft": ("sft", "sft"),
    "train_rm": ("reward", "bradley_terry"),
    "train_dpo": ("preference", "dpo"),
    "train_kto": ("preference", "kto"),
    "train_ppo_ray": ("rl", "ppo"),
}
_OF_OPTIMIZER = {  # option after "actor." or "critic." -> key of [critic.learner]
    "adam.betas": "betas",
    "adam.eps": "eps",
    "adam.weight_decay": "weight_decay",
    "max_norm": "max_grad_norm",
}
_SHORT = {
    "sft": "train_sft",
    "rm": "train_rm",
    "dpo": "train_dpo",
    "kto": "train_kto",
    "ppo": "train_ppo_ray",
}

_AFTER_BASELINE = "taken from rewards before the baseline; there after it, token by token"
_CORRECTIONS = {"tis": "tis", "icepop": "icepop", "seq-mask-tis": "sequence_mask"}


def program_of(word: str, after: str | None) -> str | None:
    """ "train_sft" of openrlhf.cli.train_sft or a path to it, and of "sft" where it is the first
    word.
    """
    if after is None and (word in _SHORT or word in JOBS):
        return _SHORT.get(word, word)
    match = re.search(r"(?:^|[./])cli[./](train_\w+?)(?:\.py)?$", word)
    return match[1] if match else None


def draft_recipe(source: SourceCommand) -> Draft:
    """The recipe of one of OpenRLHF's commands."""
    stated = canonical(source.options)
    program = source.program or ("train_ppo_ray" if "data.prompt_dataset" in stated else "")
    program = "train_ppo_ray" if program == "train_ppo" else program
    if program not in JOBS:
        raise UsageError(f"{program or 'no program'}: say which of {', '.join(_SHORT)} it is")
    job, name = JOBS[program]
    draft = Draft(job, "OpenRLHF")
    options = Options(stated, {**SHARED, **DEFAULTS[program]})
    common.run_dir(draft, options.take("ckpt.output_dir", "./ckpt"))
    if job == "rl":
        _answers(draft, options)
    else:
        draft.put("epochs", options.take("train.max_epochs"))
        ipo = flag(options.take("model.ipo_enable", False))
        draft.put("algorithm.type", "ipo" if ipo else name)
        common.processes(draft, "GPUs", source.devices)
    _ranks(draft, options)
    _data(draft, options)
    _batch(draft, options)
    _learner(draft, options)
    if job == "rl":
        _critic_learner(draft, options, source)
    _evaluation(draft, options)
    lora = ("ds.lora.rank", "ds.lora.alpha", "ds.lora.dropout", "ds.lora.target_modules")
    common.adapter(draft, options, lora, "ds.load_in_4bit")
    apply(RULES, options, draft)
    return draft


def _ranks(draft: Draft, options: Options) -> None:
    shares = {
        key: (f"ds.{name}", options.take(f"ds.{name}"))
        for key, name in (
            ("tensor_parallel", "tensor_parallel_size"),
            ("context_parallel", "ring_attn_size"),
        )
    }
    four_bits = options.stated.get("ds.load_in_4bit")
    stage = None if four_bits else options.number("ds.zero_stage", 0)
    common.divided(draft, ("ds.zero_stage", stage), shares)


def _data(draft: Draft, options: Options) -> None:
    name = "data.prompt_dataset" if draft.job == "rl" else "data.dataset"
    split = options.take("data.prompt_split" if draft.job == "rl" else "data.dataset_split")
    entries: list[dict[str, Any]] = []
    for dataset in options.texts(name):
        path, _, folder = dataset.partition("@")
        if folder:
            draft.miss(name, dataset, f"reads {path} from {folder}: give data.path the files")
        entries.append({"path": path})
    common.sources(draft, entries)
    draft.put("data.split", split)
    template = options.take("data.input_template")
    chat = flag(options.take("data.apply_chat_template", False))
    if draft.job in ("sft", "rl"):
        _columns(draft, options, chat)
    elif "data.input_key" in {**options.stated, **options.defaults}:
        draft.put("data.prompt", options.take("data.input_key"))
        draft.put("data.completion", options.take("data.output_key"))
        draft.put("data.label", options.take("data.label_key"))
    draft.put("data.max_len", options.number("data.max_len"))
    if options.states("data.max_samples") and options.number("data.max_samples") > 0:
        draft.put("data.limit", options.number("data.max_samples"))
    if not chat:
        draft.put("data.chat_template", _plain(str(template or "{}")),
                 "the prompt as it is there, without the tokenizer's chat template")  # fmt: skip


def _columns(draft: Draft, options: Options, chat: bool) -> None:
    prompt, answer = options.take("data.input_key"), options.take("data.output_key")
    whole_chats = draft.job == "sft" and answer is None
    if chat and (whole_chats or re.search(r"messages|conversation", str(prompt))):
        draft.put("data.messages", prompt, "a column of messages, as its name says")
    else:
        draft.put("data.prompt", prompt)
    label = options.take("data.label_key")
    if draft.job == "rl":
        draft.put("data.answer", label or "", "" if label else "no reference answers")
    else:
        draft.put("data.answer", answer)


def _plain(template: str) -> str:
    """A chat template, in Jinja: the prompt in `template` at {}, and the answer behind it."""
    content = "{{ message['content'] }}"
    prompt = template.replace("{}", content)
    return (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        f"{content}{{{{ eos_token }}}}{{% else %}}{prompt}{{% endif %}}{{% endfor %}}"
    )


def _answers(draft: Draft, options: Options) -> None:
    """Everything of an RL job but data and learner: rollout, batch, algorithm and rewards."""
    prompt, new = options.take("prompt_max_len"), options.take("rollout.max_new_tokens")
    total = options.number("data.max_len")
    if prompt is not None:
        total = int(prompt) + int(new or 1024)
        options.stated["data.max_len"] = total
    comment = "" if new else "half of data.max_len; there what the prompt leaves of it"
    draft.put("rollout.max_new_tokens", int(new) if new else total // 2, comment)
    draft.put("epochs", options.number("train.num_episodes"), "passes over the prompts: episodes")
    draft.put("batch.rollout_batch_size", options.number("rollout.batch_size"), "prompts")
    draft.put("batch.n_samples_per_prompt", options.number("rollout.n_samples_per_prompt"))
    draft.put("batch.epochs_per_rollout", options.number("train.max_epochs"))
    nodes = options.number("actor.num_nodes")
    common.processes(draft, "GPUs of the policy", nodes * options.number("actor.num_gpus_per_node"))
    algorithm(draft, options)
    rewards(draft, options)


def _batch(draft: Draft, options: Options) -> None:
    train, micro = options.number("train.batch_size"), options.number("train.micro_batch_size")
    pairs = draft.get("algorithm.type") in ("bradley_terry", "dpo", "ipo")
    kind = "pairs" if pairs else "samples"
    if draft.job == "rl":
        common.update_size(draft, train, "samples, over all GPUs")
    else:
        draft.put("batch.train_batch_size", train, f"{kind}, over all GPUs")
    tokens = options.number("train.max_tokens_per_gpu", 16_192)
    if flag(options.take("train.dynamic_batch_enable", False)):
        common.micro_tokens(draft, tokens, "a GPU")
    else:
        common.micro_batch(draft, micro, f"{kind}, a GPU")


def _learner(draft: Draft, options: Options) -> None:
    least, share = options.take("min_lr_ratio"), float(options.take("lr_warmup_ratio", 0.0))
    common.schedule(draft, options.take("lr_scheduler"), least)
    common.warmup(draft, share)
    if flag(options.take("train.enable_ema", False)):
        draft.put("learner.ema_decay", decimal(options.take("train.ema_beta", 0.992)))


def _critic_learner(draft: Draft, options: Options, source: SourceCommand) -> None:
    """Keys of [critic.learner] that differ from the policy's. Since OpenRLHF 0.11 an option is one
    role's alone; before it, and here, the policy's options are the critic's too unless it has its
    own.
    """
    defaults = {**SHARED, "adam.eps": 1e-8, "adam.weight_decay": 0.0, "max_norm": 1.0}
    stated: dict[str, Any] = {}
    for name in (*_OF_OPTIMIZER, "lr_scheduler", "min_lr_ratio", "lr_warmup_ratio"):
        value = options.take(f"critic.{name}")
        if value is None and f"actor.{name}" in source.options:
            value = defaults[name]
        if value is not None:
            stated[name] = value
    if draft.get("algorithm.type") != "ppo":
        for name in stated:
            if options.states(f"critic.{name}"):
                draft.skip(f"critic.{name}", stated[name], "there is no critic")
        return
    role = "critic.learner"
    for name, key in _OF_OPTIMIZER.items():
        value = stated.get(name)
        draft.put(f"{role}.{key}", decimal(value) if isinstance(value, int | float) else value)
    if stated.keys() & {"lr_scheduler", "min_lr_ratio"}:
        kind = stated.get("lr_scheduler", options.take("lr_scheduler"))
        least = stated.get("min_lr_ratio", options.take("min_lr_ratio"))
        common.schedule(draft, kind, least, role)
    if "lr_warmup_ratio" in stated:
        common.warmup(draft, float(stated["lr_warmup_ratio"]), role)
    for key in ("schedule", "min_lr_ratio", "warmup_ratio"):
        if draft.get(f"{role}.{key}") == draft.get(f"learner.{key}"):
            draft.drop(f"{role}.{key}")


def _evaluation(draft: Draft, options: Options) -> None:
    every, split = options.number("eval.steps", -1), options.take("eval.split")
    n, temperature = options.take("eval.n_samples_per_prompt"), options.take("eval.temperature")
    paths = options.texts("eval.dataset")
    if not paths:
        if every > 0:
            why = "evaluates on a hundredth of the training data; give [eval] a split"
            draft.miss("eval.steps", every, why)
        return
    draft.put("eval.path", PurePosixPath(paths[0]).as_posix())
    draft.put("eval.split", split)
    draft.put("eval.every", every if every > 0 else None)
    if draft.job == "rl":
        draft.put("eval.n_samples", int(n or 4))
        draft.put("eval.temperature", decimal(temperature or 0.6))


def algorithm(draft: Draft, options: Options) -> None:
    """[algorithm], and dynamic sampling."""
    estimator = str(options.take("algo.advantage.estimator"))
    loss = options.take("actor.policy_loss_type")
    name, aggregation = ESTIMATORS.get(estimator, ("grpo", None))
    if estimator not in ESTIMATORS:
        draft.miss("algo.advantage.estimator", estimator, "no algorithm here is called so")
    if loss == "gspo":
        name, aggregation = "gspo", None
        if estimator not in ("group_norm", "dr_grpo"):
            why = "gspo here has the advantages of group_norm"
            draft.miss("algo.advantage.estimator", estimator, why)
    draft.put("algorithm.type", name, estimator)
    _deviation(draft, options, name, estimator)
    if aggregation:
        draft.put("algorithm.aggregation", aggregation, "every token counts the same there")
    clip = decimal(options.take("actor.eps_clip", 0.2))
    bounds = options.numbers("actor.eps_clip_low_high") or [clip, clip]
    low, high = bounds[0], bounds[-1]
    if (low, high) != (0.2, 0.2) or name == "gspo":
        draft.put("algorithm.clip_low", low)
        draft.put("algorithm.clip_high", high)
    _critic(draft, options, name)
    _kl(draft, options)
    _correction(draft, options)
    if flag(options.take("algo.dynamic_filtering_enable", False)):
        above, below = options.pair("algo.dynamic_filtering_range") or (0.0, 1.0)
        draft.put("rollout.dynamic_sampling", True,
                 "by the first reward's score; in max_rounds, there until it is full")  # fmt: skip
        draft.put("rollout.keep_above", decimal(above))
        draft.put("rollout.keep_below", decimal(below))


def _deviation(draft: Draft, options: Options, name: str, estimator: str) -> None:
    """algorithm.std_norm: whether advantages are divided by their standard deviation."""
    option = "algo.advantage.no_std_norm"
    undivided = flag(options.take(option, False))
    if name == "gspo":
        undivided = estimator == "dr_grpo"
    elif estimator in ("rloo", "group_norm", "dr_grpo"):
        if undivided:
            draft.skip(option, True, f"{estimator} does not ask it there either")
        return
    if undivided:
        draft.put("algorithm.std_norm", False, "the mean is still taken, as there")


def _critic(draft: Draft, options: Options, name: str) -> None:
    lam, gamma = options.take("algo.advantage.lambd"), options.take("algo.advantage.gamma", 1.0)
    clip, freezing = options.take("critic.value_clip"), options.number("actor.freezing_steps", -1)
    path, rate = options.take("critic.model_name_or_path"), options.take("critic.adam.lr")
    _reward_clip(draft, options, name)
    if name == "ppo":
        draft.put("algorithm.critic_warmup_steps", freezing if freezing > 0 else None)
        draft.put("algorithm.gamma", decimal(gamma))
        draft.put("algorithm.lam", decimal(lam))
        draft.put("algorithm.value_clip", decimal(clip))
        draft.put("critic.model.path", path)
        draft.put("critic.learner.lr", decimal(rate))
        return
    if freezing > 0:
        draft.miss("actor.freezing_steps", freezing, "there is no critic that would learn alone")
    if name == "reinforce_pp" and float(gamma) != 1.0:
        why = f"rewards are not discounted by token in {name}"
        draft.unknown("algo.advantage.gamma", gamma, why)


def _reward_clip(draft: Draft, options: Options, name: str) -> None:
    """algorithm.reward_clip. Where a baseline is taken first, the default of 10 is left out: it
    bounds nothing that occurs.
    """
    bounds = options.pair("reward.clip_range")
    first = name in ("ppo", "reinforce_pp")
    if bounds is None or not (first or options.states("reward.clip_range")):
        return
    low, high = bounds
    comment = "" if first else "of rewards; there of what the baseline leaves of them"
    draft.put("algorithm.reward_clip", high if low == -high else [low, high], comment)


def _kl(draft: Draft, options: Options) -> None:
    # OpenRLHF takes a coefficient below 0 for 0.
    coefficient = max(0.0, decimal(options.take("algo.kl.init_coef")))
    in_loss = flag(options.take("algo.kl.use_loss", False))
    estimator, target = options.take("algo.kl.estimator"), options.take("algo.kl.target")
    horizon = options.take("algo.kl.horizon")
    draft.put("algorithm.kl_coef", coefficient)
    if not coefficient:
        return
    late = "" if draft.get("algorithm.type") in ("ppo", "reinforce_pp") else _AFTER_BASELINE
    draft.put("algorithm.kl_in", "loss" if in_loss else "reward", "" if in_loss else late)
    draft.put("algorithm.kl_estimator", estimator)
    if target is not None and not in_loss:
        draft.put("algorithm.kl_target", decimal(target))
        draft.put("algorithm.kl_horizon", horizon)


def _correction(draft: Draft, options: Options) -> None:
    kind = str(options.take("algo.advantage.is_correction_type", "tis"))
    bounds = options.numbers("algo.advantage.is_correction_threshold") or [0.5, 5.0]
    low, high = bounds[0], bounds[-1]  # a single number is the upper bound
    if not flag(options.take("algo.advantage.is_correction_enable", False)):
        return
    name = _CORRECTIONS.get(kind, "tis")
    masks = "keeps or drops a response; there its tokens are weighed too"
    draft.put("algorithm.correction", name, masks if name == "sequence_mask" else "")
    if name != "tis":
        draft.put("algorithm.correction_low", low)
    elif len(bounds) > 1:
        draft.miss("algo.advantage.is_correction_threshold", low, "tis bounds weights from above")
    draft.put("algorithm.correction_high", high)


def rewards(draft: Draft, options: Options) -> None:
    """[[rewards]]: a reward model, a server, or a Python function of the user's own."""
    model, urls = options.take("reward.model_name_or_path"), options.texts("reward.remote_url")
    normalise = flag(options.take("reward.normalize_enable", False))
    agent = options.take("train.agent_func_path")
    servers = [url for url in urls if url.startswith("http")]
    files = [url for url in [*urls, str(agent or "")] if url.endswith(".py")]
    if servers:
        draft.reward("remote", "asks as docs/serve-reward.md says, not as OpenRLHF's server",
                    urls=servers)  # fmt: skip
    if agent:
        why = "an agent of several turns is an environment: docs/environments.md"
        draft.miss("train.agent_func_path", agent, why)
    for file in files:
        name = PurePosixPath(file).stem
        draft.reward(f"{name}:score", f"{file}: write score(prompt, rollout) there")
    if model and not urls and not agent:
        draft.put("reward_model.model.path", str(model).split(",")[0])
        extra: dict[str, Any] = {"normalise": True} if normalise else {}
        draft.reward("reward_model", **extra)
    elif normalise:
        why = "takes the mean and deviation of a reward model; these rewards have none"
        draft.miss("reward.normalize_enable", True, why)
    if not (servers or files or model):
        draft.reward("my_rewards:score", "the source names no reward: write this function")
    length = options.take("reward.overlong_buffer_len")
    factor = decimal(options.take("reward.overlong_penalty_factor", 1.0))
    if length and factor < 0:
        why = f"a factor of {factor:g} pays for length, and overlong only takes"
        draft.unknown("reward.overlong_penalty_factor", factor, why)
    elif length and factor:
        draft.reward("overlong", buffer=int(length), factor=factor)
    coefficient = options.take("reward.stop_properly_penalty_coef")
    if coefficient is not None:
        _stop_properly(draft, decimal(coefficient))


def _stop_properly(draft: Draft, coefficient: float) -> None:
    """A coefficient below 0 is the reward of what was cut off, any other scales it."""
    if coefficient < 0:
        common.cut_off(draft, coefficient, "replaces the reward of what was cut off, as there")
    else:
        draft.reward("stop_properly", "scales the reward of what was cut off", stopped=1.0,
                    penalty=coefficient, multiply=True)  # fmt: skip
