"""README.md of an exported model, a model card from what the run has recorded; the upload of the
model's folder to the hub; and the exported copies beside checkpoints (`save_hf = "each"`).
"""

import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import tomlkit
from torch import Tensor

from postgrad._version import __version__
from postgrad.checkpoint.state import RunState
from postgrad.core.errors import PostgradError, RunError, UsageError
from postgrad.core.files import remove, versions
from postgrad.core.hub import COMMIT, HUB_ID, local_file, split_revision
from postgrad.fleet.exported import own_role, role_of
from postgrad.models.files import adapter_base, is_adapter
from postgrad.models.save import CARD
from postgrad.models.settings import looks_local
from postgrad.observe.follow import read_lines
from postgrad.observe.run_dir import PACKAGES, RunDirectory
from postgrad.recipe.hub_sources import RecipeSource, sources
from postgrad.recipe.recipe import Recipe
from postgrad.training.run import Run

SECRET = re.compile(  # eos_token is the text of a special token
    r"^(?!eos_token$)(.*_)?(key|token|secret|password|passwd|authorization|credentials?)$", re.I
)
USER = re.compile(r"(?<=://)[^/@\s]+@")  # of a URL
REDACTED = "(redacted)"
PASSED_ON = ("license", "license_name", "license_link", "language")  # of the base's own card


def card_of(
    directory: RunDirectory, recipe: Recipe, state: RunState, base: str, *, role: str, adapter: bool
) -> str:
    """The text of the card of one role at a step.

    base: path or hub id of the model that the role started from. role: its name as of --role.
    adapter: the adapter is exported alone. The card's metadata name base model, data sets, results,
    and the licence where the base states one. Raises RunError where eval.jsonl cannot be read.
    """
    from huggingface_hub import ModelCardData

    results = _results(directory.path, state.step)
    name = directory.path.resolve().name
    read = sources(recipe)
    about = _about_base(base)
    origin = adapter_base(base) if is_adapter(base) else base
    repository, _ = split_revision(origin)
    start = repository if HUB_ID.fullmatch(repository) and not looks_local(origin) else None
    start = start or about.get("base_model")
    metadata: Any = ModelCardData(
        base_model=start,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-classification" if role in ("reward", "critic") else "text-generation",
        tags=["postgrad", recipe.job, _algorithm(recipe), *(["lora"] if adapter else [])],
        datasets=list(dict.fromkeys(source.path for source in read if _trains_on_hub(source)))
        or None,
        model_name=name if results else None,
        eval_results=_hub_results(recipe, results) or None,
        base_model_relation=("adapter" if adapter else "finetune") if start else None,
        **{key: about[key] for key in PASSED_ON if key in about},
    )
    body = _body(name, recipe, state, base, read, results, role=role, adapter=adapter)
    return f"---\n{metadata.to_yaml()}\n---\n\n" + "\n".join(body) + "\n"


def _body(
    name: str,
    recipe: Recipe,
    state: RunState,
    base: str,
    read: Sequence[RecipeSource],
    results: Sequence[Mapping[str, Any]],
    *,
    role: str,
    adapter: bool,
) -> Iterator[str]:
    artifact = "adapter (LoRA)" if adapter else "model"
    yield f"# {name}\n"
    yield (
        f"The {role} {artifact} of a run of [postgrad](https://pypi.org/project/postgrad/) "
        f"{__version__}: job `{recipe.job}`, algorithm `{_algorithm(recipe)}`.\n"
    )
    yield from _table(
        ("", ""),
        [
            ("started from", _base_name(base, recipe)),
            ("steps", str(state.step)),
            ("updates", str(state.update)),
            ("samples", str(state.episodes)),
            ("seed", str(recipe.seed)),
            ("computed in", str(state.choices.get("dtype", ""))),
        ],
    )
    yield "\n## Data\n"
    hashes: Mapping[str, str] = state.choices.get("sources") or {}
    yield from _table(
        ("used for", "data", "configuration", "split", "revision or content"),
        [_data_row(source, hashes) for source in read if source.kind == "dataset"],
    )
    if results:
        yield "\n## Evaluation\n"
        yield f"After step {results[0]['step']}, with 95% intervals where there are any.\n"
        yield from _table(("set", "metric", "value", "rows"), _rows(results))
    yield "\n## Recipe\n"
    yield "As it ran, every key stated; values that look like secrets are left out.\n"
    text = tomlkit.dumps(_without_secrets(recipe.dump()))
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    yield f"{fence}toml\n{text}{fence}"
    yield "\n## Versions\n"
    yield ", ".join(f"{package} {version}" for package, version in versions(PACKAGES).items())


def _data_row(source: RecipeSource, hashes: Mapping[str, str]) -> tuple[str, ...]:
    path, content = _without_home(source.path), _content(source, hashes)
    return source.key, path, source.subset or "", source.split or "", content


def _algorithm(recipe: Recipe) -> str:
    return str(recipe.dump()["algorithm"]["type"])


def _base_name(base: str, recipe: Recipe) -> str:
    """The base model for readers: a hub id with its commit; of a local directory the name alone,
    because its path is private.
    """
    if recipe.model.path is None:
        return "a fresh model ([model.init])"
    repository, revision = split_revision(base)
    if is_adapter(base):
        origin = adapter_base(base)
        origin = Path(origin).name if looks_local(origin) else origin
        return f"the adapter {Path(base).name}, merged into {origin}"
    if looks_local(base):
        return f"the directory {Path(repository).name}"
    return repository if revision is None else f"{repository}, revision {revision}"


def _content(source: RecipeSource, hashes: Mapping[str, str]) -> str:
    return (source.revision if source.hub else hashes.get(source.key)) or ""


def _trains_on_hub(source: RecipeSource) -> bool:
    return source.kind == "dataset" and source.hub and source.place[0] == "data"


def _about_base(base: str) -> dict[str, Any]:
    """The metadata of the base model's card; {} where no readable card is on this machine."""
    import huggingface_hub
    from yaml import YAMLError

    hub: Any = huggingface_hub
    try:
        path = local_file(base, CARD)
        return {} if path is None else dict(hub.metadata_load(path) or {})
    except (OSError, ValueError, YAMLError):  # somebody else's card is no reason to keep a model
        return {}


def _results(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """The lines of eval.jsonl of the newest evaluation up to `step`."""
    lines = [line for line in read_lines(run_dir / "eval.jsonl") if line["step"] <= step]
    return [line for line in lines if line["step"] == lines[-1]["step"]]


def _metrics(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    left_out = ("step", "update", "rows", "failed", "set")
    for name, value in line.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        head, _, _ = name.partition("/")  # accuracy_low/algebra is an end, too
        if name in left_out or head.endswith(("_low", "_high", "_seconds")) or not number:
            continue
        if math.isfinite(value):
            yield name, float(value)


def _rows(results: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for line in results:
        for name, value in _metrics(line):
            head, slash, part = name.partition("/")
            low, high = (line.get(f"{head}_{end}{slash}{part}") for end in ("low", "high"))
            has_interval = isinstance(low, float) and isinstance(high, float)
            shown = f"{value:.4g}" + (f" ({low:.4g} to {high:.4g})" if has_interval else "")
            yield str(line.get("set") or ""), name, shown, str(line.get("rows", ""))


def _hub_results(recipe: Recipe, results: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Results on data sets of the hub, which lists no others, as EvalResult."""
    from huggingface_hub import EvalResult

    sets = {settings.name: place for place, settings in enumerate(recipe.eval.sets)}
    places = {source.place: source for source in sources(recipe)}
    eval_results: list[Any] = []
    for line in results:
        source = places.get(("eval", "sets", sets.get(line.get("set"), -1)))
        if source is None or not source.hub:
            continue
        revision = source.revision
        commit = revision if revision and COMMIT.fullmatch(revision) else None
        for name, value in _metrics(line):
            eval_results.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=source.path,
                    dataset_name=source.path,
                    dataset_config=source.subset,
                    dataset_split=source.split,
                    dataset_revision=commit,
                    metric_type=name,
                    metric_value=value,
                )
            )
    return eval_results


def _table(head: Sequence[str], rows: Any) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(_cell(text) for text in row) + " |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _without_secrets(value: Any, name: str = "") -> Any:
    """A recipe value without None and without secrets: values of keys such as "token", user names
    in URLs and in paths. name: the key of the value.
    """
    if isinstance(value, dict):
        table = cast(dict[str, Any], value)
        return {
            key: _without_secrets(entry, key) for key, entry in table.items() if entry is not None
        }
    if isinstance(value, list):
        return [
            _without_secrets(entry, name) for entry in cast(list[Any], value) if entry is not None
        ]
    if not isinstance(value, str):
        return value
    return (
        REDACTED
        if SECRET.search(name) and value
        else USER.sub(f"{REDACTED}@", _without_home(value))
    )


def _without_home(path: str) -> str:
    """A path with ~ in place of the home directory, which holds the user's name."""
    home = os.environ.get("HOME", "").rstrip("/")
    return f"~{path[len(home) :]}" if home and path.startswith(f"{home}/") else path


def require_repository(name: str, flag: str) -> None:
    """Raises UsageError where `name` is no id of a repository, before anything is done."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UsageError(f"{flag} {name}: {error}; expected ORG/NAME") from error
    if not HUB_ID.fullmatch(name):
        raise UsageError(f"{flag} {name}: expected ORG/NAME")


def push(folder: Path, repository: str, *, private: bool, message: str) -> dict[str, Any]:
    """Creates the repository where there is none, and uploads the files of a folder as one commit.

    Returns repository, commit and url. Raises RunError, with the command that pushes later, where
    the hub cannot be reached or refuses the upload.
    """
    from huggingface_hub import HfApi

    api: Any = HfApi()
    try:
        api.create_repo(repository, private=private or None, exist_ok=True, repo_type="model")
        done = api.upload_folder(
            repo_id=repository, folder_path=str(folder), commit_message=message, repo_type="model"
        )
    except Exception as error:  # each network client has its own
        why = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        words = ["hf", "upload", repository, str(folder), *(["--private"] if private else [])]
        raise RunError(
            f"{repository} was not pushed: {why}. The model is complete in {folder}; log in with "
            f"`hf auth login` (or HF_TOKEN) and push it with: {shlex.join(words)}"
        ) from error
    return {"repository": repository, "commit": str(done.oid), "url": str(done.commit_url)}


class HFCopies:
    """Writes `step-000010` when that step is saved, and removes it when the checkpoint is removed.

    Training waits meanwhile: building a model sets torch's default dtype for all threads. A copy
    that cannot be written is warned of and recorded; `postgrad export` makes it later from the
    checkpoint.
    """

    def __init__(self, run: Run) -> None:
        base = run.recipe.model.source or str(run.directory.init)
        self._run = run
        self._role = role_of(run.recipe, own_role(run.recipe), base)
        self._folder = run.directory.copies

    def write(self, state: RunState, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Writes the copy of one step and removes copies whose checkpoints are gone."""
        to = self._folder / f"step-{state.step:06d}"
        weights: Mapping[str, Any] = tensors[self._role.stem]
        try:
            run, role = self._run, self._role
            now = replace(state, choices=run.choices.to_json())
            role_name = own_role(run.recipe)
            card = card_of(run.directory, run.recipe, now, role.base, role=role_name, adapter=False)
            role.export(weights, state.algorithm, to, run.choices, overwrite=True, card=card)
            kept = {f"step-{step:06d}" for step in (*self._run.store.steps(), state.step)}
            for old in self._folder.glob("step-*"):
                if old.name not in kept:
                    remove(old)
        except (OSError, PostgradError) as error:
            text = (
                f"could not write the Hugging Face copy of step {state.step}: {error} "
                "(checkpoint.save_hf)"
            )
            self._run.logs.event("copy_failed", text, step=state.step)
            self._run.console.warn(text)
