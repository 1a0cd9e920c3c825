"""A server of the package openenv: guess the last digit of a seed. For its own Python.

Argument: the port.
"""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: str


class Seen(Observation):
    text: str


class Game(Environment[Guess, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Seen:
        self._number = (seed or 0) % 10
        return Seen(text=f"game {seed}", done=False, reward=0.0)

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Seen:
        if action.number == "break":
            raise RuntimeError("the game is broken")
        right = action.number == str(self._number)
        text = "right" if right else "higher" if int(action.number) < self._number else "lower"
        return Seen(text=text, done=right, reward=1.0 if right else -0.25)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Seen, max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
