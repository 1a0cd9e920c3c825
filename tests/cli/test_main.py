"""The commands as people type them: exit codes, one message, nothing lost."""

import json
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from helpers.terminal import Terminal
from postgrad import __version__
from postgrad.cli.main import main
from postgrad.recipe.load import load_recipe
from postgrad.tools import doctor

RECIPE = """
job = "sft"
run_dir = "RUN"
steps = 2

[model.init]
type = "qwen3"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1

[model.init.tokenizer]
kind = "characters"

[data]
path = "DATA"
max_len = 64

[batch]
train_batch_size = 2

[learner]
threads = 1
"""
RL = """
[[rewards]]
type = "gsm8k"

[algorithm]
type = "grpo"

[rollout]
max_new_tokens = 4
"""
ROWS = [{"question": f"1 + {i}?", "answer": f"#### {i + 1}"} for i in range(4)]


class Files:
    """A recipe and its data in a folder, and how to run commands on them."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self._capsys = capsys
        self.recipe = folder / "recipe.toml"
        self.data = folder / "rows.jsonl"
        self.write(RECIPE)
        self.data.write_text("\n".join(json.dumps(row) for row in ROWS), "utf-8")

    def write(self, recipe: str) -> None:
        text = recipe.replace("RUN", str(self.run_dir)).replace("DATA", str(self.data))
        self.recipe.write_text(text, "utf-8")

    def rl(self) -> None:
        """A recipe of RL with a batch that works."""
        text = RECIPE.replace('"sft"', '"rl"').replace(
            "train_batch_size = 2", "rollout_batch_size = 2"
        )
        self.write(text.replace("[learner]", f"{RL}\n[learner]"))

    def run(self, *words: str | Path) -> tuple[int, str, str]:
        """(exit code, standard output, standard error)."""
        code = main([str(word) for word in words])
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def refused(self, *words: str | Path, code: int = 2) -> str:
        """The one message of a command that fails."""
        exit_code, _, error = self.run(*words)
        assert exit_code == code
        assert error.startswith("postgrad: ")
        assert "Traceback" not in error
        return error


@pytest.fixture
def files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Files:
    return Files(tmp_path, capsys)


def test_help_and_version_need_no_recipe(files: Files) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    code, out, _ = files.run()
    assert code == 2
    assert "train" in out
    assert "doctor" in out


def test_a_file_that_rows_cannot_be_written_to_is_refused_before_anything_is_sampled(
    files: Files,
) -> None:
    words = ["generate", files.recipe, "--to", files.folder / "to", "--rows-to"]
    code, _, err = files.run(*words, "rows.csv")
    assert (code, err) == (2, "postgrad: rows.csv: rows are written as .jsonl or .parquet\n")
    _, _, err = files.run(*words, "rows.jsonl")
    assert "the recipe's model is a fresh one" in err  # the next that is wrong here


def test_a_run_its_checkpoints_its_export_and_its_evaluation(files: Files) -> None:
    files.rl()
    held_out = files.folder / "held_out.jsonl"
    held_out.write_text('{"question": "7 + 8?", "answer": "#### 15"}\n' * 4, "utf-8")
    text = files.recipe.read_text("utf-8")
    files.write(
        text + f'\n[eval]\npath = "{held_out}"\nmax_new_tokens = 4\nn_samples = 2\nmaj_at = [2]\n'
    )
    code, out, _ = files.run("train", files.recipe, "--json")
    assert code == 0
    assert json.loads(out)["steps"] == 2
    assert json.loads((files.run_dir / "summary.json").read_text("utf-8"))["updates"] == 2
    code, out, _ = files.run("checkpoints", files.run_dir, "--json")
    assert [
        (checkpoint["step"], checkpoint["complete"], checkpoint["latest"])
        for checkpoint in json.loads(out)
    ] == [(2, True, True)]
    to = files.folder / "model"
    code, out, _ = files.run("export", files.run_dir, "--to", to)
    assert code == 0
    assert (to / "model.safetensors").exists()
    code, out, _ = files.run("eval", files.recipe, "--model", to, "--against", to, "--json")
    report = json.loads(out)
    assert report["rows"] == 4
    assert report["failed"] == 0
    assert report["pass@k"] == {"1": report["accuracy"]}
    assert report["left_out@k"] == {"1": 0, "2": 0}
    assert report["maj@k"] == {"2": report["sets"][0]["maj@2"]}
    assert "maj@2" in report["comparison"][0]["metrics"]
    assert report["against"]["accuracy"] == report["accuracy"]


def test_json_leaves_nothing_else_on_standard_output(files: Files) -> None:
    code, out, error = files.run("train", files.recipe, "--json")
    assert code == 0
    assert out.count("\n") == 1
    assert "step 2/2" in error


def test_quiet_says_nothing(files: Files) -> None:
    assert files.run("train", files.recipe, "--quiet") == (0, "", "")


def test_quiet_and_json_leave_one_object_alone(files: Files) -> None:
    code, out, error = files.run("train", files.recipe, "--quiet", "--json")
    assert (code, error, out.count("\n")) == (0, "", 1)
    assert json.loads(out)["steps"] == 2


@pytest.mark.parametrize("command", ["train", "resume", "eval", "verify-resume"])
def test_every_long_command_can_be_quiet_and_speak_json(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    stdout = capsys.readouterr().out
    assert "--quiet" in stdout
    assert "--json" in stdout


def test_config_shows_every_default_and_loads_again(files: Files) -> None:
    code, out, _ = files.run("config", files.recipe, "--learner.lr", "0.25")
    resolved = json.loads(out)
    assert code == 0
    assert resolved["learner"]["lr"] == 0.25
    assert resolved["data"]["on_too_long"] == "drop"


def test_config_as_toml_is_a_recipe_with_the_same_values(files: Files) -> None:
    code, out, _ = files.run("config", files.recipe, "--toml")
    assert code == 0
    again = files.folder / "again.toml"
    again.write_text(out, "utf-8")
    assert load_recipe(again) == load_recipe(files.recipe)
    assert "a TOML file, not a folder" in files.refused("config", "quickstart", "--toml")


def test_new_writes_a_recipe_and_says_what_comes_next(files: Files) -> None:
    folder = files.folder / "mine"
    code, out, _ = files.run("new", folder, "--job", "preference")
    assert code == 0
    assert out.splitlines()[1:] == [
        f"  postgrad plan {folder}/recipe.toml",
        f"  postgrad train {folder}/recipe.toml",
    ]
    assert load_recipe(folder / "recipe.toml").job == "preference"
    assert "exists already" in files.refused("new", folder)


def test_shipped_recipes_are_listed_and_are_recipes_by_name(files: Files) -> None:
    code, out, _ = files.run("recipes", "--json")
    assert code == 0
    listed = json.loads(out)
    assert listed["quickstart"].startswith("SFT, then RL from a verifier")
    assert files.run("config", "gsm8k_sft", "--json")[0] == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_a_shells_script_completes_every_command_and_its_flags(files: Files, shell: str) -> None:
    code, out, _ = files.run("completion", shell)
    assert code == 0
    assert all(word in out for word in ("verify-resume", "postgrad", "dry-run", "kills"))


def test_batch_numbers_are_printed_with_their_units(files: Files) -> None:
    _, out, _ = files.run("train", files.recipe)
    assert re.search(r"train_batch_size +2  samples per update, over all ranks", out)
    assert re.search(r"micro_train_tokens +2048  tokens per replica", out)


def test_a_dry_run_tries_everything_and_leaves_nothing(files: Files) -> None:
    before = sorted(files.folder.rglob("*"))
    code, out, _ = files.run("train", files.recipe, "--dry-run", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["problems"] == []
    assert report["plan"]["fits"]
    assert {"rows", "train", "save", "load the checkpoint", "export"} <= {
        check["name"] for check in report["checks"] if check["ok"]
    }
    assert sorted(files.folder.rglob("*")) == before


def test_a_dry_run_that_finds_a_wrong_recipe_exits_with_2_and_says_it(files: Files) -> None:
    flags = ("--learner.lr", "1e-3", "--data.max_len", "2")
    code, out, _ = files.run("train", files.recipe, "--dry-run", *flags)
    assert code == 2
    assert "rows: " in out
    assert "no row of" in out


def test_doctor_says_what_a_run_would_choose(files: Files) -> None:
    code, out, _ = files.run("doctor", "--json")
    assert code == 0
    assert json.loads(out)["postgrad"] == __version__


@pytest.mark.parametrize(("capability", "noted"), [((7, 5), True), ((8, 0), False)])
def test_doctor_names_gpus_that_convert_bfloat16(
    capability: tuple[int, int], noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, answer in {
        "is_available": True, "device_count": 1, "mem_get_info": (0, 15 * 2**30),
        "get_device_name": "Tesla T4", "get_device_capability": capability,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *which, answer=answer: answer)
    table = dict(doctor.rows(doctor.examine()))
    assert table["CUDA devices"].startswith("Tesla T4, 15 GiB")
    assert ('model.dtype = "auto" is float32' in table["CUDA devices"]) == noted


def test_a_wrong_key_is_named_with_its_line_and_the_nearest(files: Files) -> None:
    files.write(RECIPE.replace("train_batch_size", "train_batchsize"))
    line = 1 + files.recipe.read_text("utf-8").splitlines().index("train_batchsize = 2")
    message = files.refused("train", files.recipe)
    assert f"recipe.toml:{line}: unknown key 'batch.train_batchsize'" in message
    assert "did you mean 'batch.train_batch_size'?" in message


def test_a_ratio_that_is_not_whole_names_the_values_that_work(files: Files) -> None:
    message = files.refused("train", files.recipe, "--batch.micro_train_batch_size", "3")
    assert "--batch.micro_train_batch_size 3" in message
    assert "micro_train_batch_size 2" in message


OWN = """
import numpy as np
from postgrad.algorithms.policy_gradient import PolicyGradient

class Raises(PolicyGradient):
    def advantages(self, rewards, group):
        return {}["level"]

class NaN(PolicyGradient):
    def advantages(self, rewards, group):
        return rewards * np.nan

class Short(PolicyGradient):
    def advantages(self, rewards, group):
        return rewards[:-1]

class PerToken(PolicyGradient):
    advantages = Short.advantages
    def token_advantages(self, inputs):
        return inputs.rewards
"""


def test_an_error_in_an_algorithm_of_ones_own_says_where(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(files.folder))
    (files.folder / "own_algorithm.py").write_text(OWN, "utf-8")
    files.rl()
    command = ("train", files.recipe, "--overwrite", "true", "--scoring.workers", "1")
    command = (*command, "--algorithm.type")
    message = files.refused(*command, "own_algorithm:Raises", code=1).splitlines()[-1]
    assert f"KeyError: 'level' ({files.folder / 'own_algorithm.py'}:7)" in message
    assert "report it" not in message
    message = files.refused(*command, "own_algorithm:NaN", code=1)
    assert "the algorithm's advantages are not finite at" in message
    message = files.refused(*command, "own_algorithm:Short", code=1)
    assert "Short.advantages gives 15 for 16 samples: one for each is needed" in message
    message = files.refused(*command, "own_algorithm:PerToken", code=1)
    assert "PerToken: the column 'advantages' of `credit` gives 16 for " in message


def test_a_missing_recipe_names_the_nearest_file(files: Files) -> None:
    message = files.refused("train", files.folder / "recipes.toml")
    assert f"did you mean {files.recipe}?" in message


def test_a_missing_data_file_is_named(files: Files) -> None:
    message = files.refused("train", files.recipe, "--data.path", files.folder / "no.jsonl")
    assert "no.jsonl: no such file" in message


def test_an_empty_dataset_is_named(files: Files) -> None:
    files.data.write_text("", "utf-8")
    assert f"{files.data} is empty" in files.refused("train", files.recipe)


def test_a_broken_line_is_named_with_its_number(files: Files) -> None:
    with files.data.open("a", encoding="utf-8") as data:
        data.write('\n{"question": "1 + 1?"')
    assert f"{files.data}:5: not JSON" in files.refused("train", files.recipe)


def test_a_row_without_the_column_is_named_with_the_nearest(files: Files) -> None:
    message = files.refused("train", files.recipe, "--data.prompt", "questions")
    assert f"{files.data}:1: row 0 has no column 'questions' (data.prompt)" in message
    assert "did you mean 'question'?" in message


def test_an_answer_that_no_verifier_can_read_is_named_with_its_row(files: Files) -> None:
    files.rl()
    with files.data.open("a", encoding="utf-8") as data:
        data.write('\n{"question": "1 + 1?", "answer": "two"}')
    message = files.refused("train", files.recipe)
    assert "1 of 5 rows have a reference answer that a verifier cannot read" in message
    assert "row 4 of rows.jsonl" in message
    assert 'leave them out with data.on_unreadable = "drop"' in message


def test_rows_whose_answer_no_verifier_can_read_are_left_out_where_the_recipe_says_so(
    files: Files,
) -> None:
    files.rl()
    rows = files.data.read_text("utf-8").splitlines()
    bad = json.dumps({"question": "1 + 1?", "answer": "two"})
    files.data.write_text("\n".join([rows[0], bad, *rows[1:]]), "utf-8")
    flags = ["--data.on_unreadable", "drop"]
    assert files.run("train", files.recipe, *flags)[0] == 0
    events = (files.run_dir / "events.jsonl").read_text("utf-8").splitlines()
    data_events = [event for event in map(json.loads, events) if event["event"] == "data"]
    assert [(event["rows"], event["kept"], event["unreadable"]) for event in data_events] == [
        (5, 4, 1)
    ]
    samples = (files.run_dir / "samples.jsonl").read_text("utf-8").splitlines()
    assert {json.loads(line)["row"] for line in samples} <= {0, 2, 3, 4}
    few = files.refused(
        "train", files.recipe, *flags, "--data.max_lost_fraction", "0.1", "--overwrite", "true"
    )
    assert "1 of 5 rows are lost" in few


def test_a_template_that_cannot_mark_the_assistant_shows_the_row(files: Files) -> None:
    assert files.run("train", files.recipe, "--checkpoint.save_hf", "true")[0] == 0
    model = files.folder / "model"
    shutil.copytree(files.run_dir / "model", model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | upper }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "utf-8",
    )
    with files.data.open("a", encoding="utf-8") as data:
        data.write('\n{"question": "1 + 1?", "answer": "two"}')
    message = files.refused("train", files.recipe, "--overwrite", "true", "--model.path", model)
    assert f"{files.data}:5: the learned tokens of row 4 cannot be marked" in message
    assert "drops text of message 1: 'two'" in message


def test_a_prompt_over_the_limit_is_an_error_where_the_recipe_says_so(files: Files) -> None:
    files.rl()
    message = files.refused(
        "train", files.recipe, "--data.max_len", "16", "--data.on_too_long", "error"
    )
    assert f"{files.data}:1: the prompt of row 0 has" in message
    assert "the limit is 12" in message


def test_a_full_disk_is_told_before_anything_is_trained(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 5, 5))
    message = files.refused("train", files.recipe, code=1)
    assert "the disk is full" in message
    assert "--run_dir" in message


def test_a_directory_of_another_run_is_left_alone(files: Files) -> None:
    assert files.run("train", files.recipe, "--quiet")[0] == 0
    before = (files.run_dir / "metrics.jsonl").read_bytes()
    message = files.refused("train", files.recipe, "--learner.lr", "0.5")
    assert "already holds another run" in message
    assert "learner.lr: 1e-06 there, 0.5 here" in message
    assert "--overwrite true" in message
    assert (files.run_dir / "metrics.jsonl").read_bytes() == before
    assert files.run("train", files.recipe, "--learner.lr", "0.5", "--overwrite", "true")[0] == 0


def test_a_folder_with_other_files_is_no_run_directory(files: Files) -> None:
    files.run_dir.mkdir()
    (files.run_dir / "thesis.tex").write_text("years of work", "utf-8")
    message = files.refused("train", files.recipe, "--overwrite", "true")
    assert "holds other files (thesis.tex)" in message
    assert (files.run_dir / "thesis.tex").read_text("utf-8") == "years of work"


def test_resume_of_something_else_is_refused(files: Files) -> None:
    assert "is not a run directory" in files.refused("resume", files.folder)


def test_an_unknown_command_is_refused_with_the_nearest_one(files: Files) -> None:
    assert "no command is called 'trian': did you mean train?" in files.refused("trian", "x")
    assert "there are new, recipes, completion, train," in files.refused("--debug", "xyz")


def test_an_unknown_flag_of_a_command_without_overrides_is_refused(files: Files) -> None:
    assert "doctor has no argument '--what': see" in files.refused("doctor", "--what")


def test_a_model_that_bypasses_the_attention_interface_is_refused_by_name(files: Files) -> None:
    model = files.folder / "rwkv"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "rwkv"}', "utf-8")
    message = files.refused("train", files.recipe, "--model.path", model)
    assert "rwkv" in message


def test_debug_shows_the_traceback(files: Files) -> None:
    code, _, error = files.run("train", files.folder / "no.toml", "--debug")
    assert code == 2
    assert "Traceback" in error


def test_the_module_runs_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "postgrad", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"postgrad {__version__}"


def test_an_error_on_a_terminal_is_cut_at_words(tmp_path: Path) -> None:
    missing = tmp_path / "no such recipe.toml"
    command = [sys.executable, "-m", "postgrad", "config", str(missing), "--learner.lr", "1"]
    with Terminal(command, columns=40) as terminal:
        terminal.wait_for("no recipe at")
        lines = terminal.lines
    assert lines[0] == "postgrad: no recipe at"  # the path is longer than a line, and not cut


def test_a_model_that_is_not_there_is_told_with_its_own_key(files: Files) -> None:
    text = files.recipe.read_text("utf-8")
    files.recipe.write_text(
        text.replace('job = "sft"', 'job = "preference"')
        + f'\n[algorithm]\ntype = "dpo"\n\n[reference.model]\npath = "{files.folder}/none"\n',
        "utf-8",
    )
    message = files.refused("train", files.recipe)
    assert f"no model at {files.folder}/none: there is no such directory" in message
    assert "(reference.model.path)" in message


def test_a_value_that_is_no_text_is_named(files: Files) -> None:
    message = files.refused("train", files.recipe, "--data.path", "caf\udce9.jsonl")
    assert (
        "'caf\\udce9.jsonl' is no text in utf-8, the locale's encoding: set LC_ALL=C.UTF-8"
        in message
    )
