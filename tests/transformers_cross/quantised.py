"""Quantised folders, each written by the library of its method: `quantise` makes them, `folders.build` rebuilds them.

Fixtures are those of `folders`, with two more entries::

    "stored": {"…q_proj.qweight": "base64"}          tensors that are not drawn from their names: codes and scales
    "weights": {"…q_proj.weight": "float32 1a2b…"}   what the library makes of them: a digest of each weight
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from transformers_cross import folders
from transformers_cross.cases import several
from transformers_cross.cases.decoders import FAMILIES
from transformers_cross.cases.parts import Case, Config

FIXTURES = folders.FIXTURES / "quantised"
METHODS = (
    "fp8 blocks", "fp8 blocks, scales of 8 bits", "fp8 tensor",
    "float8 channels", "float8 blocks", "int8 channels", "packed 8 asymmetric", "packed 4", "packed 4 asymmetric",
    "packed 4 channels", "nvfp4", "mxfp4", "mxfp8",
    "modelopt fp8", "modelopt fp8 channels", "modelopt mxfp8", "modelopt nvfp4",
    "gptq 4", "gptq 4 asymmetric", "gptq 3 asymmetric", "gptq 2 asymmetric", "gptq 8, second version", "awq",
    "nf4 nested", "fp4", "bitsandbytes int8",
)  # fmt: skip
NEED_32 = ("awq", "gptq 3 asymmetric", "mxfp4", "mxfp8", "modelopt mxfp8")
"""Methods whose libraries need sizes that 32 divides."""
SMALL: Config = {"num_hidden_layers": 1}
WIDE: Config = {**SMALL, "hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
_GEMMA = {"query_pre_attn_scalar": 16}
_BY_NAME = {family.name: family for family in FAMILIES}


def _cases() -> Iterator[Case]:
    for name in ("llama", "gemma2", "qwen2"):
        for method in METHODS:
            wide = WIDE | (_GEMMA if name == "gemma2" else {})
            yield _BY_NAME[name].case(method, wide if method in NEED_32 else SMALL)
    for name in ("mixtral", "qwen3_moe"):
        yield _BY_NAME[name].case("fp8 blocks", SMALL | {"moe_intermediate_size": 32})
    yield _BY_NAME["gpt_oss"].case("mxfp4 experts", WIDE)
    # What transformers saves fused; sizes that blocks of 16 divide.
    fused = next(case for case in several.cases() if case.name == "qwen3_5_moe, text")
    text = {**fused.config["text_config"], "moe_intermediate_size": 32}
    yield replace(fused, variant="fp8 blocks", config={**fused.config, "text_config": text})


CASES: tuple[Case, ...] = tuple(_cases())


def digest(weight: np.ndarray) -> str:
    """Shape and digest of a weight's values, as float32 holds them."""
    values = np.ascontiguousarray(weight, "<f4")
    return f"{'x'.join(map(str, values.shape))} {hashlib.sha256(values.tobytes()).hexdigest()[:32]}"
