"""The pages of checkpoints, and the same facts as JSON.

/                                       the catalogue (in `application`, as it is a folder's page, too)
/ui/checkpoints/NAME                    its tensors, as a tree
/api/v1/checkpoints/NAME/tensors        the same as JSON
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from aiohttp import web

from shardload.errors import MeshError, ShardloadError, UsageError
from shardload.loaders.orbax.loader import step_number
from shardload.reports.markup import escaped, escaped_lines
from shardload.reports.name_table import MOST_ROWS
from shardload.serving.jobs.records import JOB_KINDS
from shardload.serving.roots.all_roots import AllRoots
from shardload.serving.roots.catalogue import ServedFile
from shardload.serving.roots.scanning import ServedCheckpoint
from shardload.serving.site.examining import Examiner, Question, UnansweredError
from shardload.serving.site.job_pages import job_form
from shardload.serving.site.live_loads import LiveLoads, loads_page
from shardload.serving.site.pages import (
    ICON_PATH,
    LOADS_PATH,
    SCRIPT_PATH,
    STYLE_PATH,
    TABLE_PATH,
    UI,
    answer,
    checkpoint_path,
    filter_form,
    page,
    static,
)
from shardload.serving.site.plan_view import asked_mesh, command_of, mesh_form, plan_lines
from shardload.serving.site.tensor_tree import matching, tree_lines, tree_of
from shardload.sharding.mesh import MeshSpec
from shardload.units import format_bytes, format_parameters, plural

_MOST_QUERY = 200
"""Most characters of a text that a page repeats in its fields."""
_MOST_FILES = 100
"""Most files that the page of a checkpoint lists."""
_MOST_ASKED = 1000
"""Most files at an address that a page asks about: each is a request, and again when that was some time ago."""
_PART_BYTES = 1 << 16
"""Bytes of an answer that are given to a connection at a time."""


class ServerPages:
    """Answers requests for pages of checkpoints.

    ``refresh`` looks for a checkpoint again if that was long ago; ``remote_tags`` asks for the versions of files that
    are at addresses.
    """

    def __init__(
        self,
        roots: AllRoots,
        examiner: Examiner,
        live: LiveLoads,
        *,
        refresh: Callable[[str], Awaitable[None]],
        remote_tags: Callable[[Sequence[str]], Awaitable[list[str]]],
    ) -> None:
        self._roots, self._examiner, self._live = roots, examiner, live
        self._refresh, self._remote_tags = refresh, remote_tags

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add the addresses of the pages."""
        for path in (STYLE_PATH, SCRIPT_PATH, TABLE_PATH, ICON_PATH):
            router.add_get(path, self._static)
        router.add_get(UI + "/checkpoints/{name:.+}", self._page_of_checkpoint)
        router.add_get(LOADS_PATH, self._page_of_loads)
        router.add_get("/api/v1/loads", self._loads)
        router.add_get(UI + "/plans/{name:.+}", self._page_of_plan)
        router.add_get("/api/v1/checkpoints/{name:.+}/tensors", self._tensors)
        router.add_get("/api/v1/checkpoints/{name:.+}/plan", self._plan)

    async def _page_of_loads(self, request: web.Request) -> web.Response:
        return answer(loads_page(self._live.to_json()))

    async def _loads(self, request: web.Request) -> web.Response:
        return _json({"loads": self._live.to_json()})

    async def _static(self, request: web.Request) -> web.Response:
        return static(request.path)

    async def _page_of_checkpoint(self, request: web.Request) -> web.Response:
        try:
            found, step = await self._found(request)
            match, group = request.query.get("match", "")[:_MOST_QUERY], request.query.get("group", "")
            parts = {found.name: "All steps" if found.steps else found.name}
            if (folder := self._folder_of(found, step)) != found.name:
                parts = {folder: f"Step {step}", **parts}
            text = await self._examiner.read(
                await self._question(found, step, "inspect"),
                lambda facts: _checkpoint_page(found, step, facts, parts, match=match, group=group),
            )
        except UnansweredError as error:
            return _refusal(request.match_info["name"], error)
        return answer(text)

    async def _tensors(self, request: web.Request) -> web.Response:
        try:
            found, step = await self._found(request)
            return _sent(await self._examiner.ask(await self._question(found, step, "inspect")))
        except UnansweredError as error:
            return _json({"error": str(error)}, status=error.status)

    async def _page_of_plan(self, request: web.Request) -> web.Response:
        query = request.query
        text, name = query.get("mesh", ""), request.match_info["name"]
        kept = {"step": query["step"]} if "step" in query else {}
        lines = [
            f'<p><a href="{checkpoint_path(name)}{escaped("?" + urlencode(kept)) if kept else ""}">Tensors</a></p>'
        ]
        title, status = f"Plan of {name}", 200
        try:
            found, step = await self._found(request)
            lines += mesh_form(text[:_MOST_QUERY], kept)
            if text:
                mesh = _mesh(text)
                chosen = query.get("variable", "")
                lines += await self._examiner.read(
                    await self._question(found, step, *command_of(mesh)),
                    lambda plan: [*plan_lines(plan, mesh, chosen=chosen, hidden={**kept, "mesh": text})],
                )
        except UnansweredError as error:
            status = error.status
            lines.append(f'<p class="refusal">{escaped_lines(str(error))}</p>')
        return answer(
            page(title, lines, scripts=(SCRIPT_PATH, TABLE_PATH) if text and status == 200 else ()), status=status
        )

    async def _plan(self, request: web.Request) -> web.Response:
        try:
            found, step = await self._found(request)
            mesh = _mesh(request.query.get("mesh", ""))
            return _sent(await self._examiner.ask(await self._question(found, step, *command_of(mesh))))
        except UnansweredError as error:
            return _json({"error": str(error)}, status=error.status)

    async def _found(self, request: web.Request) -> tuple[ServedCheckpoint, int | None]:
        """Return the checkpoint that a request is about, and the step of it; raise if there is no such one."""
        name, step = request.match_info["name"], request.query.get("step")
        await self._refresh(name)
        found = self._roots.checkpoint(name)
        if found is None:
            above, _, own = name.rpartition("/")
            found, number = self._roots.checkpoint(above), step_number(own)
            if found is not None and number in found.steps and self._roots.names(name) is not None:
                return found, number  # by the address of the step's folder
            raise UnansweredError(404, "There is no such checkpoint.")
        if step is None:
            return found, found.steps[-1] if found.steps else None
        if not step.isascii() or not step.isdecimal() or len(step) > 18 or int(step) not in found.steps:
            raise UnansweredError(404, "The checkpoint has no such step.")
        return found, int(step)

    async def _question(self, found: ServedCheckpoint, step: int | None, *command: str) -> Question:
        source = self._folder_of(found, step)
        # What describes a file of weights is next to it.
        folder = source.rpartition("/")[0] if found.kind == "file" else source
        return Question(source, await self._version(found, folder), command)

    async def _version(self, found: ServedCheckpoint, folder: str) -> str:
        """Return a digest of names and tags of the files in a folder; of a checkpoint in one, also in those below."""
        is_deep = found.kind != "file"
        keys = await asyncio.to_thread(lambda: list(_files(self._roots, folder, is_deep=is_deep)))
        if self._roots.is_own(found.name):
            files = map(self._roots.file, keys)
            tags = [file.tag if isinstance(file, ServedFile) else "" for file in files]
        elif len(keys) > _MOST_ASKED:
            raise UnansweredError(
                422, f"Its folder has {plural(len(keys), 'file')}: too many to ask the store about each for a page."
            )
        else:
            try:
                tags = await self._remote_tags(keys)
            except ShardloadError as error:
                raise UnansweredError(502, f"{str(error).rstrip('.')}.") from error
        version = hashlib.blake2b(digest_size=16)
        for key, tag in zip(keys, tags, strict=True):
            version.update(f"{key}\0{tag}\0".encode())
        return version.hexdigest()

    def _folder_of(self, found: ServedCheckpoint, step: int | None) -> str:
        """Return the address of a step below the server's, or that of the checkpoint."""
        names = self._roots.names(found.name) or {}
        folders = (f"{found.name}/{name}" for name in names if step is not None and step_number(name) == step)
        return next(folders, found.name)


def _mesh(text: str) -> MeshSpec:
    try:
        return asked_mesh(text)
    except (UsageError, MeshError) as error:
        raise UnansweredError(400, f"{error}.") from error


def _files(roots: AllRoots, folder: str, *, is_deep: bool) -> Iterator[str]:
    """Yield the address of each file in a folder, and with ``is_deep`` of those in folders below."""
    for name, is_folder in (roots.names(folder) or {}).items():
        key = f"{folder}/{name}".lstrip("/")
        if not is_folder:
            yield key
        elif is_deep:
            yield from _files(roots, key, is_deep=True)


def _checkpoint_page(
    found: ServedCheckpoint, step: int | None, facts: dict[str, Any], parts: dict[str, str], *, match: str, group: str
) -> str:
    tensors = facts["tensors"]
    shown = matching(tensors, match) if match else tensors
    tree = tree_of(shown).below(group)
    lines = list(_summary(found, step, facts))
    kept = {"step": str(step)} if step is not None else {}
    inside = {}
    plan_query = escaped("?" + urlencode(kept)) if kept else ""
    plan = f'<a class="button" href="{UI}/plans/{quote(found.name)}{plan_query}">Plan a load</a>'
    jobs = job_form(parts, kinds=JOB_KINDS if found.source is None else ("prefetch",))
    lines.append(f'<div class="actions">{plan}{jobs}</div>')
    lines.append("<h2>Tensors</h2>")
    if tree is not None and tree.prefix:
        inside = {"group": tree.prefix}
        whole = escaped("?" + urlencode(kept))
        lines.append(f'<p class="name">{escaped(tree.prefix)}… <a href="{whole}">Show all tensors</a></p>')
    lines += filter_form(match, "Filter by name, dtype or shape", **kept, **inside)
    n_shown = 0 if tree is None else tree.n_items
    size = "" if tree is None else f", {format_bytes(tree.n_bytes)}"
    of = "" if n_shown == len(tensors) else f"{n_shown:,} of "
    lines.append(f'<p class="soft" role="status" data-noun="tensors">{of}{plural(len(tensors), "tensor")}{size}</p>')
    if tree is not None:
        is_whole = " data-filtered" if n_shown <= MOST_ROWS else ""
        kept |= {"match": match} if match else {}
        lines += [f'<div class="tree-box"{is_whole}>', *tree_lines(tree, all_open=bool(match), kept=kept), "</div>"]
    return page(found.name, lines)


def _summary(found: ServedCheckpoint, step: int | None, facts: dict[str, Any]) -> Iterator[str]:
    rows = [
        ("Format", escaped(facts["format"])),
        ("Tensors", f"{len(facts['tensors']):,}, {format_parameters(facts['parameters'])}"),
        ("Bytes", f"{format_bytes(facts['bytes'])} in tensors, {format_bytes(found.n_bytes)} in all files"),
    ]
    if found.source is not None:
        rows.append(("Source", escaped(found.source)))
    if facts["left_out"]:
        rows.append(("Partial", f"without {plural(facts['left_out'], 'weight')}"))
    if facts["undescribed"]:
        rows.append(("Model", f"none can be built from it: {escaped_lines(facts['undescribed'])}"))
    files = [f'<a href="/{quote(name)}">{escaped(name)}</a> {format_bytes(n)}' for name, n in facts["files"].items()]
    more = [f"and {plural(len(files) - _MOST_FILES, 'file')} more"] if len(files) > _MOST_FILES else []
    rows.append(("Files", "<br>".join(files[:_MOST_FILES] + more)))
    yield '<dl class="facts">'
    for label, text in rows:
        yield f"<dt>{label}</dt><dd>{text}</dd>"
    yield "</dl>"
    if found.steps:
        links = (
            f'<a href="{checkpoint_path(found.name)}?step={n}"{" aria-current=true" if n == step else ""}>{n}</a>'
            for n in reversed(found.steps)
        )
        yield f'<p class="steps">Steps: {" ".join(links)}</p>'


def _refusal(name: str, error: UnansweredError) -> web.Response:
    return answer(page(name, [f'<p class="refusal">{escaped_lines(str(error))}</p>'], scripts=()), status=error.status)


def _sent(found: bytes) -> web.Response:
    """Return a response that sends bytes in parts: a client that is slow has no copy of all of them."""

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(found), _PART_BYTES):
            yield found[start : start + _PART_BYTES]

    return web.Response(
        body=parts(),
        headers={"Content-Length": str(len(found))},
        content_type="application/json",
        charset="utf-8",
    )


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(text=json.dumps(value) + "\n", status=status, content_type="application/json")
