"""Weights & Biases: its files in RUN_DIR/wandb; WANDB_MODE=offline keeps them there."""

from postgrad.observe.loggers.base import RunIdentity, Values


class WandB:
    """Logs to W&B under the run's id, so that a resumed run is one curve.

    Online, W&B reports its newest step. Offline nobody knows what a kill left in the older files,
    so each process logs the run from its first step, and its newest files have the complete curve.
    """

    def __init__(self, run: RunIdentity) -> None:
        import wandb

        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.directory),
            config=dict(run.recipe),
            settings=wandb.Settings(
                silent=True, console="off", save_code=False, disable_git=True, disable_code=True
            ),
        )
        offline = bool(self._run.settings.mode == "offline")
        self.last = -1 if offline else self._run.starting_step - 1

    def log(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
