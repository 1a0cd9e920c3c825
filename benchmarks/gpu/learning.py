"""Part "learning": a fresh model of 100M learns to spell backward, by SFT and then RL until the
time is up: whether what is fast also learns.
"""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.checks import SPELLING, ends
from benchmarks.gpu.peers import require
from benchmarks.gpu.session import Case, Result, Session
from benchmarks.gpu.training_runs import Watching, quicker
from postgrad.core.errors import RunError
from postgrad.observe.follow import read_lines
from postgrad.recipe.load import load_recipe
from postgrad.training.run import Stopped
from postgrad.training.start import train

SIZE = {  # of the fresh model
    False: {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12,
            "num_attention_heads": 12, "num_key_value_heads": 4},
    True: {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
           "num_attention_heads": 2, "num_key_value_heads": 2},
}  # fmt: skip
SFT_STEPS = {False: 150, True: 6}
RL_STEPS = {False: 400, True: 3}
AT_ONCE = ("--learner.warmup_updates", "1")  # a dry run has few updates
SFT_SHARE = {False: 0.25, True: 0.7}  # of the time: a dry run does little but compile
CLOSING = 20.0  # seconds that a save and an evaluation take at most
EVERY = 20  # steps between evaluations


def cases(session: Session) -> Iterator[Case]:
    """One case."""
    yield Case("100M spells backward", 50, lambda: learned(session))


def learned(session: Session) -> Result:
    """Accuracy on held-out words before and after RL, and the rewards of its steps."""
    require("reasoning_gym")
    began = time.time()
    sft = run(session, "sft", began + SFT_SHARE[session.small] * session.left, sft_words(session))
    words = ["--model.path", str(session.runs / "learning-sft" / "model")]
    words += ["--steps", str(RL_STEPS[session.small]), "--eval.every", str(EVERY)]
    words += ["--learner.lr", "1e-4", "--checkpoint.save_steps", "0"]
    words += ["--batch.rollout_batch_size", "4", *AT_ONCE] if session.small else []
    rl = run(session, "rl", session.deadline - CLOSING, words)
    rewards = [line["reward"] for line in rl["lines"]]
    first, last = ends(rewards)
    return {
        "sft": {"steps": len(sft["lines"]), "losses": [line["loss"] for line in sft["lines"]],
                "seconds": sft["seconds"]},
        "rl": {"steps": len(rewards), "seconds": rl["seconds"], "rewards": rewards,
               "last_reward": last, "stopped": rl["stopped"]},
        "accuracy": [[line["step"], line.get("accuracy")] for line in rl["evaluations"]],
        "passed": last > first,
    }  # fmt: skip


def sft_words(session: Session) -> list[str]:
    """Overrides of the quickstart's SFT for the larger model."""
    words = ["--steps", str(SFT_STEPS[session.small]), "--checkpoint.save_hf", "true"]
    words += ["--learner.lr", "3e-4", "--eval.at_end", "false"]
    words += AT_ONCE if session.small else []
    for name, value in SIZE[session.small].items():
        words += [f"--model.init.{name}", str(value)]
    return words


def run(session: Session, name: str, until: float, words: list[str]) -> dict[str, Any]:
    """A recipe of the quickstart until its end, or until a time after which it is stopped as a
    person would stop it: with a checkpoint.
    """
    folder = session.runs / f"learning-{name}"

    def hook(ended: int) -> None:
        if time.time() > until:
            os.kill(os.getpid(), signal.SIGTERM)

    console = Watching(session, None, hook)
    recipe = load_recipe(
        SPELLING / f"{name}.toml", [*words, *quicker(session), "--run_dir", str(folder)]
    )
    began, stopped = time.time(), False
    try:
        train(recipe, console, overwrite=True)
    except Stopped as error:
        stopped = True
        if name == "sft":
            raise RunError(f"too slow: its SFT came to {len(console.lines)} steps") from error
    evaluations = folder / "eval.jsonl"
    return {
        "lines": console.lines, "seconds": time.time() - began, "stopped": stopped,
        "evaluations": list(read_lines(evaluations)) if evaluations.exists() else [],
    }  # fmt: skip
