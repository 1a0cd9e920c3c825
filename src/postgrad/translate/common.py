"""What the systems have in common: micro-batches, checkpoints, engines, data."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from postgrad.core.hub import HUB_ID
from postgrad.data.files import SUFFIXES
from postgrad.models import named_templates
from postgrad.rollout.settings import SamplingSettings, TokenFilters
from postgrad.rollout.vllm.settings import refused_argument
from postgrad.translate.draft import Draft
from postgrad.translate.images import BUILT_IN, vllm_samples
from postgrad.translate.places import replicas
from postgrad.translate.rules import Options, Rule, decimal, flag

UNBOUNDED = 1e9  # of importance weights, which are below exp(20) = 4.9e8
LOGGING = "metrics.jsonl is always written; observe.loggers names wandb, tensorboard and others"
ATTENTION = "model.attention chooses between torch's kernels, whose speed and memory differ"
HPZ = "copies of the weights by machine; learner.shard_groups copies all of the state by group"
CUT_BY_TOKENS = "what is only computed, not trained, is cut by tokens"
POSITIONS = "rotary positions go on behind it here, and a run warns of rows that are longer"
SO_HERE = "a run here does so, or has no such part"
CONFIG = "a model's config is its own: edit that of a copy (docs/how-to/longer-rows.md)"
KERNELS = "Liger's fused kernels are not here: layers are torch's, or compiled (model.compile)"
ROUTER = "set model.router_aux_loss_coef; left out, the model's config has it"
ADAPTED = "of the mean k1 of a step's tokens; there of its estimator, averaged over responses"
OTHER_TOKENIZER = (
    "the tokenizer is read from model.path: where the other's tokens are the same, name its "
    "chat_template.jinja in data.chat_template and what ends a turn in model.eos_token; else put "
    "its files into a copy of the model's folder"
)
PACKED = "padding is never computed here"
LAUNCH = "how processes are launched"
# The tool_format of an environment for vLLM's parsers of tool calls; "auto" is the default here.
TOOL_FORMATS: dict[str, str | None] = {
    "auto": None,
    "hermes": "hermes",
    "qwen3_json": "hermes",
    "qwen3_coder": "qwen_xml",
    "qwen3_xml": "qwen_xml",
    "llama3_json": "llama",
    "llama4_json": "llama",
    "glm45": "glm",
    "glm47": "glm",
    "mistral": "mistral",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "openai": "harmony",
    "kimi_k2": "kimi",
}


def positive(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with `--no_NAME` as NAME = false, as transformers' parser has them."""
    renamed: dict[str, Any] = {}
    for name, value in options.items():
        negated = name.startswith("no_") and value is True
        renamed[name[3:] if negated else name] = False if negated else value
    return renamed


def micro_batch(draft: Draft, samples: int, comment: str = "") -> None:
    """Samples in one forward pass of a replica; fewer where they would not divide an update, and a
    token budget chosen at start where none would.
    """
    update = draft.get("batch.train_batch_size") or draft.get("batch.rollout_batch_size", 0) * int(
        draft.get("batch.n_samples_per_prompt") or 1
    )  # a step is one update where nothing says more
    share, count = int(update or samples), replicas(draft)
    if share % count:
        why = f"an update of {share} samples is no whole number for each of {count} replicas"
        draft.notes.append(f"micro-batches are cut by tokens: {why}")
        return
    share //= count
    fitting = max(n for n in range(1, min(samples, share) + 1) if share % n == 0)
    if fitting != samples:
        comment = f"{samples} there, which does not divide {share}"
    draft.put("batch.micro_train_batch_size", fitting, comment)


def micro_tokens(draft: Draft, tokens: int, comment: str) -> None:
    """Tokens in one forward pass; more where a whole sequence, or a pair, would not fit. To be
    called when data.max_len and algorithm.type are known.
    """
    compares = draft.job in ("reward", "preference")
    pairs = compares and draft.get("algorithm.type") != "process_reward"
    needed = (2 if pairs else 1) * int(draft.get("data.max_len") or 0)
    if tokens < needed:
        comment = f"{tokens} there; {'a pair' if pairs else 'a sequence'} has to fit"
    draft.put("batch.micro_train_tokens", max(tokens, needed), comment)


def update_size(draft: Draft, samples: int, comment: str) -> None:
    """Samples of an update that divide those of a step, the nearest below where they do not."""
    step = int(draft.get("batch.rollout_batch_size")) * int(draft.get("batch.n_samples_per_prompt"))
    fitting = max(n for n in range(1, min(samples, step) + 1) if step % n == 0)
    if fitting != samples:
        comment = f"{samples} there, which does not divide a step of {step} samples"
    draft.put("batch.train_batch_size", fitting, comment)


def overlong(draft: Draft, buffer: int, factor: float, most: int) -> None:
    """DAPO's punishment of long answers, which other systems have without a bound."""
    longer = most < int(draft.get("rollout.max_new_tokens") or 0)
    why = f"at most {factor:g}; there it grows on beyond {most} tokens" if longer else ""
    draft.reward("overlong", why, buffer=buffer, factor=factor, max_new_tokens=most)


def cut_off(draft: Draft, value: float, comment: str) -> None:
    """A reward that replaces all others of a sample that the token limit cut off."""
    draft.reward("stop_properly", comment, gate=True, gate_at=0.0, gate_value=value)


def kept_checkpoints(draft: Draft, name: str, value: Any, default: str) -> None:
    """A rule, behind that for save_steps: how many checkpoints are kept. 0 and -1 mean all of them
    in other systems.
    """
    count = int(decimal(value))
    if count > 0:
        draft.put("checkpoint.max_ckpt_num", count, default)
    elif every := draft.get("checkpoint.save_steps"):
        draft.put("checkpoint.keep_steps", every, f"{name} = {value} there: all of them")
    else:
        why = "keeps all of them there; here the newest checkpoint.max_ckpt_num (3) are kept"
        draft.miss_always(name, value, why)


def checkpoints(draft: Draft, name: str, value: Any, default: str) -> None:
    """A rule: when checkpoints are saved, as a number of steps or after each "epoch"."""
    if str(value) == "epoch":
        draft.put("checkpoint.save_epochs", 1, default)
    elif str(value).isdigit():
        draft.put("checkpoint.save_steps", int(value), default)
    else:
        draft.miss(name, value, "checkpoint.save_steps is a number; save_epochs counts epochs")


def per_step(draft: Draft) -> tuple[int, int]:
    """(samples of a step, updates of a step), from the batch numbers put so far."""
    train = int(draft.get("batch.train_batch_size") or 64)
    prompts = draft.get("batch.rollout_batch_size")
    if prompts is None:
        return train, 1
    samples = int(prompts) * int(draft.get("batch.n_samples_per_prompt"))
    parts = int(draft.get("batch.num_mini_batches") or max(1, samples // train))
    if draft.get("batch.train_batch_size") is None and not draft.get("batch.num_mini_batches"):
        parts = 1
    return samples, parts * int(draft.get("batch.epochs_per_rollout") or 1)


def engine_argument(prefix: str) -> Rule:
    """A rule: vLLM gets the argument as it is, if recipes may add it. prefix: before its name."""

    def rule(draft: Draft, name: str, value: Any, _: str) -> None:
        # With the names of a table's values: "a.b". vLLM reads dashes as underscores, as here.
        argument = name.removeprefix(prefix).replace("-", "_")
        if argument == "max_num_seqs":
            draft.put("rollout.slots", int(decimal(value)), "max_num_seqs of each engine")
        elif argument == "max_model_len":
            draft.skip(name, value, "data.max_len, which bounds prompt and answer")
        elif not vllm_samples(draft.images):
            draft.miss(name, value, BUILT_IN)
        elif why := refused_argument(argument.partition(".")[0]):
            draft.miss(name, value, why)
        else:
            draft.put(f"rollout.vllm.engine_args.{argument}", value)

    return rule


def router_replay(draft: Draft, _: str, value: Any, __: str) -> None:
    """A rule: whether tokens go to the experts that they were sent to when they were sampled."""
    if flag(value):
        draft.put("rollout.router_replay", "sampled")


def shuffle(draft: Draft, name: str, value: Any, _: str) -> None:
    """A rule: whether rows have a new order each epoch."""
    draft.put("data.shuffle", None if flag(value) else False)
    if flag(value):
        draft.skip(name, value, "as here")


def sources(draft: Draft, entries: Sequence[dict[str, Any]], section: str = "data") -> None:
    """The datasets of [data] or [eval]: a single one in the section, several as a list of sets."""
    if len(entries) == 1:
        for key, value in entries[0].items():
            draft.put(
                f"{section}.{'subset' if section == 'eval' and key == 'name' else key}", value
            )
        return
    for number, entry in enumerate(entries):
        for key, value in entry.items():
            draft.put(f"{section}.sets.{number}.{key}", value)


def held_out(draft: Draft, sets: Sequence[dict[str, Any]]) -> None:
    """The datasets of [eval]: a single one in the section, several with names of their own."""
    names = [_set_name(eval_set["path"]) for eval_set in sets]
    named = [
        {"name": name if names.index(name) == number else f"{name}-{number + 1}", **eval_set}
        for number, (name, eval_set) in enumerate(zip(names, sets, strict=True))
    ]
    sources(draft, named if len(named) > 1 else sets, "eval")


def sampled_as_trained(draft: Draft) -> None:
    """[eval] samples as [rollout] does, where the source has no other setting for it."""
    evaluates = any(place[0] == "eval" for place in draft.values)
    if draft.job != "rl" or not (evaluates or draft.get("data.eval_fraction")):
        return
    for key in ("temperature", *TokenFilters.model_fields):
        default = SamplingSettings.model_fields[key].default
        trained = draft.get(f"rollout.{key}", default)
        if trained != default and draft.get(f"eval.{key}") is None:
            draft.put(f"eval.{key}", trained, "as in training, there")


def _set_name(path: str) -> str:
    """A name for the metrics of an evaluation set: of a file that is called by its split alone, its
    folder's.
    """
    *folders, name = path.split("/")
    stem, dot, suffix = name.rpartition(".")
    if not dot or f".{suffix}" not in SUFFIXES:
        return name
    return folders[-1] if folders and stem in ("test", "val", "validation", "train") else stem


def tokenizer(draft: Draft, options: Options, name: str, revision: str) -> None:
    """A tokenizer of another place than the model's is lost; the model's own needs no key."""
    place, version = options.take(name), options.take(revision)
    why = "the tokenizer is read from model.path"
    if place is not None and options.states(name):
        if str(place) == str(draft.get("model.path")):
            draft.skip(name, place, why)
        else:
            draft.miss(name, place, OTHER_TOKENIZER)
    if version is not None and options.states(revision):
        same = str(version) == str(draft.get("model.revision", "main"))
        (draft.skip if same else draft.miss)(revision, version, f"{why}, at model.revision")


def push(draft: Draft, repository: Any, private: Any = None) -> None:
    """Where the model goes on the hub, if a source names a repository that can be one."""
    name = str(repository or "")
    if not HUB_ID.fullmatch(name):
        return
    draft.put("checkpoint.push_to_hub", name, "postgrad pushes once, at the end")
    if private and str(private).lower() != "false":
        draft.put("checkpoint.push_private", True)


def mirror(draft: Draft, name: str, value: Any, default: str) -> None:
    """A folder that checkpoints are copied to as they are saved; one of this machine gets a URL."""
    if value in (None, "", "null") or default:
        return
    url = f"file://{value}" if str(value).startswith("/") else str(value)
    if "://" in url:
        draft.put("checkpoint.mirror", url, "with the run's logs, to resume from")
    else:
        draft.miss(name, value, "checkpoint.mirror is a URL, file:///FOLDER for a folder")


def branch(name: Any) -> str | None:
    """A revision on the hub; None for `main`, which is read where none is stated."""
    return None if name in (None, "main") else str(name)


def revision(draft: Draft, name: Any) -> None:
    """The model's revision on the hub; `main` is read where none is stated."""
    draft.put("model.revision", branch(name))


def reject(draft: Draft, statistic: str, kept: Any, comment: str = "") -> None:
    """Adds to algorithm.rejection what is kept: [low, high] of w, or the most of a distance from 1.
    The narrower bounds hold where the statistic is there already.
    """
    rejection = dict(draft.get("algorithm.rejection", {}))
    before = rejection.get(statistic, kept)
    if isinstance(kept, list):
        (low, high), (least, most) = cast("list[float]", kept), cast("list[float]", before)
        rejection[statistic] = [max(low, least), min(high, most)]
    else:
        rejection[statistic] = min(kept, before)
    draft.put("algorithm.rejection", rejection, comment)


def samples_ahead(draft: Draft, steps: int, comment: str, top_p: float) -> None:
    """rollout.max_staleness, and what corrects for older samples where the source does not. top_p:
    of sampling. To be called when algorithm.correction and rejection are known.
    """
    draft.put("rollout.max_staleness", steps, comment)
    if draft.get("algorithm.correction", "off") != "off" or draft.get("algorithm.rejection"):
        return
    why = "older samples need one of two corrections: docs/async.md"
    if top_p < 1.0:
        draft.put("algorithm.correction", "tis", why)
        draft.put("algorithm.correction_with_filters", True, "rollout.top_p biases it")
    else:
        draft.put("algorithm.old_logprobs", "sampled", why)


def run_dir(draft: Draft, directory: Any) -> None:
    """Where the run writes: the source's output directory, else runs/JOB."""
    path = str(directory or "").strip().rstrip("/")
    while path.startswith("./"):
        path = path[2:]
    draft.put("run_dir", path or f"runs/{draft.job}")


def chat_template(draft: Draft, name: str, value: Any, _: str) -> None:
    """A template by its name in the other system, or a file with one."""
    if value in named_templates.names() or str(value).endswith(".jinja"):
        draft.put("data.chat_template", value)
        return
    draft.miss(
        name,
        value,
        "not among the names here: give data.chat_template the file or the text "
        f"({', '.join(named_templates.names())})",
    )


def mixture(mixer: Any, splits: list[str]) -> list[dict[str, Any]]:
    """Entries of [[data.sets]]. mixer: "NAME SHARE NAME SHARE ...", as one text or a list of words,
    or a table NAME -> SHARE. A share is a number of rows (100) or a part of them (0.5, 1.0: all).
    splits: one for each name; the last one stands for those that are left.
    """
    if isinstance(mixer, dict):
        pairs = list(cast(dict[str, Any], mixer).items())
    else:
        texts = cast(list[Any], mixer) if isinstance(mixer, list) else [mixer]
        words = [word for text in texts for word in str(text).split()]
        pairs: list[tuple[str, Any]] = list(zip(words[::2], words[1::2], strict=False))
    entries: list[dict[str, Any]] = []
    for number, (path, share) in enumerate(pairs):
        split = splits[min(number, len(splits) - 1)] if splits else "train"
        entries.append({"path": str(path), **_share(str(share), split)})
    return entries


def _share(share: str, split: str) -> dict[str, Any]:
    """The keys of an entry that select a share of a split."""
    of_split = {} if split == "train" else {"split": split}
    if "." not in share:
        return {**of_split, "limit": int(share)}
    part = float(share)
    if part < 1:
        return {"split": f"{split}[:{part * 100:g}%]"}
    return {**of_split, **({"weight": part} if part > 1 else {})}
