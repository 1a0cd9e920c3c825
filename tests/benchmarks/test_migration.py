"""The counts of benchmarks/migration.py on a checkout that is made here."""

import json
from pathlib import Path

import pytest

from benchmarks.migration import count, main

SCRIPT = """
python -m openrlhf.cli.train_sft --pretrain m --dataset d --max_samples 9 --packing_samples \\
   --flash_attn --lr_scheduler constant --nonsense 3
python -m openrlhf.cli.batch_inference --pretrain m
python -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d --data.image_key images
python -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2-VL-2B --prompt_data d
"""
PAGE = """
```bash
$ trl sft --model_name_or_path m --dataset_name d \\
    --use_liger_kernel
```
```python
trl = 3
```
"""


def test_each_flag_of_a_command_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT, "utf-8")
    (tmp_path / "other.sh").write_text("mkdir a", "utf-8")
    main(["openrlhf", str(tmp_path), "--list", "lost", "images"])
    first, *listed = capsys.readouterr().out.splitlines()
    assert json.loads(first) == {
        "sources": 1, "recipes": 2, "images": 1, "another job": 1, "flags": 0, "unreadable": 0,
        "incomplete": 0,
        "carried": 7, "not needed": 1, "lost": 1, "unknown": 1, "distinct flags": 9,
    }  # fmt: skip
    assert listed[0] == "lost:"
    assert "1 ds.flash_attn: model.attention chooses" in listed[1]
    assert "run.sh: --pretrain 'Qwen/Qwen2-VL-2B'" in listed[-1]


def test_a_flag_has_the_reason_of_the_source_where_it_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same flag may be as here in another source."""
    call = "python -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d --vllm_num_engines 1"
    for number, value in enumerate(("True", "False", "True")):
        (tmp_path / f"{number}.sh").write_text(f"{call} --enable_prefix_caching {value}", "utf-8")
    main(["openrlhf", str(tmp_path), "--list", "lost", "not needed"])
    listed = capsys.readouterr().out.splitlines()
    assert "    1 vllm.enable_prefix_caching: it is always on with vLLM" in listed
    assert "    2 vllm.enable_prefix_caching: as here" in listed


def test_commands_on_pages_and_in_docstrings_count(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(PAGE, "utf-8")
    scripts = tmp_path / "examples" / "scripts"
    scripts.mkdir(parents=True)
    text = "Run it so:\n\n# first\naccelerate launch examples/scripts/dpo.py --beta 0.1\n"
    (scripts / "dpo.py").write_text(f'"""{text}"""\n', "utf-8")
    counted = count("trl", tmp_path)
    assert counted.sources == counted.commands == 2
    assert dict(counted.flags["carried"]) == {
        "model_name_or_path": 1, "dataset_name": 1, "beta": 1,
    }  # fmt: skip
    assert dict(counted.flags["lost"]) == {"use_liger_kernel": 1}
    assert len(counted.refused["incomplete"]) == 1  # the example names neither model nor data


PROGRAMS = """
```python
from trl import SFTTrainer
config = SFTConfig(max_steps=5, run_name="a", tf32=True)
SFTTrainer("m", train_dataset=load_dataset("d"), args=config)
```
> ```python
> print("no trainer")
> ```
```python
NashMDTrainer("m")
```
```python
SFTTrainer(model=model, ...)
```
"""


def test_python_programs_of_pages_examples_and_notebooks_count(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(PROGRAMS, "utf-8")
    scripts = tmp_path / "examples"
    scripts.mkdir()
    typed = "args = HfArgumentParser(SFTConfig).parse_args()\nSFTTrainer(args.model, args)\n"
    (scripts / "flags.py").write_text(typed, "utf-8")
    cells = [{"cell_type": "code", "source": ["SFTTrainer('m', train_dataset=rows())"]}]
    (scripts / "a.ipynb").write_text(json.dumps({"cells": cells}), "utf-8")
    counted = count("trl", tmp_path, of_programs=True)
    assert {name: len(texts) for name, texts in counted.refused.items()} == {
        "images": 0, "another job": 1, "flags": 1, "unreadable": 1, "incomplete": 1,
    }  # fmt: skip
    assert counted.commands == 2
    assert dict(counted.flags["carried"]) == {
        "model_name_or_path": 2,
        "max_steps": 1,
        "datasets": 1,
    }
    assert dict(counted.flags["not needed"]) == {"run_name": 1}
    assert dict(counted.flags["lost"]) == {"tf32": 1, "train_dataset": 1}


def test_configs_count_with_what_they_inherit(tmp_path: Path) -> None:
    folder = tmp_path / "examples"
    folder.mkdir()
    (folder / "base.yaml").write_text(
        "grpo: { num_prompts_per_step: 2, val_at_end: true }\n"
        "policy: { model_name: m, nonsense: 1, hf_config_overrides: { a: 1 } }\n",
        "utf-8",
    )
    (folder / "own.yaml").write_text("defaults: base.yaml\ngrpo: { seed: 3 }\n", "utf-8")
    (folder / "puzzle.yaml").write_text(
        "defaults: base.yaml\nenv: { sliding_puzzle_game: { cfg: { max_moves: 3 } } }\n", "utf-8"
    )
    (folder / "sft.yaml").write_text("sft: { seed: 3 }\n", "utf-8")
    counted = count("nemo-rl", tmp_path)
    assert (counted.sources, counted.commands) == (3, 2)
    assert dict(counted.flags["carried"]) == {
        "grpo.num_prompts_per_step": 2, "policy.model_name": 2, "grpo.seed": 1,
    }  # fmt: skip
    # these configs name no validation data, so that nothing is evaluated at the end
    assert dict(counted.flags["lost"]) == {"policy.hf_config_overrides.a": 2, "grpo.val_at_end": 2}
    assert dict(counted.flags["unknown"]) == {"policy.nonsense": 2}
    assert [name.split(":")[0] for name in counted.refused["another job"]] == [
        "examples/puzzle.yaml"
    ]
