"""A verifier: the share of a row's letters that the answer has, less what it repeats."""

from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier


class Letters(Verifier):
    repeats_cost: float = 0.5  # a setting: [[rewards]] repeats_cost = 1.0

    def check(self, prompt: PromptView) -> str | None:
        return None if prompt.metadata.get("letters") else "the column 'letters' is empty"

    def score(self, prompt: PromptView, rollout: RolloutView) -> Score:
        letters, text = set(str(prompt.metadata["letters"])), rollout.text
        has = letters & set(text)
        repeated = max(0, len(text) - len(set(text)))
        value = len(has) / len(letters) - self.repeats_cost * repeated / max(1, len(text))
        return Score(value, {"has": sorted(has), "repeated": repeated})
