"""Refuse Hugging Face checkpoints whose tensors are not the weights themselves: quantised models, and adapters.

A quantised folder stores codes, and scales that turn them into weights. `shardload.loaders.quantised` dequantises what
it knows, and then nothing here shows it. KerasHub would use other codes as weights (FP8), or find no tensor and leave
random values. Any of three things shows such a folder:

    config.json             has the field quantization_config or compression_config
    hf_quant_config.json    exists, as ModelOpt writes it
    the tensors             are float8, or have names that only a quantisation method writes (``.qweight``)

Models that Keras quantised are in Keras' formats and are not checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shardload.errors import UnsupportedError
from shardload.loaders import quantised, spec_of
from shardload.loaders.quantised.modelopt import FILE
from shardload.loaders.quantised.parts import FIELD
from shardload.manifest import Manifest
from shardload.stores.json_files import read_optional
from shardload.units import plural

ADAPTER = "adapter_config"
"""What users put in ``ignore_config`` to load the weights of a folder without the adapter that is also there."""
_BARE_FLOAT8 = "float8"
"""In place of a method's name for float8 tensors without scales: they may be quantised, or just cast."""
_SIGNS = (
    (r"\.qweight$", "gptq or awq"),
    (r"\.g_idx$", "gptq"),
    (r"\.weight_packed$", "compressed-tensors"),
    (r"\.weight\.(absmax|quant_map|nested_absmax|quant_state\..*)$", "bitsandbytes"),
    (r"\.(weight_)?SCB$", "bitsandbytes (int8)"),
    (r"\.weight_scale_inv$", "fp8"),
    (r"_blocks$", "mxfp4"),
    (r"\.(codes|codebooks)$", "aqlm"),
    (r"\.weight\._(data|scale)$", "quanto"),
)
"""Pairs: a pattern of tensor names that no unquantised model has, and the quantisation method that writes them."""
_NEEDS = {"_blocks": "_scales", ".codes": ".codebooks", ".codebooks": ".codes", ".qweight": ".scales"}
"""Ending of a tensor's name → ending of another one. Only both together show that weights are quantised."""
_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_ADAPTER = r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.|$)|^base_model\.model\."
_OPTION = f"ignore_config=({FIELD!r},) (--ignore-config {FIELD})"
_ALTERNATIVES = "Load the unquantised checkpoint of this model, or a GGUF file of it"


def check(manifest: Manifest, *, ignore: Iterable[str] = ()) -> None:
    """Raise for quantised checkpoints and adapters; the message names the method, or the adapter's base model.

    ``ignore`` has the names that a user passed as ``ignore_config``. With ``"quantization_config"``, no error is raised
    if the configuration sets quantisation but no tensor is a sign of it, or if float8 tensors have no scales. With
    ``"adapter_config"``, none is raised for an adapter next to the weights.
    """
    if not spec_of(manifest).may_be_codes:
        return
    if _is_folder(manifest):
        quantised.require_known(manifest)
    # The tensors first: a name that only a quantiser writes is a sure sign, which no option waives.
    _check_tensors(manifest, manifest.tensors, ignore=ignore)
    if ADAPTER not in ignore and _has_adapter_beside(manifest):
        raise UnsupportedError(
            f"Cannot load {manifest.source}: results would differ from transformers, which applies the PEFT adapter "
            "next to the weights (adapter_config.json). To merge it, pass the same folder as adapter (--adapter). To "
            f"load the weights without it, pass ignore_config=({ADAPTER!r},) (--ignore-config {ADAPTER})"
        )
    for method, where in _described(manifest):
        if FIELD not in ignore:
            raise UnsupportedError(
                f"Cannot load {manifest.source}: {where} sets {method} quantisation, expected plain weights. "
                f"{_ALTERNATIVES}. If its tensors are plain weights all the same, pass {_OPTION}"
            )


def check_before(manifest: Manifest, *, ignore: Iterable[str] = ()) -> None:
    """Raise for a quantised folder before a load into an existing model; bare files are checked later, when mapped."""
    if _is_folder(manifest):
        check(manifest, ignore=ignore)


def check_mapped(
    manifest: Manifest, bindings: Iterable[Any], unused: Iterable[str], *, ignore: Iterable[str] = ()
) -> None:
    """Raise if a bare file's ``unused`` tensors, or float8 ones that are cast, mean quantisation or an adapter."""
    # A layer of the model may decode codes itself, so only tensors that the model does not use are a sign.
    if not spec_of(manifest).may_be_codes or _is_folder(manifest):
        return
    _check_tensors(manifest, [*unused, *_widened(manifest, bindings)], ignore=ignore)


def accepted(manifest: Manifest, bindings: Iterable[Any], *, ignore: Iterable[str] = ()) -> tuple[str, ...]:
    """Return a note for each adapter or sign of quantisation that `check` accepted because of ``ignore``."""
    notes = []
    if ADAPTER in ignore and _has_adapter_beside(manifest):
        notes.append(f"{ADAPTER} ignored: the model has the weights without the PEFT adapter")
    if FIELD not in ignore or not spec_of(manifest).may_be_codes:
        return tuple(notes)
    ignored = [f"{where} sets {method}" for method, where in _described(manifest)]
    if bare := _widened(manifest, bindings):
        ignored.append(f"{plural(len(bare), 'tensor')} in float8 ({bare[0]!r} …)")
    return (*notes, *(f"{FIELD} ignored: {one}; the tensors are loaded as plain weights" for one in ignored))


def _widened(manifest: Manifest, bindings: Iterable[Any]) -> list[str]:
    """Return the float8 tensors that a load casts: they may be codes, which only scales turn into weights."""
    names = [b.view.tensor for b in bindings if not _is_float8(b.dtype)]
    return [name for name in names if _is_float8(manifest.tensors[name].dtype)]


def _is_folder(manifest: Manifest) -> bool:
    """Whether the checkpoint is a Hugging Face folder with a configuration, not a bare file."""
    spec = spec_of(manifest)
    return spec.may_be_codes and spec.is_hugging_face


def _check_tensors(manifest: Manifest, names: Iterable[str], *, ignore: Iterable[str] = ()) -> None:
    names, is_scaled = list(names), _is_folder(manifest) and _has_scaled_float8(manifest)
    if any(re.search(_ADAPTER, name) for name in names):
        raise UnsupportedError(_about_adapter(manifest))
    for name in names:
        method = _method_of(name, manifest)
        # Where others have scales, they are not plain casts: one that lacks its scale is not, either.
        method = "fp8" if method == _BARE_FLOAT8 and is_scaled else method
        if method is not None and not (method == _BARE_FLOAT8 and FIELD in ignore):
            said = next((found for found, _ in _described(manifest)), None)
            # A method that the configuration names has scales: without them, values are garbage.
            is_bare = _is_float8(manifest.tensors[name].dtype) and not _has_scale(name, manifest)
            lacks = " and lacks a scale" if said and is_bare else ""
            option = f". If its values need no scales, pass {_OPTION}" if method == _BARE_FLOAT8 and not said else ""
            raise UnsupportedError(
                f"Cannot load {manifest.source}: tensor {name!r} ({manifest.tensors[name].dtype}) belongs to weights "
                f"quantised with {said or method}{lacks}, expected plain weights. {_ALTERNATIVES}{option}"
            )


def _described(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield each quantisation method that a folder's configuration files name, and the field or file that names it."""
    nested = [manifest.config.get(key) for key in ("text_config", "language_config")]
    for config in (manifest.config, *(c for c in nested if isinstance(c, Mapping))):
        for key in (FIELD, "compression_config"):
            if isinstance(found := config.get(key), Mapping) and found:
                # Each library has its own key for the method's name.
                method = found.get("quant_method") or found.get("quantization_method") or found.get("quant_algo")
                # transformers ignores bitsandbytes without one of its two flags.
                if method != "bitsandbytes" or found.get("load_in_4bit") or found.get("load_in_8bit"):
                    yield str(method or "an unnamed method"), f"{key} in config.json"
    if method := _algorithm_beside(manifest):
        yield method, "hf_quant_config.json"


def _algorithm_beside(manifest: Manifest) -> str | None:
    """Return the quantisation method that ``hf_quant_config.json`` names, ModelOpt's file; ``None`` without it."""
    if not _is_folder(manifest) or quantised.is_dequantised(manifest):
        return None
    try:
        algorithm = read_optional(manifest.location / FILE)["quantization"]["quant_algo"]
    except (LookupError, TypeError):  # no such file, or of another form
        return None
    return f"modelopt {algorithm}" if algorithm else None


def _method_of(name: str, manifest: Manifest) -> str | None:
    """Return the quantisation method that stores tensors of this name or dtype; ``None`` for a plain weight."""
    tensors = manifest.tensors
    # float8 next to a scale are codes; alone, they may be plain casts.
    if _is_float8(tensors[name].dtype):
        has_input_scale = f"{name.removesuffix('.weight')}.input_scale" in tensors
        return "fp8" if has_input_scale or _has_scale(name, manifest) else _BARE_FLOAT8
    for pattern, method in _SIGNS:
        if found := re.search(pattern, name):
            needed = _NEEDS.get(found[0])
            if needed is None or name.removesuffix(found[0]) + needed in tensors:
                return method
    # A name in .weight_scale proves nothing; next to a weight of float8 or integers, it is a scale.
    scaled = tensors.get(name.removesuffix("_scale")) if name.endswith(".weight_scale") else None
    if scaled is not None and _is_float8(scaled.dtype):
        return "fp8"
    return "compressed-tensors" if scaled is not None and scaled.dtype.kind in "iu" else None


def _has_scale(name: str, manifest: Manifest) -> bool:
    stem = name.removesuffix(".weight")
    # Experts in one tensor have names without .weight.
    scales = (f"{name}_scale", f"{name}_scale_inv", f"{stem}.weight_scale", f"{stem}.weight_scale_inv")
    return any(scale in manifest.tensors for scale in (*scales, f"{stem}.scale"))


def _has_scaled_float8(manifest: Manifest) -> bool:
    return any(_is_float8(tensor.dtype) and _has_scale(name, manifest) for name, tensor in manifest.tensors.items())


def _is_float8(dtype: Any) -> bool:
    return str(dtype).startswith("float8")


def _about_adapter(manifest: Manifest) -> str:
    source = manifest.location
    config = read_optional((source if source.is_folder() else source.parent) / "adapter_config.json")
    named = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    base = repr(named[:200]) if isinstance(named, str) and named else None
    whose = f" of {base}" if base else ""
    return (
        f"Cannot load {manifest.source}: it contains a PEFT adapter{whose}, expected a model's own weights. Load "
        f"{base or 'the base model'} instead, with the adapter's folder as adapter (--adapter)"
    )


def _has_adapter_beside(manifest: Manifest) -> bool:
    """Whether transformers would apply an adapter of PEFT to the weights of this folder, and none of it is merged."""
    folder = manifest.location
    return (
        _is_folder(manifest)
        and folder / _ADAPTER_FILES[0] not in manifest.files
        and (folder / "adapter_config.json").is_file()
        and any((folder / name).is_file() for name in _ADAPTER_FILES)
    )
