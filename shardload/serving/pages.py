"""The pages by which a server shows folders to browsers, and to clients that know HTTP only."""

from __future__ import annotations

import html
from collections.abc import Iterable
from urllib.parse import quote

from shardload.serving.catalogue import ServedCheckpoint
from shardload.units import format_bytes, plural

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="stylesheet" href="/api/v1/style.css">
</head>
<body>
<main>
<h1>{title}</h1>
"""
_END = "</main>\n</body>\n</html>\n"
STYLE = """:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; margin: 0; }
main { max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; }
ul { padding: 0; list-style: none; }
li { padding: .4rem 0; border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent); }
li a { overflow-wrap: anywhere; }
small { display: block; }
"""


def folder_page(name: str, names: dict[str, bool]) -> str:
    """Return the page of a folder: a link for each name in it."""
    links = ['<li><a href="../">../</a></li>\n']
    for each, is_folder in names.items():
        end = "/" if is_folder else ""
        links.append(f'<li><a href="{quote(each)}{end}">{html.escape(each)}{end}</a></li>\n')
    return _page(name, links)


def home_page(names: dict[str, bool], checkpoints: Iterable[ServedCheckpoint]) -> str:
    """Return the page of everything: a link for each checkpoint, with its format and size, and for other names."""
    found = list(checkpoints)
    shown = {each.name for each in found}
    lines = []
    for each in found:
        end = "" if each.kind == "file" else "/"
        what = [each.format, format_bytes(each.n_bytes)]
        if each.steps:
            what.append(plural(len(each.steps), "step"))
        link = f'<a href="{quote(each.name)}{end}">{html.escape(each.name)}</a>'
        lines.append(f"<li>{link} <small>{html.escape(', '.join(what))}</small></li>\n")
    for name, is_folder in names.items():
        if name not in shown:
            end = "/" if is_folder else ""
            lines.append(f'<li><a href="{quote(name)}{end}">{html.escape(name)}{end}</a></li>\n')
    return _page("Checkpoints", lines or ["<li>There are no checkpoints.</li>\n"])


def _page(title: str, lines: list[str]) -> str:
    return _HEAD.format(title=html.escape(title)) + "<ul>\n" + "".join(lines) + "</ul>\n" + _END
