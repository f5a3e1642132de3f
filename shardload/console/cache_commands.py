"""The commands about the cache of what was read from remote stores: list it, clear it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardload.console import options, streams
from shardload.errors import ShardloadError
from shardload.reports import printable
from shardload.reports.aligned import aligned
from shardload.units import format_bytes, plural, time_ago

if TYPE_CHECKING:
    from shardload.stores.cache_space import StoredObject
    from shardload.stores.range_files import CacheFolder

cache_app = typer.Typer(rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


@cache_app.callback(invoke_without_command=True)
def list_cache(
    context: typer.Context,
    *,
    directory: options.CacheOption = None,
    json: options.Json = False,
) -> None:
    """List what the cache of remote stores contains.

    One line per object: its address, size, the bytes of it in the cache, and its last use. The folder is that of
    --cache, else of the environment variable SHARDLOAD_CACHE.

    Examples:
    $ shardload cache --cache /mnt/nvme/shardload

    $ shardload cache --json
    """
    if context.invoked_subcommand is not None:
        if directory is not None or json:
            raise typer.BadParameter(f"Give options after {context.invoked_subcommand}.", param_hint="--cache, --json")
        return
    with streams.results() as out:
        folder = _folder(directory)
        from shardload.stores.cache_space import stored_objects

        found = stored_objects(folder)
        if json:
            out.json(_as_json(folder, found))
        elif not found:
            out.text(f"{printable(str(folder.path))} contains no ranges of remote objects\n")
        else:
            head = ("address", "size", "cached", "last use")
            rows = [head, *map(_row, found), ("total", "", format_bytes(sum(each.n_bytes for each in found)), "")]
            out.text(aligned(rows, width=out.width))


def _addresses(context: typer.Context) -> list[str]:
    """Return the addresses of what is in the cache, for a shell to complete."""
    # An error would be printed into the line that is being typed; the command itself will report it.
    try:
        from shardload.stores.cache_space import stored_objects

        found = stored_objects(_folder(context.params.get("directory")))
    except (OSError, ShardloadError):
        return []
    return sorted({each.described.address for each in found if each.described is not None})


@cache_app.command("clear")
def clear_cache(
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="ADDRESS",
            help="Only objects at or below this address, as listed.",
            show_default=False,
            autocompletion=_addresses,
        ),
    ] = None,
    *,
    directory: options.CacheOption = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            "--older-than",
            metavar="AGE",
            parser=options.age,
            help="Only what was not used for so long: 30d, 12h, 90min.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Remove what the cache of remote stores contains, all by default.

    Loads that are running fetch again what they still need.

    Examples:
    $ shardload cache clear --older-than 30d

    $ shardload cache clear s3://bucket/gemma-2-9b --cache /mnt/nvme/shardload
    """
    with streams.results() as out:
        folder = _folder(directory)
        from shardload.stores import cache_space

        found = cache_space.clear(folder, older_than_s=older_than or 0.0, address=address)
        if json:
            out.json(_as_json(folder, found))
        else:
            freed = format_bytes(sum(each.n_bytes for each in found))
            out.text(f"removed {plural(len(found), 'object')}, {freed}, from {printable(str(folder.path))}\n")


def _folder(directory: str | None) -> CacheFolder:
    from shardload.stores.cache_choice import chosen_directory
    from shardload.stores.range_files import CacheFolder

    return CacheFolder(chosen_directory(directory))


def _as_json(folder: CacheFolder, found: list[StoredObject]) -> dict[str, Any]:
    objects = [
        {
            "address": None if each.described is None else each.described.address,
            "version": None if each.described is None else each.described.version,
            "size": None if each.described is None else each.described.size,
            "cached_bytes": each.n_bytes,
            "ranges": len(each.ranges),
            "used_unix_s": each.used_s,
        }
        for each in found
    ]
    return {"directory": str(folder.path), "bytes": sum(each.n_bytes for each in found), "objects": objects}


def _row(each: StoredObject) -> tuple[str, ...]:
    address, size = ("unknown", "-") if each.described is None else (each.described.address, each.described.size)
    shown = size if isinstance(size, str) else format_bytes(size)
    return printable(address), shown, format_bytes(each.n_bytes), time_ago(time.time() - each.used_s)
