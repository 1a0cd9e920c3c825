"""The house: what may import what, how large things are, how they are named, what is never called.

`pytest -s tests/test_house.py -k figures` prints the figures.
"""

import ast
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from helpers.house import climbs, walk_through
from postgrad.recipe.load import load_recipe
from postgrad.recipe.pipeline import load_pipeline

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "postgrad"
ROOMS = (
    "cli",
    "api",
    "tools",
    "training",
    "evaluation",
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
# Whose names say what they name. All but the source have three times its lines: they are read in
# `make test-slow`.
FOLDERS = (
    "src",
    *(pytest.param(f, marks=pytest.mark.slow) for f in ("tests", "benchmarks", "docs", "examples")),
)
SHARED = (
    "base",
    "behaviour_correction",
    "kl_penalty",
    "policy_gradient",
    "preference",
    "registry",
    "reward_scaling",
    "token_selection",
)  # what algorithms are made of
FORBIDDEN = re.compile(
    r"pickle\.|torch\.load\(|trust_remote_code=True|shell=True|yaml\.load\(|\beval\(|\bexec\("
)


TABLES = SOURCE / "translate" / "tables"  # options of other systems: as long as they have options
# Folders of parts that a registry names, often one small file each.
REGISTRIES = (
    "algorithms",
    "cli",
    "observe/loggers",
    "observe/sentinels",
    "rewards",
    "rewards/ifeval",
    "rollout/transport",
)
VAGUE = frozenset(
    [
        "one",
        "found",
        "made",
        "known",
        "told",
        "said",
        "own",
        "given",
        "whole",
        "mine",
        "what",
        "four",
        "ones",
        "it",
        "them",
        "they",
    ]
)
# Which field of a node is a name that it binds.
NAMED_BY: dict[type[ast.AST], str] = {
    ast.Name: "id",
    ast.Attribute: "attr",
    ast.arg: "arg",
    ast.alias: "asname",
    ast.FunctionDef: "name",
    ast.AsyncFunctionDef: "name",
    ast.ClassDef: "name",
    ast.ExceptHandler: "name",
    ast.MatchAs: "name",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function
MOST_FILES, MOST_STAYS = 69, 20  # of one RL step, of a recipe before it; lower them where you can
# Types of two modules that may share a name, and why.
SHARED_TYPES = {"Run": "`postgrad.Run`, which users open, and the run that the jobs train"}


@cache  # files are hundreds, tests that read them several
def tree_of(path: Path) -> ast.Module:
    """What the file says; do not change it."""
    return ast.parse(path.read_text("utf-8"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of the file's tree: walks take longer than what is looked for on them."""
    return tuple(ast.walk(tree_of(path)))


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@cache
def imports_of(path: Path) -> list[str]:
    """Every module that a file imports when it runs; what only annotations name binds nothing."""
    return list(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in _run_by(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where it points"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _run_by(path: Path) -> Iterator[ast.AST]:
    unread = {
        node
        for branch in tree_of(path).body
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for statement in branch.body
        for node in ast.walk(statement)
    }
    return (node for node in nodes_of(path) if node not in unread)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "postgrad" and len(parts) > 1 and parts[1] in ROOMS else None


def test_imports_point_down() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in FILES
        if (importer := room_of(module_of(path))) is not None
        for module in imports_of(path)
        if (other := room_of(module)) is not None and ROOMS.index(other) < ROOMS.index(importer)
    ]
    assert wrong == []


@cache
def import_graph() -> dict[str, set[str]]:
    """The modules that each module names, those that only annotations need among them."""
    modules = {module_of(path): path for path in FILES}
    return {
        name: {other for other in _named_by(path) if other in modules and other != name}
        for name, path in modules.items()
    }


def _named_by(path: Path) -> Iterator[str]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_module_imports_itself_by_a_detour() -> None:
    graph = import_graph()
    seen: dict[str, bool] = {}  # module -> still open

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert not seen.get(name), " -> ".join((*trail, name))
        if name in seen:
            return
        seen[name] = True
        for other in graph[name]:
            visit(other, (*trail, name))
        seen[name] = False

    for name in graph:
        visit(name, ())


def test_files_and_functions_are_small() -> None:
    large: list[str] = []
    for path in FILES:
        text = path.read_text("utf-8")
        lines = text.count("\n")
        limit = 80 if path.parent.name == "algorithms" and path.stem not in SHARED else 400
        if lines >= limit and not path.is_relative_to(TABLES):
            large.append(f"{path.relative_to(ROOT)}: {lines} lines, under {limit} are wanted")
        for name, length in lengths_of(path).items():
            if length >= 50:
                large.append(f"{path.relative_to(ROOT)}:{name}: {length} lines")
    assert large == []


def lengths_of(path: Path) -> dict[str, int]:
    """Lines of each function of a file, the longest of a name."""
    lengths: Counter[str] = Counter()
    for node in nodes_of(path):
        if isinstance(node, Function):
            assert node.end_lineno is not None
            lengths[node.name] = max(lengths[node.name], node.end_lineno - node.lineno + 1)
    return lengths


def test_no_small_module_has_one_reader_beside_it() -> None:
    readers: dict[str, set[str]] = defaultdict(set)
    for name, imported in import_graph().items():
        for module in imported:
            readers[module].add(name)
    lonely = [
        f"{path.relative_to(ROOT)} is read by {next(iter(readers[module]))} alone: join them"
        for path in FILES
        if path.name != "__init__.py"
        and path.parent.relative_to(SOURCE).as_posix() not in REGISTRIES
        and path.read_text("utf-8").count("\n") < 100
        and len(readers[module := module_of(path)]) == 1
        and next(iter(readers[module])).rpartition(".")[0] == module.rpartition(".")[0]
    ]
    assert lonely == []


def vague_names(path: Path) -> list[str]:
    """Names of variables, parameters, attributes, functions and classes that do not say what they
    name; loop variables, targets of comprehensions and caught errors are among them.
    """
    names: list[str] = []
    for node in nodes_of(path):
        name = getattr(node, NAMED_BY.get(type(node), ""), None)
        stored = isinstance(getattr(node, "ctx", ast.Store()), ast.Store)
        if name is not None and name.strip("_") in VAGUE and stored:
            names.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {name}")
    return names


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_say_what_they_name(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    assert [name for path in paths for name in vague_names(path)] == []


def test_docstrings_say_something() -> None:
    """A docstring of three words repeats the name, and "See X." sends the reader elsewhere."""
    empty: list[str] = []
    for path in FILES:
        for node in nodes_of(path):
            text = ast.get_docstring(node) if isinstance(node, Documented) else None
            if text is not None and (len(text.split()) <= 3 or re.fullmatch(r"See \S+\.?", text)):
                line = getattr(node, "lineno", 1)
                empty.append(f"{path.relative_to(ROOT)}:{line}: {text!r}")
    assert empty == []


def test_types_have_names_of_their_own() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for name in types_of(tree_of(path)):
            places[name].append(str(path.relative_to(SOURCE)))
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert {name: files for name, files in shared.items() if name not in SHARED_TYPES} == {}
    assert SHARED_TYPES.keys() <= shared.keys()  # no exception outlives its reason


def types_of(tree: ast.Module) -> Iterable[str]:
    """Classes, aliases and type variables of a module: names in CamelCase."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                name = target.id if isinstance(target, ast.Name) else ""
                if re.match(r"_*[A-Z]", name) and not name.isupper():
                    yield name


@pytest.mark.slow
def test_figures(tmp_path: Path) -> None:
    """What a reader of one RL step and of a recipe's way to it has to open."""
    walk = walk_through(tmp_path)
    lines = [path.read_text("utf-8").count("\n") for path in FILES]
    modules = [path for path in FILES if path.name != "__init__.py"]
    small = sum(path.read_text("utf-8").count("\n") < 50 for path in modules)
    longest = max((length, name) for path in FILES for name, length in lengths_of(path).items())
    figures = {
        "files": len(FILES),
        "median lines of a file": statistics.median(lines),
        "modules under 50 lines": small,
        "vague names": sum(len(vague_names(path)) for path in FILES),
        "longest function": f"{longest[0]} lines ({longest[1]})",
        "files that one RL step enters": len(walk.files),
        "stays of the recipe before the first step": len(walk.stays),
        "rooms of these stays": len(set(walk.stays)),
        "stays above the one before": climbs(walk.stays, ROOMS),
    }
    print("", *(f"{name}: {figure}" for name, figure in figures.items()), sep="\n")
    assert len(walk.files) <= MOST_FILES, "\n".join(sorted(walk.files))
    assert len(walk.stays) <= MOST_STAYS


def test_nothing_dangerous_is_called() -> None:
    calls = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if FORBIDDEN.search(line.split("#")[0]) and "lm.eval(" not in line
    ]
    assert calls == []


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
