"""The model and the rows of the configurations of benchmarks.plan_memory that read images.

The model is a Qwen2.5-VL whose tower takes more memory than its decoder. Pictures are those of
recipes/vision_tiny, which the image processor enlarges to SIDE pixels.
"""

import json
from pathlib import Path
from typing import Any

SIDE, PATCH = 192, 8  # pixels
ROWS = 64


def make_images(size: str, to: Path) -> None:
    """Writes the model, a small one that imports everything, and rows for every job."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    from benchmarks.plan_memory_child import SMALL
    from postgrad.models.save import save_model
    from postgrad.models.vision_tiny import PROCESSOR, rows, write_model

    small = to / f"{size}-{SMALL}"
    write_model(small, 0)
    config: Any = AutoConfig.from_pretrained(small)
    config.text_config.update(
        {
            "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
            "max_position_embeddings": 1024, "layer_types": ["full_attention"] * 6,
            "rope_parameters": {
                "rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 100.0
            },
        }
    )  # fmt: skip
    config.vision_config.update(
        {
            "hidden_size": 256, "intermediate_size": 768, "depth": 6, "patch_size": PATCH,
            "out_hidden_size": 256, "window_size": 64, "fullatt_block_indexes": [2, 5],
        }
    )  # fmt: skip
    torch.manual_seed(0)
    lm = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    save_model(lm, AutoTokenizer.from_pretrained(small), to / size)
    pixels = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    processor = {**PROCESSOR, "patch_size": PATCH, "size": pixels}
    (to / size / "preprocessor_config.json").write_text(json.dumps(processor), "utf-8")
    samples = list(rows(ROWS, 0))
    pairs = [
        {
            "prompt": row["messages"][:1],
            "chosen": row["messages"][1:],
            "rejected": [{"role": "assistant", "content": str(9 - int(row["answer"]))}],
        }
        for row in samples
    ]
    for name, values in (("sft", samples), ("preference", pairs)):
        text = "".join(f"{json.dumps(value)}\n" for value in values)
        (to / f"{size}-{name}.jsonl").write_text(text, "utf-8")
    print(json.dumps(sum(p.numel() for p in lm.parameters())))
