"""Draws recipes for benchmarks/random_recipes.py: a seed alone decides one."""

import contextlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from pydantic.fields import FieldInfo

from benchmarks.drawn_values import Table, drawn, keys_of
from helpers.jobs import write_pairs, write_steps
from helpers.model_types import make_model
from postgrad.algorithms.registry import ALGORITHMS, algorithm_class
from postgrad.core.errors import UsageError
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit
from postgrad.models.tokenizer import load_tokenizer
from postgrad.recipe.load import parse_recipe
from postgrad.recipe.recipe import JOBS

MOST_KEYS = 24  # beside those of the job, its data and its model
# Several keys that make a recipe together alone.
TOGETHER: tuple[Table, ...] = (
    {"model.lora.rank": 2, "model.lora.dora": True, "model.quantize": "4bit"},
    {"model.lora.rank": 2, "model.lora.init": "pissa"},
    {"model.lora.rank": 2, "model.lora.rank_pattern": {"q_proj": 3}},
    {"algorithm.kl_coef": 0.1, "algorithm.kl_in": "reward", "algorithm.kl_target": 0.01},
    {"algorithm.kl_coef": 0.1, "reference.ema_decay": 0.5},
    {"algorithm.correction": "tis", "rollout.max_staleness": 2, "rollout.slots": 3},
    {"algorithm.correction": "tis", "algorithm.rejection": {"mean_k3": 0.05, "token": [0.5, 2.0]}},
    {"rollout.top_p": 0.6, "rollout.keep_sampling_mask": True, "algorithm.correction": "tis"},
    {"rollout.top_k": 9, "rollout.keep_sampling_mask": True, "rollout.max_staleness": 1},
    {
        **{"algorithm.second_moment": 1e-3, "algorithm.old_logprobs": "sampled"},
        "rollout.max_staleness": 1,
    },
    {"algorithm.neftune_noise_alpha": 5.0, "model.lora.rank": 2},
    {"rollout.keep_sampling_mask": True},
    {"rollout.keep_sampling_mask": True, "algorithm.correction": "tis"},
    {"algorithm.length_penalty": {"output_tokens": 0.25, "turns": 0.1}},
    {"rollout.dynamic_sampling": True, "rollout.keep_above": 0.1, "rollout.max_rounds": 2},
    {"rollout.curriculum.retire_at": 0.5, "rollout.curriculum.postpone_at": 0.0},
    {"checkpoint.best_metric": "eval/accuracy", "checkpoint.early_stop": 1, "eval.every": 1},
    {"critic.learner.optimizer": "muon", "algorithm.critic_warmup_steps": 1},
)
# Keys of one of [[rewards]].
REWARD_KEYS: tuple[Table, ...] = (
    {"weight": 0.5},
    {"weight": -1.0},
    {"weight": 0.0},
    {"gate": True, "gate_at": 0.5, "gate_value": -0.5},
    {"multiply": True},
    {"after": "a"},
    {"special_tokens": True},
    {"on_failure": "drop_group"},
    {"when": {"question": "spell cat?"}},
)
REWARDS: tuple[Table, ...] = (
    {"type": "regex", "pattern": "[a-m]"},
    {"type": "stop_properly"},
    {"type": "relative_length"},
    {"type": "f1", "on_failure": "score"},
)
# What answers may be.
GRAMMARS: tuple[Table, ...] = (
    {"regex": "[a-z]{1,4}"},
    {"regex": "(cat|cow)+s"},
    {"regex": "[a-m]?"},
    {"lark": 'start: "a" start | "b"'},
    {"lark": "start: /[a-m]{1,9}/"},
    {"json_schema": '{"type": "boolean"}'},
    {"json_schema": '{"enum": ["cat", 1]}'},
)
FRESH = ("qwen3", "qwen2", "llama", "mistral", "gemma", "gemma2", "gemma3")
MADE = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "falcon_h1", "lfm2")
BPE: Table = {"kind": "bpe", "vocab_size": 400}
INIT: Table = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2},
    "max_position_embeddings": 128,
    "tokenizer": {"kind": "characters", "phrases": ["spell ", "after "]},
}


WORDS = "cat dog sun pear tree fox owl bee ant elk yak cow rat hen eel".split()  # noqa: SIM905
# What [data] says of some kinds of rows.
READ: dict[str, Table] = {
    "messages": {"messages": "messages", "max_len": 48},
    "chats": {"messages": "messages", "max_len": 128},
    "text": {"text": "text", "max_len": 48},
}
ANSWER = {"role": "assistant"}


def _chat(word: str, number: int) -> list[Table]:
    """A conversation of two turns, with weights of its answers in two of three rows."""
    ask, other = {"role": "user", "content": "say"}, {"role": "user", "content": word}
    first, last = {**ANSWER, "content": word}, {**ANSWER, "content": word[::-1]}
    if number % 3:
        first, last = first | {"weight": number % 2}, last | {"weight": 0.25 * number}
    return [{"role": "system", "content": "spell"}, ask, first, other, last]


class World:
    """The rows and models that recipes name, in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.rows, self.held_out = self._sets("rows", 0, 9), self._sets("held", 9, 3)
        self.more = self._sets("more", 12, 3)

    def _sets(self, name: str, first: int, count: int) -> dict[str, str]:
        """The file of each kind of rows."""
        words = WORDS[first : first + count]
        rows: dict[str, list[Table]] = {
            "questions": [{"question": f"spell {word}?", "answer": word[::-1]} for word in words],
            "messages": [
                {"messages": [{"role": "user", "content": "say"}, {**ANSWER, "content": word}]}
                for word in words
            ],
            "text": [{"text": f"{word} and {word}"} for word in words],
            "chats": [{"messages": _chat(word, number)} for number, word in enumerate(words)],
        }
        files = {kind: self.folder / f"{name}-{kind}.jsonl" for kind in (*rows, "pair", "step")}
        for kind, lines in rows.items():
            files[kind].write_text("".join(json.dumps(row) + "\n" for row in lines), "utf-8")
        write_pairs(files["pair"], first, count)
        write_steps(files["step"], first, count)
        return {kind: str(path) for kind, path in files.items()}

    def model(self, kind: str) -> str:
        """The directory of a tiny model of a type of MADE, or a fresh one of another seed."""
        path = self.folder / kind
        if path.exists():
            return str(path)
        if kind not in MADE:
            kept = {"initializer_range": 0.2}
            bpe = {"tokenizer": BPE} if "bpe" in kind else {}
            init = ModelInit.model_validate({**INIT, **kept, **bpe})
            return str(make_fresh(init, (), len(kind), path) or path)
        tokenizer = Path(self.model("base"))
        return str(make_model(kind, tokenizer, len(load_tokenizer(str(tokenizer))), path))


def with_key(raw: Table, key: str, value: Any) -> Table:
    """A copy of the raw recipe with a dotted key."""
    first, _, rest = key.partition(".")
    below = raw.get(first)
    table = cast(Table, below) if isinstance(below, dict) else {}
    return {**raw, first: with_key(table, rest, value) if rest else value}


def is_recipe(raw: Table) -> bool:
    """Whether it can be parsed."""
    with contextlib.suppress(UsageError):  # every other error is a failure
        return bool(parse_recipe(raw))
    return False


def folders_of(seeds: range) -> Iterator[tuple[int, World, Path]]:
    """Each seed with the world of all of them, and an empty folder for its runs."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["POSTGRAD_CACHE"] = f"{folder}/cache"
        world, runs = World(Path(folder, "world")), Path(folder, "runs")
        for seed in seeds:
            shutil.rmtree(runs, ignore_errors=True)
            runs.mkdir()
            yield seed, world, runs


def draw(seed: int, world: World, run_dir: str, ranks: int = 1) -> Table:
    """The raw recipe of a seed. ranks: processes that train it."""
    rng = random.Random(seed)
    job = rng.choice(("sft", "rl", "rl", "reward", "preference"))
    while not is_recipe(raw := _base(job, rng, world, run_dir, ranks)):
        pass
    algorithm = algorithm_class(raw["algorithm"]["type"])
    algorithm_keys = [*keys_of(algorithm, "algorithm.")]
    by_section: dict[str, list[tuple[str, FieldInfo]]] = {}
    for key, field in keys_of(JOBS[raw["job"]]):
        section = "sentinels" if key.startswith("sentinels.") else key.rpartition(".")[0]
        by_section.setdefault(section, []).append((key, field))
    sections = [*by_section.values(), *([algorithm_keys] * 3 if algorithm_keys else [])]
    changes: list[Table] = []
    for _ in range(rng.randint(0, MOST_KEYS)):
        if rng.random() < 0.15:
            changes.append(rng.choice(TOGETHER))
            continue
        key, field = rng.choice(rng.choice(sections))
        if (value := drawn(key, field, rng)) is not None:
            changes.append({key: value})
    for change in changes:
        tried = raw
        for key, value in change.items():
            tried = with_key(tried, key, value)
        raw = tried if is_recipe(tried) else raw
    return raw


def _base(job: str, rng: random.Random, world: World, run_dir: str, ranks: int) -> Table:
    """A job with an algorithm, which may be another job's, with model, rows and batch."""
    kind = rng.choice(tuple(ALGORITHMS))
    rows = _kind_of_rows(job, kind, rng)
    model: Table = {"dtype": rng.choice(("auto", "float32", "float32"))}
    if rng.random() < 0.7:
        fresh = {"type": rng.choice(FRESH), "num_hidden_layers": rng.choice((1, 2))}
        spread = {"initializer_range": rng.choice((0.02, 0.2)), "num_key_value_heads": 1}
        model["init"] = {**INIT, **fresh, **spread, "tie_word_embeddings": rng.random() < 0.5}
        if fresh["type"] == "qwen2":  # whose tokenizer loses characters
            model["init"] |= {"tokenizer": BPE}
    else:
        model["path"] = world.model(rng.choice(MADE))
    raw: Table = {
        **{"job": job, "run_dir": run_dir, "algorithm": {"type": kind}, "model": model},
        **{"data": {"path": world.rows[rows], **READ.get(rows, {"max_len": 48})}},
        "learner": {"lr": 1e-2, "threads": 1},
        "sentinels": {"truncation": "off"},
        "checkpoint": {"save_steps": 1},
        **rng.choice(({"steps": 2}, {"steps": 3}, {"epochs": 1.0}, {"total_episodes": 9})),
    }
    if job == "rl":
        samples = {"n_samples_per_prompt": rng.choice((2, 4))}
        raw["batch"] = {"rollout_batch_size": rng.choice((1, 3)), **samples}
        raw["rollout"] = {"max_new_tokens": rng.choice((3, 6))}
        raw["rewards"] = rng.sample(REWARDS, rng.choice((1, 1, 2, 3)))
        if rng.random() < 0.4:
            raw["rewards"] = [reward | rng.choice((*REWARD_KEYS, {})) for reward in raw["rewards"]]
    else:
        raw["batch"] = {"train_batch_size": rng.choice((1, 2, 4))}
    if kind in ("distillation", "on_policy_distillation"):
        raw["model"] = {"path": world.model("base")}
        raw["teacher"] = {"model": {"path": world.model("teacher")}}
    if kind == "on_policy_distillation":
        _hinted(raw, rng)
        if "teacher" in raw and not raw["data"]["hint"] and rng.random() < 0.7:
            other = world.model(rng.choice(("teacher", "bpe teacher")))
            raw["teacher"] = {"align": "text", "model": {"path": other}}
    if rng.random() < 0.5:
        raw["eval"] = {"path": world.held_out[rows]}
    if job == "rl" and rng.random() < 0.3:
        raw["eval"] = _eval_sets(world.held_out[rows], rng)
    if job == "rl" and rng.random() < 0.3 and "hint" not in raw["data"]:
        raw |= _played(rng, raw)  # it begins with other words than those that a hint replaces
    if rng.random() < (0.6 if {"teacher", "environment"} & raw.keys() else 0.25):
        raw["data"] = {**raw["data"], "sets": _sets(raw["data"], world.more[rows], rng)}
        _of_sets(raw, world, rng)
    raw["data"] |= _prepared(rows, raw["data"]["max_len"], rng)
    if job == "rl" and "init" in raw["model"] and rng.random() < 0.3:
        _answering_by_grammar(raw, rng)
    if ranks > 1:
        raw |= _ranked(raw["learner"], ranks, rng)
    return raw


def _kind_of_rows(job: str, algorithm: str, rng: random.Random) -> str:
    """Which rows of the World a job learns from."""
    of_sft = rng.choice(("questions", "messages", "text", "chats"))
    compared = "step" if algorithm_class(algorithm).level == "step" else "pair"
    return {"rl": "questions", "sft": of_sft}.get(job, compared)


def _sets(data: Table, path: str, rng: random.Random) -> list[Table]:
    """Two sets of rows, one of which may say more."""
    shares: tuple[Table, ...] = ({"weight": 0.5}, {"weight": 2.0}, {"count": 3}, {"limit": 2}, {})
    stated: tuple[Table, ...] = (
        {"system": "Be brief."},
        {"max_len": data["max_len"] - 8},
        {"shuffle": False},
        {},
    )
    if data.get("messages"):
        stated += ({"loss_turns": "last"}, {"loss_turns": ["system", "assistant"]})
    if data.get("hint"):
        stated += ({"hint": ""}, {"hint": "it is {answer}"})
    first = {"path": data["path"], **rng.choice(shares)}
    return [first, {"path": path, **rng.choice(shares), **rng.choice(stated)}]


def _of_sets(raw: Table, world: World, rng: random.Random) -> None:
    """May give each set of rows a teacher, or an environment, of its own."""
    first, second = raw["data"]["sets"]
    if "teacher" in raw and raw["job"] == "rl" and rng.random() < 0.7:
        teacher = raw["teacher"]
        other = {"model": {"path": world.model(rng.choice(("base", "other teacher")))}}
        of_second = {"datasets": [Path(second["path"]).name], **other}
        of_first = {"datasets": [Path(first["path"]).name], **teacher}
        both = {"sets": [of_first, of_second]}
        raw["teacher"] = rng.choice((both, {**teacher, "sets": [of_second]}))
    if "environment" in raw and rng.random() < 0.7:
        played, names = raw["environment"], ("rooms", "forgetful", "none")
        kinds = {"rooms": "helpers.rooms:Rooms", "forgetful": "helpers.rooms:Forgetful"}
        raw["environment"] = {
            "sets": [{**played, "type": kind, "name": name} for name, kind in kinds.items()]
        }
        first["environment"], second["environment"] = rng.sample(names, 2)
        raw["data"]["environment"] = rng.choice(names)  # of evaluations that name none


def _answering_by_grammar(raw: Table, rng: random.Random) -> None:
    """Gives answers a grammar, and the model a tokenizer whose tokens are bytes, as it needs."""
    raw["model"]["init"] |= {"tokenizer": BPE}
    raw["rollout"] |= rng.choice(GRAMMARS)
    if "eval" in raw and "sets" not in raw["eval"]:
        raw["eval"] |= rng.choice((*GRAMMARS, {}))


def _prepared(rows: str, max_len: int, rng: random.Random) -> Table:
    """Functions and a template that rows go through before they are tokenised."""
    keys: Table = {}
    if rng.random() < 0.2:
        keys["filter"] = "helpers.row_functions:without_dogs"
    if rng.random() < 0.2:
        keys["map"] = "helpers.row_functions:longer"
    if rows == "questions" and rng.random() < 0.3:
        keys["template"] = rng.choice(("say {question}", "{question} after {question}"))
    return {**keys, "max_len": 2 * max_len} if keys else keys


def _ranked(learner: Table, ranks: int, rng: random.Random) -> Table:
    """So many processes, and how they share what is trained."""
    ways: tuple[Table, ...] = (
        *({"sharding": stage} for stage in ("none", "zero1", "zero2", "zero3")),
        {"tensor_parallel": ranks},
        {"context_parallel": ranks},
    )
    return {
        "learner": {**learner, "ranks": ranks, **rng.choice(ways)},
        "cluster": {"type": "ray"},
    }


def _played(rng: random.Random, raw: Table) -> Table:
    """Episodes of several conversations, by code that may be stepped again or not."""
    kind = rng.choice(("Rooms", "Forgetful"))
    ends = {"stop": [*"abcdefghijklmno"], "max_new_tokens": rng.choice((4, 12))}
    return {
        "environment": {"type": f"helpers.rooms:{kind}", "max_turns": rng.choice((2, 4))},
        "rollout": {**raw.get("rollout", {}), **ends},
        "data": {**raw["data"], "max_len": 128},
    }


def _eval_sets(path: str, rng: random.Random) -> Table:
    """Two sets, of which one may state how its answers are sampled."""
    answers: Table = {"n_samples": rng.choice((1, 3)), "max_new_tokens": rng.choice((2, 5))}
    answers["temperature"] = rng.choice((0.5, 1.0))
    stated = {key: answers[key] for key in rng.sample(sorted(answers), rng.randint(0, 3))}
    return {"sets": [{"name": "a", "path": path, **stated}, {"name": "b", "path": path}]}


def _hinted(raw: Table, rng: random.Random) -> None:
    """Gives graders hints, of rows or of right answers of the group, and may make the policy or the
    reference one in place of the teacher.
    """
    by = rng.choice(("teacher", "policy", "reference"))
    if by != "teacher":
        del raw["teacher"]
        raw["algorithm"]["graded_by"] = by
    hint = rng.choice(("it is {answer}", "say {group.answer}", "{answer}, or {group.answer}", ""))
    raw["data"]["hint"] = hint
    if "group" in hint:
        raw["algorithm"]["correct_at"] = rng.choice((0.0, 1.0))
