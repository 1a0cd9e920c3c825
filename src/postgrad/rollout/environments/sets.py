"""The environments of a recipe: which of them plays a dataset, and what its rows have to have."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt
from postgrad.data.draws import Draws
from postgrad.data.settings import DataSettings, MixSettings
from postgrad.data.templates import template_call
from postgrad.rollout.environment import Environment, Environments
from postgrad.rollout.environments.base import ChatEnvironment, build, failure_of
from postgrad.rollout.environments.chat import dialogue
from postgrad.rollout.environments.episode_messages import EpisodeRecords
from postgrad.rollout.settings import EnvironmentSets

if TYPE_CHECKING:
    from postgrad.models.image_reader import ImageReader  # imports torch

Data = TypeVar("Data", bound=DataSettings)


def dialogues(
    settings: EnvironmentSets | None,
    data: DataSettings | MixSettings,
    tokenizer: Any,
    stack: ExitStack | None = None,
    reader: "ImageReader | None" = None,
    warn: Callable[[str], None] | None = None,
    max_len: int | None = None,
    records: EpisodeRecords | None = None,
) -> Environments:
    """The environments that `settings` name, with the chat template of `data`. stack: ends their
    threads and processes, which otherwise end with them. reader: of a policy that reads images.
    warn, records: as of Dialogue. max_len: tokens of the longest sample; None: any number.
    Raises the errors of `dialogue`.
    """
    by_name: dict[str | None, Environment] = {}
    for name, environment in (settings.by_name if settings else {}).items():
        call = template_call(data)
        world = dialogue(environment, tokenizer, call, reader, warn, max_len, records)
        if stack is not None:
            stack.callback(world.close)
        by_name[name] = world
    return Environments(by_name)


def as_played(settings: EnvironmentSets | None, data: Data) -> Data:
    """The data settings with the environment's name, and with its tools among the variables of the
    chat template, in each of [[data.sets]].

    Raises UsageError where the recipe sets one of these variables itself.
    """
    if settings is None:
        return data
    if isinstance(data, MixSettings) and data.sets:
        played = tuple(as_played(settings, dataset) for dataset in data.sets)
        return data.model_copy(update={"sets": played})
    name = settings.plays(data.environment)
    if name is None:
        return data.model_copy(update={"environment": None})
    more = build(settings.by_name[name]).variables()
    for key in more:
        if key in data.chat_template_kwargs:
            raise UsageError(f"data.chat_template_kwargs: {key!r} comes from [environment]")
    kwargs = {**data.chat_template_kwargs, **more}
    return data.model_copy(update={"environment": name, "chat_template_kwargs": kwargs})


def check_rows(settings: EnvironmentSets | None, prompts: Draws[Prompt]) -> None:
    """Raises UsageError where an environment cannot start an episode from a row."""
    for name, environment in (settings.by_name if settings else {}).items():
        chat = build(environment)
        rows, bad, first = 0, 0, None
        for prompt in prompts.all():
            if prompt.environment != name:
                continue
            rows += 1
            if (reason := _unplayable(chat, prompt)) is not None:
                bad, first = bad + 1, first or (prompt, reason)
        if first is not None:
            prompt, reason = first
            raise UsageError(
                f"{bad} of {rows} rows cannot be played in the environment "
                f"{environment.type!r}; the first is row {prompt.row} of {prompt.dataset}: "
                f"{reason}; fix the rows, or choose another environment.type"
            )


def _unplayable(chat: ChatEnvironment, row: Prompt) -> str | None:
    """What `check` says of a row; what it raises is a reason too, as a verifier's."""
    try:
        return chat.check(row)
    except Exception as error:  # noqa: BLE001  # code of others: told with its line
        return failure_of(error).message
