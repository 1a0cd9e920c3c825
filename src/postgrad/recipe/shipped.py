"""The recipes that postgrad ships: in a checkout the folder recipes/, in a wheel the same folder
beside this package.
"""

from pathlib import Path

from postgrad.core.untrusted import path_problem

PACKAGE = Path(__file__).parents[1]
START = "start"  # a folder for each job, which `postgrad new` copies


def shipped_folder() -> Path:
    """Where the shipped recipes are on this machine."""
    installed = PACKAGE / "recipes"
    return installed if installed.is_dir() else PACKAGE.parents[1] / "recipes"


def located(name: str) -> Path:
    """The recipe or folder of recipes that a word on the command line means: a path, else the name
    of a shipped one, with or without "recipes/" and ".toml". Where there is neither, the path.
    """
    path = Path(name)
    if path_problem(f"{name}.toml"):  # whoever reads the file says it
        return path
    if path.exists() or path.is_absolute() or ".." in path.parts:
        return path
    short = name.removeprefix("recipes/")
    for candidate in (shipped_folder() / short, shipped_folder() / f"{short}.toml"):
        if candidate.is_file() or (candidate / "pipeline.toml").is_file():
            return candidate
    return path


def shipped() -> list[tuple[str, Path]]:
    """(name, file) of every shipped recipe, a pipeline as its folder; those of `new` left out."""
    folder = shipped_folder()
    files = sorted(folder.rglob("*.toml"))
    pipelines = {file.parent for file in files if file.name == "pipeline.toml"}
    single = [file for file in files if file.parent not in pipelines]
    paths = sorted({*single, *pipelines} - set((folder / START).rglob("*.toml")))
    return [(str(path.relative_to(folder).with_suffix("")), path) for path in paths]


def summary_of(path: Path) -> str:
    """The first sentence of the comment with which a recipe begins."""
    file = path / "pipeline.toml" if path.is_dir() else path
    comment: list[str] = []
    for line in file.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    return " ".join(comment).partition(". ")[0].removesuffix(".")
