"""Conventions of the code base."""

import ast
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("conventions")

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "src" / "anabranch").rglob("*.py"))
FORBIDDEN_NAMES = {"utils", "helpers", "manager", "service", "base", "common", "misc"}
MAX_FUNCTION_LINES = 60
# What answers questions, serves or indexes: a help text and a client need none of it.
SERVER = "aiohttp,anabranch.app,anabranch.configuration.settings,numpy,opentelemetry,rich,starlette,uvicorn,yaml"


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Each module by its path, parsed."""
    return {str(module.relative_to(ROOT / "src")): ast.parse(module.read_text(encoding="utf-8")) for module in MODULES}


def test_a_module_has_a_docstring_and_a_name_that_says_what_it_owns(trees: dict[str, ast.Module]) -> None:
    assert [module for module, tree in trees.items() if not ast.get_docstring(tree)] == []
    assert [module for module in MODULES if module.stem in FORBIDDEN_NAMES] == []


def test_no_function_has_more_than_60_lines(trees: dict[str, ast.Module]) -> None:
    lengths = {
        f"{module}: {node.name}": (node.end_lineno or 0) - node.lineno
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def test_a_class_name_occurs_once_in_the_package(trees: dict[str, ast.Module]) -> None:
    nodes = (node for tree in trees.values() for node in ast.walk(tree))
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_only_the_settings_read_the_environment() -> None:
    others = [module for module in MODULES if module.name not in ("settings.py", "main.py")]
    read = [module for module in others if "os.environ" in module.read_text() or "getenv" in module.read_text()]
    assert read == []


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import anabranch", SERVER + ",asyncio,click,msgspec"),
        ("import anabranch.client", SERVER + ",click"),
        ("from anabranch.entrypoints.cli import main; main(['--help'])", SERVER + ",asyncio,anabranch.network"),
        ("from anabranch.entrypoints.cli import main; main(['--version'])", SERVER + ",asyncio,anabranch.network"),
        ("from anabranch import Settings", "aiohttp,anabranch.app,starlette,rich"),
        ("from anabranch import Anabranch", "uvicorn,starlette,click,matplotlib,numpy,pydantic,mcp"),
        ("import anabranch.entrypoints.http.app", "click,matplotlib,numpy,pydantic,mcp,httpx2,rapidfuzz"),
    ],
)
def test_startup_loads_only_the_modules_that_are_needed(code: str, heavy: str) -> None:
    report = f"lambda: print([m for m in '{heavy}'.split(',') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"import atexit, sys; atexit.register({report}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().splitlines()[-1] == "[]"


@pytest.mark.parametrize("package", ["anabranch", "anabranch.client", "anabranch.testing"])
def test_every_public_name_can_be_imported_and_others_cannot(package: str) -> None:
    module = import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        module.Nothing  # noqa: B018


def test_no_pin_names_an_index() -> None:
    for pins in (ROOT / "requirements").glob("*.txt"):
        text = pins.read_text(encoding="utf-8")
        for package in ("httptools", "aiohttp", "httpx", "httpcore"):
            text = text.replace(package, "")
        assert "http" not in text
        assert "index" not in text


def test_only_one_module_calls_the_normalization_of_unicode() -> None:
    """It takes quadratic time for a run of combining marks; `text.normal_forms` bounds the run."""
    named = ("unicodedata.normalize", "unicodedata import normalize")
    served = [module for module in MODULES if "testing" not in module.parts]
    calls = [module.name for module in served if any(one in module.read_text(encoding="utf-8") for one in named)]
    assert calls == ["normal_forms.py"]


def test_work_for_questions_runs_in_threads_that_callers_share(trees: dict[str, ast.Module]) -> None:
    """The default executor has no turns of callers, so it may only be the default of a parameter."""
    stages = {name: tree for name, tree in trees.items() if name.split("/")[1] in ("pipeline", "evidence")}
    calls = [
        f"{module}: {node.lineno}"
        for module, tree in stages.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "asyncio.to_thread"
    ]
    assert stages
    assert calls == []
