"""The recipe's settings of sampling: [rollout] and the tables below it."""

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from postgrad.core.errors import UsageError
from postgrad.core.settings import Settings
from postgrad.core.text import nearest
from postgrad.data.settings import NO_ENVIRONMENT
from postgrad.rollout.grammar import KINDS, compiled
from postgrad.rollout.openai.settings import OpenAISettings
from postgrad.rollout.vllm.settings import VLLMSettings

# Which experts of a mixture the policy uses again when it learns.
RouterReplay = Literal["off", "sampled", "old"]
TOTAL = "total"  # of filter_on: the shaped reward, not one of its components
# Settings that take tokens out of the policy's distribution, each off by default.
FILTERS = {"top_p", "top_k", "min_p", *KINDS}


class TokenFilters(Settings):
    """Which of the likeliest tokens can be drawn: all others have no probability. top_p (Holtzman
    et al. 2020, arXiv:1904.09751) leaves the fewest that have this probability together, min_p
    (arXiv:2407.01082) those with at least this share of the likeliest one's.
    """

    top_p: float = Field(default=1.0, gt=0.0, le=1.0)  # 1: off
    top_k: int = Field(default=0, ge=0)  # 0: off
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)  # 0: off

    @property
    def sorts(self) -> bool:
        """Whether any of them is on: the tokens are sorted for it."""
        return bool(self.top_k or self.top_p < 1.0 or self.min_p)


class SamplingSettings(TokenFilters):
    """How the next token is chosen. temperature 0 is greedy; the filters are applied after it.

    With `regex`, `json_schema` or `lark`, one of them, each answer, or each turn, is what it
    describes from its first token to its last: other tokens have no probability. Needs the extra
    `grammar`.
    """

    temperature: float = Field(default=1.0, ge=0.0)
    stop: tuple[str, ...] = ()  # texts that end an answer
    max_new_tokens: int = Field(default=512, ge=1)  # of one answer, or of one turn
    regex: str | None = None  # a regular expression, in the syntax of Rust's crate regex
    json_schema: str | None = None  # the text of a JSON schema
    lark: str | None = None  # a context-free grammar, as the library Lark writes them

    @field_validator(*KINDS)
    @classmethod
    def _readable(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is not None:
            compiled((str(info.field_name), text))
        return text

    @model_validator(mode="after")
    def _single_grammar(self) -> Self:
        stated = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(stated) > 1:
            raise ValueError(f"give one grammar, not {' and '.join(stated)}")
        return self

    @property
    def filters(self) -> tuple[str, ...]:
        """Which of FILTERS are on."""
        return tuple(self.model_dump(include=FILTERS, exclude_defaults=True))


class CurriculumSettings(Settings):
    """Rows that the policy has learned, or cannot learn yet, are passed over.

    A row whose group had a mean score of at least `retire_at` is not sampled again, or only after
    `revisit_epochs`; one with at most `postpone_at` waits for `postpone_epochs`. Scores are those
    of rollout.filter_on.
    """

    retire_at: float | None = None
    revisit_epochs: int = Field(default=0, ge=0)  # 0: never again
    postpone_at: float | None = None
    postpone_epochs: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _order(self) -> Self:
        if (
            self.retire_at is not None
            and self.postpone_at is not None
            and self.postpone_at >= self.retire_at
        ):
            raise ValueError(
                f"postpone_at = {self.postpone_at:g} must be below retire_at = {self.retire_at:g}: "
                "a prompt is postponed before it is retired"
            )
        return self


class RolloutSettings(SamplingSettings):
    """The rollout engine and where a step's samples come from.

    dynamic_sampling: groups that teach nothing are replaced by new prompts, in up to `max_rounds`
    rounds of sampling: those whose scores are all equal, and those whose mean score is not above
    `keep_above` or not below `keep_below`. `filter_on` names the component that is asked, also by
    a curriculum. A replay, which samples nothing, refuses both this and a curriculum.

    max_staleness: how many steps may lie between the weights that begin a sample and the step that
    trains on it. 0: each step samples with its own weights. Otherwise the prompts of as many steps
    ahead are sampled beside a step's own, and new weights arrive while they are being written
    (docs/async.md). in_flight_updates = false: a sample ends with the weights that began it.
    schedule, of engines that sample while the policy learns: "fixed" cuts them where samples have
    ended, so that the clock decides nothing; "free" where the learner is ready, and records it;
    "replay" where a recorded run was cut.

    `slots`: sequences decoded together; `cache_tokens`: token places in the key-value cache. Both
    are chosen at start where they are left out, and kept as run state. slots = "auto": as many as
    fit the memory that is there, tried on the device.
    """

    type: Literal["local", "vllm", "openai"] = "local"
    source: Literal["live", "replay"] = "live"
    replay_path: str | None = None  # run directory whose samples.jsonl is read
    dynamic_sampling: bool = False
    max_rounds: int = Field(default=4, ge=1)
    # The component of [[rewards]] whose scores are judged, or "total", the shaped reward. Left out:
    # eval.component, else the first that applies to the row: what evaluation takes for right.
    filter_on: str | None = None
    keep_above: float | None = None
    keep_below: float | None = None
    curriculum: CurriculumSettings = CurriculumSettings()
    max_staleness: int = Field(default=0, ge=0, le=64)
    in_flight_updates: bool = True
    schedule: Literal["fixed", "free", "replay"] = "fixed"
    schedule_path: str | None = None  # run directory whose schedule.jsonl is repeated
    slots: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    cache_tokens: int | None = Field(default=None, ge=16)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # Which experts the policy uses when it learns, where it is a mixture of them. "off": those that
    # its routers choose then. "sampled": those that the engine chose. "old": those that it
    # chose before the step, in all updates of it.
    router_replay: RouterReplay = "off"
    # With top_p, top_k or min_p: keep which tokens they left, at each token that was sampled, and
    # let learner, reference and teacher share out probability among the same tokens alone
    # (DeepSeek-V3.2, arXiv:2512.02556).
    keep_sampling_mask: bool = False
    # How weights get from the ranks to vLLM's processes and rollout workers. "memory": through the
    # memory of a machine that both share. "ipc": on the GPU that both share. "broadcast": NCCL, on
    # CPUs gloo. "auto" chooses for each engine by where it is, and says so where versions do not
    # allow what the GPUs would.
    transport: Literal["auto", "memory", "ipc", "broadcast"] = "auto"
    vllm: VLLMSettings = VLLMSettings()
    openai: OpenAISettings = OpenAISettings()

    @property
    def sends_adapter(self) -> bool:
        """Whether a publish sends the policy's adapter alone, which vLLM applies by itself."""
        return self.type == "vllm" and self.vllm.lora == "adapter"

    @property
    def stated_slots(self) -> int | None:
        """`slots` where the recipe gives a number, else None."""
        return None if self.slots == "auto" else self.slots

    @model_validator(mode="after")
    def _bounds_filter(self) -> Self:
        bounds = (self.keep_above, self.keep_below)
        if not self.dynamic_sampling and bounds != (None, None):
            raise ValueError("keep_above and keep_below filter groups: set dynamic_sampling = true")
        if None not in bounds and self.keep_above >= self.keep_below:  # pyright: ignore[reportOperatorIssue]
            raise ValueError(
                f"keep_above = {self.keep_above:g} must be below keep_below = {self.keep_below:g}: "
                "no group has a mean reward between them"
            )
        if self.filter_on is not None and not (
            self.dynamic_sampling or self.curriculum != CurriculumSettings()
        ):
            raise ValueError(
                "filter_on is read by dynamic sampling and by a curriculum only: set "
                "dynamic_sampling = true, or give [rollout.curriculum]"
            )
        return self


class EnvironmentSettings(Settings):
    """One environment: what answers the policy. Further keys are its own settings.

    `type` is an environment's name or "package.module:Class"; data.environment calls it by `name`
    where a recipe has several. `weight` is that of its rewards among [[rewards]]. An episode ends
    after `max_turns` turns of the policy; turn i has at most turn_tokens[i] tokens, later ones as
    many as the last one that is named, and none more than rollout.max_new_tokens.

    Steps of environments that wait for something run side by side, up to `concurrent` at once. A
    reply that is not there after `step_seconds`, or after all replies of an episode have taken
    `episode_seconds`, is a failure: `on_failure` says what becomes of the sample. So are more than
    `max_images` in the replies of an episode. `deterministic` overrides what the environment says
    of itself. `reply_tokens` are those of a mean reply: estimates of time read them, the run does
    not.
    """

    model_config = ConfigDict(frozen=True, extra="allow", validate_default=True)

    type: str
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]+$")  # None: its type
    weight: float = 1.0
    max_turns: int = Field(default=8, ge=1)
    turn_tokens: tuple[Annotated[int, Field(ge=1)], ...] = ()  # (): rollout.max_new_tokens each
    reply_tokens: int | None = Field(default=None, ge=0)  # for plans alone; None: not known
    concurrent: int = Field(default=16, ge=1, le=1024)
    step_seconds: float = Field(default=60.0, gt=0.0)  # of one reply, from when it has a place
    episode_seconds: float | None = Field(default=None, gt=0.0)  # None: no limit
    max_images: int = Field(default=16, ge=0)  # of all replies of an episode together
    deterministic: bool | None = None
    on_failure: Literal["drop_sample", "drop_group", "stop_run"] = "drop_sample"

    @property
    def extra_settings(self) -> dict[str, Any]:
        """The keys that are not declared here: the environment's own settings."""
        return dict(self.model_extra or {})


class EnvironmentSets(Settings):
    """The environments of a recipe. In a file one is given by its own keys in [environment],
    several as [[environment.sets]]; what a set leaves out is taken from [environment].
    """

    sets: Annotated[tuple[EnvironmentSettings, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _one_weight(self) -> Self:
        if len({environment.weight for environment in self.sets}) > 1:
            raise ValueError(
                "the rewards of all environments are one component of the reward: give `weight` "
                "in [environment], for all of them"
            )
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        for name in self.names:
            if name == NO_ENVIRONMENT:
                raise ValueError(f"{name!r} is what data.environment says for none: choose another")
            if self.names.count(name) > 1:
                raise ValueError(
                    f"{self.names.count(name)} of [[environment.sets]] are called {name!r}: `name` "
                    "each its own"
                )
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """What data.environment calls each of the sets."""
        return tuple(environment.name or environment.type for environment in self.sets)

    @property
    def by_name(self) -> dict[str, EnvironmentSettings]:
        """The sets by these names."""
        return dict(zip(self.names, self.sets, strict=True))

    def plays(self, name: str | None) -> str | None:
        """The environment of a dataset whose data.environment is `name`: its name; None where no
        environment plays it. Raises UsageError where it is not clear which one does.
        """
        if name == NO_ENVIRONMENT:
            return None
        if name is None and len(self.sets) == 1:
            return self.names[0]
        if name is None:
            raise UsageError(
                f"it is left out, and there are {len(self.sets)} environments: say one of "
                f"{', '.join(map(repr, self.names))}, or {NO_ENVIRONMENT!r}"
            )
        if name not in self.names:
            close = nearest(name, self.names)
            hint = f"did you mean {close!r}?" if close else f"known: {', '.join(self.names)}"
            raise UsageError(f"no environment is called {name!r}; {hint}")
        return name
