"""NeMo RL's environments of mathematics, and its shaping of rewards by length."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.peer_objectives.answers import (
    FORMULAS,
    LENGTHS,
    Answer,
    Scored,
    answers_to,
    weighed,
)
from benchmarks.peer_objectives.loading import Checkout, statements
from benchmarks.peer_objectives.nemo_rl import BASE, NeMoRL


def words_of(options: Mapping[str, Any]) -> list[str]:
    """A command with options beside the base's."""
    return ["grpo", *(f"{key}={value}" for key, value in (BASE | dict(options)).items())]


def cases(checkout: Path) -> Iterator[Scored]:
    """Those of the environment math."""
    NeMoRL(checkout)  # makes its files importable
    files = Checkout(checkout / "nemo_rl", ["hydra", "ray", "nemo_rl.environments.utils",
                                            "nemo_rl.environments.interfaces"])  # fmt: skip
    math = files.module("nemo_rl.environments.math_environment")
    space = vars(math) | {"ray": SimpleNamespace(remote=lambda kind: kind), "logging": logging}
    path = checkout / "nemo_rl" / "environments" / "math_environment.py"
    statements(path, "@ray.remote\nclass HFVerifyWorker")(space)
    worker = space["HFVerifyWorker"]()

    def of(kind: str) -> Any:
        return lambda answer: worker.verify(
            [answer.text], [answer.reference], math_verify_impl=kind)[0]  # fmt: skip

    data = {"data.default.dataset_name": "DeepScaler"}
    yield Scored("math", words_of(data), of("hf_math_verify"), FORMULAS)
    kind = {"env.math.math_verify_impl": "dapo_math_verify"}
    behind = {"": "the text behind Answer: is compared there"}
    yield Scored("math, dapo_math_verify", words_of(data | kind), of("dapo_math_verify"), FORMULAS,
                 behind, "compared as text")  # fmt: skip
    yield from _functions(files)
    yield from _shaped(files)


def _functions(files: Checkout) -> Iterator[Scored]:
    """The reward functions of environments with images."""
    rewards = files.module("nemo_rl.environments.rewards")
    functions = {"format": rewards.format_reward,
                 "exact_alnum": rewards.exact_answer_alphanumeric_reward}  # fmt: skip
    for name, function in functions.items():
        listed = f"env.geometry3k.reward_functions=[{{name: {name}, weight: 1}}]"
        words = [*words_of({"data.default.env_name": "geometry3k"}), listed]

        def peer(answer: Answer, function: Any = function) -> float:
            return function(answer.reference, answer.text)[0]

        spaces = {"no spaces": "letters and digits count there"} if name == "exact_alnum" else {}
        yield Scored(name, words, peer, TAGGED, spaces, "letters and digits count there")


def _shaped(files: Checkout) -> Iterator[Scored]:
    """apply_reward_shaping beside a reward model's score."""
    module = files.module("nemo_rl.algorithms.reward_functions")
    place = "grpo.reward_shaping."
    for settings in SHAPED:

        def peer(answer: Answer, settings: dict[str, Any] = settings) -> float:
            batch = {"total_reward": torch.tensor([float(answer.text)]),
                     "truncated": [answer.finish == "length"],
                     "response_token_lengths": [answer.tokens]}  # fmt: skip
            config = module.RewardShapingConfig(enabled=True, **settings)
            return float(module.apply_reward_shaping(batch, config)["total_reward"][0])

        longest = settings.get("max_response_length", 100)
        words = words_of({
            "data.default.env_name": "reward_model", "policy.generation.max_new_tokens": 100,
            "policy.max_total_sequence_length": 200, "env.reward_model.model_name": "r",
            f"{place}enabled": True, **{f"{place}{key}": value for key, value in settings.items()},
        })  # fmt: skip
        beyond = {f"{n} tokens, {end}, score 1": "beyond max_response_length it grows on there"
                  for n, end in ((99, "stop"), (100, "stop"), (100, "length"))}  # fmt: skip
        name = ", ".join(f"{key} {value}" for key, value in settings.items())
        yield Scored(name, words, peer, weighed(LENGTHS, "1"), beyond if longest < 100 else {},
                     "there it grows on")  # fmt: skip


TAGGED = answers_to(
    "Red cube",
    ("right", "<think>A</think><answer>Red cube</answer>"),
    ("no thoughts", "<answer>Red cube</answer>"),
    ("other case", "<answer>red CUBE</answer>"), ("punctuation", "<answer>Red, cube!</answer>"),
    ("no spaces", "<answer>Redcube</answer>"), ("lines", "<answer>\nRed\ncube\n</answer>"),
    ("wrong", "<think>A</think><answer>Blue cube</answer>"), ("no tags", "Red cube"),
    ("two answers", "<answer>Blue</answer> no, <answer>Red cube</answer>"),
    ("no end", "<answer>Red cube"), ("empty", ""), ("empty answer", "<answer></answer>"),
    ("ends in the wrong order", "</think><think></answer><answer>"),
    ("symbols", "<answer>Red + cube</answer>"),
)  # fmt: skip
SHAPED: tuple[dict[str, Any], ...] = (
    {"overlong_buffer_length": 20, "overlong_buffer_penalty": 1.0, "max_response_length": 100},
    {"overlong_buffer_length": 20, "overlong_buffer_penalty": 0.5, "max_response_length": 100},
    {"overlong_buffer_length": 20, "overlong_buffer_penalty": 1.0, "max_response_length": 90},
    {"stop_properly_penalty_coef": 0.5}, {"stop_properly_penalty_coef": 0.0},
)  # fmt: skip
