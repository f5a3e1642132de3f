"""The pages by which a server shows what it has: to people, and to clients that know HTTP only.

The page at ``/`` and those of folders have a link for each name in them, as other web servers' pages do, which is how
the store for ``http://`` addresses lists a folder. Every page works without a script, and has none of its own text in
it that is not escaped.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.resources import files
from typing import TypeVar
from urllib.parse import quote

from aiohttp import web

from shardload.reports.markup import escaped
from shardload.reports.page import page_script, page_style
from shardload.serving.roots.scanning import ServedCheckpoint
from shardload.units import format_bytes, plural

ItemT = TypeVar("ItemT")
UI = "/ui"
"""Where pages are that are no folders: below a reserved name, since all others belong to files."""
STYLE_PATH, SCRIPT_PATH, TABLE_PATH, ICON_PATH = (
    f"{UI}/{name}" for name in ("site.css", "site.js", "table.js", "icon.svg")
)
LOADS_PATH, JOBS_PAGE, CACHE_PAGE, SIGN_IN_PATH, SIGN_OUT_PATH = (
    f"{UI}/{name}" for name in ("loads", "jobs", "cache", "sign-in", "sign-out")
)
OPEN_PATHS = (SIGN_IN_PATH, SIGN_OUT_PATH, STYLE_PATH, ICON_PATH)
"""What needs no token: the form that takes one, and what it looks like."""
FORM_PATHS = (SIGN_IN_PATH, SIGN_OUT_PATH, JOBS_PAGE)
"""Where forms are sent, which have a body."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'"
)
"""What a page may load: files of the checkpoints have a type that browsers refuse to run."""
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · shardload</title>
<link rel="icon" href="{icon}">
<link rel="stylesheet" href="{style}">
{scripts}</head>
<body>
<a class="skip" href="#main">Skip to content</a>
<header><nav aria-label="Pages"><ul>{links}</ul></nav></header>
<main id="main">
<h1>{title}</h1>
"""
_END = "</main>\n</body>\n</html>\n"
_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path fill="#0550ae" d="M1 1h6v6H1z"/>'
    '<path fill="#6ea8fe" d="M9 1h6v6H9zM1 9h6v6H1z"/><path fill="#f4a582" d="M9 9h6v6H9z"/></svg>'
)
_PAGES = (
    ("/", "Checkpoints"),
    (LOADS_PATH, "Loads"),
    (JOBS_PAGE, "Jobs"),
    (CACHE_PAGE, "Cache"),
    (SIGN_IN_PATH, "Session"),
)
"""Address and title of the pages that each page links to. What the server has later gets a line here."""


def page(title: str, lines: Iterable[str], *, here: str = "", scripts: Iterable[str] = (SCRIPT_PATH,)) -> str:
    """Return a page; ``lines`` are HTML, ``here`` is the address of the page if others link to it."""
    links = "".join(
        f'<li><a href="{address}"{" aria-current=page" if address == here else ""}>{name}</a></li>'
        for address, name in _PAGES
    )
    tags = "".join(f'<script src="{path}" defer></script>\n' for path in scripts)
    head = _HEAD.format(title=escaped(title), style=STYLE_PATH, icon=ICON_PATH, scripts=tags, links=links)
    return head + "\n".join(lines) + "\n" + _END


def answer(text: str, *, status: int = 200) -> web.Response:
    """Return a response with a page that may run the server's scripts."""
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "private, no-cache"}
    return web.Response(text=text, status=status, content_type="text/html", headers=headers)


def moment(seconds: float) -> str:
    """Return the HTML of a point in time, given in seconds since 1970."""
    text = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    return f'<time datetime="{text.replace(" ", "T")}Z">{text} UTC</time>'


def static(path: str) -> web.Response:
    """Return a file that pages refer to: the style, or a script."""
    if path == TABLE_PATH:
        text, kind = page_script(), "text/javascript"
    elif path == ICON_PATH:
        text, kind = _ICON, "image/svg+xml"
    elif path == SCRIPT_PATH:
        text, kind = _file("site.js"), "text/javascript"
    else:
        text, kind = page_style() + _file("site.css"), "text/css"
    return web.Response(text=text, content_type=kind, headers={"Cache-Control": "private, no-cache"})


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def folder_page(name: str, names: dict[str, bool]) -> str:
    """Return the page of a folder: a link for each name in it."""
    lines = ['<ul class="files">', '<li><a href="../">../</a></li>']
    lines += map(_link, names, names.values())
    return page(name, [*lines, "</ul>"], scripts=())


def home_page(names: dict[str, bool], checkpoints: Iterable[ServedCheckpoint], *, match: str = "") -> str:
    """Return the page of everything: checkpoints whose name or format has each word of ``match``, and other names."""
    found = list(checkpoints)
    shown = filtered(found, match, lambda each: f"{each.name} {each.format}")
    own = {each.name for each in found}
    others = {name: is_folder for name, is_folder in names.items() if name not in own}
    lines = [*filter_form(match, "Filter by name or format"), *_counted(shown, found)]
    lines += ['<ul class="cards" data-filtered>', *map(_card, shown), "</ul>"]
    if not found:
        lines = ["<p>There are no checkpoints.</p>"]
    if others:
        lines += [
            "<h2>Folders and other files</h2>",
            '<ul class="files">',
            *map(_link, others, others.values()),
            "</ul>",
        ]
    return page("Checkpoints", lines, here="/")


def _counted(shown: list[ServedCheckpoint], found: list[ServedCheckpoint]) -> Iterator[str]:
    of = "" if len(shown) == len(found) else f"{len(shown):,} of "
    total = format_bytes(sum(each.n_bytes for each in shown))
    yield f'<p class="soft" role="status" data-noun="checkpoints">{of}{plural(len(found), "checkpoint")}, {total}</p>'


def filtered(found: Iterable[ItemT], match: str, text_of: Callable[[ItemT], str]) -> list[ItemT]:
    """Return the items whose text has each word of ``match``, in capital letters or not."""
    words = set(match.lower().split())

    def has_words(text: str) -> bool:
        return all(word in text for word in words)

    return [each for each in found if has_words(text_of(each).lower())]


def filter_form(match: str, label: str, **hidden: str) -> Iterator[str]:
    """Yield the form of a page that shows only what has some words; ``hidden`` are other parts of its address."""
    kept = "".join(f'<input type="hidden" name="{name}" value="{_value(text)}">' for name, text in hidden.items())
    yield (
        f'<form class="filter" role="search" method="get">{kept}<label>{label} <input type="search" name="match" '
        f'value="{_value(match)}" maxlength="200" autocomplete="off" spellcheck="false"></label> '
        "<button>Filter</button></form>"
    )


def _value(text: str) -> str:
    """Return text for the value of a field: it comes back from there, so nothing of it may be written otherwise."""
    return html.escape(text)


def _card(found: ServedCheckpoint) -> str:
    end = "" if found.kind == "file" else "/"
    facts = [found.format, format_bytes(found.n_bytes), plural(found.n_files, "file")]
    if found.steps:
        facts.append(f"{plural(len(found.steps), 'step')}, the last {found.steps[-1]}")
    spans = "".join(f"<span>{escaped(fact)}</span>" for fact in facts)
    name = escaped(found.name)
    return (
        f'<li><a class="name" href="{checkpoint_path(found.name)}">{name}</a><span class="facts-line">{spans}</span>'
        f'<a class="files-link" href="{quote(found.name)}{end}">Files<span class="hidden"> of {name}</span></a></li>'
    )


def checkpoint_path(name: str) -> str:
    """Return the address of a checkpoint's page."""
    return f"{UI}/checkpoints/{quote(name)}"


def _link(name: str, is_folder: bool) -> str:
    end = "/" if is_folder else ""
    return f'<li><a href="{quote(name)}{end}">{html.escape(name)}{end}</a></li>'
