"""Files that options name (``--html``, ``--svg``, ``--save-plan``): checked before the work, written after it.

A command first calls `check_new_files`: a file that it cannot write, or that it would read, is an error before anything
is read. It prints its results inside of `written`, so that a failed write does not lose them::

    check_new_files ──► work ──► written: write the files ──► print the results ──► raise what writing raised
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import typer

from shardload import resolve
from shardload.console.streams import note
from shardload.errors import WAYS_OUT, WriteError
from shardload.stores.local import check_replaceable, replace_text


def check_new_files(
    files: Mapping[str, Path | None], *, reads: Iterable[str | None], check_folders: bool = True
) -> None:
    """Raise if a file of ``files`` (option → path) is among what a command ``reads``, or cannot be written.

    Args:
        files: The files that the command is to write, each by the name of its option.
        reads: Sources, adapters and files of layouts. Names and addresses that are not on this machine are ignored.
        check_folders: Also create an empty file beside each, and remove it. False in a process that writes none of
            them.
    """
    asked = {option: path for option, path in files.items() if path is not None}
    read = [place for source in reads if source and (place := resolve.on_this_machine(source)) is not None]
    for option, path in asked.items():
        for source in read:
            _check_apart(path, source, option)
        if check_folders:
            try:
                check_replaceable(path)
            except OSError as error:
                raise _refused(path, error, f" ({option})") from error


@contextlib.contextmanager
def written(*files: tuple[Path | None, Callable[[Path], object]]) -> Iterator[None]:
    """Save the files that were asked for, run the block, which prints the results, and raise what saving raised."""
    failures = []
    for path, save in files:
        if path is None:
            continue
        try:
            save(path)
        except WriteError as error:
            failures.append(error)
        else:
            note(f"wrote {path}")
    yield
    if failures:
        for other in failures[1:]:
            failures[0].add_note(str(other))
        raise failures[0]


def saver(text: Callable[[], str]) -> Callable[[Path], None]:
    """Return a function for `written` that writes the text that ``text`` returns."""

    def save(path: Path) -> None:
        try:
            replace_text(path, text())
        except OSError as error:
            raise _refused(path, error) from error

    return save


def _refused(path: Path, error: OSError, option: str = "") -> WriteError:
    advice = WAYS_OUT.get(error.errno or 0, "Choose another place")
    return WriteError(f"Cannot write {str(path)!r}{option}: {error.strerror or error}. {advice}.")


def _check_apart(path: Path, source: Path, option: str) -> None:
    """Raise if ``path`` is the file ``source``, or replaces a file of the folder ``source``, also through links."""
    if source.is_dir():
        real = path.resolve()
        if not real.exists() or _is_picture(real):
            return
        if any(_same(parent, source) for parent in real.parents) or any(_same(each, real) for each in _links(source)):
            raise typer.BadParameter(
                f"{str(path)!r} is in {str(source)!r}, which the command reads. Choose a new name",
                param_hint=option,
            )
    elif _same(path, source):
        raise typer.BadParameter(
            f"{str(path)!r} is the file {str(source)!r}, which the command reads. Choose another name",
            param_hint=option,
        )


def _is_picture(path: Path) -> bool:
    """Return whether a file is a page or a picture, such as one that was written here before."""
    try:
        with path.open("rb") as file:
            return file.read(16).lower().startswith((b"<!doctype html", b"<svg"))
    except OSError:
        return False


def _links(folder: Path) -> Iterator[Path]:
    """Yield the links in a folder and those below it."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                yield Path(entry.path)
            elif entry.is_dir():
                yield from _links(Path(entry.path))


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:  # one of them does not exist
        return False
