"""Looks at pages of reports in Chromium, as a person would; run by a Python that has Playwright and axe.

It prints what is wrong as `page_visit` does, and writes screenshots to a folder.
"""

import json
import math
import sys
from pathlib import Path

from page_visit import Visit, expect, windows


class ReportVisit(Visit):
    """A browser window with a report in it."""

    @property
    def rows(self):
        return self.page.locator(".names tbody tr:visible")

    def folds(self):
        """Open and close a group by the keyboard, and all of them."""
        head = self.page.locator(".group:visible button").first
        head.focus()
        was_open = head.get_attribute("aria-expanded") == "true"
        before = self.rows.count()
        self.page.keyboard.press("ArrowLeft" if was_open else "ArrowRight")
        expect(head).to_have_attribute("aria-expanded", "false" if was_open else "true")
        assert (self.rows.count() < before) == was_open
        self.page.keyboard.press("Enter")
        expect(self.rows).to_have_count(before)
        everything = self.page.locator("#search button")
        if everything.text_content() == "Close all":  # a small tree
            everything.click()
        expect(everything).to_have_text("Open all")
        everything.click()
        expect(self.page.locator(".names tbody tr:not(:visible)")).to_have_count(0)
        self.look(f"{self.name}-open")
        everything.click()
        expect(self.rows).to_have_count(self.page.locator("[data-depth='0']").count())

    def sorts(self, heading):
        """Sort the groups, then all rows as one list."""
        button = self.page.locator(".names thead").get_by_role("button", name=heading)
        button.click()
        button.click()
        expect(button.locator("..")).to_have_attribute("aria-sort", "descending")
        column = button.locator("..").evaluate("head => head.cellIndex")
        self.page.get_by_label("As a tree").uncheck()
        expect(self.page.locator(".group:visible")).to_have_count(0)
        values = self.page.evaluate(
            "column => [...document.querySelectorAll('.names tbody tr:not([hidden])')]"
            ".map(row => Number(row.cells[column].dataset.value ?? -Infinity))",
            column,
        )
        in_order = sorted(values, key=lambda value: (math.isnan(value), value), reverse=True)
        assert str(values) == str(in_order) and len(values) > 1, values
        self.look(f"{self.name}-list")
        self.page.get_by_label("As a tree").check()

    def finds(self, words, shown):
        """Search while the tree is closed: what is found is open."""
        self.page.get_by_role("searchbox").fill(words)
        expect(self.page.locator(".names tbody tr:not(.group):visible")).to_have_count(shown)
        expect(self.page.get_by_role("status")).to_contain_text(f"{shown} of ")
        self.look(f"{self.name}-found")
        self.page.get_by_role("searchbox").fill("")

    def visit(self, file, heading, words, shown):
        """Open a page, and do everything that it offers."""
        self.name = Path(file).stem
        self.page.goto(Path(file).as_uri())
        self.look(self.name, is_whole=True)
        self.folds()
        self.sorts(heading)
        self.finds(words, int(shown))


def main(pictures, *visits):
    problems = []
    for page, label in windows():
        found = ReportVisit(page, "", Path(pictures), label)
        for one in visits:
            found.visit(*json.loads(one))
        problems += found.problems
    sys.stdout.write(json.dumps(problems))


if __name__ == "__main__":
    main(*sys.argv[1:])
