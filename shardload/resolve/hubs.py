"""Turn a model hub's handle into a local folder, cached or downloaded; find snapshots in Hugging Face's cache.

``kaggle://ORG/MODEL/keras/VARIANT[/VERSION]`` goes through kagglehub, ``hf://ORG/MODEL[@REVISION][/FILE]`` through
huggingface_hub; both come with KerasHub, and both store downloads in caches that they share with other programs.
Without a network, both libraries retry for half a minute, so one short connection attempt comes first.
"""

from __future__ import annotations

import glob
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from shardload.errors import MissingExtraError, SourceNotFoundError, public_name
from shardload.loaders.contents import part_number, pattern_of
from shardload.stores.local import any_home, home
from shardload.stores.location import Location
from shardload.stores.objects import KnownObjects
from shardload.stores.remote import RemoteStore
from shardload.stores.requests import Requests
from shardload.units import plural

_CONNECT_S = 4.0
"""Seconds to wait for a connection: enough for a satellite link, but too few to look like a hang."""
_KAGGLE_URL = "https://api.kaggle.com"
"""The server that kagglehub queries; before a download, a short attempt shows whether it can be reached."""
_HF = "hf://"
_CONFIG = "config.json"
_OPTIONAL_FILES = ("task.json", "metadata.json")
_ABSENT = ("404 Client Error", "is not present in the model files")
"""Words in kagglehub's errors for a file that a model does not have; KerasHub looks for the same words."""
_WEIGHT_FILES = ("model.weights.h5", "model.weights.json", "model.safetensors", "model.safetensors.index.json")
_HF_SMALL = ["*.json", "*.model", "*.txt", "*.spm", "*.jinja"]
_HF_PATTERNS = [*_HF_SMALL, "*.safetensors", "*.weights.h5"]
"""Patterns of files to download; they leave out copies of the weights for PyTorch, TensorFlow and llama.cpp."""
_HF_CONFIGURATION = [_CONFIG, *_OPTIONAL_FILES]


def fetch(handle: str, *, weights: bool = True) -> Path:
    """Return the local folder of a handle; download what is not cached, without ``weights`` the configuration only."""
    scheme, name = handle.split("://", 1)
    return _from_kaggle(name, weights=weights) if scheme == "kaggle" else _from_hugging_face(name, weights=weights)


def cached(handle: str) -> Path | None:
    """Return the folder of a Kaggle handle in kagglehub's cache; ``None`` if the cache lacks the weights."""
    folder = _kaggle_folder(handle.removeprefix("kaggle://"))
    return folder if _is_complete(folder) else None


def reachable(url: str) -> bool:
    """Whether a connection to the server of ``url``, or to the proxy in front of it, opens within `_CONNECT_S`."""
    # Behind a proxy, the server itself is often unreachable, and its name unknown.
    server = urlsplit(os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy") or url)
    port = server.port or (443 if server.scheme == "https" else 80)
    try:
        socket.create_connection((server.hostname or "", port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def _kaggle_folder(name: str) -> Path:
    # The name becomes a path in the cache, which it must not leave.
    if not re.fullmatch(r"[\w.\-]+(/[\w.\-]+){3}(/\d+)?", name) or ".." in name:
        raise SourceNotFoundError(f"Cannot read kaggle://{name}, expected kaggle://ORG/MODEL/keras/VARIANT[/VERSION]")
    try:
        with any_home():
            from kagglehub.config import get_cache_folder  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError.explaining(error, needed_for=f"kaggle://{name}", extra="hub") from error
    return Path(get_cache_folder()) / "models" / name


def _from_kaggle(name: str, *, weights: bool) -> Path:
    folder = _kaggle_folder(name)
    if _is_complete(folder) or (not weights and (folder / _CONFIG).exists()):
        return folder
    _require_cache(f"kaggle://{name}", "KAGGLEHUB_CACHE")
    _require_network(_KAGGLE_URL, f"kaggle://{name}")
    import kagglehub  # type: ignore[import-untyped]

    try:
        return Path(kagglehub.model_download(name)) if weights else _kaggle_configuration(name)
    except Exception as error:  # kagglehub raises a dozen kinds, its own and those of requests
        raise SourceNotFoundError(_refused(f"kaggle://{name}", error)) from error


def _kaggle_configuration(name: str) -> Path:
    """Download the files that describe a model, ``config.json`` last: a cache that has it has all of them."""
    import kagglehub

    for optional in _OPTIONAL_FILES:
        try:
            kagglehub.model_download(name, optional)
        except Exception as error:
            if not any(sign in str(error) for sign in _ABSENT):
                raise
    return Path(kagglehub.model_download(name, _CONFIG)).parent


def hugging_face_place(handle: str) -> Location:
    """Return the place of a repository of the Hugging Face Hub, or of a file in it, to be read there by ranges.

    The revision is looked up once: what is read later is that commit's.
    """
    asked = HubName.parse(handle.removeprefix(_HF))
    try:
        from huggingface_hub import HfApi, constants, get_hf_file_metadata, get_token
    except ImportError as error:
        raise MissingExtraError.explaining(error, needed_for=str(asked), extra="hub") from error
    _require_network(constants.ENDPOINT, str(asked), verb="read")
    try:
        found = HfApi(endpoint=constants.ENDPOINT).model_info(
            asked.repository, revision=asked.revision, files_metadata=True
        )
    except Exception as error:  # huggingface_hub raises a dozen kinds, its own and those of its HTTP client
        raise SourceNotFoundError(_refused(str(asked), error, verb="read")) from error
    files = {file.rfilename: file for file in found.siblings or ()}
    url = f"{constants.ENDPOINT}/{asked.repository}/resolve/{found.sha}"

    def address_of(name: str) -> str | None:
        own = f"{url}/{quote(name)}"
        location = get_hf_file_metadata(own).location
        return None if location == own else location

    known = KnownObjects(
        {name: int(file.size or 0) for name, file in files.items()},
        {name: file.lfs.sha256 for name, file in files.items() if file.lfs is not None},
        address_of,
    )
    headers = {"authorization": f"Bearer {token}"} if (token := get_token()) else {}
    requests = Requests(url, headers=headers, shown=f"{_HF}{asked.repository}@{found.sha}", known=known)
    place = Location(RemoteStore(url, requests=requests), asked.path)
    if not place.exists():
        raise SourceNotFoundError(f"Cannot find {asked}: {asked.repository} has no such file or folder. Check its name")
    return place


def hugging_face_cache(handle: str, *, weights: bool = True) -> Path | None:
    """Return what a handle names in Hugging Face's local cache; ``None`` if the cache lacks a part of it."""
    asked = HubName.parse(handle.removeprefix(_HF))
    try:
        cached = _snapshot(asked, patterns=_hf_patterns(asked.path), local_files_only=True)
    except MissingExtraError:
        raise
    except Exception:  # not in the cache, for any reason
        return None
    return cached if _is_there(cached) or (not weights and (cached / _CONFIG).exists()) else None


def _snapshot(asked: HubName, *, patterns: list[str], local_files_only: bool = False) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingExtraError.explaining(error, needed_for=str(asked), extra="hub") from error
    folder = snapshot_download(
        asked.repository, revision=asked.revision, allow_patterns=patterns, local_files_only=local_files_only
    )
    return Path(folder) / asked.path


def _from_hugging_face(name: str, *, weights: bool) -> Path:
    asked = HubName.parse(name)
    # From the cache alone at first: huggingface_hub would ask the server for a newer revision, and needs a network.
    if (cached := hugging_face_cache(name, weights=weights)) is not None:
        return cached
    from huggingface_hub import constants

    _require_cache(str(asked), "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")
    _require_network(constants.ENDPOINT, str(asked))
    try:
        found = _snapshot(asked, patterns=_hf_patterns(asked.path) if weights or asked.path else _HF_CONFIGURATION)
    except Exception as error:  # as above
        raise SourceNotFoundError(_refused(str(asked), error)) from error
    if not found.exists():
        raise SourceNotFoundError(f"Cannot find {asked}: {asked.repository} has no such file or folder. Check its name")
    return found


def _hf_patterns(path: str) -> list[str]:
    """Return patterns of the files to download for a file or folder of a repository; ``""`` is the whole repository."""
    if not path:
        return _HF_PATTERNS
    folder, _, name = path.rpartition("/")
    beside = _HF_PATTERNS if name.endswith(".json") else _HF_SMALL
    parts = [pattern_of(name)] if part_number(name) else []
    of_folder = [f"{glob.escape(folder)}/{pattern}" if folder else pattern for pattern in (*beside, *parts)]
    return [glob.escape(path), *(f"{glob.escape(path)}/{pattern}" for pattern in _HF_PATTERNS), *of_folder]


def _is_there(path: Path) -> bool:
    """Whether a cached folder has a configuration and weights, or a cached file is there with all its parts."""
    if path.is_dir():
        return _is_complete(path)
    _, count = part_number(path.name) or (1, 1)
    if path.name.endswith(".json"):
        return path.exists() and _is_complete(path.parent)
    return path.exists() and len(list(path.parent.glob(pattern_of(path.name)))) >= count


def _is_complete(folder: Path) -> bool:
    """Whether a cached folder has a configuration and weights; missing shards are left for the loader to report."""
    return (folder / _CONFIG).exists() and any((folder / name).exists() for name in _WEIGHT_FILES)


def _require_cache(handle: str, *variables: str) -> None:
    """Raise if no folder for a hub's downloads is known: the hub's library would make one named "~", or fail."""
    if home() is None and not any(os.environ.get(name) for name in variables):
        raise SourceNotFoundError(
            f"Cannot download {handle}: there is no folder for downloads, because HOME is not set and this user has no "
            f"home folder. Set {variables[0]}, or HOME, to a folder that can be written to"
        )


def _require_network(url: str, handle: str, *, verb: str = "download") -> None:
    if not reachable(url):
        raise SourceNotFoundError(
            f"Cannot {verb} {handle}, which is not in the local cache: {urlsplit(url).hostname} cannot be reached. "
            "Download it on another machine, and give the path of its folder"
        )


def _refused(handle: str, error: Exception, *, verb: str = "download") -> str:
    # Errors of the hubs go on for several lines, with advice for their own tools; the first line has the status.
    first = (str(error).strip().splitlines() or [public_name(error)])[0]
    return f"Cannot {verb} {handle}: {first}. For a gated model, accept its terms and log in with a token"


_REPOSITORY = "models--"
_HF_FORM = "hf://ORG/MODEL[@REVISION][/FILE]"
_OTHER_TYPES = ("datasets", "spaces", "kernels", "buckets")
_HANDLE = re.compile(
    r"(?:models/)?(?P<repository>(?!models/)[\w.\-]+/[\w.\-]+)"
    r"(?:@(?P<revision>refs/convert/[\w.\-]+(?=/|$)|refs/pr/\d+(?=/|$)|[^/]+))?(?:/(?P<path>.*))?"
)
"""Matches a handle without ``hf://``, by huggingface_hub's rules: a slash in a branch's name is written ``%2F``."""
_SHOWN_SNAPSHOTS = 6


@dataclass(frozen=True, slots=True)
class HubName:
    """The parts of a handle ``hf://ORG/MODEL[@REVISION][/FILE]``."""

    repository: str
    revision: str | None
    """A branch, tag or commit; ``None`` for the main branch."""
    path: str
    """A file or folder in the repository; empty for the whole repository."""

    @classmethod
    def parse(cls, name: str) -> HubName:
        """Parse a handle without ``hf://``, such as ``ORG/MODEL@REVISION``."""
        found = _HANDLE.fullmatch(name)
        path = (found["path"] or "").removesuffix("/") if found else ""
        # The name becomes a path in the cache, which it must not leave.
        if found is None or ".." in found["repository"] or not _is_inside(path) or ".." in (found["revision"] or ""):
            raise SourceNotFoundError(f"Cannot read hf://{name}, expected {_HF_FORM}")
        if (kind := name.partition("/")[0]) in _OTHER_TYPES:
            raise SourceNotFoundError(f"Cannot read hf://{name}, expected a model, {_HF_FORM}, not one of the {kind}")
        return cls(found["repository"], found["revision"] and unquote(found["revision"]), path)

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf://{self.repository}{revision}{f'/{self.path}' if self.path else ''}"


def _is_inside(path: str) -> bool:
    return not path or all(part not in ("", ".", "..") and "\\" not in part for part in path.split("/"))


def snapshot_of(path: Path) -> tuple[Path, str | None]:
    """Return the folder to open and a note for a repository in Hugging Face's cache; any other ``path`` itself.

    models--org--name/refs/main            the commit of a branch or tag
    models--org--name/snapshots/<commit>/  its files, as links to ../../blobs: the folder to open
    """
    folder = path.parent if path.name == "snapshots" else path
    snapshots = folder / "snapshots"
    if not folder.name.startswith(_REPOSITORY) or not snapshots.is_dir():
        return path, None
    refs = {}
    for file in sorted((folder / "refs").rglob("*")):  # names of branches and tags may have slashes
        if file.is_file() and file.stat().st_size < 1000:
            refs[str(file.relative_to(folder / "refs"))] = file.read_text(encoding="utf-8", errors="replace").strip()
    there = sorted(entry.name for entry in snapshots.iterdir() if entry.is_dir())
    if (main := refs.get("main")) in there:
        return snapshots / str(main), f"revision main of the cached repository, {main}"
    if len(there) == 1:
        return snapshots / there[0], f"the only cached revision of the repository, {there[0]}"
    if not there:
        raise SourceNotFoundError(
            f"Cannot open {path}: this folder of Hugging Face's cache has no snapshot. Download the model again"
        )
    names = {commit: name for name, commit in refs.items()}
    shown = [f"{commit} ({names[commit]})" if commit in names else commit for commit in there[:_SHOWN_SNAPSHOTS]]
    more = f" and {len(there) - _SHOWN_SNAPSHOTS} more" if len(there) > _SHOWN_SNAPSHOTS else ""
    raise SourceNotFoundError(
        f"Cannot choose a revision of {path}: it has {plural(len(there), 'snapshot')}, none of them of the branch "
        f"main. Open one of the folders in {snapshots}: {', '.join(shown)}{more}"
    )
