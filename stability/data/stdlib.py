"""English text from every Python installation: docstrings and ``help()`` topics.

The corpus differs between Python builds; its fingerprint identifies it.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from stability.config import Settings
from stability.corpora.tokens.corpus import Corpus, draw_stand_in
from stability.corpora.tokens.split import split_documents
from stability.corpora.tokens.vocabulary import ByteTokenizer
from stability.data import AbstractDataSource
from stability.startup import seldom_collected

# Increment if the same installation would give other documents.
VERSION = 1
MIN_CHARACTERS = 32
# Installed packages and test suites differ between machines more than the library itself.
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class StdlibConfig(Settings):
    """The settings of data=stdlib: none."""


class StdlibDocstrings(AbstractDataSource):
    """Docstrings of the standard library, and the entries of ``pydoc_data.topics``.

    Docstrings of modules, classes and functions are read from the source files, without importing. Omitted: texts
    shorter than 32 characters, test suites, site-packages and unparsable files.
    """

    Config: ClassVar[type[Settings]] = StdlibConfig
    downloads: ClassVar[bool] = False

    @classmethod
    def prepare(cls, config: StdlibConfig, scratch: Path | None = None) -> Corpus:
        """Parse the library's source (some seconds).

        Raises:
            ValueError: this Python has no standard library source in a folder.
        """
        root = library_folder()
        with seldom_collected():  # syntax trees are very many objects
            return split_documents(
                (text for file in source_files(root) for text in documents(file)), _origin(), scratch=scratch
            )

    @classmethod
    def cache_key(cls, config: StdlibConfig) -> str:
        """Return Python's version and build, and the state of each source file.

        The state is name, size and modification time.
        """
        return library_key(VERSION)

    @classmethod
    def stand_in(cls, config: StdlibConfig) -> Corpus:
        """Return random bytes: parsing the library takes a third of a dry run."""
        num_files = sum(1 for _ in source_files(library_folder()))
        return draw_stand_in(len(ByteTokenizer().vocabulary.pieces), f"{_origin()}: {num_files:,} source files")

    @classmethod
    def inputs(cls, config: StdlibConfig) -> Iterator[Path]:
        """Yield the library's source files and their folders."""
        files = list(source_files(library_folder()))
        yield from (*files, *dict.fromkeys(file.parent for file in files))

    @classmethod
    def tokens_of(cls, config: StdlibConfig) -> str:
        return "bytes"


def _origin() -> str:
    return f"standard library docstrings of {platform.python_implementation()} {platform.python_version()}"


def library_key(version: int) -> str:
    """Return a digest of a version of the reader, Python's version and build, and the state of each source file."""
    root = library_folder()
    digest = hashlib.sha256(
        repr((version, platform.python_implementation(), platform.python_version(), platform.python_build())).encode()
    )
    for file in source_files(root):
        status = file.stat()
        digest.update(f"{file.relative_to(root).as_posix()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def library_folder() -> Path:
    """Return the folder of the standard library's source.

    Raises:
        ValueError: there is none (zipped or stripped installations).
    """
    folder = Path(sysconfig.get_path("stdlib"))
    if not (folder / "os.py").is_file() or not (folder / "argparse.py").is_file():
        raise ValueError(
            f"data=stdlib: no standard library source in {folder} (a zipped or stripped Python has none).\n"
            "Use a Python with its .py files, or your own text: data=text data.path=FILE_OR_FOLDER"
        )
    return folder


def source_files(root: Path) -> Iterator[Path]:
    """Yield every ``.py`` file below ``root`` except in `EXCLUDED_FOLDERS`, in a fixed order."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - EXCLUDED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def documents(file: Path) -> Iterator[str]:
    """Yield the sufficiently long texts of one source file; none if it does not parse."""
    if (tree := parse(file)) is None:
        return
    texts = topics(tree) if file.parts[-2:] == ("pydoc_data", "topics.py") else docstrings(tree)
    yield from (text for text in map(clean, texts) if len(text) >= MIN_CHARACTERS)


def parse(file: Path) -> ast.Module | None:
    """Return a source file's syntax tree; None if it does not parse.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in other people's strings
            return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return None
    except OSError as error:
        raise ValueError(f"data=stdlib: cannot read {file}: {error.strerror}") from None


def clean(text: str) -> str:
    """Return a text with a UTF-8 form and without NUL, stripped."""
    # NUL separates documents, and a lone surrogate has no UTF-8 form; both occur only in examples
    return text.strip().replace("\0", "\\0").encode("utf-8", "replace").decode("utf-8")


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield every docstring, dedented."""
    # Statements only: expressions, most of a tree, define nothing with a docstring.
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            children = getattr(node, block, None)
            pending.extend(children if isinstance(children, list) else ())


def topics(tree: ast.Module) -> Iterator[str]:
    """Yield the texts of the dictionary ``topics`` in ``pydoc_data.topics``."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            yield from (
                value.value
                for value in statement.value.values
                if isinstance(value, ast.Constant) and isinstance(value.value, str)
            )


EXPORT = StdlibDocstrings
