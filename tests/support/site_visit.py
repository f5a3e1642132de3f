"""Reads the documentation site in Chromium, as a reader would; run by a Python that has Playwright and axe.

It prints what is wrong as a list in JSON: what axe finds, errors of scripts, requests to other hosts, pages wider than
the window, links and anchors that lead nowhere, and searches that find nothing. Screenshots are written to a folder.
"""

import json
import shutil
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urldefrag, urljoin, urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WINDOWS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
EVERY_PAGE = [(1280, "light"), (390, "dark")]
"""The windows in which every page is looked at; the pages that are pictured are looked at in all."""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


class Reader:
    """A browser window of one width and colour scheme."""

    def __init__(self, context, address, site, label):
        self.page, self.address, self.site, self.label = context.new_page(), address, site, label
        self.axe = Axe()
        self.problems = []
        self.links, self.anchors = {}, {}
        self.page.on("pageerror", lambda error: self.note(f"script: {error}"))
        self.page.on("console", lambda message: message.type == "error" and self.note(f"console: {message.text}"))
        self.page.on("request", self._request)

    def _request(self, request):
        if not request.url.startswith(f"{self.address}/"):
            self.note(f"asks {request.url}")

    def note(self, text):
        self.problems.append(f"{self.label} {urlsplit(self.page.url).path}: {text}")

    def read(self, path):
        """Open a page, check it, and keep its links and anchors."""
        self.page.goto(f"{self.address}{path}")
        expect(self.page.locator("h1").first).to_be_visible()
        for found in self.axe.run(self.page).response["violations"]:
            self.note(f"axe {found['id']}: {[node['html'][:200] for node in found['nodes'][:3]]}")
        width = self.page.viewport_size["width"]
        if (wide := self.page.evaluate("document.documentElement.scrollWidth")) > width:
            self.note(f"{wide} pixels wide in a window of {width}")
        for image in self.page.locator("article img").all():
            image.scroll_into_view_if_needed()  # some are loaded only then
        if missing := self.page.evaluate(
            "[...document.querySelectorAll('article img')].filter(i => !(i.complete && i.naturalWidth)).map(i => i.src)"
        ):
            self.note(f"no such picture: {missing}")
        links = self.page.evaluate("[...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href'))")
        self.links[path] = {urljoin(f"{self.address}{path}", link) for link in links}
        self.anchors[path] = set(self.page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)"))

    def picture(self, path, file):
        self.page.goto(f"{self.address}{path}")
        self.page.wait_for_load_state("networkidle")
        self.page.screenshot(path=file)

    def search(self, words, expected):
        """Search as a reader does: one of the first three pages is the one expected."""
        self.page.goto(self.address)
        self.page.keyboard.press("/")
        box = self.page.get_by_role("textbox", name="Search")
        box.press_sequentially(words, delay=20)
        results = self.page.locator("a.md-search-result__link")
        expect(results.first).to_be_visible()
        found = list(dict.fromkeys(urlsplit(result.get_attribute("href")).path for result in results.all()))[:3]
        if not any(path.startswith(expected) for path in found):
            self.note(f"a search for {words!r} finds {found}")

    def links_that_lead_nowhere(self):
        for path, links in self.links.items():
            for link in sorted(links):
                target, anchor = urldefrag(link)
                if not target.startswith(f"{self.address}/"):
                    continue
                there = target.removeprefix(self.address)
                if there not in self.anchors and not (self.site / there.lstrip("/")).is_file():
                    self.problems.append(f"{path} links to {there}, which is no page")
                elif anchor and anchor not in self.anchors.get(there, ()):
                    self.problems.append(f"{path} links to {there}#{anchor}, which has no such anchor")


def pages(site):
    """Return the address of each page."""
    found = (file.parent.relative_to(site).as_posix() for file in sorted(site.rglob("index.html")))
    return ["/" if path == "." else f"/{path}/" for path in found]


def visit(browser, address, site, pictures, wanted):
    problems = []
    for width, scheme in WINDOWS:
        label = f"{width}-{scheme}"
        context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
        context.set_default_timeout(60_000)
        reader = Reader(context, address, site, label)
        is_whole = (width, scheme) in EVERY_PAGE
        for path in pages(site) if is_whole else wanted["pictures"]:
            reader.read(path)
        for path in wanted["pictures"]:
            reader.picture(path, pictures / f"{path.strip('/').replace('/', '-') or 'home'}-{label}.png")
        if width > 1000:
            for words, expected in wanted["searches"].items():
                reader.search(words, expected)
        if (width, scheme) == EVERY_PAGE[0]:
            reader.links_that_lead_nowhere()
        problems += reader.problems
        context.close()
    return problems


def main(site, pictures, wanted):
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        sys.exit(f"There is no browser: install one of {', '.join(BROWSERS)}")
    site = Path(site)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    expect.set_options(timeout=60_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        address = f"http://127.0.0.1:{server.server_port}"
        problems = visit(browser, address, site, Path(pictures), json.loads(wanted))
        browser.close()
    server.shutdown()
    sys.stdout.write(json.dumps(problems))


if __name__ == "__main__":
    main(*sys.argv[1:])
