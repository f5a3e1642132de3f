"""Takes the pictures of pages of reports that the documentation shows; run by a Python that has Playwright.

    python report_screenshots.py docs/pictures      with `shardload` in PATH

Each page is that of a real run. Only the folder of the checkpoints is shown as ``/models``.
"""

import base64
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from page_visit import windows

SIZE = {"width": 1280, "height": 1200}
SMALLER = """async (source) => {
  const image = new Image();
  image.src = source;
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), {width: image.width, height: image.height});
  canvas.getContext("2d").drawImage(image, 0, 0);
  return canvas.toDataURL("image/webp", 0.75);
}"""
"""JavaScript that makes WebP of PNG: a third of the bytes."""


def pages(folder):
    """Write a page with each command, in a folder with checkpoints of its own; yield their files."""
    environment = {**os.environ, "SHARDLOAD_HOME": str(folder)}

    def call(*command, codes=(0,)):
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in codes:
            sys.exit(done.stderr)
        return done.stdout

    for seed in ("0", "1"):
        call("shardload", "synth", "gemma2_2b", "--scale", "0.02", "--seed", seed, "--directory", f"seed-{seed}")
    for name, command in {
        "load": ("gemma3_270m", "--mesh", "1x8", "--platform", "cpu"),
        "plan": ("gemma2_27b", "--mesh", "4x8", "--device-memory", "16GiB"),
        "inspect": ("gemma3_270m",),
        "diff": ("seed-0/gemma2_2b-x0.02", "seed-1/gemma2_2b-x0.02"),
    }.items():
        file = folder / f"{name}.html"
        call("shardload", name, *command, "--html", str(file), codes=(0, 1) if name == "diff" else (0,))
        file.write_text(file.read_text("utf-8").replace(str(folder), "/models"), "utf-8")
        yield file


def main(pictures):
    with tempfile.TemporaryDirectory() as folder:
        files = list(pages(Path(folder)))
        for page, label in windows():
            if label != "1280-light":
                continue
            page.set_viewport_size(SIZE)
            for file in files:
                page.goto(file.as_uri())
                picture = base64.b64encode(page.screenshot()).decode()
                page.goto("about:blank")
                _, _, data = page.evaluate(SMALLER, f"data:image/png;base64,{picture}").partition(",")
                (Path(pictures) / f"page-{file.stem}.webp").write_bytes(base64.b64decode(data))


if __name__ == "__main__":
    main(*sys.argv[1:])
