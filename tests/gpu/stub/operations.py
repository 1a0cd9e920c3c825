"""Calls every sample of helpers.refused on the stub in deterministic mode. Prints as JSON what each
was answered: null, or the name in torch's refusal.
"""

import json
from collections.abc import Callable
from typing import Any

import torch

from helpers.refused import REFUSED
from postgrad.parallel.device import Placement, apply

SAYS = " does not have a deterministic implementation"


def answer(sample: Callable[[torch.device], Any]) -> str | None:
    try:
        sample(apply(Placement("cuda", 1, True)))
    except RuntimeError as error:
        if SAYS not in str(error):
            raise
        return str(error).split(SAYS)[0]
    return None


if __name__ == "__main__":
    answers = {name: answer(call) for rule in REFUSED for name, call in rule.samples.items()}
    print(json.dumps(answers))
