"""Python programs that train with TRL: what they call a trainer with, as TRL's options.

The program is read by its text and never run. A trainer's config has the names of TRL's flags, so
what is read goes through the same tables; what cannot be read is listed with its line.
"""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from postgrad.core.errors import UsageError
from postgrad.core.untrusted import decoded, parse_json, read_bytes, reason
from postgrad.translate.common import OTHER_TOKENIZER
from postgrad.translate.draft import Draft, ImageRun
from postgrad.translate.files import text_of as read_text
from postgrad.translate.launch import launched
from postgrad.translate.python_arguments import CommandLine
from postgrad.translate.python_program import followed
from postgrad.translate.python_values import Built, Imported, Unread, is_literal
from postgrad.translate.reader import NoTrainer, SourceCommand
from postgrad.translate.tables.trl import JOBS, OTHERS, RULES
from postgrad.translate.trl import program_of
from postgrad.translate.trl_datasets import put_rows
from postgrad.translate.trl_objects import (
    Reading,
    path_of,
    put_adapter,
    put_bits,
    put_loading,
    put_model,
    put_rewards,
)

_PROGRAMS = {
    "OnlineDPO": "online_dpo", "NashMD": "nash_md", "AsyncGRPO": "async_grpo", "Unsloth": "sft",
    "UnslothSFT": "sft",
}  # fmt: skip
# What TRL's own classes of flags have where nothing is said, as far as programs ask for it.
_OF_FLAGS: dict[str, dict[str, Any]] = {
    "ScriptArguments": {
        "dataset_name": None, "dataset_config": None, "dataset_train_split": "train",
        "dataset_test_split": "test", "dataset_streaming": False,
    },
    "ModelConfig": {
        "model_revision": "main", "dtype": "float32", "attn_implementation": None,
        "trust_remote_code": False, "use_peft": False, "load_in_4bit": False,
        "load_in_8bit": False,
    },
    "Config": {"eval_strategy": "no"},
    "TrainingArguments": {"eval_strategy": "no"},
}  # fmt: skip
# Defaults of transformers' own arguments, which a trainer takes over; TRL's configs have others.
_TRANSFORMERS = {"learning_rate": 5e-5, "gradient_checkpointing": False, "bf16": False}
_UNSLOTH = (
    "Unsloth changes defaults of TRL's configs (batch, schedule, optimizer, seed): what the "
    "program does not say has TRL's here."
)
_POSITIONS = {
    "dpo": ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "kto": ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "grpo": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "rloo": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    **dict.fromkeys(("gmpo", "async_grpo", "sdpo"), ("model", "reward_funcs", "args")),
    "minillm": ("model", "teacher_model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "distillation": ("model", "teacher_model", "args", "train_dataset", "eval_dataset"),
    "gkd": ("model", "teacher_model", "args", "data_collator", "train_dataset"),
    "online_dpo": ("model", "ref_model", "reward_funcs", "args"),
    "ppo": ("args", "processing_class", "model", "ref_model", "reward_model", "train_dataset"),
}
_ARGUMENTS = ("model", "args", "data_collator", "train_dataset", "eval_dataset")  # of the others
_ROOTS = ("trl", "unsloth", "trl_patches")
_LOGGING = re.compile(
    r"(Progress|Printer|LogCompletions|Wandb|TensorBoard|Trackio|Rich\w*)Callback"
)
_WORLD = "an agent's world is an environment: docs/environments.md"
_LOST = {
    "callbacks": "the loop logs, evaluates and saves as the recipe says: callbacks are not here",
    "compute_metrics": "what is measured is in docs/metrics.md",
    "preprocess_logits_for_metrics": "what is measured is in docs/metrics.md",
    "data_collator": "how rows are read is said in [data]",
    "formatting_func": 'data.map is a function row -> {"text": ...}, with data.text = "text"',
    "compute_loss_func": "a loss of your own is an algorithm: docs/algorithms/index.md",
    "optimizers": "learner.optimizer, lr and schedule say it",
    "optimizer_cls_and_kwargs": "learner.optimizer, lr and schedule say it",
    "tools": _WORLD,
    "environment_factory": _WORLD,
    "rollout_func": _WORLD,
    "rollout_worker": _WORLD,
    "weight_transfer": "weights go to engines as cluster and rollout.vllm say: docs/vllm.md",
    "judge": 'online_dpo has rewards: [[rewards]] type = "judge" asks a model',
    "model_init": "a run starts from model.path",
    "teacher_model": "teacher.model.path names it",
    "model_adapter_name": "a run has one adapter",
    "ref_adapter_name": "a run has one adapter",
}  # fmt: skip
_OWN = re.compile(r"(?:^|/)(?:examples|trl)/scripts/")  # where TRL's own programs are
_OF_IMAGES = re.compile(r"FastVisionModel|VisionDataCollator|ForVision2Seq")
_MOST_TRAINERS = 50
_MOST_PROGRAM = 2**20  # bytes
_MOST_NOTEBOOK = 2**24  # bytes: they have pictures in them
_ANSWER_ALONE = ("DataCollatorForCompletionOnlyLM",)
_SKIPPED = ("value_model", "reward_processing_classes", "force_use_ref_model", "is_encoder_decoder")


def commands_of(
    path: Path, words: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[SourceCommand, ...] | None:
    """The trainers of a program, in order; None for one of TRL's own programs, of which the flags
    alone say what it does.

    words: options behind it, which win. environment: variables that are set before it. Raises
    NoTrainer where it has no trainer of TRL, UsageError where it cannot be read.
    """
    line = CommandLine(words, _OF_FLAGS)
    text = _code(path)
    calls = followed(text, str(path), line.answer, environment) if "Trainer" in text else []
    trainers = [call for call in calls if call.short.endswith("Trainer") and not call.base]
    ours = [_Trainer(call, calls, line, path) for call in trainers if _is_trl(call)]
    program = program_of(str(path), "") if _OWN.search(path.as_posix()) else None
    if program is not None and all(trainer.is_typed for trainer in ours):
        if words or program not in JOBS:
            return None
        raise UsageError(_typed(path, line))
    if not ours:
        others = ", ".join(dict.fromkeys(f"{call.name} in line {call.line}" for call in trainers))
        raise NoTrainer(
            f"{path}: the program calls no trainer of TRL{others and f', but {others}'}; "
            "SFTTrainer, DPOTrainer, GRPOTrainer and its other trainers are read, others not"
        )
    if len(ours) > _MOST_TRAINERS:
        raise UsageError(f"{path}: it calls more than {_MOST_TRAINERS} trainers")
    return tuple(trainer.command() for trainer in ours)


def _typed(path: Path, line: CommandLine) -> str:
    """That the settings of a program are flags, for people."""
    where = f" (line {line.line})" if line.line else ""
    return (
        f"{path}: its settings come from the command line{where}: put the flags behind the "
        f"program, as in postgrad translate trl {path.name} --model_name_or_path Qwen/Qwen3-0.6B "
        "--dataset_name trl-lib/Capybara"
    )


def _is_trl(call: Built) -> bool:
    """Whether a trainer is TRL's, or made from one; a name that nothing imports counts too."""
    return "." not in call.name or call.name.partition(".")[0] in _ROOTS


def _is_needless(option: str) -> bool:
    """Whether a run is the same without an option, whatever its value."""
    draft = Draft("sft", "TRL")
    if option in RULES:
        with contextlib.suppress(UsageError):
            RULES[option](draft, option, "value", "")
    return bool(draft.needless)


def _code(path: Path) -> str:
    """A program's text; of a notebook that of its cells, without commands to the shell."""
    if path.suffix != ".ipynb":
        return read_text(path, _MOST_PROGRAM)
    try:
        cells = parse_json(decoded(read_bytes(path, _MOST_NOTEBOOK)))["cells"]
        sources = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
        texts = ["".join(source) for source in sources]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {reason(error)}") from error
    except (ValueError, TypeError, LookupError) as error:
        raise UsageError(f"{path} is no notebook: {error}") from error
    magic = re.compile(r"(?m)^([ \t]*)[!%](?:.*\\\n)*.*$")
    elsewhere = re.compile(r"%%(?!capture|time)")  # of another language
    return "\n".join(magic.sub(r"\1pass", text) for text in texts if not elsewhere.match(text))


def _is_of(call: Built, trainer: Built) -> bool:
    """Whether a call is a method of a trainer, or gets it as its first argument."""
    value: Any = call
    while isinstance(value, Built):
        if value.number == trainer.number:
            return value is not call
        value = value.base if value.base is not None else next(iter(value.args), None)
    return False


class _Trainer:
    """One call of a trainer."""

    def __init__(self, call: Built, calls: list[Built], line: CommandLine, path: Path) -> None:
        name = call.short.removesuffix("Trainer")
        self._call = call
        self._calls = calls
        self._line = line
        self._path = path
        self._reading = Reading(says=line.says)
        program = _PROGRAMS.get(name, name.lower())
        named = program in JOBS or any(re.fullmatch(pattern, program) for pattern in OTHERS)
        self.program = program if named else call.short

        names = _POSITIONS.get(self.program, _ARGUMENTS)
        self._arguments = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        self._settings = self._arguments.pop("args", self._arguments.pop("config", None))

    @property
    def is_typed(self) -> bool:
        """Whether its settings are flags of the command line."""
        return self._line.says(self._settings)

    def command(self) -> SourceCommand:
        """TRL's options that the call states."""
        reading, arguments = self._reading, self._arguments
        self._config(self._settings)
        for name in ("model", *(name for name in arguments if name != "model")):
            if arguments.get(name) is not None:
                self._argument(name, arguments[name])
        self._afterwards()
        options = {**reading.options, **self._line.rest}
        if "dataset_name" in self._line.rest:
            options.pop("datasets", None)
        models = (options.get(name) for name in ("model_name_or_path", "sft_model_path"))
        if self.program in JOBS and self.is_typed and not any(models) and self._line.is_silent:
            raise UsageError(_typed(self._path, self._line))
        launch = launched([], options)
        name = f"{self._call.short} in line {self._call.line} of {self._path.name}"
        unsloth = any(call.name.startswith("unsloth") for call in self._calls)
        return SourceCommand(
            self.program, options, launch.devices, launch.stage,
            notes=(f"{name}, whose text was read, not run.", *([_UNSLOTH] if unsloth else [])),
            folder=self._path.parent,
            images=self._images(options), lost=tuple(reading.lost),
            needless=tuple(reading.needless),
        )  # fmt: skip

    def _config(self, config: Any) -> None:
        """The trainer's config: its fields are TRL's flags."""
        reading = self._reading
        if config is None:
            return
        if not isinstance(config, Built):
            reading.lose("args", config)
            return
        named = {**dict(zip(("output_dir",), config.args, strict=False)), **config.kwargs}
        for name, value in named.items():
            if name == "model_init_kwargs" and isinstance(value, dict):
                put_loading(reading, cast(dict[str, Any], value))
            elif name == "**":
                reading.lose("**", value, "options that the text does not give")
            elif not (_is_needless(name) and not is_literal(value)):
                reading.put(name, value)
        if config.short == "TrainingArguments":
            reading.options = {**_TRANSFORMERS, **reading.options}

    def _argument(self, name: str, value: Any) -> None:
        """One of the trainer's arguments."""
        reading = self._reading
        of_rows = name in ("train_dataset", "eval_dataset")
        if value == [] or (self._line.says(value) and not of_rows):
            return
        match name:
            case "model" if isinstance(value, Unread) and "model_name_or_path" in self._line.rest:
                pass  # a flag names it
            case "model":
                option = "sft_model_path" if self.program == "ppo" else "model_name_or_path"
                put_model(reading, value, option)
            case "train_dataset":
                put_rows(reading, "datasets", name, value)
            case "eval_dataset":
                self._held_out(value)
            case "peft_config":
                put_adapter(reading, value)
            case "quantization_config":
                put_bits(reading, value)
            case "reward_funcs":
                put_rewards(reading, value)
            case "reward_model" if (path := path_of(value)) is not None:
                reading.put("reward_model_path", path)
            case "teacher_model" if (path := path_of(value)) is not None:
                reading.put("teacher_model_name_or_path", path)
            case "ref_model":
                self._reference(value)
            case "processing_class" | "tokenizer":
                self._tokenizer(name, value)
            case "callbacks":
                self._callbacks(value)
            case "data_collator" if isinstance(value, Built) and value.short in _ANSWER_ALONE:
                reading.spare(name, value, "the loss is always on the answer alone")
            case _:
                self._other(name, value)

    def _other(self, name: str, value: Any) -> None:
        if name in _LOST:
            self._reading.lose(name, value, _LOST[name])
        elif name in _SKIPPED:
            self._reading.spare(name, value, "a role reads the model that its own key names")
        elif name == "**":
            self._reading.lose("**", value, "arguments that the text does not give")
        else:  # of the config, in older versions
            self._reading.put(name, value)

    def _held_out(self, value: Any) -> None:
        options = {**self._reading.options, **self._line.rest}
        kind = options.get("eval_strategy", options.get("evaluation_strategy", "no"))
        if str(kind).lower() == "no":
            why = "eval_strategy is no: nothing is evaluated there"
            self._reading.spare("eval_dataset", value, why)
        else:
            self._reading.options["eval_dataset"] = []
            put_rows(self._reading, "eval_dataset", "eval_dataset", value)

    def _reference(self, value: Any) -> None:
        path, name = path_of(value), self._reading.options.get("model_name_or_path")
        copied = isinstance(value, Built) and value.short == "create_reference_model"
        if copied or (path is not None and path == name):
            self._reading.spare("ref_model", value, "the reference is the policy's start")
        elif path is not None:
            self._reading.put("ref_model", path)
        else:
            self._reading.lose("ref_model", value)

    def _tokenizer(self, name: str, value: Any) -> None:
        path, model = path_of(value), self._reading.options.get("model_name_or_path")
        kwargs = value.kwargs if isinstance(value, Built) else {}
        if "chat_template" in kwargs:
            self._reading.put("chat_template_path", kwargs["chat_template"])
        if path is not None and path != model:
            self._reading.lose(name, path, OTHER_TOKENIZER)
        else:
            self._reading.spare(name, value, "the tokenizer is read from model.path")

    def _callbacks(self, value: Any) -> None:
        for callback in cast(list[Any], value) if isinstance(value, list) else [value]:
            name = callback.subclass or callback.short if isinstance(callback, Built) else ""
            if _LOGGING.fullmatch(name):
                self._reading.spare("callbacks", callback, "a run logs itself: observe.loggers")
            else:
                self._reading.lose("callbacks", callback, _LOST["callbacks"])

    def _afterwards(self) -> None:
        """What the program does with the trainer, and methods of a class of its own."""
        reading, trainer = self._reading, self._call
        if trainer.subclass:
            changed = Imported(trainer.subclass, trainer.line)
            why = f"a class of its own, made from {trainer.short}: what it changes is lost"
            reading.lose("trainer", changed, why)
        for call in self._calls:
            if not _is_of(call, trainer):
                continue
            if call.name == ".train" and "resume_from_checkpoint" in call.kwargs:
                reading.put("resume_from_checkpoint", call.kwargs["resume_from_checkpoint"])
            elif call.name == ".add_callback" and call.args:
                self._callbacks(call.args[0])
            elif call.short == "train_on_responses_only":
                self._answers_alone(call)

    def _answers_alone(self, call: Built) -> None:
        """That the loss is on answers alone, also where rows are one text."""
        self._reading.options["assistant_only_loss"] = True
        if self._reading.options.pop("dataset_text_field", None) is not None:
            why = "answers alone are trained on: let data.map return messages, not one text"
            self._reading.lose("dataset_text_field", call, why)

    def _images(self, options: Mapping[str, Any]) -> ImageRun | None:
        """The images of a run whose program loads or collates some."""
        names = (call.name for call in self._calls if _OF_IMAGES.search(call.name))
        if (name := next(names, None)) is None:
            return None
        return ImageRun(name, str(options.get("model_name_or_path", "")), "model_name_or_path")
