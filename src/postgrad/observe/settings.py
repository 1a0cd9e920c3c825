"""The settings of observing in a recipe: [sentinels], and [observe] for external loggers."""

from typing import Annotated, Literal

from pydantic import Field

from postgrad.core.settings import Settings
from postgrad.observe.sentinels.base import Sentinel
from postgrad.observe.sentinels.entropy import Entropy
from postgrad.observe.sentinels.evaluation import Evaluation
from postgrad.observe.sentinels.gradient import Gradient
from postgrad.observe.sentinels.kl import KL
from postgrad.observe.sentinels.length import Length
from postgrad.observe.sentinels.mismatch import Mismatch, Staleness
from postgrad.observe.sentinels.no_gradient import NoGradient
from postgrad.observe.sentinels.on_policy import OnPolicy
from postgrad.observe.sentinels.publish import Publish
from postgrad.observe.sentinels.repetition import Repetition
from postgrad.observe.sentinels.router import Router
from postgrad.observe.sentinels.stall import Stall
from postgrad.observe.sentinels.truncation import Truncation
from postgrad.observe.sentinels.verifier import VerifierFailures

KeptSamples = Literal["all", "some"] | Annotated[int, Field(ge=1)]
LoggerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]


class SentinelSettings(Settings):
    """Cheap checks that are on by default; each has an action and thresholds of its own."""

    on_policy: OnPolicy = OnPolicy()
    mismatch: Mismatch = Mismatch()
    staleness: Staleness = Staleness()
    publish: Publish = Publish()
    gradient: Gradient = Gradient()
    entropy: Entropy = Entropy()
    router: Router = Router()
    kl: KL = KL()
    evaluation: Evaluation = Evaluation()
    length: Length = Length()
    repetition: Repetition = Repetition()
    truncation: Truncation = Truncation()
    no_gradient: NoGradient = NoGradient()
    verifier: VerifierFailures = VerifierFailures()
    stall: Stall = Stall()

    def looking(self) -> dict[str, Sentinel]:
        """Name -> sentinel of those that look at metrics and are not off."""
        every = {name: getattr(self, name) for name in type(self).model_fields}
        return {
            name: sentinel
            for name, sentinel in every.items()
            if isinstance(sentinel, Sentinel) and sentinel.action != "off"
        }

    def for_dtypes(self, learner: str, engine: str | None) -> "SentinelSettings":
        """A copy with the limits for the compute dtypes of the learner and the rollout engine."""
        plain = {learner, engine} <= {"float32", None}
        suited = {
            "on_policy": self.on_policy.for_dtype(learner),
            "publish": self.publish.for_dtype("float32" if plain else "bfloat16"),
        }
        return self.model_copy(update=suited)


class ObserveSettings(Settings):
    """What of the samples is kept, and external loggers that get the metrics, too.

    `samples` thins samples.jsonl, `eval_samples` eval_samples.jsonl: whole groups, the same prompts
    whenever they come again, up to so many samples of a step or an evaluation ("some": 64).
    """

    samples: KeptSamples = "all"  # a replay needs all
    eval_samples: KeptSamples = "all"
    compress: Literal["none", "gzip"] = "none"  # of both files, from a run's start on

    loggers: tuple[LoggerName, ...] = ()
    project: str = Field(default="postgrad", min_length=1)  # the project there
    name: str | None = Field(default=None, min_length=1)  # of the run there; None: of run_dir
