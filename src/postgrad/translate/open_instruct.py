"""Open-Instruct (finetune, dpo, reward_modeling, grpo, ppo): its options as recipes."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.models import named_templates
from postgrad.translate import common, learning, mixtures, open_instruct_rl, places
from postgrad.translate.common import mixture
from postgrad.translate.draft import Draft
from postgrad.translate.files import config_table, prompt_text
from postgrad.translate.launch import flags
from postgrad.translate.reader import SourceCommand
from postgrad.translate.rules import Options, apply, decimal, flag
from postgrad.translate.tables.open_instruct import (
    DEFAULTS,
    JOBS,
    OF_OLMO_CORE,
    RENAMED,
    RULES,
    SCRIPTS,
)
from postgrad.translate.tables.open_instruct import (
    OTHERS as OTHERS,
)

_MEANS = "a mean over an update's tokens; over those of each micro-batch, which count alike there"

config_of = config_table
flags_of = flags


def program_of(word: str, after: str | None) -> str | None:
    """ "dpo" of open_instruct/dpo_tune_cache.py, and of "dpo" itself where it is the first word."""
    if after is None and word in (*JOBS, *SCRIPTS):
        return word if word in JOBS else SCRIPTS[word]
    match = re.search(r"(?:^|/)open_instruct[./](\w+?)(?:\.py)?$", word)
    return SCRIPTS.get(match[1], match[1]) if match else None


def names_of(source: SourceCommand) -> list[str]:
    """The options that a source states, by the names that its draft has."""
    return [RENAMED.get(name, name) for name in common.positive(source.options)]


def draft_recipe(source: SourceCommand) -> Draft:
    """The recipe of one of Open-Instruct's commands or configs."""
    stated = {
        RENAMED.get(name, name): value for name, value in common.positive(source.options).items()
    }
    program = source.program or _guessed(stated)
    if program not in JOBS:
        raise UsageError(
            f"what does it train? put one of {', '.join(JOBS)} before it: "
            "postgrad translate open-instruct sft FILE"
        )
    job, algorithm = JOBS[program]
    draft = Draft(job, "Open-Instruct", source.images)
    options = Options(stated, DEFAULTS[program])
    in_olmo_core, program = program in OF_OLMO_CORE, OF_OLMO_CORE.get(program, program)
    name = options.stated.get("exp_name") or options.stated.get("run_name")
    common.run_dir(draft, options.take("output_dir", f"runs/{name}" if name else None))
    draft.put("algorithm.type", algorithm, _MEANS if algorithm == "sft" else "")
    draft.put("model.dtype", "bfloat16")
    _data(draft, options)
    _system(draft, options, source.folder)
    if job == "rl":
        open_instruct_rl.answers(draft, options, program)
    else:
        _batch(draft, options, source)
        if program == "dpo":
            _loss(draft, options)
        _adapter(draft, options)
        _held_out(draft, options)
    _learner(draft, options, in_olmo_core=in_olmo_core)
    _optimizer(draft, options, program, in_olmo_core=in_olmo_core)
    _clipping(draft, options, program, deepspeed=source.stage is not None and not in_olmo_core)
    draft.put("checkpoint.save_hf", True)
    _on_hub(draft, options)
    draft.put("model.path", options.take("model_name_or_path"))
    common.tokenizer(draft, options, "tokenizer_name", "tokenizer_revision")
    add_bos = flag(options.take("add_bos", False))
    name = "keep_last_n_checkpoints"
    kept, default = options.take(name), "" if options.states(name) else "Open-Instruct's default"
    apply(RULES, options, draft)
    if kept is not None:
        common.kept_checkpoints(draft, name, kept, default)
    if add_bos:
        _begin_with_bos(draft)
    mixtures.balanced(draft)
    common.sampled_as_trained(draft)
    return draft


def _begin_with_bos(draft: Draft) -> None:
    """A chat template behind the token that begins texts. OLMo's tokenizers have none, and
    Open-Instruct takes the one that ends texts in its place.
    """
    name, key = draft.get("data.chat_template", "tokenizer"), "data.chat_template"
    token = (
        "bos_token or eos_token" if "olmo" in str(draft.get("model.path")).lower() else "bos_token"
    )
    text, comment = f'{{{{ {token} }}}}{{% include "{name}" %}}', "add_bos"
    if name == "tokenizer":
        comment = "add_bos; refused there where the tokenizer's template begins with the token"
    if name in (*named_templates.names(), "tokenizer"):
        draft.put(key, text, comment)
    else:
        draft.miss("add_bos", True, f"begin the template's text with {{{{ {token} }}}}")


def _on_hub(draft: Draft, options: Options) -> None:
    """The model's revision and where it is pushed. Open-Instruct also pushes by default, to a
    repository of its authors: that is not taken over.
    """
    common.revision(draft, options.take("model_revision"))
    owner, repository = options.take("hf_entity"), options.take("hf_repo_id")
    target = repository if owner is None or "/" in str(repository) else f"{owner}/{repository}"
    if flag(options.take("push_to_hub", False)) and repository:
        common.push(draft, target)


def _guessed(options: Mapping[str, Any]) -> str:
    """The program, from options that one program alone has; "" where none of them is stated."""
    programs = {
        "num_unique_prompts_rollout": "grpo",
        "local_rollout_batch_size": "ppo",
        "loss_type": "dpo",
        "beta": "dpo",
        "max_seq_length": "sft",
    }
    return next((program for name, program in programs.items() if name in options), "")


def _data(draft: Draft, options: Options) -> None:
    named, table = options.take("dataset_name"), options.take("dataset_mixer")
    mixed = options.take("dataset_mixer_list") or table
    splits = [part for text in options.texts("dataset_mixer_list_splits") for part in text.split()]
    entries = mixture(mixed, splits) if mixed else [{"path": str(named)}] if named else []
    common.sources(draft, entries)
    if draft.drop("data.weight"):
        draft.notes.append("a weight above 1 of a single dataset is more epochs")
    if draft.job in ("sft", "rl"):
        draft.put("data.messages", options.take("sft_messages_key", "messages"))
    if draft.job == "rl":
        draft.put("data.answer", options.take("ground_truths_key", "ground_truth"))
        options.take("max_seq_length")  # of rows, before they are prompts
        return
    draft.put("data.max_len", options.number("max_seq_length"))
    if draft.job == "sft":
        draft.put("data.on_too_long", "truncate", "as there")


def _system(draft: Draft, options: Options, folder: Path) -> None:
    name = options.take("system_prompt_override_file")
    text = prompt_text(str(name), folder) if name else None
    if text is not None:
        comment = "before conversations without one; there in place of theirs too"
        draft.put("data.system", text.strip(), comment)
    elif name:
        draft.miss("system_prompt_override_file", name, "put the file's text into data.system")


def _batch(draft: Draft, options: Options, source: SourceCommand) -> None:
    count = places.processes(draft, "devices", source.devices, source.machines)
    open_instruct_rl.ranks(draft, options, source.stage)
    micro = options.number("per_device_train_batch_size")
    steps = options.number("gradient_accumulation_steps")
    size = f"per device {micro} * accumulation {steps} * devices {count}"
    draft.put("batch.train_batch_size", micro * steps * count, size)
    common.micro_batch(draft, micro, "" if draft.job == "sft" else "pairs")
    epochs, updates = options.take("num_epochs"), options.number("max_train_steps", 0)
    if updates > 0:
        draft.put("steps", updates)
    else:
        is_stated = options.states("num_epochs")
        draft.put("epochs", epochs, "" if is_stated else "Open-Instruct's default")


def _held_out(draft: Draft, options: Options) -> None:
    """[eval], where the source names held-out rows."""
    mixed, splits = options.take("dataset_mixer_eval_list"), "dataset_mixer_eval_list_splits"
    words = [part for text in options.texts(splits) for part in text.split()]
    if mixed:
        common.held_out(draft, mixture(mixed, words))


def _loss(draft: Draft, options: Options) -> None:
    kind, beta = str(options.take("loss_type")), decimal(options.take("beta"))
    ratio = decimal(options.take("gamma_beta_ratio", 0.3))
    if kind == "simpo":
        draft.put("algorithm.type", "simpo")
        draft.put("algorithm.gamma", beta * ratio, "beta * gamma_beta_ratio")
    elif kind == "dpo_norm":
        draft.put("algorithm.length_normalised", True, "dpo_norm there")
    elif kind != "dpo":
        draft.miss("loss_type", kind, "dpo, ipo, simpo, kto and orpo are here")
    draft.put("algorithm.beta", beta)


def _adapter(draft: Draft, options: Options) -> None:
    names = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")
    if flag(options.take("use_lora", False)) or flag(options.take("use_qlora", False)):
        learning.adapter(draft, options, names, "use_qlora")
    else:
        for name in names:
            options.take(name)


def _learner(draft: Draft, options: Options, *, in_olmo_core: bool) -> None:
    final, kind = options.take("final_lr_ratio"), options.take("lr_scheduler_type")
    falls_to = 0.1 if in_olmo_core and kind == "cosine" else None
    learning.schedule(draft, kind, comment="to a tenth, as OLMo-core has it" if falls_to else "")
    draft.put("learner.min_lr_ratio", falls_to)
    if final is not None and draft.get("learner.schedule") == "linear":
        draft.put("learner.min_lr_ratio", decimal(final) or None)
    share, count = float(options.take("warmup_ratio", 0.0)), options.number("warm_up_steps", 0)
    names = ("warmup_ratio", "warm_up_steps")
    if not in_olmo_core and learning.unwarmed(draft, options, kind, names):
        return
    if share:
        learning.warmup(draft, share, comment="rounded up; down there")
    elif count:
        draft.put("learner.warmup_updates", count)


def _optimizer(draft: Draft, options: Options, program: str, *, in_olmo_core: bool) -> None:
    """AdamW's weight decay, and what it is of; some of its programs do not pass the option on."""
    name, decay = "weight_decay", decimal(options.take("weight_decay", 0.0))
    if program == "sft" and in_olmo_core:
        draft.put("learner.betas", [0.9, 0.95], "of OLMo-core's SkipStepAdamW, which also skips "
                  "updates whose loss or gradient is an outlier; none is skipped here")  # fmt: skip
    grouped = flag(options.take("set_weight_decay_on_bias_and_norm", True))
    if program == "reward":
        draft.put("learner.weight_decay", decay, f"torch's default; {learning.ALL_DECAY}")
    elif program == "grpo" and not grouped and not in_olmo_core:
        draft.put("learner.weight_decay", 0.01, f"torch's default, as {name} is not read there "
                  f"without groups; {learning.ALL_DECAY}")  # fmt: skip
    elif decay or options.states(name):
        of_all = in_olmo_core and decay
        draft.put("learner.weight_decay", decay, learning.ALL_DECAY if of_all else "")


def _clipping(draft: Draft, options: Options, program: str, *, deepspeed: bool) -> None:
    """The bound of a gradient's norm: 1 where DeepSpeed trains, whose "auto" accelerate fills in;
    else none but the one that is stated. GRPO and PPO have one of 1.
    """
    bound = options.take("clip_grad_norm", 1.0 if draft.job == "rl" else 0.0)
    norm = max(0.0, decimal(bound)) if str(bound) != "None" else 0.0
    if deepspeed and draft.job != "rl":
        if options.states("clip_grad_norm") and norm != 1.0:
            why = 'DeepSpeed clips at 1, what accelerate makes of "auto"'
            draft.skip("clip_grad_norm", bound, why)
        norm, comment = 1.0, 'of DeepSpeed there, whose "auto" is 1'
    elif program == "reward" and options.states("clip_grad_norm"):
        draft.skip("clip_grad_norm", bound, "reward_modeling.py does not clip")
        norm, comment = 0.0, ""
    else:
        comment = "" if options.states("clip_grad_norm") else "none there without DeepSpeed"
    if norm != 1.0 or options.states("clip_grad_norm"):
        draft.put("learner.max_grad_norm", norm, comment)
