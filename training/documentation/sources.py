"""The documentation that questions are made from: eight packages, at these versions, and no others, so that the
documentation of all other packages stays unseen."""

import ast
import hashlib
import inspect
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urljoin
from urllib.request import urlopen


class Package(NamedTuple):
    """A source distribution: `docs` and `code` are folders in it. Its folder is named as the archive."""

    name: str
    archive: str
    sha256: str
    docs: str
    code: str

    @property
    def folder(self) -> str:
        return self.archive.removesuffix(".tar.gz")


PACKAGES = (
    Package(
        "Django", "django-6.1.3.tar.gz", "b5d2d9e35295065d13b1927b3f19a59bd119f737aa6299def14ccca1ae3c8c0d", "docs", ""
    ),
    Package(
        "SQLAlchemy",
        "sqlalchemy-2.1.8.tar.gz",
        "8bc4081dd7c17c073f2384ad0f5ee968e63b43507b2e024a3523c000a06d70da",
        "doc/build",
        "lib/sqlalchemy",
    ),
    Package(
        "Celery",
        "celery-5.7.0.tar.gz",
        "6a5dfcf6662287204f009a02002b9e66c83d4105e47ebabdc7079108772fc6f0",
        "docs",
        "celery",
    ),
    Package(
        "Scrapy",
        "scrapy-2.19.0.tar.gz",
        "34130726582b64c91531162ab277c4053e558876d49ba219cb43679e71d80a87",
        "docs",
        "scrapy",
    ),
    Package(
        "pandas",
        "pandas-3.1.1.tar.gz",
        "05fed3e3b7c99b226f160e29d7d6cb7ef39638c758cbfe42b3f24ba34f04b859",
        "",
        "pandas",
    ),
    Package(
        "pytest",
        "pytest-9.2.0.tar.gz",
        "97c4f3b1f3c7414aa36465e09b8220f1d03627993bd51b1282e193753c80557b",
        "doc/en",
        "src",
    ),
    Package(
        "Sphinx", "sphinx-9.2.0.tar.gz", "90470459f3cab15d9dfed146c71cf77694b0445df17b2e0e69059cb9f7fc9ee4", "doc", ""
    ),
    Package(
        "Jinja",
        "jinja2-3.1.6.tar.gz",
        "0137fb05990d35f1275a587e9aee6d56da821fc83491a0fb838183be43f66d6d",
        "docs",
        "src",
    ),
)

# Lists of changes and of people are not what people ask about.
_LEFT_OUT = re.compile(
    r"(?:^|/)(?:releases?|changelog|changes|history|announce|whatsnew|_\w+|tests?|testing|plugin_list.*|authors.*|licen[cs]e.*|"
    r"copyright.*|sponsor.*|backwards-compatibility.*|historical-notes.*|includes|news|internals?|array_algos|interchange|dtypes|compat|computation|ops|utils?|requirements.*|spelling.*)(?:/|\.rst$|\.txt$|$)",
    re.IGNORECASE,
)
MIN_TEXT, MIN_DOCSTRING = 800, 150
FETCH_TIMEOUT_S = 120


class Document(NamedTuple):
    """A reStructuredText document of a package; `name` is its path or, for docstrings, the dotted name."""

    package: str
    name: str
    text: str


def fetched(folder: Path) -> Path:
    """Download what is missing from the index that pip uses on this machine, check it, and unpack it here."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        archive = folder / package.archive
        if not archive.is_file():
            archive.write_bytes(_download(package))
        if hashlib.sha256(archive.read_bytes()).hexdigest() != package.sha256:
            raise SystemExit(f"{archive} is not the pinned file (sha256 {package.sha256}). Delete it and try again.")
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
    return folder


class _Links(HTMLParser):
    """Collects the addresses of links."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _download(package: Package) -> bytes:
    """The archive. `pip download` would also build the package, which needs compilers for some."""
    page = f"{_index().rstrip('/')}/{package.archive.rpartition('-')[0]}/"
    links = _Links()
    with urlopen(page, timeout=FETCH_TIMEOUT_S) as answer:  # noqa: S310  the index that pip is configured to use
        links.feed(answer.read().decode())
    address = next((link for link in links.found if link.split("#")[0].endswith("/" + package.archive)), None)
    if address is None:
        raise SystemExit(f"The package index has no {package.archive}. Unpack it by hand and use --sources.")
    with urlopen(urljoin(page, address), timeout=FETCH_TIMEOUT_S) as answer:  # noqa: S310
        content: bytes = answer.read()
    return content


def _index() -> str:
    """The package index that pip is configured to use, or its default."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    configured = re.findall(r"^\S*\.index-url='([^']+)'$", listed, re.MULTILINE)
    if configured:
        return str(configured[-1])
    from pip._internal.models.index import PyPI  # noqa: PLC0415  only when something is downloaded

    return str(PyPI.simple_url)


def documents(folder: Path) -> Iterator[Document]:
    """The documents of all packages: files of documentation, and docstrings."""
    for package in PACKAGES:
        root = folder / package.folder
        if not root.is_dir():
            raise SystemExit(f"{root} is missing. Without --sources, the source distributions are downloaded.")
        if package.docs:
            yield from _files(package, root / package.docs)
        if package.code:
            yield from _docstrings(package, root / package.code)


def _files(package: Package, root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.suffix in (".rst", ".txt") and path.is_file() and not _LEFT_OUT.search(name):
            text = path.read_text(encoding="utf-8").expandtabs()
            if len(text) >= MIN_TEXT:
                yield Document(package.name, name, text)


def _docstrings(package: Package, root: Path) -> Iterator[Document]:
    """One document for each public class with its methods, and one for the public functions of each module."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if _LEFT_OUT.search(name):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        yield from _documented(package, module, [(f"{node.name}()", node) for node in functions])
        for node in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            named: list[tuple[str, _Documented]] = [(node.name, node)]
            yield from _documented(
                package, f"{module}.{node.name}", [*named, *((f"{node.name}.{each.name}()", each) for each in methods)]
            )


_Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _documented(package: Package, title: str, nodes: "list[tuple[str, _Documented]]") -> Iterator[Document]:
    parts = [f"{title}\n{'=' * len(title)}"]
    for name, node in nodes:
        text = ast.get_docstring(node) or ""
        public = not any(part.startswith("_") for part in name.split("."))
        if (
            public
            and len(text) >= MIN_DOCSTRING
            and not re.search(r"%\(|[\x00-\x08]", text)
            and not re.search(r"\{\w+\}", text)
        ):
            parts.append(f"{name}\n{'~' * len(name)}\n\n{inspect.cleandoc(text)}")
    if len(parts) > 1 and sum(map(len, parts)) >= MIN_TEXT:
        yield Document(package.name, title, "\n\n".join(parts) + "\n")
