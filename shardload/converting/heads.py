"""Heads of tasks that a written backbone lacks: ``config.json`` names transformers' class without the head.

    source                                 written
    XLMRobertaForSequenceClassification    XLMRobertaModel, without labels, and a note that names the head's tensors

KerasHub's backbone ends before the head. A ``config.json`` that still named the task would have transformers make a
random head, and a pipeline answer with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from shardload.converting.source import Source, some
from shardload.families.parts.config import GENERATORS, architecture_of
from shardload.families.registry import model_type_of
from shardload.units import plural

_TASK = re.compile(r"(.+?)(For[A-Z]\w*|LMHeadModel|DoubleHeadsModel)")
"""Names of transformers' classes with a head, whose first part, with "Model", is the name of the class without one."""
_FIELDS = ("id2label", "label2id", "num_labels", "problem_type", "finetuning_task")
"""Fields of ``config.json`` about a head's outputs."""
_OUTPUT_LAYERS = ("lm_head.", "cls.")
"""Starts of the names of output layers over a vocabulary. A backbone has none where they belong to a head (BERT)."""


def without_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``config.json`` of a backbone: the class without a head, and no fields about the head's outputs."""
    found = _TASK.fullmatch(architecture_of(config))
    if found is None or (found[0].endswith(GENERATORS) and not _is_head(config, _OUTPUT_LAYERS)):
        return dict(config)
    kept = {name: value for name, value in config.items() if name not in _FIELDS}
    return kept | {"architectures": [f"{found[1]}Model"]}


def notes_on_heads(source: Source, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note if the source has a head that is not written. ``config``: the ``config.json`` that is."""
    original = source.described_as
    names = [name for name in (source.origin or source.manifest).tensors if _is_head(original, (name,))]
    task, written = architecture_of(original), architecture_of(config)
    is_renamed = bool(task) and task != architecture_of(without_head(original))
    if not names and not is_renamed:
        return ()
    tensors = f" ({plural(len(names), 'tensor')}: {some(names)})" if names else ""
    head = f"the head of {task or 'a task'}{tensors} is not written, because {type(source.backbone).__name__} ends"
    named = f": config.json names {written}" if is_renamed else ""
    return (f"{head} before it{named}",)


def _is_head(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    heads = model_type_of(config).heads
    return bool(heads) and any(re.match(heads, name) for name in names)
