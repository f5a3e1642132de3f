"""Clicks through the pages of a server in Chromium, as a person would; run by a Python that has Playwright and axe.

It prints what is wrong as a list in JSON: what axe finds, errors of scripts, what the policy refuses, and pages wider
than the window. Screenshots are written to a folder.
"""

import json
import shutil
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Visit:
    """A browser window of one width and colour scheme."""

    def __init__(self, page, address, pictures, label):
        self.page, self.address, self.pictures, self.label = page, address, pictures, label
        self.problems = []
        page.on("pageerror", lambda error: self.note(f"script: {error}"))
        page.on("console", self._console)

    def note(self, text):
        self.problems.append(f"{self.label} {self.page.url}: {text}")

    def _console(self, message):
        # Chromium reports statuses such as 401 as errors, too.
        if message.type == "error" and "the server responded with a status" not in message.text:
            self.note(f"console: {message.text}")

    def look(self, name, *, is_whole=False):
        """Check the page as it is now, and take a picture of it, or of what the window shows."""
        for found in Axe().run(self.page).response["violations"]:
            self.note(f"axe {found['id']}: {[node['html'][:200] for node in found['nodes'][:3]]}")
        width = self.page.viewport_size["width"]
        if (wide := self.page.evaluate("document.documentElement.scrollWidth")) > width:
            self.note(f"{wide} pixels wide in a window of {width}")
        self.page.screenshot(path=self.pictures / f"{name}-{self.label}.png", full_page=is_whole)

    def sign_in(self, token):
        """Give a wrong token, then the right one."""
        self.page.goto(f"{self.address}/ui/loads")
        self.look("sign-in")
        self.page.get_by_label("Token").fill("a-wrong-token-of-nobody")
        self.page.keyboard.press("Enter")
        expect(self.page.get_by_role("alert")).to_contain_text("not a token")
        self.page.get_by_label("Token").fill(token)
        self.page.keyboard.press("Enter")
        expect(self.page.get_by_role("heading", level=1)).to_have_text("Loads")

    def catalogue(self, name):
        """Filter while typing, and open a checkpoint."""
        self.page.get_by_role("link", name="Checkpoints").click()
        self.look("catalogue")
        self.page.get_by_role("searchbox").press_sequentially(name)
        expect(self.page.get_by_role("status")).to_contain_text("1 of ")
        self.page.get_by_role("link", name=name, exact=True).click()
        expect(self.page.get_by_role("heading", level=1)).to_have_text(name)

    def tree(self, group, tensor):
        """Open and close a group by the keyboard, and filter while typing."""
        self.look("tree")
        head = self.page.locator("summary", has_text=group).first
        head.focus()
        opened = head.locator("..")
        was_open = opened.evaluate("group => group.open")
        self.page.keyboard.press("ArrowLeft" if was_open else "ArrowRight")
        expect(opened).to_have_js_property("open", not was_open)
        self.page.keyboard.press("ArrowRight" if was_open else "ArrowLeft")
        expect(opened).to_have_js_property("open", was_open)
        self.page.keyboard.press("ArrowDown")
        assert self.page.evaluate("document.activeElement.matches('.group')")
        self.page.get_by_role("searchbox").fill(tensor)
        expect(self.page.get_by_role("status")).to_contain_text("1 of ")
        expect(self.page.locator(".tensor:visible")).to_have_count(1)
        self.look("filtered")

    def plan(self, mesh, variable):
        """Plan for a mesh, and show where a variable goes."""
        self.page.get_by_role("link", name="Plan a load").click()
        self.page.get_by_label("Mesh, such as").fill(mesh)
        self.page.get_by_role("button", name="Plan").click()
        self.page.get_by_label("Show where").select_option(variable)
        self.page.get_by_role("button", name="Show").click()
        expect(self.page.get_by_text("part 1 of 4")).to_have_count(2)
        self.look("plan")
        search = self.page.get_by_role("searchbox")
        search.fill("norm")
        expect(self.page.locator("#search [role=status]")).to_contain_text("variables")
        search.scroll_into_view_if_needed()
        self.page.screenshot(path=self.pictures / f"variables-{self.label}.png")

    def loads(self, path, token):
        """See a load while it is read, without a reload of the page."""
        self.page.get_by_role("link", name="Loads").click()
        with reading(f"{self.address}{path}", token) as answer:
            bar = self.page.get_by_role("progressbar").first
            expect(bar).to_be_visible()
            before = bar.text_content()
            while answer.read(1 << 20):
                pass
            expect(bar).not_to_have_text(before)
            self.look("loads")

    def jobs(self, checkpoint, large):
        """Verify a checkpoint from its page, and see the job end without a reload; cancel a long one."""
        self._start("Verify", checkpoint)
        first = self.page.locator(".loads li").first
        expect(first).to_contain_text(f"Verify {checkpoint}")
        expect(first).to_contain_text("ended after")
        self._start("Verify", large)
        expect(first).to_contain_text("running")
        bar = first.get_by_role("progressbar")
        before = bar.get_attribute("value")
        expect(bar).not_to_have_attribute("value", before)
        self.look("jobs")
        first.get_by_role("button", name=f"Cancel Verify {large}").press("Enter")
        expect(first).to_contain_text("cancelled")
        self.look("jobs-ended")

    def _start(self, button, checkpoint):
        self.page.goto(f"{self.address}/ui/checkpoints/{checkpoint}")
        self.page.get_by_role("button", name=f"{button} {checkpoint}").click()
        expect(self.page.get_by_role("heading", level=1)).to_have_text("Jobs")

    def cache(self):
        """Look at the cache and the peers, fetch a checkpoint into the cache, and see that it is there."""
        self.page.get_by_role("link", name="Cache", exact=True).click()
        expect(self.page.get_by_text("left out")).to_be_visible()
        self.look("cache", is_whole=True)
        items = self.page.locator(".loads li", has=self.page.get_by_role("button", name="Prefetch"))
        name = items.first.locator(".name").text_content()
        items.first.get_by_role("button", name=f"Prefetch {name}").click()
        job = self.page.locator(".loads li", has_text=f"Prefetch {name}").first
        expect(job).to_contain_text("ended after")
        self.page.get_by_role("link", name="Cache", exact=True).click()
        item = self.page.locator(".loads li", has=self.page.get_by_text(name, exact=True))
        expect(item.get_by_role("button")).to_have_count(0)
        self.look("cached", is_whole=True)

    def sign_out(self):
        """End the session."""
        self.page.get_by_role("link", name="Session").click()
        self.look("session")
        self.page.get_by_role("button", name="Sign out").click()
        expect(self.page.get_by_role("heading", level=1)).to_have_text("Sign in")


@contextmanager
def reading(url, token):
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})) as answer:
        answer.read(1000)
        yield answer


def windows():
    """Yield an empty page in a window of each width and colour scheme, with a label for its pictures."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        sys.exit(f"There is no browser: install one of {', '.join(BROWSERS)}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for width, scheme in ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")):
            context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
            context.set_default_timeout(60_000)
            expect.set_options(timeout=60_000)
            yield context.new_page(), f"{width}-{scheme}"
            context.close()
        browser.close()


def main(address, token, checkpoint, pictures, *files):
    file, large = files
    problems = []
    for page, label in windows():
        visit = Visit(page, address, Path(pictures), label)
        visit.sign_in(token)
        visit.catalogue(checkpoint)
        visit.tree("attention", "decoder_block/ query")
        visit.plan("2x4", "decoder_block_0/attention/query/kernel")
        visit.loads(file, token)
        visit.jobs(checkpoint, large)
        visit.cache()
        visit.sign_out()
        problems += visit.problems
    sys.stdout.write(json.dumps(problems))


if __name__ == "__main__":
    main(*sys.argv[1:])
