"""Each checkpoint as a Hugging Face directory too: what the job trains, alone, in run_dir/hf."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from postgrad.checkpoint.state import RunState
from postgrad.core.errors import PostgradError
from postgrad.core.files import remove
from postgrad.jobs.card import card_of
from postgrad.jobs.export import own_role, role_of
from postgrad.jobs.run import Run


class HFCopies:
    """Writes `step-000010` when that step is saved, and removes it when the checkpoint is removed.

    Training waits meanwhile: building a model sets torch's default dtype for all threads. A copy
    that cannot be written is warned of and recorded; `postgrad export` makes it later from the
    checkpoint.
    """

    def __init__(self, run: Run) -> None:
        base = run.recipe.model.source or str(run.directory.init)
        self._run = run
        self._role = role_of(run.recipe, own_role(run.recipe), base)
        self._folder = run.directory.copies

    def write(self, state: RunState, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Writes the copy of one step and removes copies whose checkpoints are gone."""
        to = self._folder / f"step-{state.step:06d}"
        weights: Mapping[str, Any] = tensors[self._role.stem]
        try:
            run, role = self._run, self._role
            now = replace(state, choices=run.choices.to_json())
            role_name = own_role(run.recipe)
            card = card_of(run.directory, run.recipe, now, role.base, role=role_name, adapter=False)
            role.export(weights, state.algorithm, to, run.choices, overwrite=True, card=card)
            kept = {f"step-{step:06d}" for step in (*self._run.store.steps(), state.step)}
            for old in self._folder.glob("step-*"):
                if old.name not in kept:
                    remove(old)
        except (OSError, PostgradError) as error:
            text = f"no Hugging Face copy of step {state.step}: {error} (checkpoint.save_hf)"
            self._run.logs.event("copy_failed", text, step=state.step)
            self._run.console.warn(text)
