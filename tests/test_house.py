"""The house: what may import what, how large things are, what is never called."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from postgrad.recipe.load import load_recipe
from postgrad.recipe.pipeline import load_pipeline

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "postgrad"
ROOMS = (
    "cli",
    "api",
    "tools",
    "train",
    "evaluate",
    "fleet",
    "translate",
    "plan",
    "recipe",
    "cluster",
    "observe",
    "checkpoint",
    "learner",
    "rollout",
    "rewards",
    "data",
    "models",
    "parallel",
    "algorithms",
    "layout",
    "ops",
    "core",
)
FILES = sorted(SOURCE.rglob("*.py"))
SHARED = (
    "base",
    "behaviour_correction",
    "policy_gradient",
    "preference",
    "registry",
    "reward_scaling",
)  # what algorithms are made of
FORBIDDEN = re.compile(
    r"pickle\.|torch\.load\(|trust_remote_code=True|shell=True|yaml\.load\(|\beval\(|\bexec\("
)


@cache  # files are 440, tests that read them several
def tree_of(path: Path) -> ast.Module:
    """What the file says; do not change it."""
    return ast.parse(path.read_text("utf-8"))


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@cache
def imports_of(path: Path) -> list[str]:
    """Every module that a file imports when it runs; what only annotations name binds nothing."""
    return list(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in _run_by(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where it points"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _run_by(tree: ast.Module) -> Iterator[ast.AST]:
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for other in node.orelse:
                yield from ast.walk(other)
        else:
            yield from ast.walk(node)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "postgrad" and len(parts) > 1 and parts[1] in ROOMS else None


def test_imports_point_down() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in FILES
        if (own := room_of(module_of(path))) is not None
        for module in imports_of(path)
        if (other := room_of(module)) is not None and ROOMS.index(other) < ROOMS.index(own)
    ]
    assert wrong == []


def test_no_module_imports_itself_by_a_detour() -> None:
    modules = {module_of(path): path for path in FILES}
    graph = {
        name: {other for other in imports_of(path) if other in modules and other != name}
        for name, path in modules.items()
    }
    seen: dict[str, bool] = {}  # module -> still open

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert not seen.get(name), " -> ".join((*way, name))
        if name in seen:
            return
        seen[name] = True
        for other in graph[name]:
            visit(other, (*way, name))
        seen[name] = False

    for name in graph:
        visit(name, ())


def test_files_and_functions_are_small() -> None:
    large: list[str] = []
    for path in FILES:
        text = path.read_text("utf-8")
        lines = text.count("\n")
        limit = 80 if path.parent.name == "algorithms" and path.stem not in SHARED else 400
        if lines >= limit:
            large.append(f"{path.relative_to(ROOT)}: {lines} lines, under {limit} are wanted")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                if length >= 50:
                    large.append(f"{path.relative_to(ROOT)}:{node.name}: {length} lines")
    assert large == []


def test_nothing_dangerous_is_called() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if FORBIDDEN.search(line.split("#")[0]) and "lm.eval(" not in line
    ]
    assert found == []


def test_engines_and_clusters_of_others_stay_in_their_rooms() -> None:
    homes = {"ray": "cluster", "vllm": "vllm"}
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in FILES
        for module in imports_of(path)
        if (home := homes.get(module.split(".")[0])) is not None and path.parent.name != home
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "command",
    [
        "import postgrad",
        "import contextlib, io, postgrad.cli.main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    postgrad.cli.main.main(['--help'])\n",
        "from postgrad.recipe.load import load_recipe; "
        "load_recipe('recipes/gsm8k_grpo.toml', ['--model.path', 'x'])",
    ],
)
def test_neither_torch_nor_transformers_is_imported_before_it_is_needed(command: str) -> None:
    check = "import sys; print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"{command}\n{check}"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_every_shipped_recipe_is_valid() -> None:
    single = [
        path
        for path in sorted((ROOT / "recipes").rglob("*.toml"))
        if not (path.parent / "pipeline.toml").exists()
    ]
    jobs = {str(path.relative_to(ROOT / "recipes")): load_recipe(path).job for path in single}
    assert (jobs["gsm8k_sft.toml"], jobs["gsm8k_grpo.toml"]) == ("sft", "rl")
    full_size = {job for name, job in jobs.items() if name.startswith("7b/")}
    assert full_size == {"sft", "reward", "preference", "rl"}
    folders = [path.parent for path in sorted((ROOT / "recipes").rglob("pipeline.toml"))]
    assert {"algorithms", "quickstart"} <= {folder.name for folder in folders}
    for folder in folders:
        assert load_pipeline(folder).stages[0].name == "sft"


def test_every_setting_is_named_in_the_docs() -> None:
    from postgrad.recipe.recipe import JOBS

    pages = (path.read_text("utf-8") for path in (ROOT / "docs").rglob("*.md"))
    named = {word for page in pages for word in re.findall(r"\w+", page)}
    missing = [
        f"{section}.{key}"
        for kind in JOBS.values()
        for section, field in kind.model_fields.items()
        if hasattr(field.annotation, "model_fields")
        for key in field.annotation.model_fields
        if key not in named
    ]
    assert sorted(set(missing)) == []


def test_every_docs_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page not in navigation] == []
