"""The teachers of a recipe: [teacher], and [[teacher.sets]] for rows of some datasets."""

from collections.abc import Iterator
from typing import Literal, Protocol

from pydantic import Field

from postgrad.algorithms.base import Algorithm
from postgrad.cluster.settings import ClusterSettings
from postgrad.core.settings import Settings
from postgrad.data.settings import MixSettings
from postgrad.models.settings import ModelSettings
from postgrad.recipe.lines import KeyPath, RecipeProblem
from postgrad.rollout.openai.settings import TeacherServerSettings
from postgrad.rollout.settings import EnvironmentSets, RolloutSettings


class OneTeacher(Settings):
    """A frozen model that a student learns from, loaded here or behind a server. align: "tokens":
    it reads the student's tokens, so that it needs the same tokenizer. "text": it reads the same
    text in its own tokens and chat template, and grades segments that end with a token of both.
    """

    align: Literal["tokens", "text"] = "tokens"
    model: ModelSettings = ModelSettings()
    server: TeacherServerSettings = TeacherServerSettings()

    @property
    def named(self) -> bool:
        """Whether there is one."""
        return self.model.path is not None or self.server.base_url is not None


class TeacherSet(OneTeacher):
    """The teacher of some datasets, as samples.jsonl calls them."""

    datasets: tuple[str, ...] = Field(min_length=1)


class TeacherSettings(OneTeacher):
    """The teacher of every dataset that none of [[teacher.sets]] names. top_k, of SFT: the teacher
    reads the rows once, before the first update, and so many of its most likely tokens are kept of
    each distribution; left out, it computes beside its student.
    """

    sets: tuple[TeacherSet, ...] = ()
    top_k: int | None = Field(default=None, ge=1)

    @property
    def places(self) -> list[tuple[KeyPath, OneTeacher]]:
        """All of them, [teacher] first, each with its place."""
        sets = ((("teacher", "sets", number), other) for number, other in enumerate(self.sets))
        return [(("teacher",), self), *sets]

    @property
    def tables(self) -> dict[KeyPath, ModelSettings]:
        """The [model] of each, by place."""
        return {(*place, "model"): teacher.model for place, teacher in self.places}

    @property
    def models(self) -> dict[KeyPath, ModelSettings]:
        """Those that are loaded, and not behind servers."""
        return {place: model for place, model in self.tables.items() if model.path is not None}


class WithTeachers(Protocol):
    """What a recipe that may have teachers says beside them."""

    @property
    def teacher(self) -> TeacherSettings: ...

    @property
    def algorithm(self) -> Algorithm: ...

    @property
    def trains_on_rollouts(self) -> bool: ...

    @property
    def logprob_temperature(self) -> float: ...

    @property
    def cluster(self) -> ClusterSettings: ...

    @property
    def data(self) -> MixSettings: ...

    @property
    def environment(self) -> EnvironmentSets | None: ...

    @property
    def rollout(self) -> RolloutSettings: ...


def teacher_problems(recipe: WithTeachers) -> Iterator[RecipeProblem]:
    """A teacher that is not named, or that nothing reads, or that cannot do what is asked."""
    settings, places = recipe.teacher, dict(recipe.teacher.places)
    named = {place: teacher for place, teacher in places.items() if teacher.named}
    for place, teacher in places.items():
        if teacher.align == "text" and not teacher.named:
            yield (*place, "align"), "is of a teacher, and this table names none (model.path)"
    if not recipe.algorithm.needs().teacher:
        if named or settings.sets or settings.top_k is not None:
            yield (
                ("teacher",),
                'this algorithm asks no teacher: take "on_policy_distillation" (RL; graded_by = '
                '"teacher") or "distillation" (SFT), or leave it out',
            )
        return
    if not named:
        yield (
            ("teacher", "model", "path"),
            "the algorithm learns from a teacher: give its directory or hub id, or "
            "teacher.server.base_url",
        )
    for place, teacher in places.items():
        if place != ("teacher",) and not teacher.named:
            yield place, "a set names its teacher: model.path, or server.base_url"
        if teacher.model.path is not None and teacher.server.base_url is not None:
            yield (
                (*place, "server"),
                "beside model.path there are two teachers: keep one, or give each datasets of its "
                "own in [[teacher.sets]]",
            )
    yield from _datasets_once(settings)
    yield from (_of_rollouts if recipe.trains_on_rollouts else _of_rows)(recipe, named)


def _datasets_once(settings: TeacherSettings) -> Iterator[RecipeProblem]:
    seen = set[str]()
    for number, other in enumerate(settings.sets):
        for name in other.datasets:
            if name in seen:
                yield (
                    ("teacher", "sets", number, "datasets"),
                    f"{name!r} has a teacher already: each dataset has one",
                )
            seen.add(name)


def _of_rollouts(recipe: WithTeachers, named: dict[KeyPath, OneTeacher]) -> Iterator[RecipeProblem]:
    """Of RL, whose teachers grade the tokens of samples."""
    if recipe.teacher.top_k is not None:
        yield (
            ("teacher", "top_k"),
            'is of job = "sft", where all rows are known before the first update; a teacher of RL '
            "grades samples as they come: leave it out",
        )
    for place, teacher in named.items():
        if teacher.align == "text":
            yield from _of_text(recipe, (*place, "align"), teacher)
    for place, teacher in named.items():
        if teacher.server.base_url is not None and recipe.logprob_temperature != 1.0:
            yield (
                (*place, "server"),
                f"rollout.temperature = {recipe.logprob_temperature:g}: a server gives logprobs "
                "at a temperature of 1 alone: sample at 1, or load this teacher here (model.path)",
            )
    if recipe.cluster.teacher is not None and not recipe.teacher.models:
        yield (
            ("cluster", "teacher"),
            "all teachers are behind servers, so there is nothing to place: leave this out",
        )


def _of_text(recipe: WithTeachers, key: KeyPath, teacher: OneTeacher) -> Iterator[RecipeProblem]:
    """Of a teacher that reads the text of samples."""
    if teacher.server.base_url is not None:
        yield (
            key,
            '"text" needs the tokenizer, which a server does not give: load this teacher here '
            "(model.path)",
        )
    if any(source.hint for source in recipe.data.sources):
        yield key, '"text" reads the messages of rows, which have no hint: leave data.hint out'
    if recipe.environment is not None:
        yield (
            key,
            '"text" reads one answer behind a prompt, and an [environment] replies between '
            "several: leave one of them out",
        )
    if recipe.rollout.stop:
        yield (
            key,
            f'"text" reads rollout.stop = {list(recipe.rollout.stop)} as words of the answer, and '
            "a teacher that ends its turns in another way would grade them down: end answers with "
            "a token (model.eos_token), and leave stop out",
        )
    if recipe.rollout.source == "replay":
        yield key, '"text" reads the messages of rows, and recorded samples have none'


def _of_rows(recipe: WithTeachers, named: dict[KeyPath, OneTeacher]) -> Iterator[RecipeProblem]:
    """Of SFT, whose teacher gives whole distributions."""
    if recipe.teacher.top_k is not None and recipe.algorithm.needs().own_answers:
        yield (
            ("teacher", "top_k"),
            "reads the rows before the first update, and with algorithm.on_policy some answers are "
            "sampled later: leave one of them out",
        )
    if recipe.teacher.align == "text":
        yield (
            ("teacher", "align"),
            '"text" compares probabilities of segments of text, and distillation compares whole '
            'distributions over one vocabulary: take job = "rl" with "on_policy_distillation", or '
            "let the teacher write answers (postgrad generate) and train on their text",
        )
    if recipe.teacher.sets:
        yield (
            ("teacher", "sets"),
            'are of job = "rl": here one teacher reads all rows. Train on one dataset after the '
            "other, each with its teacher",
        )
    if recipe.teacher.server.base_url is not None:
        yield (
            ("teacher", "server"),
            "gives the logprobs of single tokens, and distillation compares whole distributions: "
            'load the teacher here (model.path), or take job = "rl" with '
            '"on_policy_distillation"',
        )
