"""Checks of what samples are drawn from and what the policy learns from them: filters, older
weights, other experts. Each yields (place in the recipe, what is wrong).
"""

from collections.abc import Iterator

from postgrad.algorithms.base import RolloutAlgorithm
from postgrad.algorithms.behaviour_correction import BehaviourCorrection
from postgrad.algorithms.token_selection import TokenSelection
from postgrad.recipe.lines import RecipeProblem
from postgrad.recipe.settings import AnsweringSections
from postgrad.recipe.teachers import TeacherSettings
from postgrad.rollout.grammar import KINDS
from postgrad.rollout.settings import RolloutSettings

KEEP = "rollout.keep_sampling_mask = true"


def stale_samples(algorithm: RolloutAlgorithm, rollout: RolloutSettings) -> Iterator[RecipeProblem]:
    """Samples of older weights that nothing corrects for, and a ratio to truncated samples."""
    sampled_is_old = algorithm.needs().sampled_is_old
    weighs = rejects = False
    if isinstance(algorithm, BehaviourCorrection):
        weighs, rejects = algorithm.weighs, bool(algorithm.rejection)
    corrects = sampled_is_old or weighs or rejects
    if rollout.max_staleness and algorithm.needs().ratio and not corrects:
        yield (
            ("rollout", "max_staleness"),
            f"{rollout.max_staleness} trains on samples of older weights, and nothing corrects for "
            "it: on the quickstart's task such runs went from 0.47 right answers to 0.14 at 4 "
            'steps and 0.05 at 8; set algorithm.correction = "tis", or algorithm.old_logprobs = '
            '"sampled"',
        )
    if sampled_is_old and weighs:
        yield (
            ("algorithm", "old_logprobs"),
            '"sampled" clips the ratio to the sampler itself: there is nothing left for '
            "algorithm.correction to do, leave one of them out (algorithm.rejection may stay)",
        )
    if sampled_is_old and rollout.filters and not rollout.keep_sampling_mask:
        yield (
            ("algorithm", "old_logprobs"),
            f'"sampled" with rollout.{rollout.filters[0]}: samples come from another distribution '
            "than the policy's, which biases the ratio; sample without, or keep their sampling "
            f"mask ({KEEP})",
        )
    grammars = [name for name in rollout.filters if name in KINDS]
    if rollout.max_staleness and grammars and rollout.type == "vllm":
        yield (
            ("rollout", grammars[0]),
            f"with rollout.max_staleness = {rollout.max_staleness}: vLLM begins a grammar anew "
            'where a sample goes on; use type = "local", or max_staleness = 0',
        )
    if rollout.max_staleness == 0 and not rollout.in_flight_updates:
        yield (
            ("rollout", "in_flight_updates"),
            "is of samples that are under way while weights change: give rollout.max_staleness",
        )


def router_replay(recipe: AnsweringSections, rollout: RolloutSettings) -> Iterator[RecipeProblem]:
    """Experts that nobody records, or that no rank has for all tokens."""
    place = ("rollout", "router_replay")
    if rollout.router_replay == "sampled" and rollout.type not in ("local", "vllm"):
        yield (
            place,
            f'"sampled" with rollout.type = "{rollout.type}", whose samples come without the '
            'experts that they were sent to: use "old", or type = "local"',
        )
    if rollout.router_replay == "old" and recipe.learner.context_parallel > 1:
        yield (
            place,
            f'"old" with learner.context_parallel = {recipe.learner.context_parallel}, where a '
            'rank has a part of each sequence: use "sampled", or 1',
        )


def correction(algorithm: RolloutAlgorithm, rollout: RolloutSettings) -> Iterator[RecipeProblem]:
    """Importance weights of samples that were drawn from a truncated distribution."""
    if not isinstance(algorithm, BehaviourCorrection) or algorithm.correction_with_filters:
        return
    reads = {
        "correction": algorithm.weighs,
        "rejection": bool(algorithm.rejection),
        "off_policy_threshold": algorithm.off_policy_threshold is not None,
        "second_moment": isinstance(algorithm, TokenSelection)
        and algorithm.second_moment is not None,
    }
    if any(reads.values()) and rollout.filters and not rollout.keep_sampling_mask:
        stated = " and ".join(f"rollout.{name}" for name in rollout.filters)
        yield (
            ("algorithm", next(key for key, read in reads.items() if read)),
            f"with {stated} samples come from another distribution than the policy's, which biases "
            f"importance weights: sample without, keep their sampling mask ({KEEP}), or say "
            "correction_with_filters = true",
        )


def sampling_mask(
    rollout: RolloutSettings, algorithm: RolloutAlgorithm, teacher: TeacherSettings
) -> Iterator[RecipeProblem]:
    """Masks that nobody records, that take nothing away, or that a teacher cannot read."""
    place = ("rollout", "keep_sampling_mask")
    if not rollout.keep_sampling_mask:
        return
    if rollout.type != "local":
        yield (
            place,
            f'with rollout.type = "{rollout.type}", whose samples come without what the filters '
            'left: use type = "local"',
        )
    if not rollout.sorts:
        alone = f", and rollout.{rollout.filters[0]} leaves too many" if rollout.filters else ""
        yield (
            place,
            f"keeps the tokens that top_p, top_k and min_p leave, and none of them is on{alone}: "
            "set one of them, or leave this out",
        )
    if not algorithm.needs().teacher or algorithm.needs().self_graded:
        return
    for table, settings in teacher.places:
        if settings.align == "text" or settings.server.base_url is not None:
            key = "align" if settings.align == "text" else "server"
            yield (
                place,
                f"with {'.'.join(map(str, (*table, key)))}: this teacher's logprobs are of its "
                "whole vocabulary, and the policy's of what the filters left; load a teacher with "
                "the student's tokens, or sample without filters",
            )
