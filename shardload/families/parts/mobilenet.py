"""Tensors of ``mobilenetv5_300m_enc``, the vision tower of Gemma 3n, as timm names and builds it.

Source: https://github.com/huggingface/pytorch-image-models, ``timm/models/mobilenetv5.py``. No configuration states
these sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardload.families.parts.tensors import TensorSpec

_STEM, _OUT = 64, 2048
_EDGES = (128, 128, 128)
"""Channels of the first stage's blocks, which widen by a convolution of 3x3."""
_DEPTHWISE = {
    1: (256, 6, ((3, 5), (5, 0), (3, 0), (5, 0), (3, 0))),
    2: (640, 6, ((5, 5), *((5, 0),) * 7, (0, 0))),
    3: (1280, 6, ((5, 5),)),
}
"""Stage → channels, the factor by which its first block widens, and each block's two depthwise kernels (0: none). Later
blocks widen by 4, and one without a kernel does not widen."""
_ATTENDING = {2: (640, 14, 12 * 64, 64, 3), 3: (1280, 19, 16 * 96, 96, 0)}
"""Stage → channels, pairs of an attention and a block without depthwise kernels, widths of queries and of keys, and
the kernel that shrinks keys and values (0: none)."""


def mobilenet_tensors(at: str) -> Iterator[TensorSpec]:
    """Yield the tensors of the tower, whose names begin with ``at``."""
    yield from _normalised(f"{at}.conv_stem", 3, _STEM, 3)
    yield TensorSpec(f"{at}.conv_stem.conv.bias", (_STEM,))
    before = _STEM
    for number, channels in enumerate(_EDGES):
        block = f"{at}.blocks.0.{number}"
        yield TensorSpec(f"{block}.conv_exp.weight", (4 * before, before, 3, 3))
        yield _scale(f"{block}.bn1", 4 * before)
        yield TensorSpec(f"{block}.conv_pwl.weight", (channels, 4 * before, 1, 1))
        yield _scale(f"{block}.bn2", channels)
        before = channels
    for stage, (channels, factor, kernels) in _DEPTHWISE.items():
        for number, (start, mid) in enumerate(kernels):
            times = factor if number == 0 else 4 if start else 1
            yield from _inverted(
                f"{at}.blocks.{stage}.{number}", (before, times * before, channels), start=start, mid=mid
            )
            before = channels
        if stage in _ATTENDING:
            yield from _attending(f"{at}.blocks.{stage}", stage, first=len(kernels))
    joined = _DEPTHWISE[2][0] + _DEPTHWISE[3][0]
    yield from _normalised(f"{at}.msfa.ffn.pw_exp", joined, 2 * joined, 1)
    yield from _normalised(f"{at}.msfa.ffn.pw_proj", 2 * joined, _OUT, 1)
    yield _scale(f"{at}.msfa.norm", _OUT)


def _attending(at: str, stage: int, *, first: int) -> Iterator[TensorSpec]:
    channels, pairs, queries, keys, kernel = _ATTENDING[stage]
    for pair in range(pairs):
        block = f"{at}.{first + 2 * pair}"
        for name, width in (("key", keys), ("value", keys)):
            if kernel:
                yield TensorSpec(f"{block}.attn.{name}.down_conv.weight", (channels, 1, kernel, kernel))
                yield _scale(f"{block}.attn.{name}.norm", channels)
            yield TensorSpec(f"{block}.attn.{name}.proj.weight", (width, channels, 1, 1))
        yield TensorSpec(f"{block}.attn.query.proj.weight", (queries, channels, 1, 1))
        yield TensorSpec(f"{block}.attn.output.proj.weight", (channels, queries, 1, 1))
        yield _scale(f"{block}.norm", channels)
        yield TensorSpec(f"{block}.layer_scale.gamma", (channels,))
        yield from _inverted(f"{at}.{first + 2 * pair + 1}", (channels, 2 * channels, channels))


def _inverted(at: str, channels: tuple[int, int, int], *, start: int = 0, mid: int = 0) -> Iterator[TensorSpec]:
    """Yield a block with channels before, between and after, and depthwise kernels of ``start`` and ``mid``, or 0."""
    before, widened, after = channels
    if start:
        yield from _normalised(f"{at}.dw_start", 1, before, start)
    yield from _normalised(f"{at}.pw_exp", before, widened, 1)
    if mid:
        yield from _normalised(f"{at}.dw_mid", 1, widened, mid)
    yield from _normalised(f"{at}.pw_proj", widened, after, 1)
    yield TensorSpec(f"{at}.layer_scale.gamma", (after,))


def _normalised(at: str, before: int, after: int, kernel: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{at}.conv.weight", (after, before, kernel, kernel))
    yield _scale(f"{at}.bn", after)


def _scale(at: str, width: int) -> TensorSpec:
    return TensorSpec(f"{at}.weight", (width,), near_one=True)
