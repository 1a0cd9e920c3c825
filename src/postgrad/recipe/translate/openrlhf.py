"""OpenRLHF (openrlhf.cli.train_*): its options as recipes.

Its batch numbers count over all GPUs but for the micro-batch, as ours do; what differs is what it
does where nothing is said.
"""

import re
from pathlib import PurePosixPath
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.recipe.translate import common
from postgrad.recipe.translate.draft import Draft
from postgrad.recipe.translate.openrlhf_options import RULES, SHARED, UNSAID, canonical
from postgrad.recipe.translate.openrlhf_rl import algorithm, rewards
from postgrad.recipe.translate.options import Options
from postgrad.recipe.translate.reader import Source
from postgrad.recipe.translate.rules import apply, decimal, flag

JOBS = {
    "train_sft": ("sft", "sft"),
    "train_rm": ("reward", "bradley_terry"),
    "train_dpo": ("preference", "dpo"),
    "train_kto": ("preference", "kto"),
    "train_ppo_ray": ("rl", "ppo"),
}
_OF_OPTIMIZER = {  # of a role, and of the same in [critic.learner]
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


def program_of(word: str, after: str | None) -> str | None:
    """train_sft of openrlhf.cli.train_sft or of a path; sft alone where it is the first word."""
    if after is None and (word in _SHORT or word in JOBS):
        return _SHORT.get(word, word)
    found = re.search(r"(?:^|[./])cli[./](train_\w+?)(?:\.py)?$", word)
    return found.group(1) if found else None


def draft(source: Source) -> Draft:
    """The recipe of one of OpenRLHF's commands."""
    given = canonical(source.options)
    program = source.program or ("train_ppo_ray" if "data.prompt_dataset" in given else "")
    program = "train_ppo_ray" if program == "train_ppo" else program
    if program not in JOBS:
        raise UsageError(f"{program or 'no program'}: say which of {', '.join(_SHORT)} it is")
    job, name = JOBS[program]
    made = Draft(job, "OpenRLHF")
    options = Options(given, {**SHARED, **UNSAID[program]})
    common.run_dir(made, options.take("ckpt.output_dir", "./ckpt"))
    if job == "rl":
        _answers(made, options)
    else:
        made.put("epochs", options.take("train.max_epochs"))
        ipo = flag(options.take("model.ipo_enable", False))
        made.put("algorithm.type", "ipo" if ipo else name)
        common.processes(made, "GPUs", source.devices)
    _ranks(made, options)
    _data(made, options)
    _batch(made, options)
    _learner(made, options)
    if job == "rl":
        _critic_learner(made, options, source)
    _evaluation(made, options)
    lora = ("ds.lora.rank", "ds.lora.alpha", "ds.lora.dropout", "ds.lora.target_modules")
    common.adapter(made, options, lora, "ds.load_in_4bit")
    apply(RULES, options, made)
    return made


def _ranks(made: Draft, options: Options) -> None:
    shares = {
        key: (f"ds.{name}", options.take(f"ds.{name}"))
        for key, name in (
            ("tensor_parallel", "tensor_parallel_size"),
            ("context_parallel", "ring_attn_size"),
        )
    }
    four_bits = options.given.get("ds.load_in_4bit")
    stage = None if four_bits else options.number("ds.zero_stage", 0)
    common.divided(made, ("ds.zero_stage", stage), shares)


def _data(made: Draft, options: Options) -> None:
    name = "data.prompt_dataset" if made.job == "rl" else "data.dataset"
    split = options.take("data.prompt_split" if made.job == "rl" else "data.dataset_split")
    entries: list[dict[str, Any]] = []
    for given in options.texts(name):
        path, _, folder = given.partition("@")
        if folder:
            made.miss(name, given, f"reads {path} from {folder}: give data.path the files")
        entries.append({"path": path})
    common.sources(made, entries)
    made.put("data.split", split)
    template = options.take("data.input_template")
    chat = flag(options.take("data.apply_chat_template", False))
    if made.job in ("sft", "rl"):
        _columns(made, options, chat)
    elif "data.input_key" in {**options.given, **options.defaults}:
        made.put("data.prompt", options.take("data.input_key"))
        made.put("data.completion", options.take("data.output_key"))
        made.put("data.label", options.take("data.label_key"))
    made.put("data.max_len", options.number("data.max_len"))
    if options.said("data.max_samples") and options.number("data.max_samples") > 0:
        made.put("data.limit", options.number("data.max_samples"))
    if not chat:
        made.put("data.chat_template", _plain(str(template or "{}")),
                 "the prompt as it is there, without the tokenizer's chat template")  # fmt: skip


def _columns(made: Draft, options: Options, chat: bool) -> None:
    prompt, answer = options.take("data.input_key"), options.take("data.output_key")
    whole_chats = made.job == "sft" and answer is None
    if chat and (whole_chats or re.search(r"messages|conversation", str(prompt))):
        made.put("data.messages", prompt, "a column of messages, as its name says")
    else:
        made.put("data.prompt", prompt)
    label = options.take("data.label_key")
    if made.job == "rl":
        made.put("data.answer", label or "", "" if label else "no reference answers")
    else:
        made.put("data.answer", answer)


def _plain(template: str) -> str:
    said = "{{ message['content'] }}"
    asked = template.replace("{}", said)
    return (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        f"{said}{{{{ eos_token }}}}{{% else %}}{asked}{{% endif %}}{{% endfor %}}"
    )


def _answers(made: Draft, options: Options) -> None:
    """What PPO and its like say beside data and learner."""
    prompt, new = options.take("prompt_max_len"), options.take("rollout.max_new_tokens")
    total = options.number("data.max_len")
    if prompt is not None:
        total = int(prompt) + int(new or 1024)
        options.given["data.max_len"] = total
    comment = "" if new else "half of data.max_len; there what the prompt leaves of it"
    made.put("rollout.max_new_tokens", int(new) if new else total // 2, comment)
    made.put("epochs", options.number("train.num_episodes"), "passes over the prompts: episodes")
    made.put("batch.rollout_batch_size", options.number("rollout.batch_size"), "prompts")
    made.put("batch.n_samples_per_prompt", options.number("rollout.n_samples_per_prompt"))
    made.put("batch.epochs_per_rollout", options.number("train.max_epochs"))
    nodes = options.number("actor.num_nodes")
    common.processes(made, "GPUs of the policy", nodes * options.number("actor.num_gpus_per_node"))
    algorithm(made, options)
    rewards(made, options)


def _batch(made: Draft, options: Options) -> None:
    train, micro = options.number("train.batch_size"), options.number("train.micro_batch_size")
    pairs = made.get("algorithm.type") in ("bradley_terry", "dpo", "ipo")
    kind = "pairs" if pairs else "samples"
    if made.job == "rl":
        common.update_size(made, train, "samples, over all GPUs")
    else:
        made.put("batch.train_batch_size", train, f"{kind}, over all GPUs")
    tokens = options.number("train.max_tokens_per_gpu", 16_192)
    if flag(options.take("train.dynamic_batch_enable", False)):
        common.micro_tokens(made, tokens, "a GPU")
    else:
        common.micro_batch(made, micro, f"{kind}, a GPU")


def _learner(made: Draft, options: Options) -> None:
    least, share = options.take("min_lr_ratio"), float(options.take("lr_warmup_ratio", 0.0))
    common.schedule(made, options.take("lr_scheduler"), least)
    common.warmup(made, share)
    if flag(options.take("train.enable_ema", False)):
        made.put("learner.ema_decay", decimal(options.take("train.ema_beta", 0.992)))


def _critic_learner(made: Draft, options: Options, source: Source) -> None:
    """What differs from the policy's. Options since 0.11 are one role's alone, those before it and
    those here are both's where the critic's are not said.
    """
    unsaid = {**SHARED, "adam.eps": 1e-8, "adam.weight_decay": 0.0, "max_norm": 1.0}
    said: dict[str, Any] = {}
    for name in (*_OF_OPTIMIZER, "lr_scheduler", "min_lr_ratio", "lr_warmup_ratio"):
        value = options.take(f"critic.{name}")
        if value is None and f"actor.{name}" in source.options:
            value = unsaid[name]
        if value is not None:
            said[name] = value
    if made.get("algorithm.type") != "ppo":
        for name in said:
            if options.said(f"critic.{name}"):
                made.skip(f"critic.{name}", said[name], "there is no critic")
        return
    role = "critic.learner"
    for name, key in _OF_OPTIMIZER.items():
        value = said.get(name)
        made.put(f"{role}.{key}", decimal(value) if isinstance(value, int | float) else value)
    if said.keys() & {"lr_scheduler", "min_lr_ratio"}:
        kind = said.get("lr_scheduler", options.take("lr_scheduler"))
        least = said.get("min_lr_ratio", options.take("min_lr_ratio"))
        common.schedule(made, kind, least, role)
    if "lr_warmup_ratio" in said:
        common.warmup(made, float(said["lr_warmup_ratio"]), role)
    for key in ("schedule", "min_lr_ratio", "warmup_ratio"):
        if made.get(f"{role}.{key}") == made.get(f"learner.{key}"):
            made.drop(f"{role}.{key}")


def _evaluation(made: Draft, options: Options) -> None:
    every, split = options.number("eval.steps", -1), options.take("eval.split")
    n, temperature = options.take("eval.n_samples_per_prompt"), options.take("eval.temperature")
    paths = options.texts("eval.dataset")
    if not paths:
        if every > 0:
            why = "evaluates on a hundredth of the training data; give [eval] a split"
            made.miss("eval.steps", every, why)
        return
    made.put("eval.path", PurePosixPath(paths[0]).as_posix())
    made.put("eval.split", split)
    made.put("eval.every", every if every > 0 else None)
    if made.job == "rl":
        made.put("eval.n_samples", int(n or 4))
        made.put("eval.temperature", decimal(temperature or 0.6))
