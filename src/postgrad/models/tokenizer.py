"""Tokenizers of models, and whether two models have the same one."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from postgrad.core.errors import UsageError
from postgrad.core.hub import pretrained
from postgrad.models import files
from postgrad.models.config import reading, require_directory


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model, checked: an end-of-sequence token, offsets. Of an adapter its own,
    or where its directory has none its base's.
    """
    require_directory(path, "tokenizer")
    if files.is_adapter(path) and not files.has_tokenizer(Path(path)):
        path = files.weights_source(path)
    wanted = "model.path is a directory with tokenizer.json, or a hub id"
    with reading(f"no tokenizer at {path}", wanted):
        if Path(path).is_dir():
            files.require_tokenizer_files(Path(path))
        name, at = pretrained(path)
        tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **at)
        size = len(tokenizer)
    if not tokenizer.is_fast or not size:
        raise UsageError(
            f"the tokenizer at {path} gives no offsets, which loss masks need: convert it "
            "to tokenizer.json"
        )
    if tokenizer.eos_token_id is None:
        raise UsageError(
            f"the tokenizer at {path} has no end-of-sequence token: no answer could ever end; set "
            "eos_token in tokenizer_config.json"
        )
    return tokenizer


def require_same_tokens(
    path: str,
    key: str,
    policy_tokenizer: Any,
    *,
    remedy: str = "take a model of the same family",
) -> None:
    """Raises UsageError where the model at `path`, which will read the policy's token ids, has
    another vocabulary. key: the recipe's key that names the model.
    """
    tokenizer = load_tokenizer(path)
    if tokenizer.get_vocab() != policy_tokenizer.get_vocab():
        raise UsageError(
            f"{key}: {path} has another tokenizer than the policy ({len(tokenizer)} and "
            f"{len(policy_tokenizer)} tokens): the policy's token ids mean other text to it; "
            f"{remedy}"
        )
