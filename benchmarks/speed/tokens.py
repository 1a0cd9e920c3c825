"""The token ids that training sides read, as postgrad's readers make them of the work's rows.

tokens.json: "pairs", each [ids of chosen, ids of rejected]; "conversations", each [ids, loss mask].
A peer that read the rows itself would drop and cut others; so every side trains on the same tokens.
"""

import json
from pathlib import Path
from typing import Any

MAX_LEN = 512  # tokens of a conversation; longer ones are cut
PAIRS = {"max_len": MAX_LEN, "on_too_long": "truncate", "shuffle": False}
CONVERSATIONS = {"max_len": 1024, "shuffle": False}


def write_tokens(folder: Path) -> None:
    """Reads pairs.jsonl and questions.jsonl with the tokenizer of model/."""
    from postgrad.data.conversations import load_conversations
    from postgrad.data.pairs import load_pairs
    from postgrad.data.settings import DataSettings, PairSettings
    from postgrad.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(folder / "model"))
    pairs = load_pairs(PairSettings(path=str(folder / "pairs.jsonl"), **PAIRS), tokenizer).all()
    answered = DataSettings(path=str(folder / "questions.jsonl"), **CONVERSATIONS)
    conversations = load_conversations(answered, tokenizer).all()
    token_lists = {
        "pairs": [[pair.chosen.tolist(), pair.rejected.tolist()] for pair in pairs],
        "conversations": [
            [conversation.token_ids.tolist(), conversation.loss_mask.tolist()]
            for conversation in conversations
        ],
    }
    (folder / "tokens.json").write_text(json.dumps(token_lists), "utf-8")


def read_tokens(folder: Path, kind: str) -> Any:
    """ "pairs" or "conversations"."""
    return json.loads((folder / "tokens.json").read_text("utf-8"))[kind]
