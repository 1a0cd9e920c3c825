"""OpenRLHF (openrlhf.cli.train_*): its options as recipes.

Its batch numbers count over all GPUs but for the micro-batch, as ours do; what differs is what it
does where nothing is said.
"""

import re
from pathlib import PurePosixPath
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.translate import common, learning, mixtures, openrlhf_rl, places
from postgrad.translate.draft import Draft
from postgrad.translate.files import config_table
from postgrad.translate.launch import flags
from postgrad.translate.reader import SourceCommand
from postgrad.translate.rules import Options, apply, decimal, flag
from postgrad.translate.tables.openrlhf import (
    DEFAULTS,
    JOBS,
    RULES,
    SHARED,
    SHORT,
    canonical,
)
from postgrad.translate.tables.openrlhf import (
    OTHERS as OTHERS,
)

_OF_OPTIMIZER = {  # option after "actor." or "critic." -> key of [critic.learner]
    "adam.betas": "betas",
    "adam.eps": "eps",
    "adam.weight_decay": "weight_decay",
    "max_norm": "max_grad_norm",
}


_MEANS = {  # what is averaged over something else there
    "sft": "a mean over an update's tokens, as since 0.11; before it over each micro-batch's",
    "distillation": "a mean over an update's tokens; there over each micro-batch's",
    "process_reward": "a head with two labels; there the logits of their tokens, of all tokens "
    "where no data.reward_tokens are named. A mean over an update's steps; there over each "
    "micro-batch's",
    "kto": "its reference point z is a mean over an update; there over a micro-batch of all GPUs",
}

_TAUGHT = (
    "forward KL: its cross-entropy, but for the teacher's own entropy, which has no gradient. At "
    "the tokens that predict the answer; there one token later: not before its first, but at its "
    "last"
)

config_of = config_table
flags_of = flags


def program_of(word: str, after: str | None) -> str | None:
    """ "train_sft" of openrlhf.cli.train_sft or a path to it, and of "sft" where it is the first
    word.
    """
    if after is None and (word in SHORT or word in JOBS):
        return SHORT.get(word, word)
    match = re.search(r"(?:^|[./])cli[./](\w+?)(?:\.py)?$", word)
    return match[1] if match and match[1] != "train_ppo" else "train_ppo_ray" if match else None


def names_of(source: SourceCommand) -> list[str]:
    """The options that a source states, by the names that its draft has."""
    return list(canonical(source.options))


def draft_recipe(source: SourceCommand) -> Draft:
    """The recipe of one of OpenRLHF's commands."""
    stated = canonical(source.options)
    program = source.program or ("train_ppo_ray" if "data.prompt_dataset" in stated else "")
    if program not in JOBS:
        raise UsageError(f"{program or 'no program'}: say which of {', '.join(SHORT)} it is")
    job, name = JOBS[program]
    draft = Draft(job, "OpenRLHF", source.images)
    options = Options(stated, {**SHARED, **DEFAULTS[program]})
    common.run_dir(draft, options.take("ckpt.output_dir", "./ckpt"))
    if job == "rl":
        _answers(draft, options, older=not any("." in name for name in source.options))
    else:
        draft.put("epochs", options.take("train.max_epochs"))
        ipo = flag(options.take("model.ipo_enable", False))
        draft.put("algorithm.type", "ipo" if ipo else name, _MEANS.get(name, ""))
        if ipo:
            draft.put("algorithm.length_normalised", False, "log-ratios are sums, as there")
        _unread(draft, options, ipo)
        if name == "distillation":
            taught = round(float(options.take("kd.coef")), 9)
            draft.put("algorithm.teacher_coef", taught, _TAUGHT)
            draft.put("algorithm.nll_coef", round(1.0 - taught, 9))
        places.processes(draft, "GPUs", source.devices, source.machines)
    _ranks(draft, options)
    _data(draft, options)
    _batch(draft, options)
    _learner(draft, options)
    if job == "rl":
        _critic_learner(draft, options, source)
    _evaluation(draft, options)
    lora = ("ds.lora.rank", "ds.lora.alpha", "ds.lora.dropout", "ds.lora.target_modules")
    learning.adapter(draft, options, lora, "ds.load_in_4bit")
    apply(RULES, options, draft)
    mixtures.balanced(draft)
    common.sampled_as_trained(draft)
    return draft


def _unread(draft: Draft, options: Options, ipo: bool) -> None:
    """Options that the chosen loss does not read."""
    unread = {"model.label_smoothing": "IPO"} if ipo else {}
    if options.stated.get("model.loss_type") == "logexp":
        unread["model.margin_loss_enable"] = "logexp"
    for name, loss in unread.items():
        if options.states(name):
            draft.skip(name, options.take(name), f"{loss} does not read it there")


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
    places.divided(draft, ("ds.zero_stage", stage), shares)


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
    if draft.get("algorithm.type") == "process_reward":
        _steps(draft, options)
    elif not chat and draft.get("data.text") is None:
        draft.put("data.chat_template", _plain(str(template or "{}")),
                 "the prompt as it is there, without the tokenizer's chat template")  # fmt: skip


def _columns(draft: Draft, options: Options, chat: bool) -> None:
    prompt, answer = options.take("data.input_key"), options.take("data.output_key")
    if draft.job == "sft" and flag(options.take("model.pretrain_mode_enable", False)):
        draft.put("data.text", prompt, "all of it is trained on; here an end of text is behind it")
        return
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


def _steps(draft: Draft, options: Options) -> None:
    """The text of its rows: the mark stays behind each step, and no chat template is used."""
    mark = str(options.take("data.placeholder_token") or "ки")
    draft.put("data.step_mark", mark)
    draft.put("data.separator", f" {mark}\n", "a step is judged behind its mark")
    behind = f"{{% if message['role'] == 'assistant' %}}{{{{ ' {mark}' }}}}{{% endif %}}"
    between = "{% if not loop.first %}{{ ' ' }}{% endif %}"
    text = f"{between}{{{{ message['content'] }}}}{behind}"
    template = f"{{% for message in messages %}}{text}{{% endfor %}}"
    draft.put("data.chat_template", template, "the text of the rows as it is there")


def _plain(template: str) -> str:
    """A chat template, in Jinja: the prompt in `template` at {}, and the answer behind it."""
    content = "{{ message['content'] }}"
    prompt = template.replace("{}", content)
    return (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        f"{content}{{{{ eos_token }}}}{{% else %}}{prompt}{{% endif %}}{{% endfor %}}"
    )


def _answers(draft: Draft, options: Options, *, older: bool) -> None:
    """Everything of an RL job but data and learner: rollout, batch, algorithm and rewards. older:
    options have the names of before 0.11.
    """
    prompt, new = options.take("prompt_max_len"), options.take("rollout.max_new_tokens")
    total = options.number("data.max_len")
    if prompt is not None:
        total = int(prompt) + int(new or 1024)
        options.stated["data.max_len"] = total
        draft.notes.append(
            f"Prompts of more than {int(prompt)} tokens are dropped; there their end is cut off."
        )
    comment = "" if new else "half of data.max_len; there what the prompt leaves of it"
    draft.put("rollout.max_new_tokens", int(new) if new else total // 2, comment)
    draft.put("epochs", options.number("train.num_episodes"), "passes over the prompts: episodes")
    draft.put("batch.rollout_batch_size", options.number("rollout.batch_size"), "prompts")
    draft.put("batch.n_samples_per_prompt", options.number("rollout.n_samples_per_prompt"))
    draft.put("batch.epochs_per_rollout", options.number("train.max_epochs"))
    openrlhf_rl.layout(draft, options)
    openrlhf_rl.algorithm(draft, options)
    if older:
        openrlhf_rl.as_before(draft)
    openrlhf_rl.rewards(draft, options)
    openrlhf_rl.roles(draft, options)


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
    kind = options.take("lr_scheduler")
    learning.schedule(draft, kind, least)
    if not learning.unwarmed(draft, options, kind, ("lr_warmup_ratio",)):
        learning.warmup(draft, share)
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
        learning.schedule(draft, kind, least, role)
    kind = stated.get("lr_scheduler", options.take("lr_scheduler"))
    if learning.unwarmed(draft, options, kind, ("critic.lr_warmup_ratio",)):
        learning.warmup(draft, 0.0, role)
    elif stated.keys() & {"lr_warmup_ratio", "lr_scheduler"}:
        share = stated.get("lr_warmup_ratio", options.take("lr_warmup_ratio", 0.0))
        learning.warmup(draft, float(share), role)
    for key in ("schedule", "min_lr_ratio", "warmup_ratio"):
        if (draft.get(f"{role}.{key}") or None) == draft.get(f"learner.{key}"):
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
