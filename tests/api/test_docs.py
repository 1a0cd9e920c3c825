"""docs/python.md, executed as it stands; the model of the hub is a tiny one here."""

import re
from pathlib import Path

import pytest

from helpers.jobs import write_pairs
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
INIT = {
    "type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "tokenizer": {"kind": "characters"},
}


@pytest.mark.slow
def test_every_example_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.S | re.M)
    assert len(examples) == 4
    first = [line for line in examples[0].splitlines() if line.strip()]
    assert first[0] == "from postgrad import GRPO, RLRecipe, train"
    monkeypatch.chdir(tmp_path)
    make_fresh(ModelInit.model_validate(INIT), [], 0, Path("Qwen/Qwen3-0.6B"))
    write_pairs(Path("pairs.jsonl"))
    namespace: dict[str, object] = {}
    for number, example in enumerate(examples, 1):
        exec(compile(example, f"{PAGE.name}, example {number}", "exec"), namespace)  # noqa: S102
    stdout = capsys.readouterr().out
    assert "did you mean 'batch.rollout_batch_size'?" in stdout
    assert "[(4, True)]" in stdout
    assert Path("models/spell-backward/model.safetensors").is_file()
    assert Path("runs/dpo/summary.json").is_file()
    assert Path("runs/again/checkpoints/latest").read_text("utf-8").strip() == "step-000004"
