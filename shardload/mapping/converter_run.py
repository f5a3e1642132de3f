"""Run a KerasHub converter once with a loader that returns arrays without data, and record what it assigns.

A converter requests a tensor by one name; checkpoints may store it under others. These are tried in order, and the
first one that the checkpoint has is used::

    as requested        roberta.encoder.layer.0.…     the same name, or one that ends with it (KerasHub's rule)
    another spelling    LayerNorm.gamma               for LayerNorm.weight: `transformers` has used both names
    without a prefix    encoder.layer.0.…             for roberta.encoder.layer.0.…: a base model may lack the prefix
    the tied tensor     model.embed_tokens.weight     for lm_head.weight, where the configuration ties them

If several names match without the prefix, that is an error.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardload.errors import (
    LimitError,
    MismatchError,
    MissingExtraError,
    ShardloadError,
    SourceError,
    UnsupportedError,
    import_failure,
    public_name,
)
from shardload.families.parts.config import Config
from shardload.families.registry import model_type_of, model_types
from shardload.hub.config_forms import read_config
from shardload.hub.kerashub import preset_path
from shardload.keras_bridge import Variable
from shardload.keras_bridge.recording import is_tracing_error, without_computing
from shardload.keras_bridge.saving import assignments_to
from shardload.manifest import Manifest, Tensor, View
from shardload.mapping.placeholders import CASTS, FloatCasts, Reservations, tensors_behind
from shardload.mapping.variable_map import Mismatch

Assign = Callable[[Variable, Any], Any]
_SPELLINGS = (
    ("LayerNorm.weight", "LayerNorm.gamma"),
    ("LayerNorm.bias", "LayerNorm.beta"),
    ("vision_tower.vision_model.", "vision_tower."),
    ("cls_classifier.", "classifier."),
)
"""Pairs of spellings: a part of the names that converters request, and what some checkpoints store in its place.

If a requested name is absent, the other spelling is tried. Old TensorFlow checkpoints and those of ESM have ``gamma``
and ``beta``. Those of transformers 5 have the short ``vision_tower.``, and some of DeiT have ``classifier.``.
"""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Run:
    """A call of one of a converter's functions (``convert_weights``), made twice: first to record, then to load."""

    function: Callable[[Any, Any, Any], Any]
    target: Any
    manifest: Manifest
    prefix: str | None
    float_casts: FloatCasts = "viewed"
    """``"viewed"``: variables get float values as they are stored; ``"computed"``: as the converter rounds them."""

    def __call__(self, loader: Loader) -> str:
        """Call the function with ``loader``; return what it printed, which is how converters warn."""
        # Converters warn with print(); the report shows it as notes.
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), loader:
            config = read_config(self.manifest)
            self.function(self.target, loader, config)
            if self.prefix is None:  # else it is the run for a head
                _port_forgotten(self.target, loader, config)
        return printed.getvalue()


def _port_forgotten(backbone: Any, loader: Loader, config: Config) -> None:
    for variable, name in model_type_of(config).forgotten(backbone):
        with contextlib.suppress(KeyError):
            loader.find(name)
            loader.port_weight(variable, name)


class Loader(contextlib.ExitStack):
    """What a converter requests tensors from, in place of KerasHub's ``SafetensorLoader``; finds them by name."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.tensors = run.manifest.tensors
        self.preset = preset_path(run.manifest)
        self._names = HubNames(run.manifest, run.prefix)
        # Attributes of KerasHub's loader: converters read some of them, and test for its None without an index.
        self.fname = None
        self.safetensor_files: dict[str, Any] = {}
        self.safetensor_config: dict[str, Any] | None = None
        if len(run.manifest.files) > 1:
            files = {n: getattr(t.storage, "path", run.manifest.location).name for n, t in self.tensors.items()}
            self.safetensor_config = {"weight_map": files}

    @property
    def prefix(self) -> str | None:
        """What the checkpoint has before the name that was last requested (``model.``); some converters read it."""
        return self._names.prefix

    def get_prefixed_key(self, hf_weight_key: str, dict_like: Any) -> str:
        """Return the name in the checkpoint of a tensor that the converter requests as ``hf_weight_key``."""
        return self._names.find(hf_weight_key, dict_like)

    def port_weight(self, keras_variable: Any, hf_weight_key: str, hook_fn: Any = None) -> None:
        """Assign a tensor, after ``hook_fn``, to a variable, or record it."""
        raise NotImplementedError

    def find(self, hf_weight_key: str) -> Tensor:
        """Return the tensor that a converter requests; raise a `KeyError`, which converters expect, if it is absent."""
        return self.tensors[self.get_prefixed_key(hf_weight_key, self.tensors)]


@dataclass(slots=True, eq=False)
class ConverterAssign:
    """One assignment that a converter made in its first run: a variable, and which tensors the value is from."""

    variable: Variable
    view: View | None
    tensors: frozenset[str]
    ported: bool
    """True if the converter called ``port_weight``, which assigns one tensor; false if ``variable.assign``."""


@dataclass(slots=True)
class Recording:
    """What a converter requested from the checkpoint and assigned to variables in its first run."""

    run: Run
    assigned: list[ConverterAssign] = field(default_factory=list)
    fetched: set[str] = field(default_factory=set)
    computing: set[str] = field(default_factory=set)
    """Tensors that the converter computes with, so that it needs their values when it runs again to load them."""
    rounded: dict[str, str] = field(default_factory=dict)
    """Tensor → the less precise dtype to which the converter casts it before it computes with it, for a warning."""
    mismatched: list[Mismatch] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    """Names of tensors that the converter requested, but that the checkpoint lacks."""
    uncomputed: list[Variable] = field(default_factory=list)
    """Variables of such tensors that the model never computes with; they keep their initial values."""
    printed: str = ""


class RecordingLoader(Loader):
    """What a converter requests tensors from in its first run: returns arrays without data, records assignments."""

    def __init__(self, run: Run, recording: Recording, *, lenient: bool) -> None:
        super().__init__(run)
        self.recording = recording
        # A converter may do anything with the result of `get_tensor` until it ends; `port_weight` uses its tensor up.
        self.shared = Reservations(run.float_casts)
        self._ported: Reservations | None = None
        self._lenient = lenient
        self._uncomputed = model_type_of(run.manifest.config).uncomputed(run.manifest.config)

    def get_tensor(self, hf_weight_key: str) -> Any:
        """Return an array without data (a reservation) for the requested tensor, valid until the end of the run."""
        tensor = self.find(hf_weight_key)
        self.recording.fetched.add(tensor.name)
        return self.shared.make(tensor)

    def port_weight(self, keras_variable: Any, hf_weight_key: str, hook_fn: Any = None) -> None:
        """Apply ``hook_fn`` to an array without data that stands for the tensor, and record what would be assigned."""
        try:
            tensor = self.find(hf_weight_key)
        except KeyError:
            if self._uncomputed and re.fullmatch(self._uncomputed, hf_weight_key):
                self.recording.uncomputed.append(keras_variable)
                return
            if not self._lenient:
                raise
            self.recording.absent.append(hf_weight_key)
            return
        self.recording.fetched.add(tensor.name)
        self._ported = Reservations(self.recording.run.float_casts)
        value: Any = self._ported.make(tensor)
        if hook_fn:
            value = hook_fn(value, list(keras_variable.shape))
        event = self._note(keras_variable, value, tensor.name)
        # Closing finds out whether the hook read the tensor's bytes; a live reference would count as such a use.
        del value
        self._ported.close()
        if event and self._ported.used:
            event.view = None
            self.recording.rounded.update(self._ported.rounding)
        self._ported = None

    def assign(self, variable: Variable, value: Any, assign: Assign) -> Any:
        """Record an assignment instead of doing it; Keras calls this for every ``variable.assign`` of the converter."""
        # Nothing is assigned while recording.
        del assign
        self._note(variable, value, None)
        return value

    def _note(self, variable: Variable, value: Any, ported: str | None) -> ConverterAssign | None:
        if not hasattr(variable, "assign") or not hasattr(variable, "path"):
            raise UnsupportedError(
                f"Cannot assign tensor {ported!r} as KerasHub's converter does: its target is not a variable, because "
                "a quantised or LoRA-enabled layer computes its kernel. Load the weights first, then call quantize() "
                "or enable_lora()"
            )
        view = (self._ported if ported and self._ported else self.shared).locate(value)
        shape = tuple(getattr(value, "shape", ()))
        if shape != tuple(variable.shape):
            self.recording.mismatched.append(Mismatch.of_shapes(variable, ported or "", shape))
            return None
        tensors = frozenset((ported,)) if ported else tensors_behind(value)
        self.recording.assigned.append(ConverterAssign(variable, view, tensors, ported is not None))
        return self.recording.assigned[-1]


def record(run: Run) -> Recording:
    """Record one run of a converter. If a tensor is absent, run it again, and only collect the names of absent ones."""
    try:
        return _record(run)
    except ShardloadError:
        raise
    except Exception as error:
        if failed := import_failure(error):
            raise MissingExtraError.explaining(failed, needed_for=f"Converting {run.manifest.source}") from error
        if limit := LimitError.explaining(error, f"convert {run.manifest.source}"):
            raise limit from error
        name, target = run.function.__module__.rpartition(".")[2], type(run.target).__name__
        raise MismatchError(
            f"Cannot convert {run.manifest.source} to {target} with KerasHub's {name}: "
            f"{str(error)[:200] or public_name(error)}. If config.json does not match the tensors, correct "
            f"config.json. Otherwise KerasHub's {target} cannot represent this model: load it into a model of your "
            "own with shardload.load_weights(model, source)"
        ) from error


def _record(run: Run) -> Recording:
    for lenient in (False, True):
        recording = Recording(run)
        try:
            without_computing(lambda: _watch(recording, lenient))  # noqa: B023  # called before the next turn
        except KeyError as error:
            if lenient:
                raise UnsupportedError(
                    f"Cannot convert {run.manifest.source}: KerasHub's converter needs the tensor {error}, which the "
                    "checkpoint lacks. Use a complete checkpoint, or correct its config.json"
                ) from error
            continue
        except Exception as error:
            if not is_tracing_error(error):
                raise
            # The converter needs the numbers of a traced value (NumPy code, an `if`), so let it compute for real.
            recording = Recording(run)
            _watch(recording, lenient)
        break
    return recording


def _watch(recording: Recording, lenient: bool) -> None:
    loader = RecordingLoader(recording.run, recording, lenient=lenient)
    with assignments_to(loader.assign), CASTS.applied():
        recording.printed = recording.run(loader)
    # A tensor that is computed with is read whole in the second run, so its views are assigned there too.
    loader.shared.close()
    recording.computing = set(loader.shared.used)
    recording.rounded |= {n: to for n, to in loader.shared.rounding.items() if n in recording.computing}
    for event in recording.assigned:
        if not event.ported and event.view is not None and event.view.tensor in recording.computing:
            event.view = None


class HubNames:
    """Finds the tensors that a converter requests by name in a checkpoint that may have other spellings or prefixes."""

    def __init__(self, manifest: Manifest, prefix: str | None) -> None:
        self.prefix = prefix
        self._source = manifest.source
        self._config = manifest.config
        self._bare: dict[str, str] = {}
        """First part of requested names (``roberta``) → what this checkpoint has in its place: ``""`` or a prefix."""

    def find(self, wanted: str, names: Mapping[str, Any]) -> str:
        """Return which of a checkpoint's ``names`` a converter means by ``wanted``; ``wanted`` itself if none fits."""
        spellings = [wanted, *(wanted.replace(own, other) for own, other in _SPELLINGS if own in wanted)]
        for look_up in (self._plain, self._without_base):
            for spelling in spellings:
                if (found := look_up(spelling, names)) is not None:
                    return found
        if wanted == _HEAD and self._config.get("tie_word_embeddings") is True:
            return self.find(_EMBEDDING, names)
        # KerasHub's loader forgets its prefix after a miss, too.
        self.prefix = ""
        return wanted

    def _plain(self, wanted: str, names: Mapping[str, Any]) -> str | None:
        if wanted in names:
            return wanted
        if self.prefix is not None and self.prefix + wanted in names:
            return self.prefix + wanted
        # Whole parts only, unlike KerasHub: "norm.weight" must not find "layers.1.self_attn.q_norm.weight".
        for name in names:
            if name.endswith(f".{wanted}"):
                self.prefix = name[: -len(wanted)]
                return str(name)
        return None

    def _without_base(self, wanted: str, names: Mapping[str, Any]) -> str | None:
        base, _, rest = wanted.partition(".")
        # First parts of names that `transformers` omits when it stores a base model alone.
        bases = {"model", "transformer", *(kind.prefix for kind in model_types().values() if kind.prefix)}
        if base not in bases or not rest:
            return None
        if base not in self._bare:
            # The checkpoint does have the prefix, so a name that is not found with it is absent.
            if any(name.startswith(f"{base}.") for name in names):
                return None
            # Empty, or whole parts.
            found = [name[: len(name) - len(rest)] for name in names if name == rest or name.endswith(f".{rest}")]
            if len(found) > 1:
                raise SourceError(
                    f"Cannot determine which tensor of {self._source} KerasHub's converter means by {wanted!r}: "
                    f"{len(found)} names match: {', '.join(repr(prefix + rest) for prefix in found[:4])}. Remove the "
                    "tensors that are not part of the model"
                )
            if not found:
                return None
            self._bare[base] = found[0]
        name = self._bare[base] + rest
        return name if name in names else None
