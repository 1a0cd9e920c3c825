"""An agent with instructions of its own: it asks which digit follows another, three times."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

INSTRUCTIONS = {"role": "system", "content": "Say the next digit."}
CLIENT = httpx.AsyncClient(timeout=None)  # of all samples: each has a key of its own


async def count_on(base_url: str, api_key: str, model: str, row: Mapping[str, Any]) -> float:
    """Asks until an answer is wrong. The reward: the share of the row's digits that were right."""
    messages: list[dict[str, Any]] = [INSTRUCTIONS]
    for place, digit in enumerate(row["digits"]):
        messages.append({"role": "user", "content": str(digit)})
        answer = await CLIENT.post(
            f"{base_url}/chat/completions",
            headers={"Authorization": f"Bearer {api_key}"},
            json={"model": model, "messages": messages},
        )
        messages.append(answer.raise_for_status().json()["choices"][0]["message"])
        if messages[-1]["content"].strip() != str((digit + 1) % 10):
            return place / len(row["digits"])
    return 1.0


def rows(size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Three digits each. The question is for people: the agent writes messages of its own."""
    for index in range(size):
        digits = random.Random(f"{seed} {index}").choices(range(10), k=3)
        yield {"question": " ".join(map(str, digits)), "answer": "", "digits": digits}


def lessons(size: int, seed: int) -> Iterator[dict[str, Any]]:
    """What a pupil says who is right in two cases out of three."""
    for row in rows(size, seed):
        dice, messages = random.Random(row["question"]), [INSTRUCTIONS]
        for digit in row["digits"]:
            answer = (digit + 1) % 10 if dice.random() < 2 / 3 else dice.randrange(10)
            messages.append({"role": "user", "content": str(digit)})
            messages.append({"role": "assistant", "content": str(answer)})
        yield {"messages": messages}
