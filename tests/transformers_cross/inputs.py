"""What each model is asked, small enough to keep: token ids as they are, images by name and shape."""

from __future__ import annotations

from typing import Any

import numpy as np

from transformers_cross import weights
from transformers_cross.cases import Case

BATCH, LENGTH = 2, 12
FIRST_TOKEN = 6
"""Smaller ones are padding, beginnings, ends and masks in some family."""


def of(case: Case, config: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a case: lists of ids, or ``{"image": shape}``."""
    text = config.get("text_config") or config.get("decoder") or config
    size = min(text.get("vocab_size", 48), 48)
    ids = np.random.RandomState(1).randint(FIRST_TOKEN, size, size=(BATCH, LENGTH))
    match case.ask:
        case "text":
            return {"input_ids": ids.tolist()}
        case "text to text":
            return {"input_ids": ids.tolist(), "decoder_input_ids": ids[::-1, 1:8].tolist()}
        case "image":
            side = config["image_size"]
            return {"pixel_values": {"image": [BATCH, 3, side, side]}}
        case "image and text" | "queries and text" | "image and text to text" | "queries and text to text":
            within = config.get("encoder", config)
            count = within.get("mm_tokens_per_image") or (16 if case.family == "paligemma" else 4)
            ids = np.random.RandomState(1).randint(FIRST_TOKEN, size, size=(BATCH, count + 8))
            ids[:, 2 : 2 + count] = within.get("image_token_index", within.get("image_token_id"))
            if case.family in ("paligemma", "blip-2"):
                ids[:, : count + 2] = np.roll(ids[:, : count + 2], count, axis=1)
            side = within["vision_config"]["image_size"]
            made = {"input_ids": ids.tolist(), "pixel_values": {"image": [BATCH, 3, side, side]}}
            if case.family in ("gemma3", "paligemma"):
                is_image = ids == ids[0, 2 if case.family == "gemma3" else 0]
                made["token_type_ids"] = (is_image if case.family == "gemma3" else ids * 0).astype(int).tolist()
            return made | ({"decoder_input_ids": ids[::-1, 6:].tolist()} if "to text" in case.ask else {})
        case "image beside text":
            side = config["vision_config"]["image_size"]
            ids[:, -1] = text["eos_token_id"]
            return {"input_ids": ids.tolist(), "pixel_values": {"image": [BATCH, 3, side, side]}}
        case "image and concept":
            side = config["detector_config"]["vision_config"]["backbone_config"]["image_size"]
            boxes = [[[0.5, 0.5, 0.5, 0.25]], [[0.25, 0.625, 0.375, 0.5]]]
            return {
                "input_ids": ids.tolist(), "pixel_values": {"image": [BATCH, 3, side, side]}, "input_boxes": boxes,
            }  # fmt: skip
        case "patches and text":
            vision = config["vision_config"]
            values = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
            return {
                "input_ids": ids.tolist(),
                "pixel_values": {"image": [BATCH * 16, values]},
                "image_grid_thw": [[1, 4, 4]] * BATCH,
            }
        case "placed patches and text" | "sound and text" | "placed patches, sound and text":
            return _of_gemma_4(case, config, ids)
    raise ValueError(case.ask)


def _of_gemma_4(case: Case, config: dict[str, Any], ids: np.ndarray) -> dict[str, Any]:
    """Patches, each with its place in the image, and sound."""
    made: dict[str, Any] = {}
    kinds = np.zeros_like(ids)
    if "patches" in case.ask:
        vision = config["vision_config"]
        places = [[x, y] for y in range(4) for x in range(4)]
        kinds[:, 1 : 1 + len(places) // vision["pooling_kernel_size"] ** 2] = 1
        made["pixel_values"] = {"image": [BATCH, len(places), 3 * vision["patch_size"] ** 2]}
        made["image_position_ids"] = [places] * BATCH
    if "sound" in case.ask:  # four frames are one token
        kinds[:, 6:11] = 3
        made |= {"input_features": {"image": [BATCH, 20, 128]}, "input_features_mask": [[True] * 20] * BATCH}
    ids = np.where(kinds == 1, config["image_token_id"], np.where(kinds == 3, config["audio_token_id"], ids))
    return {"input_ids": ids.tolist(), "mm_token_type_ids": kinds.tolist(), **made}


def expand(fed: dict[str, Any]) -> dict[str, np.ndarray]:
    """Arrays from what `of` gave."""
    return {name: _expanded(name, value) for name, value in fed.items()}


def _expanded(name: str, value: Any) -> np.ndarray:
    if isinstance(value, dict):
        return np.asarray(weights.draw(name, tuple(value["image"])) / np.float32(64))
    found = np.array(value)
    return found.astype(np.float32) if found.dtype.kind == "f" else found
