"""Truncated responses: most samples hit the token limit, or a dead end, before they end."""

from pydantic import Field

from postgrad.observe.sentinels.base import Level, Seen


class Truncation(Level):
    """Speaks while more than `limit` of the samples are truncated, `steps` steps in a row."""

    limit: float = Field(default=0.5, gt=0.0, le=1.0)

    def value(self, seen: Seen) -> float | None:
        return seen.get("truncated_fraction") if "samples" in seen else None

    def tell(self, value: float, seen: Seen) -> str:
        if 2 * seen.get("dead_end_fraction", 0.0) > value:
            return (
                f"{value:.0%} of the answers are truncated (limit {self.limit:.0%}), most of them "
                "at a dead end of their grammar, which no token of the tokenizer continues: look "
                "at their ends in samples.jsonl and change the grammar in [rollout]"
            )
        return (
            f"{value:.0%} of the answers are cut off at the token limit (limit {self.limit:.0%}), "
            f"at {seen['response_length']:.0f} tokens on average: raise rollout.max_new_tokens and "
            "data.max_len, or teach the model to stop (SFT, a length penalty)"
        )
