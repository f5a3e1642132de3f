"""The tensors of a Hugging Face checkpoint, listed from its configuration alone.

Shapes are stored shapes: a ``Linear`` is ``(out, in)``, GPT-2's ``Conv1D`` is ``(in, out)``. The layers that a task
adds to its base model are listed for language models only (``lm_head``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardload.families.parts.config import GENERATORS, SIZES, Config, architecture_of

DECODER_FIELDS = (*SIZES, "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name and shape of one tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    near_one: bool = False
    """Whether made-up values (``shardload synth``) are around one, like a norm's scales, instead of around zero."""
    is_zero: bool = False
    """Whether made-up values are zeros, because KerasHub's class lacks this tensor and loads no other values."""


def has_output_layer(config: Config) -> bool:
    """Whether a checkpoint has an output layer of its own, besides the embedding."""
    # A base model (LlamaModel) has no output layer; a configuration without a class is taken for a generator's.
    architecture = architecture_of(config)
    return not config.get("tie_word_embeddings", True) and (not architecture or architecture.endswith(GENERATORS))


def affine(at: str, shape: tuple[int, int], *, out: int) -> Iterator[TensorSpec]:
    """Yield name and shape of the matrix and the bias of the layer named ``at``; the bias has ``out`` elements."""
    yield TensorSpec(f"{at}.weight", shape)
    yield TensorSpec(f"{at}.bias", (out,))


def dense(at: str, inputs: int, outputs: int) -> Iterator[TensorSpec]:
    """Yield name and shape of the matrix and the bias of the linear layer named ``at``."""
    yield from affine(at, (outputs, inputs), out=outputs)


def norm(at: str, hidden: int) -> Iterator[TensorSpec]:
    """Yield name and shape of the scale and the bias of the norm named ``at``."""
    yield TensorSpec(f"{at}.weight", (hidden,), near_one=True)
    yield TensorSpec(f"{at}.bias", (hidden,))


def gated_mlp(
    config: Config,
    at: str,
    *,
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    size: str = "intermediate_size",
    biased: bool = False,
) -> Iterator[TensorSpec]:
    """Yield name and shape of a gated feed-forward layer's three matrices; ``size`` is the field with its width."""
    hidden, width = config["hidden_size"], config[size]
    for name, shape in zip(names, ((width, hidden), (width, hidden), (hidden, width)), strict=True):
        yield TensorSpec(f"{at}.{name}.weight", shape)
        if biased:
            yield TensorSpec(f"{at}.{name}.bias", shape[:1])


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderTensors:
    """Lists the tensors that a decoder's checkpoint has, from its configuration; fields say how model types differ."""

    norms_minus_one: bool = False
    """Whether norms store their scale minus one, so that a stored 0 scales by 1."""
    sandwich: bool = False
    """Whether blocks have norms both before and after attention, and before and after the feed-forward part."""
    normed_heads: bool = False
    """Whether queries and keys are normalised, head by head (``q_norm``, ``k_norm``)."""
    reads_attention_bias: bool = True
    """Whether the field ``attention_bias`` decides if attention has biases; ``False``: the field is ignored."""
    qkv_biases: bool = False
    """Whether query, key and value have biases in every model of the family."""
    feed_forward: Callable[[Config, int, str], Iterator[TensorSpec]] = lambda config, layer, at: gated_mlp(
        config, f"{at}.mlp"
    )
    """Takes the configuration, the index of a layer and the start of its names (``model.layers.0``); yields the tensors
    of its feed-forward part."""

    def __call__(self, config: Config) -> Iterator[TensorSpec]:
        """Yield name and shape of each tensor of a checkpoint with this configuration, in the order of the file."""
        vocab, hidden, one = config["vocab_size"], config["hidden_size"], not self.norms_minus_one
        yield TensorSpec("model.embed_tokens.weight", (vocab, hidden))
        for i in range(config["num_hidden_layers"]):
            at = f"model.layers.{i}"
            yield from self._attention(config, f"{at}.self_attn")
            yield from self.feed_forward(config, i, at)
            yield TensorSpec(f"{at}.input_layernorm.weight", (hidden,), one)
            yield TensorSpec(f"{at}.post_attention_layernorm.weight", (hidden,), one)
            if self.sandwich:
                yield TensorSpec(f"{at}.pre_feedforward_layernorm.weight", (hidden,), one)
                yield TensorSpec(f"{at}.post_feedforward_layernorm.weight", (hidden,), one)
        yield TensorSpec("model.norm.weight", (hidden,), one)
        if has_output_layer(config):
            yield TensorSpec("lm_head.weight", (vocab, hidden))

    def _attention(self, config: Config, at: str) -> Iterator[TensorSpec]:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        queries, keys = heads * head_dim, config["num_key_value_heads"] * head_dim
        biased = self.reads_attention_bias and bool(config.get("attention_bias"))
        for letter, out in (("q", queries), ("k", keys), ("v", keys)):
            yield TensorSpec(f"{at}.{letter}_proj.weight", (out, hidden))
            if biased or self.qkv_biases:
                yield TensorSpec(f"{at}.{letter}_proj.bias", (out,))
        yield TensorSpec(f"{at}.o_proj.weight", (hidden, queries))
        if biased:
            yield TensorSpec(f"{at}.o_proj.bias", (hidden,))
        if self.normed_heads:
            yield TensorSpec(f"{at}.q_norm.weight", (head_dim,), not self.norms_minus_one)
            yield TensorSpec(f"{at}.k_norm.weight", (head_dim,), not self.norms_minus_one)


@dataclass(frozen=True, slots=True)
class OptionalPart:
    """A part that a KerasHub class always has (pooler, output layer), but that checkpoints of some classes lack."""

    title: str
    names: str
    """Regular expression that matches the names of the part's tensors."""
    without: tuple[str, ...]
    """Endings of class names in `transformers` (``ForMaskedLM``) whose checkpoints may lack the part."""
    output: str
    """What the part computes (``the pooled output``). A checkpoint without the part is loaded, and a note in the report
    says that this result is meaningless until trained."""


POOLER = r"(\w+\.)?pooler\.(dense\.)?(weight|bias)"
DECODER_HEADS = r"score\.|qa_outputs\."
VISION_HEADS = r"classifier\.|decoder\.\d+\."
VISION_POOLER = {r"(model\.)?vision_tower\.(vision_model\.)?head\..+": "the vision tower's pooling head, never called"}
MASK_TOKEN = {r"(\w+\.)?embeddings\.mask_token": "replaces masked patches, in masked training only"}
OPTIONAL_POOLER = OptionalPart(
    "pooler",
    POOLER,
    # A ``BertModel`` may have been created with ``add_pooling_layer=False``.
    ("Model", "ForMaskedLM", "ForCausalLM", "LMHeadModel", "ForTokenClassification", "ForQuestionAnswering"),
    "the pooled output",
)
OPTIONAL_OUTPUT_LAYER = OptionalPart(
    "output layer",
    r"lm_head\.weight",
    ("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"),
    "token_embedding(…, reverse=True)",
)
