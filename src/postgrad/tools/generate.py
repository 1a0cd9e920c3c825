"""`postgrad generate`: answers of a model to the prompts of a recipe, scored and kept in shards.
A shard is complete or absent. What is selected of them is in tools.selection.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np

from postgrad.core.errors import RunError, UsageError
from postgrad.core.files import left_behind, names_in, remove, versions, whole_file, write_json
from postgrad.core.hub import split_revision
from postgrad.core.media import IMAGES, images_kept_in
from postgrad.core.progress import reported_to
from postgrad.core.records import Prompt, Rollout, ScoredGroup
from postgrad.core.untrusted import parse_json
from postgrad.data.draws import Draws
from postgrad.data.mixture import training_prompts
from postgrad.evaluation.answers import (
    check_answers,
    unreadable_by,
)
from postgrad.fleet.choices import Choices, choose
from postgrad.fleet.engines import build_engine
from postgrad.fleet.learned import learned_reward, scorer_of
from postgrad.fleet.loading import frozen_reward_model
from postgrad.models.rendering import in_parts
from postgrad.models.save import model_hash
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.observe.run_dir import PACKAGES
from postgrad.observe.sinks import fast_json
from postgrad.recipe.recipe import Answering, Recipe, RLRecipe
from postgrad.rewards.scorer import Scorer
from postgrad.rollout.engine import Engine
from postgrad.rollout.environment import SamplingSpec
from postgrad.rollout.environments.episode_messages import EpisodeRecords
from postgrad.rollout.environments.sets import as_played, check_rows, dialogues
from postgrad.rollout.records_json import Json, group_to_json
from postgrad.rollout.sampling import sample_groups
from postgrad.tools.evaluate import read_from
from postgrad.training.pinned import pin, require_same_sources
from postgrad.training.rows import held_out, image_reader, print_rows

ABOUT, SHARDS = "generate.json", "shards"
SHARD_SAMPLES = 2048  # of one shard, where the prompts of a shard are left open
UNUSED = (
    "step",
    "policy_version",
    "prompt_token_ids",
    "turns",
    "images",
    "kept",
)  # of a line of samples.jsonl


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is generated; None: as the recipe or this machine has it."""

    samples: int | None = None  # of each prompt; batch.n_samples_per_prompt, or 1
    rows: int | None = None  # the first prompts only
    shard: int | None = None  # prompts of a shard

    def __post_init__(self) -> None:
        """Raises UsageError for a number below 1."""
        for flag in ("samples", "rows", "shard"):
            value = getattr(self, flag)
            if value is not None and value < 1:
                raise UsageError(f"--{flag} {value}: 1 or more is wanted")


@dataclass(frozen=True, slots=True)
class Generated:
    """The samples in a directory."""

    folder: Path
    about: Mapping[str, Any]  # generate.json

    @property
    def name(self) -> str:
        """Twelve hex digits that rows carry: of the hash of generate.json."""
        content = json.dumps(self.about, sort_keys=True).encode()
        return hashlib.sha256(content).hexdigest()[:12]

    def missing(self) -> list[int]:
        """The shards that are not there."""
        return [n for n in range(self.about["shards"]) if not self.shard(n).exists()]

    def shard(self, number: int) -> Path:
        return self.folder / SHARDS / f"{number:05d}.jsonl"

    def groups(self, rows: Path | None = None) -> Iterator[list[Json]]:
        """The samples of each prompt, in the order of the prompts. rows: the file that they are
        written to, from whose folder on images are named; None: from this directory on.
        """
        for number in range(self.about["shards"]):
            with self.shard(number).open("rb") as lines:
                group: list[Json] = []
                for line in lines:
                    kept = _read(line, self.shard(number))
                    sample = _seen_from(rows or self.folder / ABOUT, self.folder, kept)
                    if group and group[0]["ticket"] != sample["ticket"]:
                        yield group
                        group = []
                    group.append(sample)
            if group:
                yield group


def _read(line: bytes, shard: Path) -> Json:
    """A line of a shard. Raises RunError where something has damaged it since."""
    try:
        return json.loads(line)
    except ValueError as error:
        raise RunError(
            f"{shard} is damaged: {error}; remove it and repeat the command, which samples it again"
        ) from error


def _seen_from(rows: Path, folder: Path, sample: Json) -> Json:
    """A sample whose images are named as they are found from the folder of the file `rows` on."""
    conversations = [each["messages"] for each in sample.get("conversations", ())]
    parts = [
        part
        for message in chain(sample["messages"], *conversations)
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image"
    ]
    for part in parts:
        part["image"] = os.path.relpath(folder / part["image"], rows.parent)
    return sample


def generate(
    recipe: Recipe, to: Path, console: Console, extent: Extent, model: str | None = None
) -> Generated:
    """Samples and scores `extent.samples` answers to every prompt of the recipe's training data,
    one epoch in the order of its files, into `to`: generate.json and shards/00000.jsonl and on.

    A shard is complete or absent, so that a killed command goes on with the first shard that is
    missing, and on the same engine and machine gives the same answers. model: in place of
    model.path: a Hugging Face directory, a hub id, a run or one of its checkpoints.

    Raises UsageError where `to` holds another generation, RunError where too many verifiers fail.
    """
    if not isinstance(recipe, Answering):
        raise UsageError(
            f'job = "{recipe.job}" reads pairs: generate takes a recipe of job = "rl" or "sft"'
        )
    recorded = _recorded(to)
    if (name := model or recipe.model.path) is None:
        raise UsageError("the recipe's model is a fresh one ([model.init]): name one with --model")
    sections = ("data", "eval", "reward_model", *(() if model else ("model",)))
    recipe, hub_sources = pin(recipe, recorded.get("hub_sources", ()), sections=sections)
    assert isinstance(recipe, Answering)
    with TemporaryDirectory(prefix="postgrad-") as folder, ExitStack() as stack:
        stack.enter_context(images_kept_in(to / IMAGES))
        path = read_from(name, Path(folder) / "model")
        choices = choose(recipe, recorded.get("choices", {}))
        choices.apply()
        sampler = _Sampler(recipe, path, stack, console)
        drawn = sampler.drawn()
        print_rows(console, drawn.accounts, "rows that are answered")
        prompts = [replace(prompt, ticket=n) for n, prompt in enumerate(drawn.all()[: extent.rows])]
        about: dict[str, Any] = {
            "recipe": recipe.dump(),
            "model": name,
            "content": _content(path),
            "hub_sources": [source.to_json() for source in hub_sources],
            "sources": _sources(recipe, recorded, to),
            "prompts": len(prompts),
            **_sizes(recipe, extent, recorded, len(prompts)),
        }
        _require_same(to, recorded, about)
        if not recorded or Generated(to, recorded).missing():
            engine, choices = sampler.engine(choices, about["shard"] * about["samples"])
            if not recorded:
                recorded = {**about, "choices": choices.to_json(), "versions": versions(PACKAGES)}
                (to / SHARDS).mkdir(parents=True, exist_ok=True)
                write_json(to / ABOUT, recorded)
            _sample(Generated(to, recorded), prompts, sampler, engine, console)
    return Generated(to, recorded)


def _sources(recipe: Answering, recorded: Mapping[str, Any], to: Path) -> dict[str, str]:
    """Identities of models and data, which have to be those of the samples that `to` holds."""
    since, remedy = f"samples were written to {to}", "or choose another --to"
    return require_same_sources(recipe, recorded.get("sources", {}), since=since, remedy=remedy)


def _sizes(
    recipe: Answering, extent: Extent, recorded: Mapping[str, Any], prompts: int
) -> dict[str, int]:
    """Samples of a prompt, prompts of a shard, and shards."""
    of_recipe = recipe.batch.n_samples_per_prompt if isinstance(recipe, RLRecipe) else 1
    samples = extent.samples or of_recipe
    shard = extent.shard or recorded.get("shard") or max(1, SHARD_SAMPLES // samples)
    return {"samples": samples, "shard": shard, "shards": -(-prompts // shard)}


class _Sampler:
    """What answers and scores: scorer, environment, engine."""

    def __init__(self, recipe: Answering, path: str, stack: ExitStack, console: Console) -> None:
        self._recipe, self._path, self._stack = recipe, path, stack
        self.tokenizer: Any = load_tokenizer(path)
        self._reader = image_reader(path, self.tokenizer)
        self._learned = learned_reward(recipe, self.tokenizer)
        scores = recipe.reward_components != []
        with console.phase("load") as shown, reported_to(shown.count):
            scorer = scorer_of(recipe, self.tokenizer, self._learned) if scores else None
        self._scorer = stack.enter_context(scorer) if scorer is not None else None
        self.episodes: EpisodeRecords = {}

    def drawn(self) -> Draws[Prompt]:
        """The prompts. Raises UsageError for rows that cannot be read, played or scored."""
        recipe = self._recipe
        drawn = training_prompts(
            as_played(recipe.environment, recipe.data),
            self.tokenizer,
            max_new_tokens=recipe.rollout.max_new_tokens,
            exclude=held_out(recipe),
            reader=self._reader,
            unreadable=unreadable_by(self._scorer),
        )
        check_rows(recipe.environment, drawn)
        if self._scorer is not None:
            check_answers(self._scorer, drawn.all(), recipe.data.sources)
        return drawn

    def sampling_spec(self, samples: int) -> SamplingSpec:
        recipe = self._recipe
        data, stack = recipe.data, self._stack
        played = dialogues(
            recipe.environment,
            data,
            self.tokenizer,
            stack,
            self._reader,
            max_len=data.max_len,
            records=self.episodes,
        )
        return SamplingSpec(samples, recipe.rollout, recipe.seed, played, recipe.data.max_len)

    def engine(self, choices: Choices, sequences: int) -> tuple[Engine, Choices]:
        """The engine, and the choices with its sizes; the reward model is loaded before it."""
        recipe, learned = self._recipe, self._learned
        if learned is not None:
            settings = recipe.model_tables["reward_model", "model"]
            learned.role = frozen_reward_model(recipe, settings, learned.path, choices)
        return build_engine(
            recipe.rollout,
            self._path,
            choices,
            self._stack,
            sequences=sequences,
            max_len=recipe.data.max_len,
            eos_token=recipe.model.eos_token,
            router_dtype=recipe.model.router_dtype,
        )

    @property
    def scoring(self) -> "Scorer | _Unscored":
        """Scores answers, or lets them pass where nothing does."""
        return self._scorer or _Unscored()


class _Unscored:
    """Groups without a score, of a recipe without rewards."""

    def __init__(self) -> None:
        self._ready: list[ScoredGroup] = []

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        n = len(rollouts)
        total = np.full(n, np.nan)
        self._ready.append(ScoredGroup(prompt, tuple(rollouts), {}, total, np.ones(n, np.bool_)))

    def completed(self, wait: bool) -> list[ScoredGroup]:
        ready, self._ready = self._ready, []
        return ready

    def too_many_failed(self, groups: Iterable[ScoredGroup], samples: int) -> bool:
        return False

    def require_scored(self, groups: Iterable[ScoredGroup]) -> None:
        pass


def is_generated(to: Path) -> bool:
    """Whether a directory holds samples of `generate`."""
    return (to / ABOUT).is_file()


def _recorded(to: Path) -> dict[str, Any]:
    """What generate.json of `to` says; {} where there is none. Raises UsageError for a directory
    that holds something else.
    """
    if not to.exists():
        return {}
    if not is_generated(to):
        half = left_behind(to, [ABOUT]) if to.is_dir() else []
        if to.is_dir() and not names_in(to) - {*(path.name for path in half), SHARDS, IMAGES}:
            for path in half:  # of a command that was killed as it began
                remove(path)
            return {}
        raise UsageError(f"{to} is there already and holds no {ABOUT}: choose another --to")
    try:
        about: Any = parse_json((to / ABOUT).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{to / ABOUT} cannot be read: {error}; choose another --to") from error
    about = cast(dict[str, Any], about) if isinstance(about, dict) else {}
    if not isinstance(about.get("shards"), int):
        raise UsageError(f"{to / ABOUT} is not of postgrad generate: choose another --to")
    return about


def _require_same(to: Path, recorded: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Raises UsageError where `to` holds the samples of another recipe, model or extent."""
    if not recorded:
        return
    differing = [key for key in about if key != "model" and recorded.get(key) != about[key]]
    if differing:
        key = differing[0]
        change = f"another {key}"
        if isinstance(about[key], int):
            change = f"{key} = {recorded.get(key)}, and now it is {about[key]}"
        raise UsageError(
            f"{to} was generated with {change}: choose another --to, or repeat the command as it "
            "was"
        )


def _content(path: str) -> str:
    """What the model is: the hash of its files, or the commit of a hub id."""
    if Path(path).is_dir():
        return f"sha256:{model_hash(Path(path))}"
    return split_revision(path)[1] or "main"


def _sample(
    generated: Generated,
    prompts: Sequence[Prompt],
    sampler: _Sampler,
    engine: Engine,
    console: Console,
) -> None:
    """Fills the shards that are missing."""
    size, missing = generated.about["shard"], generated.missing()
    spec = sampler.sampling_spec(generated.about["samples"])
    for path in left_behind(generated.folder / SHARDS, [generated.shard(n).name for n in missing]):
        remove(path)
    parts = {n: prompts[n * size : (n + 1) * size] for n in missing}
    total = sum(map(len, parts.values())) * spec.samples
    done = generated.about["shards"] - len(missing)
    if done:
        console.note(f"{done} of {generated.about['shards']} shards are there already")
    with console.phase("generate", total) as shown:
        for number, part in parts.items():
            groups = sample_groups(
                engine, sampler.scoring, part, spec, sampler.tokenizer, shown.advance
            )
            with whole_file(generated.shard(number)) as written, written.open("wb") as file:
                for group in groups:
                    file.writelines(fast_json(line) + b"\n" for line in _lines(group, sampler))


def _lines(group: ScoredGroup, sampler: _Sampler) -> Iterator[Json]:
    """The samples of a prompt as in samples.jsonl, without token ids, and with the messages of the
    prompt; of an episode also with those of its conversations.
    """
    lines = group_to_json(group, step=0, decode=sampler.tokenizer.decode)
    for line, rollout in zip(lines, group.rollouts, strict=True):
        kept = {key: value for key, value in line.items() if key not in UNUSED}
        kept["messages"] = _messages(group.prompt.messages)
        kept["tokens"] = rollout.policy_tokens
        if (episode := sampler.episodes.pop((rollout.ticket, rollout.sample), None)) is not None:
            kept["conversations"] = [
                {"messages": _messages(each.messages), "tools": list(each.tools)}
                for each in episode.conversations
            ]
        yield kept


def _messages(messages: Iterable[Mapping[str, Any]]) -> list[Json]:
    """Messages whose images name files."""
    return [in_parts(m, IMAGES) if "images" in m else dict(m) for m in messages]
