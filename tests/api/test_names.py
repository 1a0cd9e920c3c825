"""Every public name is there, lazily, with its documentation and types."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import postgrad
from postgrad import api
from postgrad.algorithms.registry import ALGORITHMS
from postgrad.recipe.recipe import JOBS

API = Path(api.__file__).read_text("utf-8")
ALIASED = re.compile(r" as (\w+)$", re.MULTILINE)
PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text("utf-8")


def functions_of(public: Any) -> list[Any]:
    """A function, or what a class says itself that is no underscore's."""
    if inspect.isfunction(public):
        return [public]
    members = [member for name, member in vars(public).items() if not name.startswith("_")]
    members = [member.fget if isinstance(member, property) else member for member in members]
    return [member for member in members if inspect.isfunction(member)]


@pytest.mark.parametrize("name", postgrad.__all__)
def test_a_public_name_has_a_docstring_and_types(name: str) -> None:
    public = getattr(postgrad, name)
    assert public.__doc__
    assert public.__module__.startswith("postgrad.")
    if not inspect.isclass(public):
        assert inspect.isfunction(public)
    for function in functions_of(public):
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty, function
        for parameter in list(signature.parameters.values()):
            typed = parameter.annotation is not inspect.Parameter.empty
            assert typed or parameter.name in ("self", "cls"), (function, parameter)
        if public.__module__.startswith("postgrad.api"):
            assert function.__doc__, function


def test_annotations_of_functions_are_ones_that_exist() -> None:
    for name in ("train", "resume", "evaluate", "load_recipe"):
        assert get_type_hints(getattr(postgrad, name))["return"] is not Any


def test_every_job_and_algorithm_is_public() -> None:
    assert {kind.__name__ for kind in JOBS.values()} <= set(postgrad.__all__)
    assert {target.partition(":")[2] for target in ALGORITHMS.values()} <= set(postgrad.__all__)


def test_the_page_names_them_all() -> None:
    assert [name for name in postgrad.__all__ if not re.search(rf"`{name}`", PAGE)] == []


def test_what_is_not_public_is_not_there() -> None:
    assert set(postgrad.__all__) <= set(dir(postgrad))
    with pytest.raises(AttributeError, match="no attribute 'GPRO'"):
        _ = postgrad.GPRO
    with pytest.raises(ImportError):
        from postgrad import _no_such_name  # noqa: F401


def test_the_package_lists_the_names_of_its_api() -> None:
    assert sorted(postgrad.__all__) == sorted(ALIASED.findall(API))


def test_a_name_that_is_not_public_is_refused_without_an_import() -> None:
    """pickle asks every module for the names of objects that do not say where they come from; in
    vLLM's processes, which lack postgrad's dependencies, an import here ended the engine.
    """
    check = (
        "import pickle, sys, postgrad\n"
        "clear = object()\n"
        "assert pickle.whichmodule(clear, 'clear') == '__main__'\n"
        "assert not hasattr(postgrad, 'clear')\n"
        "dir(postgrad)\n"
        "assert 'postgrad.api' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.slow
def test_the_names_come_without_torch_and_the_package_without_anything() -> None:
    check = (
        "import sys, postgrad\n"
        "rooms = {name for name in sys.modules if name.startswith('postgrad.')}\n"
        "assert rooms == {'postgrad._version'}, rooms\n"
        "assert 'pydantic' not in sys.modules\n"
        "from postgrad import *\n"
        "from postgrad import GRPO, RLRecipe, train, Run\n"
        "assert not {'torch', 'transformers', 'datasets', 'pandas'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_type_checkers_read_the_types() -> None:
    assert (Path(postgrad.__file__).parent / "py.typed").is_file()
