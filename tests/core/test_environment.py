"""Child processes that run code of others get no key of this one."""

import pytest

from postgrad.core.process import inherited


def test_what_is_no_secret_and_what_is_named_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "MY_KEY", "LC_ALL", "PATH"):
        monkeypatch.setenv(name, "value")
    environment = inherited(["MY_KEY", "NOT_SET"])
    assert {"MY_KEY", "LC_ALL", "PATH"} <= environment.keys()
    assert not {"WANDB_API_KEY", "HF_TOKEN", "NOT_SET"} & environment.keys()
