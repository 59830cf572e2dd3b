"""Run an entry: errors of the user or the machine become a short message and exit code 2."""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType

# modules that read words are imported when they are needed: a known answer is printed sooner than they are
from stability.printable import print_text, replace_unencodable
from stability.startup import end_at_once, postpone_compiler

USAGE = 2
CRASHED = 1  # as Python's own for an uncaught exception
READER_LEFT = 128 + 13  # as a shell reports SIGPIPE
FLAGS = ("-h", "--help", "help")


def run_entry(
    main: Callable[[list[str]], int],
    root: str,
    head: str,
    repeat: Callable[[list[str]], int | None] = lambda argv: None,
) -> None:
    """Run an entry's ``main`` on the command line and exit with its code; ``-h`` prints its settings.

    Args:
        main: the entry's function of the words.
        root: the entry's name, e.g. ``sweep``.
        head: the beginning of the text of ``-h``.
        repeat: prints the answer to a command that was run before and returns the exit code, or returns None.

    Errors of the user or the machine are printed in about two lines, with exit code 2.
    """
    argv = sys.argv[1:]
    replace_unencodable()
    try:
        if words := [word for word in argv if word in FLAGS]:
            code = _run(lambda argv: _print_help(root, head, argv), [word for word in argv if word not in words])
        else:
            signal.signal(signal.SIGTERM, _stop)  # a sweep's launch replaces this handler (`sweeps.launchers`)
            atexit.register(end_at_once)
            postpone_compiler()
            code = _run(main, argv, repeat)
        if sys.stdout is not None:  # None after a shell's `>&-`
            sys.stdout.flush()  # here: a closed pipe would be a traceback if Python flushed at exit
    except BrokenPipeError:  # the reader has closed the pipe, e.g. `| head`
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                os.dup2(nowhere, stream.fileno())
        code = READER_LEFT
    sys.exit(code)


def _run(
    main: Callable[[list[str]], int], argv: list[str], repeat: Callable[[list[str]], int | None] = lambda argv: None
) -> int:
    """Run an entry's ``main`` and return the exit code; errors of the user and the machine are printed."""
    try:
        code = repeat(argv)
        return _run_checked(main, argv) if code is None else code
    except BrokenPipeError:
        raise
    except OSError as error:  # an unwritable folder, a full disk
        return _refuse(_describe_os_error(error, argv), argv)
    except Exception as error:
        is_refusal = isinstance(error, ValueError | RuntimeError)
        if described := _describe_own_error(error):
            _refuse(described, argv)
            return USAGE if is_refusal else CRASHED
        if not is_refusal or not str(error):  # e.g. NotImplementedError: only its traceback says anything
            raise
        return _refuse(str(error), argv)
    except KeyboardInterrupt as stop:
        print_text("stopped; the same command goes on from here", file=sys.stderr)
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)


def _run_checked(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run ``main`` unless a word is repeated with another value."""
    from stability.cli.mistakes import check_repetitions
    from stability.cli.words import Invocation

    check_repetitions(Invocation.of(argv))
    return main(argv)


def _refuse(reason: str, argv: list[str]) -> int:
    """Print an error of the user or the machine, and return the exit code."""
    from stability.cli.mistakes import make_printable
    from stability.cli.words import Invocation

    print_text(f"error: {make_printable(reason, Invocation.of(argv))}", file=sys.stderr)
    return USAGE


def _describe_own_error(error: Exception) -> str:
    """Return class, message and line of an error in the user's own code, e.g. a plugin; "" for any other error."""
    from stability.cli.own_errors import describe_own_error, find_own_line

    place = find_own_line(error)
    return describe_own_error(error, place) if place else ""


def _print_help(root: str, head: str, argv: list[str]) -> int:
    from stability.cli.help import help_text

    print_text(help_text(root, head, argv))
    return 0


def _describe_os_error(error: OSError, argv: list[str]) -> str:
    """Return the error and path of a failed operation, and the word with this path."""
    from stability.cli.words import Invocation

    place = str(error.filename or "")
    holders = (Path(place).absolute(), *Path(place).absolute().parents)
    named = [word.key for word in Invocation.of(argv).words if word.value and Path(word.value).absolute() in holders]
    what = ": ".join(filter(None, [*named[:1], error.strerror or str(error), place]))
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{what}\nfree some room there; the same command goes on from here" if is_full else what


def _stop(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt at SIGTERM: `kill` or a shutdown ends an entry like Ctrl-C."""
    raise KeyboardInterrupt(number)


def check_writable(key: str, folder: str) -> None:
    """Check that a folder is writable or can be created; leaves no file behind.

    Raises:
        RuntimeError: ``key=folder`` can be neither written to nor created.
    """
    try:
        nearest = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise RuntimeError(
            f"{key}={folder}: nothing can be written there ({error.strerror or error}); give a folder of your own"
        ) from None
