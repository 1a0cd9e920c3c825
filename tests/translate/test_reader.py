"""Reading of scripts and flags, without running anything."""

from pathlib import Path

import pytest

from postgrad.core.errors import UsageError
from postgrad.translate import trl
from postgrad.translate.launch import devices, flags
from postgrad.translate.reader import read
from postgrad.translate.shell import UNKNOWN, commands

SCRIPT = """
#!/bin/bash
# it's a comment: $(never run)
SIZE="0.6B"
export MODEL=Qwen/Qwen3-${SIZE}
NAME="${NAME:-run-${SIZE}-$(date +%s)}"
ARGS=(--one 1  # isn't two
      --two "a b")
ARGS+=(--three)
LAUNCH="python x.py \\
    --four 4"
for LOOP in 7 8; do
uv run $LAUNCH --loop $LOOP --model ${MODEL} --name "$NAME" "${ARGS[@]}" '--raw=$SIZE' > log.txt
"""


def test_variables_arrays_and_defaults_are_filled_in() -> None:
    (words,) = commands(SCRIPT)
    assert words == [
        "uv", "run", "python", "x.py", "--four", "4", "--loop", "7",
        "--model", "Qwen/Qwen3-0.6B", "--name", f"run-0.6B-{UNKNOWN}",
        "--one", "1", "--two", "a b", "--three",
        "--raw=$SIZE", ">", "log.txt",
    ]  # fmt: skip


def test_a_here_document_is_the_value_of_its_variable() -> None:
    text = "read -r -d '' ARGS <<END\nprog \\\n --a 1\nEND\nrun $ARGS\n"
    assert commands(text) == [["run", "prog", "--a", "1"]]


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("N=4\nB=$((N * 8))\nrun $B", "32"),
        ('N=4\nrun "--b=$(( ${N} * 2 ))"', "--b=8"),
        ("run '$((1 + 1))'", "$((1 + 1))"),
        ("N=$(nproc)\nrun $((N / 2))", UNKNOWN),
        ("run $((GPUS * 2))", UNKNOWN),  # which the script never sets
        ("M=org/Model-7B\nrun ${M##*/}", "Model-7B"),
        ("M=org/Model-7B\nrun ${M%-*}", "org/Model"),
        ("M=org/Model-7B\nrun ${M//[-]/_}", "${M//[-]/_}"),
        ("M=org/Model-7B\nrun ${M/Model/X}", "org/X-7B"),
        ("M=org/Model\nrun ${M,,}", "org/model"),
        ("M=abcdef\nrun ${M:1:3}", "bcd"),
        ("M=org/Model-7B\nrun $(basename $M -7B)", "Model"),
        ("run $(dirname /a/b/c)", "/a/b"),
        ("run $(basename $(pwd))", UNKNOWN),
        ("run $(echo a | tr a b)", UNKNOWN),
        ("E=\nrun ${E:-full} ", "full"),
        ('E=\nrun "${E-full}"', ""),
        ('P=\nrun "${P:+:x}"', ""),
        (': "${A:=0.6}"\nrun $A', "0.6"),
        ("X=(5 6 7)\nrun ${#X[@]}", "3"),
        ("X=(5 6 7)\nrun ${X[1]}", "6"),
        ("A=1\nA+=2\nrun $A", "12"),
        ("for i in $(seq 3 9); do\nrun $i", "3"),
        ("for i in {4..8}\ndo\nrun $i", "4"),
        ("for ((i=2; i<5; i++)); do\nrun $i", "2"),
        ("declare -i N=3\nrun $N", "3"),
    ],
)
def test_what_follows_from_the_script_alone_is_worked_out(script: str, word: str) -> None:
    assert commands(script)[-1] == ["run", word]


def test_exported_gpus_stand_before_every_command_after_them() -> None:
    script = "echo a\nexport CUDA_VISIBLE_DEVICES=0,1\necho b\nB=3\nCUDA_VISIBLE_DEVICES=2 echo c"
    set_once = "CUDA_VISIBLE_DEVICES=0,1"
    assert commands(script) == [
        ["echo", "a"], [set_once, "echo", "b"], [set_once, "CUDA_VISIBLE_DEVICES=2", "echo", "c"],
    ]  # fmt: skip


def test_a_value_that_doubles_without_end_is_refused() -> None:
    script = "A=aaaaaaaaaaaaaaaa\n" + 'A="$A$A"\n' * 60
    with pytest.raises(UsageError, match="refers to itself, or expands to too much"):
        commands(script)


def test_a_quote_that_never_ends_is_named() -> None:
    with pytest.raises(UsageError, match="ends within a quote"):
        commands('python x.py --name "a\n')


def test_a_script_may_end_within_a_continued_line() -> None:
    assert commands("python x.py \\\n    --a 1 \\") == [["python", "x.py", "--a", "1"]]
    assert commands("python x.py --a 1 \\\n") == [["python", "x.py", "--a", "1"]]


def test_flags_have_a_value_several_or_none() -> None:
    words = ["--a", "1", "--b=x", "--c", "0.5", "2", "--d-e", "--f", "-1", "--g", "5e-7"]
    expected = {"a": 1, "b": "x", "c": [0.5, 2], "d_e": True, "f": -1, "g": 5e-7}
    assert flags(words) == expected


@pytest.mark.parametrize(
    ("launcher", "count"),
    [
        ("accelerate launch --num_processes 4", 4),
        ("accelerate launch --config_file configs/deepspeed_zero2.yaml", 8),
        ("accelerate launch --config_file configs/single_gpu.yaml", 1),
        ("torchrun --nnodes 2 --nproc_per_node=8", 16),
        ("torchrun --standalone --nproc-per-node 8 -m", 8),
        ("accelerate launch --num_processes 4 -m", 4),
        ("python mason.py --num_nodes 4 --gpus 8 -- accelerate launch --num_processes 8", 32),
        ("deepspeed --include localhost:0,1,2,3", 4),
        ("deepspeed --include=localhost:4,5 --master_port 29502", 2),
        ("deepspeed --include worker-0:0,2-4@worker-1:0", 5),
        ("deepspeed --include worker-0@worker-1:0", None),  # all GPUs of a machine
        ("deepspeed --exclude worker-0:0 --num_nodes 2", None),
        ("deepspeed --num_gpus 3 --num_nodes 2", 6),
        ("CUDA_VISIBLE_DEVICES=0,3,5 deepspeed --module", 3),
        ("CUDA_VISIBLE_DEVICES=0,1 python", None),
        ("CUDA_VISIBLE_DEVICES=0 CUDA_VISIBLE_DEVICES=2,3 accelerate launch --multi_gpu", 2),
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node gpu --nnodes 2", 4),
        ("CUDA_VISIBLE_DEVICES=$GPUS deepspeed", None),
        ("python", None),
    ],
)
def test_the_launcher_says_how_many_devices_train(launcher: str, count: int | None) -> None:
    assert devices(launcher.split(), {}) == count


def test_a_config_is_read_and_flags_win_over_it(tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("learning_rate: 5e-6\nseed: 1\n", "utf-8")
    (command,) = read(["sft", "--config", str(config), "--seed", "2"], trl).commands
    assert command.program == "sft"
    assert command.options == {"learning_rate": 5e-6, "seed": 2}


def test_all_commands_of_a_script_are_read_in_order(tmp_path: Path) -> None:
    script = tmp_path / "two.sh"
    script.write_text(
        "mkdir x\ntrl sft --seed 1 && echo done\ntrl dpo --seed 2\nmkdir y\n", "utf-8"
    )
    commands_read = read([str(script)], trl)
    assert [(command.program, command.options) for command in commands_read.commands] == [
        ("sft", {"seed": 1}), ("dpo", {"seed": 2}),
    ]  # fmt: skip
    assert commands_read.others == ("mkdir (2 times)",)


def test_a_script_without_a_training_command_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "other.sh"
    script.write_text("echo hello\n", "utf-8")
    with pytest.raises(UsageError, match="no training command"):
        read([str(script)], trl)


def test_variables_before_a_script_are_set_when_it_begins(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "N=${N:-1}\naccelerate launch --num_processes $N trl sft --model_name m", "utf-8"
    )
    for words, number in ((["N=4", str(path)], 4), ([str(path)], 1)):
        (command,) = read(words, trl).commands
        assert command.devices == number


@pytest.mark.parametrize("words", [["grpo", "train.py"], ["train.py"]])
def test_a_python_program_without_a_reader_is_refused_because_its_settings_are_code(
    words: list[str],
) -> None:
    with pytest.raises(UsageError, match=r"train\.py: of Python programs those of TRL alone"):
        read(words, trl)


def test_flags_behind_a_python_program_are_read() -> None:
    source = read(["train.py", "--learning_rate", "1e-6"], trl)
    assert source.commands[0].options["learning_rate"] == 1e-6
