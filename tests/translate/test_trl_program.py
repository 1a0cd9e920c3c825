"""Python programs that train with TRL, and those that do not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from postgrad.cli.main import main
from postgrad.core.errors import UsageError
from postgrad.translate.translate import Translation, sources, translate

SFT = "SFTTrainer(model='m', train_dataset=load_dataset('org/rows'), {})"


@pytest.fixture
def program(tmp_path: Path) -> Any:
    """Writes a program and translates it, with words behind it."""

    def written(text: str, *words: str, command: int | None = None) -> Translation:
        path = tmp_path / "train.py"
        path.write_text(text, "utf-8")
        return translate("trl", [str(path), *words], command=command)

    return written


def lost(translation: Translation) -> dict[str, tuple[Any, str]]:
    """Options without counterpart: name -> value, reason."""
    return {option.name: (option.value, option.why) for option in translation.draft.missing}


@pytest.mark.parametrize(
    ("trainer", "job", "algorithm"),
    [
        ("SFTTrainer", "sft", "sft"), ("DPOTrainer", "preference", "dpo"),
        ("KTOTrainer", "preference", "kto"), ("ORPOTrainer", "preference", "orpo"),
        ("CPOTrainer", "preference", "cpo"), ("RewardTrainer", "reward", "bradley_terry"),
        ("GRPOTrainer", "rl", "grpo"), ("RLOOTrainer", "rl", "rloo"),
        ("OnlineDPOTrainer", "rl", "online_dpo"), ("UnslothTrainer", "sft", "sft"),
        ("PRMTrainer", "reward", "process_reward"), ("GMPOTrainer", "rl", "gmpo"),
        ("AsyncGRPOTrainer", "rl", "grpo"), ("SDFTTrainer", "rl", "on_policy_distillation"),
        ("SDPOTrainer", "rl", "on_policy_distillation"),
    ],
)  # fmt: skip
def test_each_trainer_is_a_job(program: Any, trainer: str, job: str, algorithm: str) -> None:
    translation = program(
        f"from trl import *\n{trainer}('m', train_dataset=load_dataset('org/rows'))"
    )
    assert translation.problem is None
    assert (translation.recipe["job"], translation.recipe["algorithm"]["type"]) == (job, algorithm)
    assert translation.recipe["model"]["path"] == "m"
    assert translation.recipe["data"]["path"] == "org/rows"


@pytest.mark.parametrize("trainer", ["DistillationTrainer", "GKDTrainer", "MiniLLMTrainer"])
def test_a_teacher_is_read_by_its_name_or_its_model(program: Any, trainer: str) -> None:
    rows = "train_dataset=load_dataset('d')"
    named = program(f"{trainer}('m', teacher_model='t', {rows})")
    placed = program(f"{trainer}('m', AutoModelForCausalLM.from_pretrained('t'), {rows})")
    for translation in (named, placed):
        assert translation.problem is None
        assert translation.recipe["teacher"]["model"]["path"] == "t"


def test_arguments_by_position_are_the_trainer_s(program: Any) -> None:
    dpo = program("DPOTrainer('m', 'r', DPOConfig(beta=0.3), None, load_dataset('d'))")
    assert dpo.recipe["algorithm"]["beta"] == 0.3
    assert dpo.recipe["reference"]["model"]["path"] == "r"
    assert dpo.recipe["data"]["path"] == "d"
    ppo = program(
        "PPOTrainer(PPOConfig('out', gamma=0.9), tok, AutoModelForCausalLM.from_pretrained('m'), "
        "None, AutoModelForSequenceClassification.from_pretrained('rm'), load_dataset('d'))"
    )
    assert ppo.recipe["model"]["path"] == "m"
    assert ppo.recipe["reward_model"]["model"]["path"] == "rm"
    assert ppo.recipe["run_dir"] == "out"


def test_fields_of_a_config_are_flags_of_the_same_name(program: Any) -> None:
    text = (
        "import torch\nfrom transformers import TrainingArguments, IntervalStrategy\n"
        "args = TrainingArguments(save_strategy=IntervalStrategy.EPOCH, warmup_ratio=0.1, "
        "optim='adamw_8bit', model_init_kwargs={'dtype': torch.float32, 'revision': 'v1'})\n"
    )
    translation = program(
        text + SFT.format("args=args, max_seq_length=77, dataset_text_field='body'")
    )
    assert translation.recipe["checkpoint"]["save_epochs"] == 1
    assert translation.recipe["learner"]["warmup_ratio"] == 0.1
    assert translation.recipe["learner"]["optimizer_state"] == "8bit"
    assert translation.recipe["model"]["revision"] == "v1"
    assert (translation.recipe["data"]["max_len"], translation.recipe["data"]["text"]) == (
        77,
        "body",
    )
    assert lost(translation) == {}


def test_what_only_a_run_would_give_is_listed_with_its_line_and_not_guessed(program: Any) -> None:
    text = "args = SFTConfig(learning_rate=best(), max_steps=5,\n  **extra)\n"
    translation = program(text + SFT.format("args=args, callbacks=[Stopper()], compute_metrics=f"))
    assert lost(translation)["learning_rate"][0] == "best()"
    assert lost(translation)["learning_rate"][1].startswith("line 1: only a run of the program")
    assert lost(translation)["**"] == ("extra", "line 2: options that the text does not give")
    assert lost(translation)["callbacks"][0] == "Stopper()"
    assert lost(translation)["compute_metrics"][1].startswith("line 3: ")
    assert "lr" in translation.text
    assert "learning_rate best(): line 1: only a run" in translation.text
    assert translation.recipe["steps"] == 5


def test_json_lists_what_a_program_loses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    config = "args=SFTConfig(learning_rate=best(), tf32=[1e999, f, C]), tools=[f, C, {'a': f}]"
    path.write_text("def f(): ...\nclass C: ...\n" + SFT.format(config), "utf-8")
    assert main(["translate", "trl", str(path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    values = {option["name"]: option["value"] for option in listed["missing"]}
    assert values["learning_rate"] == "best()"
    assert values["tools"] == ["f", "C", {"a": "f"}]
    assert listed["recipe"]["data"]["path"] == "org/rows"


def test_a_name_of_another_module_is_no_value(program: Any) -> None:
    text = "import config\nfrom settings import LR\n"
    options = "output_dir=config.OUTPUT_DIR, learning_rate=LR, lr_scheduler_type=config.cosine"
    translation = program(text + SFT.format(f"args=SFTConfig({options})"))
    assert lost(translation).keys() == {"output_dir", "learning_rate", "lr_scheduler_type"}
    assert lost(translation)["output_dir"][0] == "config.OUTPUT_DIR"
    assert translation.recipe["run_dir"] == "runs/sft"


def test_an_option_that_no_run_needs_is_not_lost_where_it_cannot_be_read(program: Any) -> None:
    translation = program(
        SFT.format("args=SFTConfig(run_name=f'run-{now()}', logging_steps=steps())")
    )
    assert lost(translation) == {}


def test_arguments_of_transformers_have_its_defaults(program: Any) -> None:
    plain = program(SFT.format("args=TrainingArguments(output_dir='a')")).recipe
    assert plain["learner"]["lr"] == 5e-5
    assert plain["model"]["dtype"] == "float32"
    assert plain["model"]["gradient_checkpointing"] is False
    stated = program(SFT.format("args=TrainingArguments(bf16=True, learning_rate=1e-4)")).recipe
    assert (stated["learner"]["lr"], stated["model"]["dtype"]) == (1e-4, "bfloat16")
    assert program(SFT.format("args=SFTConfig()")).recipe["learner"]["lr"] == 2e-5


def test_defaults_that_unsloth_changes_are_told(program: Any) -> None:
    load = (
        "from unsloth import FastLanguageModel\nmodel, tok = FastLanguageModel.from_pretrained('m')"
    )
    text = f"{load}\n" + SFT.format("").replace("'m'", "model")
    assert any("Unsloth changes defaults" in note for note in program(text).draft.notes)
    assert not any("Unsloth" in note for note in program(SFT.format("")).draft.notes)


def test_no_row_is_cut_where_the_config_says_so(program: Any) -> None:
    translation = program(SFT.format("args=SFTConfig(max_length=None)"))
    assert translation.problem is None
    assert translation.recipe["data"]["max_len"] == 4096
    assert "on_too_long" not in translation.recipe["data"]


def test_several_trainers_are_several_commands(program: Any) -> None:
    text = (
        "for beta in [0.1, 0.2]:\n"
        "    DPOTrainer('m', args=DPOConfig(beta=beta), train_dataset=load_dataset('d'))\n"
        + SFT.format("")
    )
    assert program(text).recipe["algorithm"]["beta"] == 0.1
    assert any("--command 2" in note for note in program(text).draft.notes)
    assert program(text, command=2).recipe["algorithm"]["beta"] == 0.2
    assert program(text, command=3).recipe["job"] == "sft"


def test_a_class_made_from_a_trainer_or_a_config_counts_as_it(program: Any) -> None:
    text = (
        "from trl import GRPOConfig, GRPOTrainer\nclass Mine(GRPOTrainer):\n"
        "    def compute_loss(self): ...\n@dataclass\nclass Args(GRPOConfig):\n"
        "    learning_rate: float = 3e-6\n    mine: int = 1\n"
        "Mine('m', f, args=Args(beta=0.5), train_dataset=load_dataset('d'))"
    )
    translation = program(text)
    assert translation.recipe["learner"]["lr"] == 3e-6
    assert translation.recipe["algorithm"]["kl_coef"] == 0.5
    assert lost(translation)["trainer"][0] == "Mine"
    assert "not an option" in lost(translation)["mine"][1]


def test_what_happens_to_the_trainer_later_counts_too(program: Any) -> None:
    text = (
        "trainer = " + SFT.format("") + "\ntrainer.add_callback(EarlyStoppingCallback(3))\n"
        "trainer.add_callback(RichProgressCallback())\n"
        "trainer = train_on_responses_only(trainer, instruction_part='a', response_part='b')\n"
        "trainer.train(resume_from_checkpoint=True)\n"
    )
    translation = program(text)
    assert lost(translation)["callbacks"][0] == "EarlyStoppingCallback(3)"
    assert translation.recipe["checkpoint"]["load_checkpoint"] is True
    assert (
        "algorithm",
        "type",
    ) not in translation.draft.comments  # there too answers alone are trained


def test_answers_alone_are_trained_on_where_rows_are_one_text(program: Any) -> None:
    text = SFT.format("args=SFTConfig(dataset_text_field='text')")
    assert program(text).recipe["data"]["text"] == "text"
    translation = program(f"trainer = {text}\ntrain_on_responses_only(trainer)")
    assert "text" not in translation.recipe["data"]
    assert "data.map return messages" in lost(translation)["dataset_text_field"][1]


def test_a_program_that_loads_a_model_for_images_has_images(program: Any) -> None:
    load = "model, tok = FastVisionModel.from_pretrained('Qwen/Qwen3.5-4B')\n"
    translation = program(load + SFT.format("").replace("'m'", "model"))
    assert translation.recipe["data"]["images"] == "images"
    assert "freeze" not in translation.recipe["model"]
    with pytest.raises(UsageError, match=r"FastVisionModel.*: this run needs images"):
        program(load.replace("Qwen3.5", "Qwen2-VL") + SFT.format("").replace("'m'", "model"))


def test_a_world_for_an_agent_is_named_as_lost(program: Any) -> None:
    translation = program(
        "class World: ...\nGRPOTrainer('m', accuracy_reward, train_dataset=load_dataset('d'), "
        "tools=[f], environment_factory=World, rollout_func=g)"
    )
    assert {"tools", "environment_factory", "rollout_func"} <= lost(translation).keys()
    assert "docs/environments.md" in lost(translation)["tools"][1]
    assert translation.problem is None


def test_words_behind_a_program_win(program: Any) -> None:
    text = SFT.format("args=SFTConfig(learning_rate=1e-5, num_train_epochs=2)")
    translation = program(text, "--learning_rate", "3e-5", "--dataset_name", "other")
    assert translation.recipe["learner"]["lr"] == 3e-5
    assert translation.recipe["epochs"] == 2
    assert translation.recipe["data"]["path"] == "other"


def test_variables_before_a_program_are_set_when_it_begins(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    text = "import os\n" + SFT.format("args=SFTConfig(output_dir=os.environ.get('OUT', 'a'))")
    path.write_text(text, "utf-8")
    assert translate("trl", [str(path)]).recipe["run_dir"] == "a"
    assert translate("trl", ["OUT=b", str(path)]).recipe["run_dir"] == "b"


PARSED = """
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config
script_args, training_args, model_args = TrlParser(
    (ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
kwargs = dict(revision=model_args.model_revision, dtype=model_args.dtype)
if model_args.load_in_4bit:
    kwargs["quantization_config"] = bits()
training_args.model_init_kwargs = kwargs
training_args.packing = True
dataset = load_dataset(script_args.dataset_name or "org/rows", name=script_args.dataset_config)
SFTTrainer(
    model=model_args.model_name_or_path, args=training_args,
    train_dataset=dataset[script_args.dataset_train_split].map(change),
    eval_dataset=dataset["test"] if training_args.eval_strategy != "no" else None,
    peft_config=get_peft_config(model_args),
)
"""


def test_a_program_whose_settings_are_flags_wants_them_behind_it(program: Any) -> None:
    with pytest.raises(UsageError, match=r"come from the command line \(line 3\): put the flags"):
        program(PARSED)
    translation = program(PARSED, "--model_name_or_path", "m", "--use_peft", "--lora_r", "4")
    assert translation.problem is None
    assert translation.recipe["model"]["path"] == "m"
    assert translation.recipe["model"]["lora"]["rank"] == 4
    assert translation.recipe["data"] == {
        "path": "org/rows", "split": "train", "map": "my_rows:row", "max_len": 1024,
        "on_too_long": "truncate",
    }  # fmt: skip
    assert lost(translation) == {}


def test_a_config_file_behind_a_program_is_read(program: Any, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model_name_or_path: m\nlearning_rate: 7e-6\n", "utf-8")
    translation = program(PARSED, "--config", "a.yaml")
    assert translation.recipe["model"]["path"] == "m"
    assert translation.recipe["learner"]["lr"] == 7e-6


def test_trl_s_own_programs_are_their_flags(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "scripts"
    folder.mkdir(parents=True)
    (folder / "sft_vlm.py").write_text(PARSED, "utf-8")
    path = str(folder / "sft_vlm.py")
    translation = translate("trl", [path, "--model_name_or_path", "Qwen/Qwen2.5-VL-3B-Instruct",
                                    "--dataset_name", "d"])  # fmt: skip
    assert translation.recipe["data"]["path"] == "d"
    assert "map" not in translation.recipe["data"]
    with pytest.raises(UsageError, match="put the flags behind"):
        translate("trl", [path])
    (folder / "tpo.py").write_text("from trl.scripts import main\nmain()\n", "utf-8")
    with pytest.raises(UsageError, match="tpo: this trainer is not here"):
        translate("trl", [str(folder / "tpo.py")])


def test_a_program_of_yours_in_a_folder_called_scripts_is_read(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "sft.py").write_text(SFT.format("args=SFTConfig(max_steps=5)"), "utf-8")
    own_program = translate("trl", [str(tmp_path / "scripts" / "sft.py"), "--seed", "3"])
    assert (own_program.recipe["steps"], own_program.recipe["seed"]) == (5, 3)
    (tmp_path / "run.sh").write_text("python scripts/sft.py --seed 4", "utf-8")
    started = translate("trl", [str(tmp_path / "run.sh")])
    assert (started.recipe["steps"], started.recipe["seed"]) == (5, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print(1)\n", "the program calls no trainer of TRL; SFTTrainer"),
        ("from transformers import Trainer\nTrainer(model)\n",
         "no trainer of TRL, but transformers.Trainer in line 2"),
        ("from verl.trainer import SFTTrainer\nSFTTrainer('m')\n",
         "but verl.trainer.SFTTrainer in line 2"),
        ("x = [\n", "calls no trainer of TRL"),
        ("SFTTrainer(\n", "line 1 is not Python"),
        ("TPOTrainer('m', train_dataset=x)", "tpo: this trainer is not here"),
        ("LaterTrainer('m')", "LaterTrainer: not a program that this translator knows"),
        ("SFTTrainer('m')\n" * 60, "calls more than 50 trainers"),
        ("x = 1\n" * 200_000, "more than 1048576 bytes"),
    ],
)  # fmt: skip
def test_a_program_without_a_recipe_says_why(program: Any, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        program(text)


def test_bytes_that_are_no_program_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    for content, message in ((b"\xff\xfe", "line 1 is not UTF-8"), (b"SFTTrainer\0", "not Python")):
        path.write_bytes(content)
        assert main(["translate", "trl", str(path)]) == 2
        assert message in capsys.readouterr().err
    assert main(["translate", "trl", str(tmp_path / "none.py")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("system", ["openrlhf", "open-instruct", "verl", "prime-rl", "nemo-rl"])
def test_programs_of_other_systems_are_refused(system: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SFT.format(""), "utf-8")
    with pytest.raises(UsageError, match="of Python programs those of TRL alone are read"):
        translate(system, [str(path)])


def test_a_notebook_is_the_code_of_its_cells(tmp_path: Path) -> None:
    cells = [
        ("markdown", ["# SFTTrainer('x')"]),
        ("code", ["%%capture\n", "!pip install trl \\\n", "   peft\n", "import os"]),
        ("code", ["%%bash\n", "echo 'no Python'"]),
        ("code", ["if True:\n", "    !nvidia-smi\n", "model = 'm'"]),
        ("code", [SFT.format("").replace("'m'", "model")]),
    ]
    notebook = {"cells": [{"cell_type": kind, "source": lines} for kind, lines in cells]}
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(notebook), "utf-8")
    assert translate("trl", [str(path)]).recipe["model"]["path"] == "m"
    for text in ("[]", "{", '{"cells": [1]}', '{"cells": [{"cell_type": "code"}]}'):
        path.write_text(text, "utf-8")
        with pytest.raises(UsageError, match="is no notebook"):
            translate("trl", [str(path)])


def test_a_script_that_starts_a_program_says_how_many_devices_train(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SFT.format("args=SFTConfig(max_steps=5)"), "utf-8")
    (tmp_path / "prepare.py").write_text("print 'of another Python'\n", "utf-8")
    script = tmp_path / "run.sh"
    script.write_text(
        "LR=3e-5\npython prepare.py\npython absent.py\n"
        "accelerate launch --num_processes 4 train.py --learning_rate $LR\n",
        "utf-8",
    )
    translation = translate("trl", [str(script), "--max_steps", "7"])
    assert translation.recipe["learner"]["ranks"] == 4
    assert translation.recipe["learner"]["lr"] == 3e-5
    assert translation.recipe["steps"] == 7
    assert "not in the recipe: python prepare.py, python absent.py." in "\n".join(
        translation.draft.notes
    )


def test_an_accelerator_s_config_of_the_program_says_how_state_is_divided(program: Any) -> None:
    translation = program(SFT.format("args=SFTConfig(deepspeed='ds_zero3.json')"))
    assert "one is assumed" in "\n".join(translation.draft.notes)
    assert "ZeRO stage" in lost(translation) or "sharding" in translation.recipe.get("learner", {})


TRAINERS = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "grpo": "GRPO"}
OF_ADAPTERS = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": None}


def as_program(trainer: str, options: dict[str, Any]) -> str:
    """The program that says what a command of TRL's says with flags."""
    options = {name.removeprefix("no_"): value if name[:3] != "no_" else False
               for name, value in options.items()}  # fmt: skip
    lora = {name.removeprefix("lora_") if name == "lora_r" else name: options.pop(name, default)
            for name, default in OF_ADAPTERS.items()}  # fmt: skip
    lora["target_modules"] = lora.pop("lora_target_modules")
    if isinstance(lora["target_modules"], list):
        lora["target_modules"] = [name.strip(", ") for name in lora["target_modules"]]
    arguments = {"model": repr(options.pop("model_name_or_path"))}
    rows = repr(options.pop("dataset_name"))
    arguments["train_dataset"] = f"load_dataset({rows})"
    if "eval_strategy" in options:
        arguments["eval_dataset"] = f"load_dataset({rows}, split='test')"
    if options.pop("use_peft", False):
        arguments["peft_config"] = f"LoraConfig(**{lora!r})"
    if options.pop("load_in_4bit", False):
        arguments["quantization_config"] = "BitsAndBytesConfig(load_in_4bit=True)"
    if "dtype" in options:
        options["model_init_kwargs"] = {"dtype": options.pop("dtype")}
    if "reward_funcs" in options:
        arguments["reward_funcs"] = f"[{', '.join(options.pop('reward_funcs'))}]"
    named = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return f"args = {trainer}Config(**{options!r})\n{trainer}Trainer(args=args, {named})"


@pytest.mark.parametrize("case", list(TRAINERS))
def test_a_program_becomes_the_recipe_of_the_same_flags(tmp_path: Path, case: str) -> None:
    source = Path(__file__).parent / "cases" / f"trl-{case}.sh"
    (command,) = sources("trl", [str(source)]).commands
    (tmp_path / "train.py").write_text(as_program(TRAINERS[case], dict(command.options)), "utf-8")
    launcher = re.sub(r"\S+/scripts/\w+\.py|trl kto", "train.py", source.read_text("utf-8"))
    script = tmp_path / "run.sh"
    script.write_text(launcher.partition("train.py")[0] + "train.py", "utf-8")
    by_flags, by_program = translate("trl", [str(source)]), translate("trl", [str(script)])
    assert by_program.recipe == by_flags.recipe
    assert lost(by_program) == lost(by_flags)
