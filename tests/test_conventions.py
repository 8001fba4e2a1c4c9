"""Conventions that had to be said twice."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "src" / "anabranch").rglob("*.py"))
FORBIDDEN_NAMES = {"utils", "helpers", "manager", "service", "base", "common", "misc"}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_a_module_says_what_it_owns_and_its_functions_fit_on_a_screen(module: Path) -> None:
    text = module.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module begins with a sentence on what it owns"
    assert module.stem not in FORBIDDEN_NAMES
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno <= 60, f"{node.name} does not fit on a screen"


@pytest.mark.parametrize("module", [m for m in MODULES if m.name not in ("settings.py", "main.py")], ids=str)
def test_only_the_settings_read_the_environment(module: Path) -> None:
    text = module.read_text(encoding="utf-8")
    assert "os.environ" not in text
    assert "getenv" not in text


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("anabranch", "uvicorn,starlette,click,matplotlib,pydantic,mcp"),
        ("anabranch.entrypoints.http.app", "click,matplotlib,pydantic,mcp,httpx2,rapidfuzz"),
    ],
)
def test_what_few_need_is_loaded_when_they_need_it(module: str, heavy: str) -> None:
    code = f"import sys, {module}; print([m for m in '{heavy}'.split(',') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_pin_names_an_index() -> None:
    for pins in (ROOT / "requirements").glob("*.txt"):
        text = pins.read_text(encoding="utf-8")
        assert "http" not in text.replace("httptools", "").replace("aiohttp", "").replace("httpx", "").replace(
            "httpcore", ""
        )
        assert "index" not in text
