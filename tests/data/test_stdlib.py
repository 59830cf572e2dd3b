"""Docstrings out of source files, on a small library of its own; the real one is in test_cache.py (it is prepared once
there)."""

import pytest

from stability.data import stdlib
from stability.data.stdlib import StdlibConfig, StdlibDocstrings, documents, library_folder, source_files

SOURCE = '''"""The docstring of the module, which is long enough."""
import nothing_that_exists
if nothing_that_exists:
    class Thing:
        """The docstring of a class,

            with an indented line.
        And one that is not.
        """
        async def method(self):
            """The docstring of a coroutine, long enough."""
            def inner():
                """The docstring of a function in a function."""
else:
    try:
        pass
    except OSError:
        def late():
            r"""The docstring of a function in a handler: \\d and NUL."""
    finally:
        def short():
            """Too short."""
def other():
    "A NUL \\x00 and a lone surrogate \\ud800 are written otherwise."
    "A second string, which documents nothing at all."
'''


@pytest.fixture
def library(tmp_path, monkeypatch):
    (tmp_path / "os.py").write_text(SOURCE)
    (tmp_path / "argparse.py").write_text('"""Another module, with a docstring of its own."""')
    (tmp_path / "broken.py").write_text('"""A file that does not parse, whatever it says."""\ndef (:')
    (tmp_path / "latin.py").write_bytes(
        '# -*- coding: latin-1 -*-\n"""Ein Text in Latin-1, mit \xdcmlauten und anderem."""'.encode("latin-1")
    )
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text(
        "topics = {'if': 'The first topic, in two strings, '\n 'of enough characters.', 'x': 'short'}"
    )
    for folder in ("test", "site-packages", "unittest/test", "lib2to3/tests", "idlelib/idle_test"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "left_out.py").write_text('"""This one must never be read, in no folder."""')
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda _: str(tmp_path))
    return tmp_path


# os.py imports a module that does not exist: whoever imported it instead of parsing it would fail
def test_every_docstring_is_found_and_nothing_else(library):
    assert sorted(documents(library / "os.py")) == sorted(
        [
            "The docstring of the module, which is long enough.",
            "The docstring of a class,\n\n    with an indented line.\nAnd one that is not.",
            "The docstring of a coroutine, long enough.",
            "The docstring of a function in a function.",
            "The docstring of a function in a handler: \\d and NUL.",
            "A NUL \\0 and a lone surrogate ? are written otherwise.",
        ]
    )


def test_topics_are_read_without_being_imported(library):
    assert list(documents(library / "pydoc_data" / "topics.py")) == [
        "The first topic, in two strings, of enough characters."
    ]


def test_source_encodings_are_respected(library):
    assert list(documents(library / "latin.py")) == ["Ein Text in Latin-1, mit Ümlauten und anderem."]


def test_tests_and_installed_packages_are_left_out(library):
    names = [file.relative_to(library).as_posix() for file in source_files(library)]
    assert names == ["argparse.py", "broken.py", "latin.py", "os.py", "pydoc_data/topics.py"]


def test_files_that_do_not_parse_are_left_out(library):
    assert list(documents(library / "broken.py")) == []


def test_preparation_is_deterministic_and_needs_no_test_package(library):
    first, second = StdlibDocstrings.prepare(StdlibConfig()), StdlibDocstrings.prepare(StdlibConfig())
    assert first.fingerprint == second.fingerprint and first.num_train_documents + first.num_val_documents == 9


def test_cache_key_follows_a_changed_file(library):
    before = StdlibDocstrings.cache_key(StdlibConfig())
    assert before == StdlibDocstrings.cache_key(StdlibConfig())
    (library / "os.py").write_text(SOURCE + "\n")
    assert StdlibDocstrings.cache_key(StdlibConfig()) != before


def test_a_python_without_its_source_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda _: str(tmp_path / "python311.zip"))
    with pytest.raises(ValueError, match=r"data=stdlib: no standard library source in .*python311\.zip") as caught:
        library_folder()
    assert "data=text data.path=" in str(caught.value) and str(caught.value).count("\n") == 1
