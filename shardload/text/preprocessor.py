"""Give models KerasHub's preprocessor, so that ``model.generate("text")`` works as after ``from_preset``.

    folder      made in a thread while the model is built and its weights are read
    GGUF file   made on first use, because it takes a second: header ─► Hugging Face's files ─► KerasHub

KerasHub splits some texts differently than the tokenizer in a GGUF file (byte pairs of models other than Llama 3), so
the tokens of a sample text are compared, and a difference gives a warning.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardload.errors import UnsupportedError, reason_text
from shardload.families.parts.gguf import GgufTokenizer
from shardload.hub import kerashub
from shardload.keras_bridge.caller import warn_caller
from shardload.keras_bridge.model_records import record_of
from shardload.loaders import spec_of
from shardload.loaders.gguf.loader import tokenizer_metadata
from shardload.manifest import Manifest
from shardload.stores.local import located, temporary_folder
from shardload.stores.location import Fingerprint
from shardload.text.gguf_tokenizer import check_supported, files_of, of_metadata

if TYPE_CHECKING:
    from shardload.keras_bridge.recording import InThread

_log = logging.getLogger(__name__)
_INSTEAD = "Use shardload.generate(model, prompts)"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Any of these files means that a folder has a tokenizer, so that a missing preprocessor is worth a note."""
_PROBE = "It's 2 o'clock:\n\n  x = [12345, 0.5]\ttabs, naïve 日本語 \U0001f600"
"""A text to compare two tokenizers on. It has what they may split differently: contractions, spaces, digits, emoji."""


class TextInput:
    """Gives a task its preprocessor, which is made during the load for a folder, and on first use for a GGUF file."""

    def __init__(self, *, task: bool = True) -> None:
        """Prepare for one load of a model; with ``task=False``, the model is a backbone and gets no preprocessor."""
        self._task = task
        self._cls: Any = None
        self._making: InThread[Any] | None = None

    def begin(self, manifest: Manifest) -> None:
        """Begin to make the preprocessor of a folder's text-generating model, in a thread, before the model is built.

        Other preprocessors may draw random seeds, which a thread would draw in a different order in each run.
        """
        # Making Gemma 3's takes half a second, mostly in C++ without Python's lock, and was what a load waited for.
        if not self._task or not _is_folder(manifest):
            return
        try:
            task = kerashub.task_class(manifest)
        # Of any kind, for a damaged configuration. The build meets it again, and raises an error that explains it.
        except Exception:
            return
        if task is not None and issubclass(task, kerashub.keras_hub().models.CausalLM):
            self._make(task.preprocessor_cls, manifest)

    def prepare(self, model: Any, manifest: Manifest) -> None:
        """Begin, in a thread, to make the preprocessor of a model that was just built, unless `begin` already did."""
        # `begin` guessed the class from the configuration: another one replaces it.
        if (cls := _wanted(model)) is not self._cls and cls is not None and _is_folder(manifest):
            self._make(cls, manifest)

    def _make(self, cls: Any, manifest: Manifest) -> None:
        from shardload.keras_bridge.recording import InThread

        self._cls = cls
        self._making = InThread(lambda: kerashub.make_preprocessor(cls, manifest), name="shardload-text")

    def attach(self, model: Any, manifest: Manifest) -> str | None:
        """Set the preprocessor of a loaded model; return a note for the report if that is impossible, else ``None``."""
        cls = _wanted(model)
        if cls is None:
            return None
        in_header = spec_of(manifest).tokenizer == "header"
        why = _why_none(cls, manifest) if in_header else self._set(model, cls, manifest)
        if why is not None:
            return f"model.preprocessor is None: {why}" if hasattr(model, "generate") else None
        # The file is read again on first use: a rewritten one must not give another model's tokens.
        if in_header:
            files = Fingerprint.of(manifest.files)
            _defer_preprocessor(model, lambda: _made(cls, manifest, files))
        return None

    def _set(self, model: Any, cls: Any, manifest: Manifest) -> str | None:
        """Give a model the preprocessor that the thread makes, once it is made; return the reason if it failed."""
        # A source that has none, such as a folder with weights only, needs no line in the report.
        has_vocabulary = any((manifest.location / name).is_file() for name in _VOCABULARIES)
        was_saved = (manifest.config.get("config") or {}).get("preprocessor") is not None
        try:
            if self._making is not None:
                model.preprocessor = self._making.result()
                return None
        # Of any kind: files may be damaged, or missing. The weights are fine, so the load goes on.
        except Exception as error:
            _log.info("No preprocessor for %s: %s", manifest.source, error)
            if has_vocabulary and not kerashub.lacks_tensorflow(cls):
                return f"KerasHub's {cls.__name__} cannot read the tokenizer: {reason_text(error)}. {_INSTEAD}"
        return _lacks_tensorflow(cls) if (has_vocabulary or was_saved) and kerashub.lacks_tensorflow(cls) else None


def _wanted(model: Any) -> Any:
    """Return the class of the preprocessor that a model lacks; ``None`` if it has a preprocessor or takes none."""
    cls = getattr(type(model), "preprocessor_cls", None)
    return cls if cls is not None and model.preprocessor is None else None


def _is_folder(manifest: Manifest) -> bool:
    spec = spec_of(manifest)
    if spec.tokenizer == "header" or spec.described_by not in ("keras-hub", "hugging-face"):
        return False
    return Path(kerashub.preset_path(manifest)).is_dir()


def _lacks_tensorflow(cls: Any) -> str:
    return f"KerasHub's {cls.__name__} requires TensorFlow, which was not found. {_INSTEAD}"


_FORMS: Mapping[str, str] = {
    GgufTokenizer.SENTENCEPIECE: "SentencePiece",
    GgufTokenizer.BYTE_PAIRS: "byte pairs",
    GgufTokenizer.WORD_PIECES: "WordPiece",
    GgufTokenizer.UNIGRAMS: "unigrams",
}


def _why_none(cls: Any, manifest: Manifest) -> str | None:
    """Return why KerasHub cannot make a preprocessor from a GGUF file's type of tokenizer; ``None`` if it can."""
    # From the manifest's metadata only: rebuilding the tokenizer here would cost every load.
    values, source = manifest.metadata, manifest.source
    if not values.get("tokenizer.ggml.tokens"):
        return f"{source} contains no tokenizer. Pass token ids to the model"
    kind = str(values.get("tokenizer.ggml.model", ""))
    try:
        check_supported(kind, str(values.get("tokenizer.ggml.pre", "default")), source)
    except UnsupportedError as error:
        return str(error)
    is_pieces = kind == GgufTokenizer.SENTENCEPIECE
    is_read = (is_pieces or kind == GgufTokenizer.BYTE_PAIRS) and kerashub.reads_tokenizer(cls, sentencepiece=is_pieces)
    if not is_read:
        form = _FORMS.get(kind, kind)
        return f"the tokenizer in {source} is {form}, which KerasHub's {cls.__name__} cannot read. {_INSTEAD}"
    if kerashub.lacks_tensorflow(cls):
        return _lacks_tensorflow(cls)
    return None


def _made(cls: Any, manifest: Manifest, files: Fingerprint) -> Any:
    """Make the preprocessor of a GGUF checkpoint; if that fails or its files changed, warn and return ``None``."""
    try:
        files.check()
        metadata = tokenizer_metadata(manifest.location)
        contents = files_of(metadata, manifest.source, str(manifest.config.get("model_type")))
        with temporary_folder() as folder:  # KerasHub reads files only
            for name, content in contents.items():
                (folder / name).write_bytes(content)
            made = kerashub.make_preprocessor(cls, replace(manifest, location=located(folder)))
        # No tokenizer makes more tokens than bytes, but for the start token.
        prompt = made.generate_preprocess([_PROBE], sequence_length=len(_PROBE.encode()) + 1)
        ids = np.asarray(prompt["token_ids"])[0][np.asarray(prompt["padding_mask"])[0]].tolist()
        same = ids == of_metadata(metadata, manifest.source).encode(_PROBE)
    # Of any kind, as above. Only a warning, because token ids and `shardload.generate` work without it.
    except Exception as error:
        warn_caller(f"Cannot make the preprocessor of {manifest.source}: {error}. {_INSTEAD}")
        return None
    if not same:
        warn_caller(
            f"KerasHub's {cls.__name__} splits some texts into other tokens than the tokenizer in {manifest.source}. "
            f"For the file's own tokens: {_INSTEAD}"
        )
    return made


# ---- a preprocessor that is made when a task first uses it -----------------------------------------


_ATTRIBUTE = "_preprocessor"


def _defer_preprocessor(task: Any, make: Callable[[], Any]) -> None:
    """Call ``make`` when a task's preprocessor is first used; if another one is set before, ``make`` is dropped."""
    cls = kerashub.keras_hub().models.Task
    if vars(cls).get(_ATTRIBUTE) is None:
        setattr(cls, _ATTRIBUTE, _Deferred())
    # The task's constructor set its own attribute to None: without it, lookups reach the class.
    record_of(task).make_preprocessor = make
    vars(task).pop(_ATTRIBUTE, None)


class _Deferred:
    """Descriptor on KerasHub's ``Task``: if a task has no preprocessor, the first look-up of the attribute makes it."""

    def __init__(self) -> None:
        # Reentrant: what makes a preprocessor may ask the task for it, and must not wait for itself.
        self._lock = threading.RLock()

    def __get__(self, task: Any, owner: type) -> Any:
        if task is None:  # looked up on the class itself, which has none
            raise AttributeError(_ATTRIBUTE)
        with self._lock:
            if vars(task).get(_ATTRIBUTE) is None:  # another thread may have made it meanwhile
                task.preprocessor = self._made(task)
        return vars(task)[_ATTRIBUTE]

    def _made(self, task: Any) -> Any:
        record = record_of(task)
        make, record.make_preprocessor = record.make_preprocessor, None
        if make is None:
            raise AttributeError(_ATTRIBUTE)
        try:
            return make()
        except BaseException:  # Ctrl-C, mostly: the next use tries again
            record.make_preprocessor = make
            raise
