"""What becomes of a folder: loaded here, or by KerasHub itself, and asked what PyTorch was asked."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transformers_cross import folders, inputs

TOLERANCE = 2e-5
"""Of an output's largest magnitude. Every weight is exact in every dtype, and all arithmetic is float32: what is left
is the order of sums, a few units in the last place (6e-8) of what goes into each of some ten layers of sums."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened: ``equal``, ``differs``, ``refused`` or ``no output``, and details."""

    kind: str
    detail: str = ""
    error: float = 0.0
    """Largest deviation from PyTorch, relative to the output's scale."""


def ours(fixture: dict[str, Any], folder: Path, mesh: str = "") -> Outcome:
    """Load with `shardload.load` and nothing but a mesh and float32."""
    import shardload
    from shardload.errors import ShardloadError

    try:
        with quietly():
            model = shardload.load(folder, mesh=mesh or "1x1", dtype="float32")
    except ShardloadError as error:
        return Outcome("refused", f"{type(error).__name__}: {error}")
    return compare(model, fixture)


def kerashubs(fixture: dict[str, Any], folder: Path) -> Outcome:
    """Load with KerasHub's own ``from_preset``, as the class that is loaded here."""
    config = fixture["json"].get("config.json", {})
    try:
        kind = _class_of(config)
        options = {} if kind.__name__.endswith("Backbone") else {"preprocessor": None}
        with quietly():
            model = kind.from_preset(str(folder), dtype="float32", **options)
    except Exception as error:  # of any kind
        return Outcome("fails", f"{type(error).__name__}: {error}")
    return compare(model, fixture)


def _class_of(config: dict[str, Any]) -> Any:
    """KerasHub's class for a configuration: the task that its architecture is, or the backbone."""
    from keras_hub import models
    from keras_hub.src.utils.transformers.preset_loader import TransformersPresetLoader

    backbone = TransformersPresetLoader("", config).check_backbone_class()
    architecture = (config.get("architectures") or [""])[0]
    stem = backbone.__name__.removesuffix("Backbone")
    if config.get("text_config", {}).get("model_type") == "t5":
        return getattr(models, f"{stem}Seq2SeqLM")
    if "ForImageClassification" in architecture:
        return getattr(models, f"{stem}ImageClassifier", backbone)
    if not architecture or architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return getattr(models, f"{stem}CausalLM", getattr(models, f"{stem}Seq2SeqLM", backbone))
    return backbone


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without what KerasHub's converters print."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def compare(model: Any, fixture: dict[str, Any]) -> Outcome:
    """What the model answers, beside what PyTorch answered."""
    expected = fixture.get("outputs", {})
    if not expected:  # what PyTorch was not asked about should not have loaded
        return Outcome("differs", f"{type(model).__name__}, without a reference", float("inf"))
    found = answers(model, fixture)
    shared = [name for name in expected if name in found]
    if not shared:
        return Outcome("no output", f"{type(model).__name__}: {sorted(found)}, PyTorch: {sorted(expected)}")
    errors = {}
    for name in shared:
        wanted = expected[name]
        flat = np.asarray(found[name], np.float32).ravel()
        if flat.size != np.prod(wanted["shape"]):
            return Outcome("differs", f"{name}: {found[name].shape} for {tuple(wanted['shape'])}", float("inf"))
        deviation = np.abs(flat[folders.positions(flat.size)] - np.array(wanted["sample"], np.float32)).max()
        errors[name] = float(deviation / wanted["scale"])
    worst = max(errors, key=lambda name: errors[name])
    kind = "equal" if errors[worst] <= TOLERANCE else "differs"
    return Outcome(kind, f"{type(model).__name__}: {', '.join(shared)}", errors[worst])


NAMES = {
    "sequence_output": "last_hidden_state", "pooled_output": "pooler_output",
    "decoder_sequence_output": "last_hidden_state", "encoder_sequence_output": "encoder_last_hidden_state",
    "vision_logits": "logits_per_image", "text_logits": "logits_per_text", "semantic_segs": "semantic_seg",
}  # fmt: skip


def answers(model: Any, fixture: dict[str, Any]) -> dict[str, np.ndarray]:
    """Outputs under PyTorch's names."""
    import keras

    backbone = getattr(model, "backbone", model)
    given = inputs.expand(fixture["inputs"])
    found = {}
    if "image_grid_thw" in given:
        patches = _patches(given.pop("pixel_values"), backbone.input["pixel_values"].shape)
        found["image_features"] = np.asarray(backbone.vision_encoder(patches, given.pop("image_grid_thw")))
    fed = feed(backbone, given)
    batch = len(next(iter(fed.values())))
    fed = fed if len(fed) > 1 or isinstance(backbone.input, dict) else next(iter(fed.values()))
    answer = model.predict(fed, batch_size=batch, verbose=0)
    if not isinstance(answer, dict):
        is_task = isinstance(model, keras.Model) and model is not backbone
        return {**found, "logits" if is_task else "last_hidden_state": np.asarray(answer)}
    if "pred_masks" in answer:  # channels last
        answer["pred_masks"] = np.moveaxis(answer["pred_masks"], -1, 1)
    return found | {NAMES.get(name, name): np.asarray(value) for name, value in answer.items()}


def feed(backbone: Any, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """PyTorch's inputs under KerasHub's names, with the masks and indices it wants."""
    wanted = backbone.input if isinstance(backbone.input, dict) else {"images": backbone.input}
    images = _placed_patches(given) if "image_position_ids" in given else _images(wanted, given)
    made = {**_texts(backbone, given), **images, **_sound(given), **_boxes(given)}
    return {name: made[name] for name in wanted}


def _texts(backbone: Any, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if "input_ids" not in given:
        return {}
    ids = text = given["input_ids"]
    decoded = given.get("decoder_input_ids", ids)
    if puts_the_image_first := type(backbone).__name__ in ("PaliGemmaBackbone", "BLIP2Backbone"):
        text = ids[:, int((ids[0] == ids[0, 0]).sum()) :]
    whole = ids if puts_the_image_first and "images" in backbone.input and "response_mask" in backbone.input else text
    made = {
        "token_ids": text, "encoder_token_ids": text, "padding_mask": np.ones(whole.shape),
        "encoder_padding_mask": np.ones(text.shape), "response_mask": np.zeros(whole.shape),
        "segment_ids": np.zeros(text.shape), "position_ids": np.tile(np.arange(text.shape[1]), (len(text), 1)),
        "decoder_token_ids": decoded, "decoder_padding_mask": np.ones(decoded.shape),
    }  # fmt: skip
    return {name: np.asarray(value, "int32") for name, value in made.items()}


def _places(is_one: np.ndarray) -> np.ndarray:
    """The positions in each text of the tokens that stand for something else, of which each text has as many."""
    return np.stack([np.flatnonzero(row) for row in is_one]).astype("int32")


def _placed_patches(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gemma 4 takes patches and where in the image they are; each text has one image."""
    is_image = given["mm_token_type_ids"] == 1
    return {
        "pixel_values": given["pixel_values"][:, None],
        "pixel_position_ids": given["image_position_ids"][:, None].astype("int32"),
        "vision_mask": is_image.astype("int32"),
        "vision_indices": _places(is_image),
    }


def _sound(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each text has one sound."""
    if "input_features" not in given:
        return {}
    is_sound = given["mm_token_type_ids"] == 3
    return {
        "audio_mel": given["input_features"][:, None],
        "audio_mel_mask": given["input_features_mask"][:, None].astype("int32"),
        "audio_mask": is_sound.astype("int32"),
        "audio_indices": _places(is_sound),
    }


def _boxes(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """KerasHub wants the number of its image with each box, and takes a label where PyTorch has one by default."""
    if "input_boxes" not in given:
        return {}
    boxes = given["input_boxes"]
    images = np.broadcast_to(np.arange(len(boxes), dtype=boxes.dtype)[:, None, None], (*boxes.shape[:2], 1))
    return {"boxes": np.concatenate([images, boxes], -1), "box_labels": np.ones(boxes.shape[:2], "int32")}


def _images(wanted: dict[str, Any], given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Channels come last; where several images may belong to one text, each text has one, or none."""
    batch = len(next(iter(given.values())))
    if "pixel_values" not in given:
        shape = wanted["pixel_values"].shape[2:] if "pixel_values" in wanted else ()
        none = np.zeros((batch, 0), "int32")
        return {
            "pixel_values": np.zeros((batch, 0, *shape)),
            "image_grid_thw": none[..., None] + [[0, 0, 0]],
            "vision_indices": none,
        }
    images = np.moveaxis(given["pixel_values"], 1, -1)
    made = {"pixel_values": images, "images": images}
    if "vision_indices" in wanted:
        is_image = given["input_ids"] == given["input_ids"][0, 2]
        made["images"] = images[:, None]
        made["vision_mask"] = is_image.astype("int32")
        made["vision_indices"] = _places(is_image)
    return made


def _patches(values: np.ndarray, shape: tuple[int | None, ...]) -> np.ndarray:
    """PyTorch's patches, each a row of channels, times, heights and widths, as KerasHub takes them: channels last."""
    _, _, times, height, width, channels = shape
    return np.moveaxis(values.reshape(-1, channels, times, height, width), 1, -1)
