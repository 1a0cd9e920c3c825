"""Whether a regular expression matches somewhere in the sample."""

import re

from postgrad.rewards.patterns import Pattern
from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier


class Regex(Verifier):
    """1 where the sample has a match of `pattern`, else 0; with `absent` the other way round.

    The score's detail has the first match. A pattern that backtracks without end uses up the CPU
    limit: a recorded failure.
    """

    pattern: Pattern
    absent: bool = False
    ignore_case: bool = False
    multiline: bool = False  # ^ and $ match at every line
    dot_all: bool = False  # . matches a line's end too

    def score(self, prompt: PromptView, rollout: RolloutView) -> Score:
        flags = re.IGNORECASE if self.ignore_case else re.NOFLAG
        flags |= re.MULTILINE if self.multiline else re.NOFLAG
        flags |= re.DOTALL if self.dot_all else re.NOFLAG
        match = re.search(self.pattern, rollout.text, flags)
        right = (match is None) is self.absent
        return Score(float(right), {"match": None if match is None else match[0][:200]})
