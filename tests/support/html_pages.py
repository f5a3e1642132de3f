"""Reads a page that a report was written to, as a test needs it: its elements, attributes, text, and rows of tables."""

import re
from collections import Counter
from html.parser import HTMLParser

from shardload.units import format_bytes


class ParsedPage(HTMLParser):
    """The elements of a page, and the rows of its tables."""

    def __init__(self, page):
        super().__init__()
        self.page, self.text = page, ""
        self.open, self.tags, self.attributes, self.rows, self.kinds = [], Counter(), [], [], []
        self.feed(page)
        assert self.open == []  # every element is closed

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("meta", "input", "wbr", "rect"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
            self.kinds.append(dict(attrs))
        if tag in ("th", "td"):
            self.rows[-1].append(["", dict(attrs)])

    def handle_endtag(self, tag):
        if tag != "rect":
            assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1][0] += data

    def row(self, name):
        """Return the texts of the first row of any table that begins with a name."""
        return next([text for text, _ in row] for row in self.rows if row and row[0][0] == name)

    def bars(self, heading):
        """Return the texts of the rows of a chart, the longest bar first."""
        charts = re.findall(r"<section>\n<h2>(.*?)</h2>\n<table class=\"bars\">(.*?)</table>", self.page, re.DOTALL)
        (chart,) = [table for name, table in charts if name == heading]
        return [[text for text, _ in row] for row in ParsedPage(f"<table>{chart}</table>").rows]

    @property
    def _leaf_rows(self):
        rows = zip(self.rows, self.kinds, strict=True)
        return [row for row, kind in rows if "data-depth" in kind and kind.get("class") != "group"]

    @property
    def leaves(self):
        """The texts of all rows of tensors."""
        return [[text for text, _ in row] for row in self._leaf_rows]

    def leaf(self, name):
        """Return the texts of the row of a tensor."""
        return next(row for row in self.leaves if row[0] == name)

    def group(self, label):
        """Return the texts of the row of a group."""
        rows = zip(self.rows, self.kinds, strict=True)
        found = [[text for text, _ in row] for row, kind in rows if kind.get("class") == "group"]
        return next(row for row in found if row[0].startswith(f"{label} "))

    def values(self, kind):
        """Return the exact numbers in a column of tensors, whose cells have a class."""
        cells = (attributes for row in self._leaf_rows for _, attributes in row)
        return [int(each["data-value"]) for each in cells if kind in (each.get("class") or "").split()]

    def shown_bytes(self, *counts):
        """Return numbers of bytes as pages show them."""
        return list(map(format_bytes, counts))
