"""What comes after the last save: the exported model and the summary."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import assert_same_run
from helpers.tiny_runs import MakeRecipe
from postgrad.core.errors import RunError
from postgrad.core.files import beside
from postgrad.observe.console import Console
from postgrad.training.start import resume, train


@pytest.mark.parametrize(
    ("name", "call", "message"),
    [
        ("model", "mkdir", "run/model cannot be written: [Errno 28] No space left on device"),
        ("summary.json", "open", "run: the disk is full; make room"),
    ],
)
def test_what_finds_no_room_behind_the_last_save_is_written_by_a_resume(
    name: str,
    call: str,
    message: str,
    make_recipe: MakeRecipe,
    trained: MakeRecipe,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = make_recipe("sft", checkpoint={"save_hf": True})
    run = Path(recipe.run_dir)
    write = getattr(Path, call)

    def full(path: Path, *arguments: Any, **named: Any) -> Any:
        if path == beside(run / name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, call, full)
        with pytest.raises(RunError) as failed:
            train(recipe, console)
    assert message in str(failed.value)
    missing = f"; every step is saved; postgrad resume {run} writes what is missing"
    assert str(failed.value).endswith(missing)
    assert not (run / name).exists()
    resume(run, [], [], console)
    assert (run / "model" / "model.safetensors").exists()
    assert (run / "summary.json").exists()
    assert_same_run(trained("sft"), recipe, 3)
