"""TensorBoard: event files in RUN_DIR/tensorboard."""

from postgrad.observe.loggers.base import RunIdentity, Values

FOLDER = "tensorboard"


class TensorBoard:
    """Steps after the one that a run goes on from are purged: TensorBoard draws the new ones."""

    def __init__(self, run: RunIdentity) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.directory / FOLDER
        held = folder.is_dir() and any(folder.iterdir())
        self.last = run.start if held else -1
        purge = self.last + 1 if held else None
        self._writer = SummaryWriter(str(folder), purge_step=purge)  # pyright: ignore[reportPrivateImportUsage, reportUnknownMemberType, reportArgumentType]

    def log(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)  # pyright: ignore[reportUnknownMemberType]
        self._writer.flush()  # a killed run has what it told

    def close(self) -> None:
        self._writer.close()
