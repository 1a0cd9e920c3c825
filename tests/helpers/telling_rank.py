"""A rank that tells which models it holds."""

import gc

from transformers import PreTrainedModel

from postgrad.fleet.worker import RankWorker


class Telling(RankWorker):
    """A rank of a run whose test asks."""

    def held(self) -> tuple[list[str], int]:
        """The names of its roles, and how many language models are in its memory."""
        return sorted(self._fleet.roles), language_models()


def language_models() -> int:
    """Those that nothing refers to any more count too, until they are collected."""
    kinds = [type(each) for each in gc.get_objects() if issubclass(type(each), PreTrainedModel)]
    return sum(kind.__name__.endswith("ForCausalLM") for kind in kinds)
