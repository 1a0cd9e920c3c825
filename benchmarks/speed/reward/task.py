"""What both sides do: how many pairs an update has, and the model with its head."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

UPDATE = 16  # pairs


def start(folder: Path) -> Path:
    """The work's body with a `score` head, drawn once, so that both sides start alike."""
    to = folder / "scoring"
    if to.exists():
        return to
    partial_copy = folder / "scoring.part"
    partial_copy.mkdir()
    for file in (folder / "model").iterdir():
        if file.suffix != ".safetensors":
            (partial_copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((partial_copy / "config.json").read_text("utf-8"))
    config |= {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    config["label2id"] = {"LABEL_0": 0}
    (partial_copy / "config.json").write_text(json.dumps(config), "utf-8")
    weights = load_file(folder / "model" / "model.safetensors")
    head = torch.randn(1, config["hidden_size"], generator=torch.Generator().manual_seed(0))
    weights["score.weight"] = head * config["hidden_size"] ** -0.5
    save_file(weights, partial_copy / "model.safetensors", {"format": "pt"})
    partial_copy.rename(to)
    return to
