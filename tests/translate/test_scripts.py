"""Scripts with several commands, within Slurm and within other shells: none goes without a word."""

from pathlib import Path

import pytest

from postgrad.cli.main import main
from postgrad.core.errors import UsageError
from postgrad.translate.launch import devices, slurm_job
from postgrad.translate.shell import commands, named
from postgrad.translate.translate import translate

ITERATED = """
set -x
checkSuccess() {
   if [[ $? != 0 ]]; then
      exit 1
   fi
}
mkdir -p ckpt
for round in 1 2; do
   python -m openrlhf.cli.batch_inference --eval_task generate_vllm --pretrain m
   checkSuccess "GENERATE"
   deepspeed --num_gpus 2 --module openrlhf.cli.batch_inference --eval_task rm --pretrain r
   deepspeed --num_gpus 2 --module openrlhf.cli.train_sft --pretrain m --dataset rows \\
      --max_samples 100
   echo openrlhf.cli.train_sft
   python -m openrlhf.cli.train_dpo --pretrain m --dataset pairs
done
"""
SLURM = """#!/bin/bash
#SBATCH --job-name=x
#SBATCH -N 2                 # machines
#SBATCH --gpus-per-node=4
GPUS=${SLURM_GPUS_PER_NODE}
export ARGS="-m openrlhf.cli.train_sft --pretrain m --dataset d --max_samples 100"
srun --container-image="img" bash -c "cd /work; pip install . ; torchrun \\
  --nproc_per_node $GPUS --nnodes $SLURM_NNODES --node_rank $SLURM_PROCID $ARGS" &>> log
"""


def test_every_command_of_a_script_is_told(tmp_path: Path) -> None:
    path = tmp_path / "iterated.sh"
    path.write_text(ITERATED, "utf-8")
    translation = translate("openrlhf", [str(path)])
    assert translation.recipe["job"] == "sft"
    notes = "\n".join(translation.draft.notes)
    assert "Commands 1, 2 of the script: batch_inference is not in this recipe: it writes" in notes
    assert "Command 4 of the script, train_dpo, is a run of its own" in notes
    assert notes.endswith("not in the recipe: set, exit, mkdir, echo.")


def test_another_command_of_a_script_is_translated_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "iterated.sh"
    path.write_text(ITERATED, "utf-8")
    assert main(["translate", "openrlhf", str(path), "--command", "4"]) == 0
    assert 'job = "preference"' in capsys.readouterr().out
    with pytest.raises(UsageError, match="batch_inference: it writes answers or scores"):
        translate("openrlhf", [str(path)], command=1)
    with pytest.raises(UsageError, match="--command 5: the source has 1 batch_inference, 2 batch"):
        translate("openrlhf", [str(path)], command=5)


def test_a_script_that_trains_nothing_says_what_stands_for_it_here(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python -m openrlhf.cli.serve_rm --pretrain m\n", "utf-8")
    with pytest.raises(UsageError, match="serve_rm: postgrad serve-reward answers over HTTP"):
        translate("openrlhf", [str(path)])
    path.write_text("mkdir a\nray start --head\n", "utf-8")
    with pytest.raises(UsageError, match=r"no training command .*\(its commands: mkdir, ray start"):
        translate("openrlhf", [str(path)])


def test_names_of_commands_are_programs_without_keywords_and_assignments() -> None:
    script = (
        "if [ -f a ]; then\nX=1 pip install b > log\nfi\nuv run python prepare.py --x 1\n"
        "make all && git clone c | tee d; sleep 3\nexport PATH=a:$PATH\nnohup ray start &\n"
    )
    assert named(commands(script)) == [
        "pip install", "uv prepare.py", "make", "git clone", "tee", "sleep", "ray start",
    ]  # fmt: skip


def test_a_run_within_slurm_has_the_devices_that_it_asks_for(tmp_path: Path) -> None:
    path = tmp_path / "job.slurm"
    path.write_text(SLURM, "utf-8")
    translation = translate("openrlhf", [str(path)])
    assert translation.recipe["learner"]["ranks"] == 8
    assert translation.recipe["cluster"]["policy"] == {"machines": 2}
    assert translation.recipe["model"]["path"] == "m"


@pytest.mark.parametrize(
    ("head", "wanted"),
    [
        ("#SBATCH -N 2", {"SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2"}),
        ("#SBATCH --nodes=2 --gpus=16\n", {
            "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS": "16",
            "SLURM_GPUS_PER_NODE": "8", "SLURM_GPUS_ON_NODE": "8"}),
        ("#SBATCH --gres=gpu:a100:4", {"SLURM_GPUS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "4"}),
        ("#SBATCH -n8\n#SBATCH --ntasks-per-node=4", {
            "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}),
        ("#SBATCH --nodes={ nodes }\n# SBATCH -N 3\necho -N 4", {}),
    ],
)  # fmt: skip
def test_slurms_variables_follow_from_a_scripts_head(head: str, wanted: dict[str, str]) -> None:
    assert slurm_job(head) == wanted


@pytest.mark.parametrize(
    ("launcher", "count"),
    [
        ("srun -N 2 --ntasks-per-node 8 python", 16),
        ("srun --ntasks=4 python", 4),
        ("srun python", 6),  # as the job
        ("srun -n 1 torchrun --nproc_per_node 8", 8),
    ],
)
def test_srun_starts_a_process_for_each_task(launcher: str, count: int) -> None:
    assert devices(launcher.split(), {}, {"SLURM_NTASKS": "6"}) == count


def test_options_of_a_launcher_that_nothing_reads_are_named(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "accelerate launch --num_processes 2 --mixed_precision bf16 --dynamo_mode x "
        "trl/scripts/sft.py --model_name_or_path m --dataset_name d",
        "utf-8",
    )
    translation = translate("trl", [str(path)])
    note = "options of the launcher, not in the recipe: mixed_precision, dynamo_mode"
    assert note in translation.draft.notes
    assert translation.recipe["learner"]["ranks"] == 2


def test_a_sourced_script_gives_its_variables_and_not_its_commands(tmp_path: Path) -> None:
    (tmp_path / "settings.sh").write_text("MODEL=org/a\ntrl dpo --seed 3\n", "utf-8")
    path = tmp_path / "run.sh"
    path.write_text("source ./settings.sh now\ntrl sft --model_name_or_path $MODEL "
                    "--dataset_name d", "utf-8")  # fmt: skip
    translation = translate("trl", [str(path)])
    assert (translation.recipe["job"], translation.recipe["model"]["path"]) == ("sft", "org/a")


def test_a_script_that_sources_itself_ends(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("source ./run.sh\ntrl sft\n", "utf-8")
    with pytest.raises(UsageError, match="scripts within scripts"):
        translate("trl", [str(path)])


def test_a_path_that_a_script_extends_is_no_loop() -> None:
    assert commands("export PATH=/a:$PATH\nrun $PATH") == [["run", "/a:"]]
    assert commands('P="${P}:b"\nrun $P')[-1] == ["run", ":b"]
