"""Objects of Python programs that train with TRL: models, adapters, datasets and rewards, as TRL's
options say them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from postgrad.translate.draft import Missing
from postgrad.translate.files import checked
from postgrad.translate.python_values import (
    Built,
    Defined,
    DefinedClass,
    Imported,
    Unread,
    is_literal,
)
from postgrad.translate.tables.trl import FUNCTIONS, MADE_FROM

_RUN = "only a run of the program gives its value: write it into the recipe"
_NAMED = ("torch", "transformers", "trl")  # whose names of dtypes and choices are flags' words
# Of a model: nothing here, and names that its trainer's options have.
_NOTHING = (
    "device_map", "token", "use_auth_token", "cache_dir", "use_cache", "low_cpu_mem_usage",
    "num_labels", "return_dict", "is_trainable", "fast_inference", "gpu_memory_utilization",
    "max_lora_rank", "local_files_only", "use_safetensors", "ignore_mismatched_sizes",
    "fix_tokenizer",
    "pretrained_model_name_or_path", "model_name", "max_seq_length", "full_finetuning", "task_type",
    "random_state", "inference_mode", "device",
)  # fmt: skip
_OF_MODEL = {
    "revision": "model_revision", "torch_dtype": "dtype", "dtype": "dtype",
    "attn_implementation": "attn_implementation", "trust_remote_code": "trust_remote_code",
    "load_in_4bit": "load_in_4bit", "load_in_8bit": "load_in_8bit",
}  # fmt: skip
_OF_BITS = {
    "load_in_4bit": "load_in_4bit", "load_in_8bit": "load_in_8bit",
    "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
    "bnb_4bit_compute_dtype": "bnb_4bit_compute_dtype",
}  # fmt: skip
_OF_ADAPTER = {
    "r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save",
    "use_rslora": "use_rslora", "use_dora": "use_dora", "rank_pattern": "lora_rank_pattern",
    "alpha_pattern": "lora_alpha_pattern", "layers_to_transform": "lora_layers_to_transform",
    "exclude_modules": "lora_exclude_modules", "init_lora_weights": "lora_init",
}  # fmt: skip
_PEFT = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0}  # LoraConfig's defaults
_UNSLOTH = {"r": 16, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": ["all-linear"]}
_SAME = {  # arguments of adapters that say what model.lora does
    "bias": "none", "loftq_config": None, "finetune_language_layers": True, "fan_in_fan_out": False,
    "finetune_attention_modules": True, "finetune_mlp_modules": True,
    "finetune_vision_layers": False,
}  # fmt: skip
_AROUND = (  # a model: what it returns is the same model for us
    "prepare_model_for_kbit_training", "prepare", "to", "cuda", "train", "for_training",
    "bfloat16", "float", "half", "patch_model",
)  # fmt: skip


@dataclass(slots=True)
class Reading:
    """TRL's options that a program states, and what it has beside them."""

    options: dict[str, Any] = field(default_factory=dict[str, Any])
    lost: list[Missing] = field(default_factory=list[Missing])
    needless: list[Missing] = field(default_factory=list[Missing])
    says: Callable[[Any], bool] = lambda _: False  # whether only the command line gives a value

    def put(self, name: str, value: Any) -> None:
        """An option; one that cannot be read is lost, with its line and text."""
        try:
            self.options[name] = checked(name, plain(value))
        except ValueError:
            self.lose(name, value)

    def lose(self, name: str, value: Any, why: str = _RUN) -> None:
        """What the recipe does not have, unless the command line says it."""
        if not self.says(value):
            self.lost.append(Missing(name, text_of(value), f"{place(value)}{why}"))

    def spare(self, name: str, value: Any, why: str) -> None:
        """What a recipe does not need."""
        self.needless.append(Missing(name, text_of(value), why))


def text_of(value: Any) -> Any:
    """What the program says, for people: the value itself where it is a literal."""
    match value:
        case Unread() | Built():
            return value.text
        case Imported() | Defined() | DefinedClass():
            return value.name
        case list():
            return [text_of(inner) for inner in cast(list[Any], value)]
        case dict():
            return {key: text_of(inner) for key, inner in cast(dict[Any, Any], value).items()}
        case _:
            return value


def place(value: Any) -> str:
    """Where the program has it: "line 12: "; "" for a literal."""
    if isinstance(value, list) and value:
        return place(cast(list[Any], value)[0])
    line = getattr(value, "line", 0)
    return f"line {line}: " if line else ""


def plain(value: Any) -> Any:
    """A value as a flag has it: torch.bfloat16 is "bfloat16". Raises ValueError for one that is not
    read.
    """
    if isinstance(value, list):
        return [plain(inner) for inner in cast(list[Any], value)]
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in cast(dict[str, Any], value).items()}
    if isinstance(value, Imported) and value.name.partition(".")[0] in _NAMED:
        word = value.name.rpartition(".")[2]
        return word.lower() if word.isupper() else word
    if isinstance(value, Built) and value.name == "torch.dtype" and value.args:
        return plain(value.args[0])
    if not is_literal(value):
        raise ValueError
    return value


def path_of(value: Any) -> str | None:
    """The name that a model or a tokenizer is loaded from; None where it cannot be read."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Built):
        return None
    if value.short == "from_pretrained":
        named = (value.kwargs.get(name) for name in ("pretrained_model_name_or_path", "model_name"))
        loaded = value.args[0] if value.args else next(filter(None, named), None)
        return path_of(loaded)
    if value.name == "[]":
        return path_of(value.base)
    inner = value.base if value.name.startswith(".") else next(iter(value.args), None)
    around = (*_AROUND, "get_peft_model", "get_chat_template", "setup_chat_format")
    named = value.kwargs.get("tokenizer", value.kwargs.get("model"))
    return path_of(named if inner is None else inner) if value.short in around else None


def put_model(reading: Reading, value: Any, option: str = "model_name_or_path") -> None:
    """The model that is trained, with what it is loaded with."""
    if isinstance(value, str):
        _named(reading, value, option)
        return
    if not isinstance(value, Built):
        reading.lose("model", value)
        return
    inner = value.base if value.name.startswith((".", "[]")) else next(iter(value.args), None)
    if value.short == "get_peft_model":
        unsloth = "peft_config" not in value.kwargs and len(value.args) < 2
        inner = value.kwargs.get("model", inner)
        put_model(reading, inner, option)
        config = value.kwargs.get("peft_config", value.args[1] if len(value.args) > 1 else None)
        if unsloth:
            _put_adapter(reading, value.kwargs, _UNSLOTH)
        else:
            put_adapter(reading, config)
    elif value.short == "from_pretrained":
        _loaded(reading, value, option)
    elif value.name == "[]" or value.short in _AROUND:
        put_model(reading, inner, option)
    elif value.short == "setup_chat_format":
        put_model(reading, value.kwargs.get("model", inner), option)
        reading.options["chat_template_path"] = "chatml"
    else:
        reading.lose("model", value)


def _named(reading: Reading, path: str, option: str) -> None:
    reading.put(option, path)
    if path.endswith("-bnb-4bit"):
        reading.lose("model", path, "its weights are stored in four bits: name the model that they "
                     "were made from, and model.quantize makes them here")  # fmt: skip


def _loaded(reading: Reading, value: Built, option: str) -> None:
    kind = value.name.split(".")[-2] if "." in value.name else ""
    if "Peft" in kind:
        why = "a run starts with an adapter of its own: merge this one (postgrad merge), or load "
        reading.lose("model", value, f"{why}its base")
        if len(value.args) > 1:  # PeftModel.from_pretrained(base, adapter)
            put_model(reading, value.args[0], option)
        return
    path = path_of(value)
    if path is not None:
        _named(reading, path, option)
    else:
        reading.lose("model", value.args[0] if value.args else value)
    put_loading(reading, value.kwargs)
    of_config = reading.options.keys() & {"max_length", "max_seq_length"}
    if "unsloth" in value.name and "max_seq_length" in value.kwargs and not of_config:
        reading.put("max_length", value.kwargs["max_seq_length"])
    if value.name.startswith("unsloth") and value.kwargs.get("load_in_4bit", True) is True:
        reading.options["load_in_4bit"] = value.kwargs.get("full_finetuning") is not True


def put_loading(reading: Reading, kwargs: Mapping[str, Any]) -> None:
    """What a model is loaded with: arguments of from_pretrained, or model_init_kwargs."""
    for name, value in kwargs.items():
        if name == "use_gradient_checkpointing":
            reading.options.setdefault("gradient_checkpointing", value is not False)
        elif value in (None, False) or name in _NOTHING:
            continue
        elif name == "quantization_config":
            put_bits(reading, value)
        elif name in _OF_MODEL:
            reading.put(_OF_MODEL[name], value)
        elif not name.startswith("config."):
            reading.lose(name, value, "an argument of the model, not in the recipe")


def put_bits(reading: Reading, value: Any) -> None:
    """What BitsAndBytesConfig says of weights in four bits."""
    if not isinstance(value, Built) or value.short != "BitsAndBytesConfig":
        why = "weights are in 16 or 32 bits, or in four" if isinstance(value, Built) else _RUN
        reading.lose("quantization_config", value, why)
        return
    for name, inner in value.kwargs.items():
        if name in _OF_BITS:
            reading.put(_OF_BITS[name], inner)
        else:
            reading.lose(name, inner, "an argument of BitsAndBytesConfig, not in the recipe")


def put_adapter(reading: Reading, value: Any) -> None:
    """LoraConfig; the other kinds of PEFT are not here."""
    if value is None:
        return
    if not isinstance(value, Built) or value.short != "LoraConfig":
        reading.lose("peft_config", value, "model.lora is the one kind of adapter"
                     if isinstance(value, Built) else _RUN)  # fmt: skip
        return
    _put_adapter(reading, value.kwargs, _PEFT)


def _put_adapter(
    reading: Reading, kwargs: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:  # fmt: skip
    reading.put("use_peft", True)
    for name, value in {**defaults, **kwargs}.items():
        if name in _OF_ADAPTER:
            if value is not None:
                reading.put(_OF_ADAPTER[name], value)
        elif name == "use_gradient_checkpointing":
            reading.options.setdefault("gradient_checkpointing", value is not False)
        elif name not in _NOTHING and value != _SAME.get(name, False):
            reading.lose(name, value, "an argument of the adapter that model.lora does not have")


def put_rewards(reading: Reading, value: Any) -> None:
    """reward_funcs: functions of TRL and of the program, and reward models by their names."""
    listed = cast(list[Any], value) if isinstance(value, list) else [value]
    names: list[Any] = []
    weights: list[Any] = []
    stated = reading.options.get("reward_weights")
    for number, function in enumerate(listed):
        weight = stated[number] if isinstance(stated, list) and number < len(stated) else 1.0
        if (model := path_of(function)) is not None:
            if "reward_model_name_or_path" in reading.options:
                reading.lose("reward_funcs", function, "a run has one reward model")
                continue
            reading.put("reward_model_name_or_path", model)
            weights.insert(0, weight)
        elif (entry := _reward(reading, function)) is not None:
            names.append(entry)
            weights.append(weight)
    if names:
        reading.options["reward_funcs"] = names
    if stated is not None:
        reading.options["reward_weights"] = weights


def _reward(reading: Reading, function: Any) -> Any:
    """A function of reward as an entry of `reward_funcs`: its name, or a table with what it is
    called with.
    """
    match function:
        case Defined(name=name):
            return f"my_rewards.{'score' if name == 'lambda' else name}"
        case DefinedClass(name=name) | Built(subclass=name) if name:
            return f"my_rewards.{name}"
        case Imported(name=name):
            return _function(name)
        case Built(name=name, args=[Defined() | Imported() as inner]) if name.endswith("partial"):
            entry = _reward(reading, inner)
            knobs = {key: knob for key, knob in function.kwargs.items() if is_literal(knob)}
            return {**entry, **knobs} if isinstance(entry, dict) else {"name": entry, **knobs}
        case Built(name=name, args=args, kwargs=kwargs) if name[:1].isalpha():
            entry = _function(name)
            named = {**dict(zip(MADE_FROM.get(entry, ()), args, strict=False)), **kwargs}
            if len(named) == len(args) + len(kwargs) and is_literal(named):
                return {"name": entry, **named}
            reading.lose("reward_funcs", function, "what it is called with is not in the recipe")
            return entry
        case _:
            reading.lose("reward_funcs", function)
            return None


def _function(name: str) -> str:
    """A function of TRL by its name alone, another one with its module."""
    module, _, function = name.rpartition(".")
    if module and not name.startswith("trl."):
        return name
    return function if function in FUNCTIONS else f"my_rewards.{function}"
