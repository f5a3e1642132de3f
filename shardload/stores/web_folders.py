"""What is in a folder of an HTTP server: the links of its index page, or those of a list of names that exist.

HTTP has no request for a list. Many servers (nginx and Apache, if they are told to) send a page with links instead.
Others send nothing for a folder, so that only names which checkpoints usually have can be asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin, urlsplit

USUAL_NAMES = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model.weights.h5",
    "model.weights.json",
    "task.json",
    "task.weights.h5",
    "metadata.json",
    "preprocessor.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "vocabulary.json",
    "vocabulary.spm",
    "vocabulary.txt",
    "spiece.model",
    "_CHECKPOINT_METADATA",
    "_METADATA",
    "manifest.ocdbt",
    "_strings.json",
)
"""Names that are asked for in a folder of a server that shows no index: files of Hugging Face, Keras and Orbax."""
USUAL_FOLDERS = ("assets", "tokenizer", "pytree", "default", "state", "model_config", "shardload")
"""The same for folders. Whether there is one shows in what it contains."""
FILE_ENDINGS = (
    *(".json", ".safetensors", ".h5", ".hdf5", ".keras", ".gguf", ".model", ".spm", ".txt", ".jinja"),
    *(".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".onnx", ".npy", ".npz", ".ocdbt"),
)
"""Endings of names that no folder has, so that nothing is asked for below them."""

_LIST = re.compile(rb"<title>\s*(?:Index of|Directory listing for) |\xc2\xb7 shardload</title>", re.IGNORECASE)
"""The titles of lists: those of nginx and Apache, of Python's http.server, and of `shardload serve`."""


def links(page: bytes, address: str) -> dict[str, bool]:
    """Return name → whether it is a folder, for all links of a page to what is directly below ``address``."""
    parser = _Links()
    parser.feed(page.decode("utf-8", errors="replace"))
    base = f"{address.rstrip('/')}/"
    found: dict[str, bool] = {}
    for target in parser.targets:
        try:
            parts = urlsplit(urljoin(base, target))
        except ValueError:  # no address at all
            continue
        whole = unquote(parts._replace(query="", fragment="").geturl())
        if parts.query or not whole.startswith(unquote(base)):  # columns to sort by, the folder above, other sites
            continue
        name = whole[len(unquote(base)) :]
        plain = name.removesuffix("/")
        if plain not in ("", ".", "..") and "/" not in plain and "\0" not in plain:
            found[plain] = name.endswith("/")
    return found


def is_list(page: bytes, found: Mapping[str, bool]) -> bool:
    """Whether a page lists a folder; ``found`` is what `links` returned.

    Servers that list folders say so in the title. Of other pages, those count that link to what checkpoints consist of.
    """
    return _LIST.search(page) is not None or is_of_checkpoints(found)


def is_of_checkpoints(found: Mapping[str, bool]) -> bool:
    """Whether a page links to anything that checkpoints consist of: a file, a folder of theirs, or a step.

    Otherwise it may be a page about the model. It then says nothing about the files of the folder. ``found`` is what
    `links` returned.
    """
    files = any(name in USUAL_NAMES or name.lower().endswith(FILE_ENDINGS) for name in found)
    return files or any(name in USUAL_FOLDERS or name.isdecimal() for name, is_folder in found.items() if is_folder)


class _Links(HTMLParser):
    """Collects the targets of links."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the target of a link."""
        if tag == "a":
            self.targets += [value for name, value in attrs if name == "href" and value]
