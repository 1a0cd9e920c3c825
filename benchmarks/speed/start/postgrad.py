"""`postgrad train RECIPE`, as a person starts it."""

import sys
from pathlib import Path

from benchmarks.speed.side import Options, Round
from benchmarks.speed.start.processes import NEW_TOKENS, QUESTIONS, SAMPLES, Starts

RECIPE = """
job = "rl"
run_dir = "{folder}/start"
steps = 2  # the first is waited for

[model]
path = "{folder}/model"
dtype = "{precision}"

[data]
path = "{folder}/questions.jsonl"
prompt = "question"
answer = "answer"

[[rewards]]
type = "gsm8k"

[algorithm]
type = "grpo"
kl_coef = 0.0

[batch]
rollout_batch_size = {questions}
n_samples_per_prompt = {samples}

[rollout]
max_new_tokens = {new_tokens}

[learner]
lr = 1e-6
threads = {threads}
"""


def prepare(folder: Path, options: Options) -> Round:
    """See Side."""
    recipe = folder / f"start-{options.precision}.toml"
    recipe.write_text(
        RECIPE.format(
            folder=folder,
            precision=options.precision,
            questions=QUESTIONS,
            samples=SAMPLES,
            new_tokens=NEW_TOKENS,
            threads=options.threads,
        ),
        "utf-8",
    )
    command = [sys.executable, "-m", "postgrad", "train", str(recipe), "--overwrite", "true"]
    return Starts(lambda number: [*command, "--run_dir", f"{folder}/start-{number}"])
