"""Checks of recipes whose policy answers: sampling, evaluation by answers, and what scores them
(verifiers, a reward model, the environment). Each yields (place in the recipe, what is wrong).
"""

from collections.abc import Iterator

from postgrad.algorithms.base import Algorithm, Needs, RolloutAlgorithm
from postgrad.algorithms.policy_gradient import PolicyGradient
from postgrad.core.batch import RolloutBatchSettings
from postgrad.data.chat_format import roles_of
from postgrad.data.settings import GROUP_ANSWER, NO_ENVIRONMENT
from postgrad.ops.kl import MAX_STEP
from postgrad.recipe.checks import token_budget
from postgrad.recipe.eval_checks import evaluation_lengths
from postgrad.recipe.eval_settings import SAMPLING
from postgrad.recipe.lines import KeyPath, RecipeProblem
from postgrad.recipe.placement import engine_problems
from postgrad.recipe.scored import judges, reward_problems, scores
from postgrad.recipe.settings import AnsweringSections
from postgrad.rewards.mixing import ENVIRONMENT
from postgrad.rewards.registry import VERIFIERS
from postgrad.rollout.settings import TOTAL, RolloutSettings

# Verifiers whose details say which answer they read.
READ_ANSWERS = ("gsm8k", "math", "exact_match", "multiple_choice", "f1", "reasoning_gym")
# Keys of [rollout] about samples that have rewards, and are learned from.
_OF_REWARDED = (
    *("dynamic_sampling", "keep_above", "keep_below", "curriculum", "max_staleness"),
    *("router_replay", "keep_sampling_mask"),
)


def answering(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """Problems of jobs whose policy answers questions."""
    yield from token_budget(recipe, "a sequence")
    yield from reward_problems(recipe)
    yield from _plain_text(recipe)
    yield from _unread_answers(recipe)
    yield from scores(recipe)
    yield from engine_problems(recipe)
    settings = recipe.eval
    if not settings.sets:
        return
    yield from _held_out(recipe)
    if not recipe.evaluates_answers:
        return
    yield from _votes(recipe)
    names = recipe.reward_components
    for number, eval_set in enumerate(settings.sets):
        new = settings.sampling_of(eval_set).max_new_tokens or recipe.rollout.max_new_tokens
        if new >= eval_set.max_len:
            table = f"sets.{number}." if eval_set.max_new_tokens is not None else ""
            longer = "data.max_len" if eval_set.max_len == recipe.data.max_len else "this"
            yield (
                ("eval", "sets", number, "max_len"),
                f"max_new_tokens = {new} leaves no room for a prompt in {eval_set.max_len} tokens: "
                f"lower eval.{table}max_new_tokens, or raise {longer}",
            )
    if settings.component is not None and names and settings.component not in names:
        yield (
            ("eval", "component"),
            f"no reward is called {settings.component!r}; known: {', '.join(names)}",
        )


def _of_dataset(recipe: AnsweringSections, number: int, key: str) -> KeyPath:
    """Where a key of a training dataset stands: in [[data.sets]], or in [data]."""
    return ("data", "sets", number, key) if recipe.data.sets else ("data", key)


def _plain_text(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """Rows of plain text where questions are answered: it asks nothing."""
    why = "is plain text, and {} answers questions: name the columns of questions, or leave it out"
    for number, dataset in enumerate(recipe.data.sources if recipe.trains_on_rollouts else ()):
        if dataset.text:
            yield _of_dataset(recipe, number, "text"), why.format("an RL job")
    for number, eval_set in enumerate(recipe.eval.sets if recipe.evaluates_answers else ()):
        if eval_set.text:
            yield ("eval", "sets", number, "text"), why.format("an evaluation with [[rewards]]")


def _unread_answers(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """Rows that verifiers would have to refuse, where no verifier reads their answers."""
    why = "leaves out rows that no verifier can read, and no [[rewards]] read these"
    for number, dataset in enumerate(() if recipe.trains_on_rollouts else recipe.data.sources):
        if dataset.on_unreadable == "drop":
            yield (
                _of_dataset(recipe, number, "on_unreadable"),
                why,
            )
    for number, eval_set in enumerate(() if recipe.evaluates_answers else recipe.eval.sets):
        if eval_set.on_unreadable == "drop":
            yield ("eval", "sets", number, "on_unreadable"), why


def hints(recipe: AnsweringSections, algorithm: Algorithm) -> Iterator[RecipeProblem]:
    """Hints that nothing reads, or that are missing where the policy grades itself."""
    needs = algorithm.needs()
    graded = recipe.trains_on_rollouts and (needs.teacher or needs.self_graded is not None)
    for number, dataset in enumerate(recipe.data.sources):
        place = _of_dataset(recipe, number, "hint")
        if dataset.hint and not graded:
            yield (
                place,
                "is read by what grades the tokens of samples, and nothing does: take "
                'algorithm.type = "on_policy_distillation" (job = "rl"), or leave it out',
            )
        elif dataset.hint and recipe.rollout.source == "replay":
            yield place, 'is not among recorded samples: with source = "replay" leave it out'
        elif needs.self_graded == "policy" and not dataset.hint:
            yield (
                place,
                "the policy would grade its samples with its own logprobs, and every advantage "
                'would be 0: give a text that helps, such as "A right solution:\\n{answer}"',
            )
    for number, eval_set in enumerate(recipe.eval.sets):
        if eval_set.hint:
            place = ("eval", "sets", number, "hint")
            yield place, "is of training samples: the answers of an evaluation get no hint"


def group_hints(
    recipe: AnsweringSections, algorithm: RolloutAlgorithm, batch: RolloutBatchSettings
) -> Iterator[RecipeProblem]:
    """Hints that show a right answer of the group where no sample can be one."""
    datasets, n = recipe.data.sources, batch.n_samples_per_prompt
    showing = [number for number, dataset in enumerate(datasets) if dataset.shows_group]
    for number in showing:
        if recipe.environment is not None and datasets[number].environment != NO_ENVIRONMENT:
            yield (
                _of_dataset(recipe, number, "hint"),
                f"{{{GROUP_ANSWER}}} is an answer of one turn, and an [environment] plays these "
                "rows: take columns alone",
            )
    if showing and n < 2:
        yield (
            ("batch", "n_samples_per_prompt"),
            f"{n} leaves no other sample whose answer {{{GROUP_ANSWER}}} of data.hint could be: at "
            "least 2",
        )
    if not showing and algorithm.needs().correct_at != Needs().correct_at:
        yield (
            ("algorithm", "correct_at"),
            f"says which samples {{{GROUP_ANSWER}}} of data.hint may show, and no hint has it",
        )


def _held_out(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """An evaluation by loss where there is none, and keys of [eval] that it would not read."""
    settings = recipe.eval
    if settings.loss and recipe.trains_on_rollouts:
        yield ("eval", "loss"), "is of SFT jobs: RL is evaluated by sampled answers, leave it out"
    if recipe.measures_loss:
        yield from evaluation_lengths(recipe)
    if recipe.evaluates_answers:
        return
    kind = type(settings)
    for key in (
        *("n_samples", "pass_at", "maj_at", "greedy", "component", "correct_at"),
        *(key for key in SAMPLING if key != "n_samples"),
    ):
        if getattr(settings, key) != kind.model_fields[key].default:
            yield (
                ("eval", key),
                "is of sampled answers, and nothing says which are right: give [[rewards]] with a "
                "type, or leave this out for the loss alone",
            )
    for number, eval_set in enumerate(settings.sets):
        for key in SAMPLING:
            if getattr(eval_set, key) is not None:
                yield (
                    ("eval", "sets", number, key),
                    "is of sampled answers, and nothing says which are right: give [[rewards]] "
                    "with a type, or leave this out for the loss alone",
                )
        if eval_set.by is not None:
            yield (
                ("eval", "sets", number, "by"),
                "divides the rates of sampled answers: for losses give each part a set of its own",
            )


def _votes(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """Majority votes on what a verifier of ours or an environment does not read: an answer."""
    if not recipe.eval.maj_at:
        return
    judging = [recipe.rewards[place] for place in judges(recipe.eval, recipe.rewards)]
    silent = [r.name or r.type for r in judging if r.type in {*VERIFIERS} - {*READ_ANSWERS}]
    if recipe.eval.component == ENVIRONMENT or not recipe.rewards:
        silent = [ENVIRONMENT]
    for name in silent:
        yield (
            ("eval", "maj_at"),
            f"votes on answers, and {name!r} reads none: name a component that does with "
            f"eval.component, of type {', '.join(READ_ANSWERS)} or of your own",
        )


def unrewarded(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """Keys of [rollout] that nothing reads in SFT, whose samples are those of evaluations, or
    answers that a teacher grades.
    """
    defaults = RolloutSettings()
    for key in _OF_REWARDED:
        if getattr(recipe.rollout, key) != getattr(defaults, key):
            yield ("rollout", key), 'is of samples that have rewards (job = "rl"): leave it out'
    if recipe.rollout.source == "replay" and not recipe.own_answers:
        yield ("rollout", "source"), '"replay" is of job = "rl": leave it out'


def own_answers(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """SFT that answers some rows itself: a row asks something, and an answer has room."""
    if not recipe.own_answers:
        return
    rollout, why = recipe.rollout, "with algorithm.on_policy"
    for number, dataset in enumerate(recipe.data.sources):
        if dataset.text:
            place = _of_dataset(recipe, number, "text")
            yield place, f"is plain text, which asks nothing, {why}: name columns of questions"
        elif dataset.loss_turns == "everything":
            place = _of_dataset(recipe, number, "loss_turns")
            yield place, f'"everything" leaves no question to answer, {why}: take "all"'
        elif {*roles_of(dataset.loss_turns)} != {"assistant"}:
            place = _of_dataset(recipe, number, "loss_turns")
            yield place, f'the student answers alone, {why}: take "all" or "last"'
    if rollout.max_new_tokens >= recipe.data.max_len:
        yield (
            ("rollout", "max_new_tokens"),
            f"{rollout.max_new_tokens} leaves no room for a question in data.max_len = "
            f"{recipe.data.max_len} tokens, {why}: take fewer",
        )
    if rollout.source == "replay":
        yield ("rollout", "source"), f'"replay" has no answers of this student, {why}: leave it out'


def sampling(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """[rollout] and [[rewards]] of a job that learns from what it samples."""
    if recipe.reward_components == []:
        yield ("rewards",), "nothing scores the samples: give at least one [[rewards]] with a type"
    rollout, data = recipe.rollout, recipe.data
    if rollout.max_new_tokens >= data.max_len:
        yield (
            ("rollout", "max_new_tokens"),
            f"{rollout.max_new_tokens} leaves no room for a prompt in data.max_len = "
            f"{data.max_len} tokens, which count prompt and response",
        )
    if rollout.temperature == 0.0:
        yield (
            ("rollout", "temperature"),
            "0 gives the same greedy answer in all samples of a prompt, and there is nothing to "
            "learn from: above 0, such as 1.0",
        )
    if rollout.source == "replay" and rollout.replay_path is None:
        yield (
            ("rollout", "replay_path"),
            'source = "replay" needs the run directory whose samples are read',
        )
    if rollout.source == "live" and rollout.replay_path is not None:
        yield ("rollout", "replay_path"), 'is read only where source = "replay"'
    yield from _replay(rollout)
    yield from _filter(recipe)


def group_size(algorithm: RolloutAlgorithm, batch: RolloutBatchSettings) -> Iterator[RecipeProblem]:
    """Fewer samples of a prompt than the algorithm's baseline compares."""
    least, n = algorithm.min_group_size, batch.n_samples_per_prompt
    if n < least:
        yield (
            ("batch", "n_samples_per_prompt"),
            f"{n} is too few for a baseline among a prompt's samples: at least {least}",
        )
    if n == 1 and getattr(algorithm, "length_penalty", None):
        yield (
            ("algorithm", "length_penalty"),
            "compares the samples of a prompt, and takes the same share off each where there is "
            "one: raise batch.n_samples_per_prompt to at least 2, or leave it out",
        )
    if algorithm.level == "pair" and (batch.micro_train_batch_size or 2) < 2:
        yield (
            ("batch", "micro_train_batch_size"),
            "1 cannot hold both samples of a pair, which share a forward pass: at least 2",
        )


def adapted_kl(algorithm: RolloutAlgorithm, batch: RolloutBatchSettings) -> Iterator[RecipeProblem]:
    """A horizon so short that a step could turn the sign of the KL coefficient."""
    if not isinstance(algorithm, PolicyGradient) or algorithm.kl_target is None:
        return
    samples = batch.rollout_batch_size * batch.n_samples_per_prompt
    change = MAX_STEP * samples / algorithm.kl_horizon
    if change >= 1.0:
        yield (
            ("algorithm", "kl_horizon"),
            f"{algorithm.kl_horizon} samples are too few: a step of {samples} samples changes "
            f"algorithm.kl_coef by up to {change:.0%}, and could make it 0 or negative: more than "
            f"{MAX_STEP * samples:g} are needed",
        )


def _replay(rollout: RolloutSettings) -> Iterator[RecipeProblem]:
    """Keys that choose which prompts are sampled, in a replay that samples none."""
    if rollout.source != "replay":
        return
    for key in ("dynamic_sampling", "curriculum"):
        if getattr(rollout, key) != type(rollout).model_fields[key].default:
            yield (
                ("rollout", key),
                "samples nothing in a replay, which takes the groups that the recorded run kept: "
                'leave this out, or take source = "live"',
            )


def _filter(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """A `filter_on`, of dynamic sampling and a curriculum, that names no reward of the recipe."""
    component, names = recipe.rollout.filter_on, recipe.reward_components
    if component is None or not names:
        return
    place = ("rollout", "filter_on")
    if component != TOTAL and component not in names:
        yield (
            place,
            f"no reward is called {component!r}; known: {', '.join([*names, TOTAL])}",
        )
    if component == TOTAL and TOTAL in names:
        yield (
            place,
            f"{TOTAL!r} is the name of the total reward and of one of [[rewards]]: give that one "
            "another `name`",
        )
