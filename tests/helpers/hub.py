"""A hub that is out of reach, and its caches, as huggingface_hub and datasets lay them out."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import datasets.config
import pytest
from datasets.arrow_writer import ArrowWriter
from huggingface_hub import constants

A, B = "a" * 40, "b" * 40  # commits


class OfflineHub:
    """Caches in a folder of a test's own; nothing reaches a network."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.models, self.datasets = folder / "hub", folder / "datasets"
        patch.setattr(constants, "HF_HUB_CACHE", str(self.models))
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(self.datasets))

    def model(self, repo: str, commit: str, directory: str | Path, branch: str = "main") -> Path:
        """Caches a model's directory as a commit, which the branch means from now on."""
        to = self._repository("models", repo) / "snapshots" / commit
        shutil.copytree(directory, to, dirs_exist_ok=True)
        self.point("models", repo, branch, commit)
        return to

    def point(self, kind: str, repo: str, branch: str, commit: str) -> None:
        ref = self._repository(kind, repo) / "refs" / branch
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)

    def forget(self, repo: str, commit: str) -> None:
        shutil.rmtree(self._repository("models", repo) / "snapshots" / commit)

    def dataset(
        self, repo: str, commit: str, rows: Sequence[Mapping[str, Any]], *, when: int
    ) -> None:
        """Caches rows as split train of a commit, as `datasets` prepares them. when: seconds; it
        takes the newest.
        """
        owner, name = repo.split("/")
        folder = self.datasets / f"{owner}___{name}" / "default" / "0.0.0" / commit
        folder.mkdir(parents=True)
        table = datasets.Dataset.from_list([dict(row) for row in rows])
        with ArrowWriter(features=table.features, path=str(folder / f"{name}-train.arrow")) as file:
            for row in rows:
                file.write(dict(row))
            file.finalize()
        split = {"name": "train", "num_examples": len(rows), "dataset_name": name}
        datasets.DatasetInfo(
            features=table.features,
            config_name="default",
            dataset_name=name,
            version="0.0.0",
            splits={"train": split},
        ).write_to_directory(str(folder))
        os.utime(folder, (when, when))
        self.point("datasets", repo, "main", commit)

    def _repository(self, kind: str, repo: str) -> Path:
        return self.models / "--".join([kind, *repo.split("/")])
