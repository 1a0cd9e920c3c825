"""A save, made in another process and looked at in this one."""

from pathlib import Path

import torch
from torch import Tensor

from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.state import Best, RunState
from postgrad.checkpoint.store import CheckpointStore, SaveFailed, Untidy
from postgrad.core.cursor import Cursor

FAILED = 3  # exit codes of `save`
UNTIDY = 4


def store_in(root: Path, keep_steps: int = 0) -> CheckpointStore:
    """Keeps one checkpoint beside the best, and those of keep_steps: each save has something to
    remove.
    """
    settings = CheckpointSettings(max_ckpt_num=1, save_steps=1, keep_steps=keep_steps)
    return CheckpointStore(root, settings)


def tensors(step: int) -> dict[str, dict[str, Tensor]]:
    """Of a small model at a step: every number is the step."""
    weights = {"a": torch.full((64, 33), float(step)), "b": torch.full((7,), float(step))}
    return {"policy.weights": weights, "policy.optimizer": {"a.exp_avg": weights["a"]}}


def state(step: int, best: int) -> RunState:
    """After `step` steps, the best of which was `best`."""
    return RunState(
        step=step,
        update=step,
        episodes=8 * step,
        cursor=Cursor(),
        algorithm={},
        evaluations={},
        best=Best("m", best / 10, best),
        choices={},
        log_offsets={},
    )


def save(root: str, step: int, best: int, keep_steps: int = 0) -> int:
    """Saves `step`, which is the best where it equals `best`."""
    try:
        store_in(Path(root), keep_steps).save(state(step, best), tensors(step), best=step == best)
    except SaveFailed as error:
        print(error)
        return FAILED
    except Untidy as error:
        print(error)
        return UNTIDY
    return 0


def loads(root: Path, step: int) -> bool:
    """True where the newest whole checkpoint is that of `step`, with all it should hold."""
    loaded = store_in(root).load()
    assert loaded.skipped == ()
    assert loaded.state == state(loaded.step, loaded.state.best.step if loaded.state.best else 0)
    for stem, named in tensors(loaded.step).items():
        for name, tensor in loaded.tensors(stem).items():
            assert torch.equal(tensor, named[name])
    return loaded.step == step
