"""Generate text from prompts, greedily (always the most probable token), on the model's own mesh.

    prompts ─► token ids ─► padded to one length and to the batch axis ─► CausalLM's compiled loop ─► cut ─► text

KerasHub's ``generate()`` needs a preprocessor, which may need TensorFlow. So this module calls the compiled loop inside
it, which takes token ids. There must be a prompt for each part of the batch: on a 2x4 mesh, one prompt runs twice.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import keras
import numpy as np
from numpy.typing import NDArray

from shardload.errors import UnsupportedError, UsageError, reason_text, suggests_arguments
from shardload.keras_bridge.binding import binding_of
from shardload.keras_bridge.compiled_steps import LoweredStep, lower_generation
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.model_records import record_first_result, record_of
from shardload.keras_bridge.model_state import plain_model
from shardload.manifest import Manifest
from shardload.text import sources
from shardload.text.prompts import SHORTER, encode_prompts
from shardload.text.tokenizer import Tokenizer, from_keras_hub
from shardload.typing import PathLike
from shardload.units import plural

LENGTH_STEP = 32
"""Prompts with their new tokens are padded to a multiple of this length, so that similar ones share a compiled loop."""

DEFAULT_NEW_TOKENS = 32
"""Most tokens that `generate` adds, unless told otherwise."""


class PreparedModel(Protocol):
    """A model that is about to be loaded, and the headers of its checkpoint."""

    @property
    def model(self) -> Any:
        """The model, bound to its mesh."""

    @property
    def manifest(self) -> Manifest:
        """The headers of the checkpoint."""


_CACHE = "_shardload_greedy"


@overload
def generate(
    model: Any, prompts: str, *, max_new_tokens: int = ..., tokenizer: Tokenizer | PathLike | None = ...
) -> str: ...
@overload
def generate(
    model: Any, prompts: Sequence[str], *, max_new_tokens: int = ..., tokenizer: Tokenizer | PathLike | None = ...
) -> list[str]: ...
@suggests_arguments
def generate(
    model: Any,
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    tokenizer: Tokenizer | PathLike | None = None,
) -> str | list[str]:
    """Continue one prompt or several, always with the most probable token; return only the continuations.

    ``model.generate`` needs a KerasHub preprocessor, which not every checkpoint has, and which may need TensorFlow.
    This function needs neither.

    Examples:
        ```python
        model = shardload.load("gemma3_270m", mesh="1x8")
        print(shardload.generate(model, "The capital of France is", max_new_tokens=8))
        ```

    Args:
        model: A KerasHub ``CausalLM``, as `shardload.load` returns it; on any mesh.
        prompts: One prompt, or several that run as one batch.
        max_new_tokens: Most tokens to add, 32 by default; an end-of-text or end-of-turn token ends it sooner.
        tokenizer: A result of `shardload.tokenizer`, or a source with a tokenizer; by default, that of the source from
            which the model was loaded.

    Returns:
        The continuation of a single prompt, or a list with one for each prompt.

    Raises:
        UsageError: When a prompt is not text, or ``max_new_tokens`` is not a positive integer.
        UnsupportedError: When the model does not generate, there is no tokenizer, or prompt and new tokens exceed the
            model's context.
        SourceError: When the tokenizer is damaged.
        TransferError: When the tokenizer is in a GGUF file that changed since the model was loaded.
        MissingExtraError: When the package that reads the tokenizer is not installed.
    """
    model = plain_model(model)
    _require_causal_lm(model)
    found = sources.tokenizer_for(model) if tokenizer is None else _opened(tokenizer)
    source = record_of(model).text_source
    encoded = encode_prompts(prompts, found, max_new_tokens=max_new_tokens, manifest=source, name=model.name)
    # Tell people at a terminal why the first call takes so long.
    if _CACHE not in vars(model) and sys.stderr is not None and sys.stderr.isatty():
        print("Compiling for the first prompt; on a CPU, this can take a minute.", file=sys.stderr)  # noqa: T201
    added = generate_ids(model, encoded, max_new_tokens=max_new_tokens, stop_ids=found.stop_ids)
    continued = []
    for ids, new in zip(encoded, added, strict=True):
        # Decoded with the prompt, as the first piece of a text loses its leading space; but only if the prompt's own
        # text does not change: its last bytes may form one character with the first new ones.
        before, whole = found.decode(ids), found.decode([*ids, *new])
        continued.append(whole[len(before) :] if whole.startswith(before) else found.decode(new))
    return continued[0] if isinstance(prompts, str) else continued


def generate_ids(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    stop_ids: tuple[int, ...] = (),
) -> list[list[int]]:
    """Continue prompts of token ids with the most probable tokens; return the ids added to each, without stop ids."""
    _require_causal_lm(model)
    if not all(len(ids) for ids in prompts):
        raise UnsupportedError("Cannot continue an empty prompt. Give it some text")
    if not prompts:
        return []
    inputs = _padded(model, prompts, max_new_tokens)
    with _greedy(model) as generate, _on_mesh(model) as place:
        placed = {name: place(value) for name, value in inputs.items()}
        outputs = generate(placed, stop_token_ids=stop_ids or None)
        rows = np.asarray(outputs["token_ids"])
    record_first_result(model)
    # Not strict: the rows that fill up the batch are dropped.
    # The loop ends when all rows have a stop id, or at the padded length: a row may have more than it should.
    added = (row[len(ids) : len(ids) + max_new_tokens].tolist() for row, ids in zip(rows, prompts, strict=False))
    return [list(itertools.takewhile(lambda token: token not in stop_ids, new)) for new in added]


class GenerationAhead:
    """Compiles the loop of the first `generate` during a load, and keeps the tokenizer that this needs."""

    def __init__(self) -> None:
        self._tokenizer: Tokenizer | None = None

    def lower(self, prepared: PreparedModel, wanted: Any) -> LoweredStep:
        """Trace and lower the loop; ``wanted``: prompts, or a mapping of the arguments of `generate`."""
        given = dict(wanted) if isinstance(wanted, Mapping) else {"prompts": wanted}
        model, manifest, new = prepared.model, prepared.manifest, given.get("max_new_tokens", DEFAULT_NEW_TOKENS)
        _require_causal_lm(model)
        if (tokenizer := given.get("tokenizer")) is None:
            found = self._tokenizer = sources.tokenizer_of(manifest)
        else:
            found = _opened(tokenizer)
        prompts = encode_prompts(given["prompts"], found, max_new_tokens=new, manifest=manifest, name=model.name)
        inputs = _padded(model, prompts, new)
        try:
            with _greedy(model) as function, _on_mesh(model) as place:
                placed = {name: place(value) for name, value in inputs.items()}
                return lower_generation(model, function, placed, tuple(found.stop_ids) or None, model.sampler)
        except BaseException:
            vars(model).pop(_CACHE, None)
            raise

    def keep_tokenizer(self, model: Any) -> None:
        """Let the first `generate` of the loaded model use the tokenizer that was read for compiling."""
        if self._tokenizer is not None:
            record_of(model).tokenizer = self._tokenizer


def _opened(tokenizer: Tokenizer | PathLike) -> Tokenizer:
    if isinstance(tokenizer, str | os.PathLike):
        return sources.tokenizer(tokenizer)
    if hasattr(tokenizer, "detokenize"):  # a layer of KerasHub's
        return from_keras_hub(tokenizer)
    if not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
        raise UsageError(f"Cannot use tokenizer={tokenizer!r:.60}: expected shardload.tokenizer(source), or a source")
    return tokenizer


def _require_causal_lm(model: Any) -> None:
    if not callable(getattr(model, "make_generate_function", None)):
        raise UnsupportedError(
            f"Cannot generate text with {getattr(model, 'name', model)!r}: it is a {type(model).__name__}, expected a "
            "CausalLM. Load a checkpoint of a model that generates text"
        )


def _needs_more_than_text(model: Any, error: Exception) -> UnsupportedError:
    """Build the error for a loop that looks for other inputs than tokens and their mask, or for another model."""
    why = (
        f"{type(model).__name__} also needs the input {error}, expected a model that continues text alone. Call "
        "model.generate with all of its inputs"
        if isinstance(error, KeyError)
        else reason_text(error)
    )
    return UnsupportedError(f"Cannot generate text with {model.name!r}: {why}")


def _padded(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> dict[str, NDArray[Any]]:
    """Return token ids and mask, (rows, length), with room for new tokens; rows beyond the prompts repeat the last."""
    # Backbones with learned positions, such as GPT-2's, have a fixed number of them.
    longest = max(len(ids) for ids in prompts) + max_new_tokens
    limit = getattr(backbone_of(model), "max_sequence_length", None)
    if limit is not None and longest > limit:
        raise UnsupportedError(
            f"Cannot generate {plural(max_new_tokens, 'token')}: prompt and continuation have {longest}, but the "
            f"model has {plural(limit, 'position')}. {SHORTER}"
        )
    # Rounded up, as -(-a // b) is.
    length = -(-longest // LENGTH_STEP) * LENGTH_STEP
    length = min(length, limit) if limit is not None else length
    binding = binding_of(model)
    parts = 1 if binding is None else math.prod(map(binding.mesh.axis_size, binding.mesh.batch_axes))
    rows = -(-len(prompts) // parts) * parts
    tokens = np.zeros((rows, length), np.int32)
    mask = np.zeros((rows, length), np.bool_)
    for row in range(rows):
        ids = prompts[min(row, len(prompts) - 1)]
        tokens[row, : len(ids)] = ids
        mask[row, : len(ids)] = True
    return {"token_ids": tokens, "padding_mask": mask}


@contextlib.contextmanager
def _on_mesh(model: Any) -> Iterator[Any]:
    """Yield a function that places an input on the model's mesh or, if the model has none, on Keras' default device."""
    binding = binding_of(model)
    if binding is None:
        yield keras.ops.convert_to_tensor
        return

    def place(value: NDArray[Any]) -> Any:
        layout = binding.distribution.get_data_layout(value.shape)
        return keras.distribution.distribute_tensor(keras.ops.convert_to_tensor(value), layout)

    with binding.scope():
        yield place


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A compiled generation loop (always the most probable token), kept on its model because compiling takes long."""

    binding: Any
    sampler: Any
    function: Callable[..., Any]


@contextlib.contextmanager
def _greedy(model: Any) -> Iterator[Callable[..., Any]]:
    """Yield a greedy loop, then restore the model's own loop: ``compile(sampler=…)`` would discard its optimizer."""
    from shardload.hub import kerashub

    # A model that was moved to another mesh since has another binding, for which the loop is compiled again.
    cached: _Compiled | None = vars(model).get(_CACHE)
    if cached is None or cached.binding is not binding_of(model):
        cached = None
    before = getattr(model, "sampler", None), getattr(model, "generate_function", None)
    # Always as a pair: KerasHub's compiled function reads `model.sampler` when it is called.
    model.sampler = cached.sampler if cached else kerashub.greedy_sampler()
    model.generate_function = cached.function if cached else None
    try:
        function = model.make_generate_function()
        # Bypass Keras' attribute tracking: the cache is not part of the model.
        vars(model)[_CACHE] = _Compiled(binding_of(model), model.sampler, function)
        yield function
    except (KeyError, NotImplementedError) as error:
        raise _needs_more_than_text(model, error) from error
    finally:
        model.sampler, model.generate_function = before
