"""Tiny Hugging Face folders for every architecture KerasHub converts, made by asking its converters.

A converter says which tensors it wants (``port_weight(variable, name, hook)``); the shape is whichever of the
few plausible ones its hook turns into the variable's shape. Tensors it fetches directly get shapes from `SHAPES`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import re
import types
from unittest import mock

import hub_folders
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import shardload.keras_bridge.abstraction
from shardload.hub import building, kerashub
from shardload.keras_bridge.saving import saved_objects
from shardload.manifest import Extent, Manifest, Tensor
from shardload.stores.local import located

COMMON = {
    "vocab_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32,
    "intermediate_size": 56, "head_dim": 8, "max_position_embeddings": 24, "rope_theta": 10000.0,
    "rope_parameters": {"rope_theta": 10000.0}, "rms_norm_eps": 1e-6, "layer_norm_eps": 1e-6,
    "tie_word_embeddings": False, "sliding_window": 8, "use_sliding_window": False, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "dropout": 0.0, "attention_dropout": 0.0, "attention_bias": False,
    "image_size": 32, "patch_size": 16, "qkv_bias": True, "drop_path_rate": 0.0, "type_vocab_size": 2,
    "query_pre_attn_scalar": 8, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
    "output_router_logits": False, "router_aux_loss_coef": 0.01, "num_experts": 3, "num_local_experts": 3,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "mlp_ratio": 2,
}  # fmt: skip
CONFIGS = {
    "gemma": {}, "gemma2": {}, "gemma3_text": {"rope_theta": 1e6, "rope_local_base_freq": 1e4}, "llama": {},
    "mistral": {}, "mixtral": {}, "qwen2": {"tie_word_embeddings": True}, "qwen3": {}, "qwen2_moe": {},
    "qwen3_moe": {}, "smollm3": {"no_rope_layers": [1, 0], "layer_types": ["full_attention"] * 2, "mlp_bias": False},
    "gpt2": {"n_layer": 2, "n_head": 4, "n_embd": 32, "resid_pdrop": 0.0, "n_positions": 24}, "bert": {},
    "roberta": {}, "xlm-roberta": {}, "distilbert": {"n_layers": 2, "n_heads": 4, "dim": 32, "hidden_dim": 56},
    "albert": {"embedding_size": 16, "num_hidden_groups": 1, "inner_group_num": 1},
    "bart": {"d_model": 32, "encoder_ffn_dim": 56, "decoder_ffn_dim": 56, "encoder_layers": 2, "decoder_layers": 2}
    | {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "esm": {"position_embedding_type": "rotary", "pad_token_id": 1},
    "vit": {"architectures": ["ViTForImageClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}},
    "deit": {"architectures": ["DeiTForImageClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}},
    "dinov2": {"layerscale_value": 1.0, "use_swiglu_ffn": False, "image_size": 64},
    "swin": {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4},
    "gpt_oss": {"sliding_window": 24},
}  # fmt: skip
"""By ``model_type``: what differs from `COMMON`."""

SHAPES = {
    r"attn\.c_attn\.weight": (32, 96),
    r"attn\.c_attn\.bias": (96,),
    r"block_sparse_moe\.experts\.\d+\.w[13]\.weight": (56, 32),
    r"block_sparse_moe\.experts\.\d+\.w2\.weight": (32, 56),
    r"mlp\.experts\.\d+\.(gate|up)_proj\.weight": (24, 32),
    r"mlp\.experts\.\d+\.down_proj\.weight": (32, 24),
    r"layers\.0\.blocks\.\d\.attention\.self\.(query|key|value)\.weight": (16, 16),
    r"layers\.1\.blocks\.\d\.attention\.self\.(query|key|value)\.weight": (32, 32),
    r"layers\.0\.blocks\.\d\.attention\.self\.(query|key|value)\.bias": (16,),
    r"layers\.1\.blocks\.\d\.attention\.self\.(query|key|value)\.bias": (32,),
    r"embeddings\.token_type_embeddings\.weight": (1, 32),
    r"gate_up_proj_blocks": (3, 112, 1, 16),
    r"gate_up_proj_scales": (3, 112, 1),
    r"gate_up_proj_bias": (3, 112),
    r"down_proj_blocks": (3, 32, 1, 28),
    r"down_proj_scales": (3, 32, 1),
    r"down_proj_bias": (3, 32),
}
"""Of tensors fetched directly or cut into parts, by pattern."""


def config_of(model_type):
    return {**COMMON, "architectures": [""], **CONFIGS[model_type], "model_type": model_type}


class AskingLoader(contextlib.ExitStack):
    """Answers a converter with seeded random tensors and remembers them."""

    preset, prefix, safetensor_config = "", "", None

    def __init__(self, dtype):
        super().__init__()
        self.rng = np.random.default_rng(0)
        self.dtype = np.dtype(dtype)
        self.tensors = {}

    def make(self, name, shape):
        if name.endswith(("_blocks", "_scales")):
            self.tensors[name] = self.rng.integers(120, 130, size=shape).astype(np.uint8)
        else:
            self.tensors.setdefault(name, self.rng.normal(size=shape).astype(self.dtype))
        return self.tensors[name]

    def get_tensor(self, name):
        if name in self.tensors:
            return self.tensors[name]
        if known(name) is None:
            raise KeyError(name)
        return self.make(name, known(name))

    def port_weight(self, keras_variable, hf_weight_key, hook_fn=None):
        wanted = tuple(keras_variable.shape)
        if "c_attn" in hf_weight_key:  # query, key and value in one
            self.get_tensor(hf_weight_key)
            return
        fitting = []
        for shape in candidates(wanted):
            whole = np.zeros(shape, self.dtype).view(Uncast)
            with contextlib.suppress(ValueError, IndexError):
                found = hook_fn(whole, list(wanted)) if hook_fn else whole
                if found.shape == wanted:
                    fitting.append((not np.shares_memory(found, whole), len(fitting), shape))
        assert fitting, f"no shape of {hf_weight_key} fits {keras_variable.path} {wanted}"
        self.make(hf_weight_key, min(fitting)[2])


class Uncast(np.ndarray):
    """An array whose casts are views, so that memory tells which shapes a hook only rearranges."""

    def astype(self, *args, **kwargs):
        return self[...]


def known(name):
    return next((shape for pattern, shape in SHAPES.items() if re.search(pattern + "$", name)), None)


def candidates(shape):
    """Shapes a hook may turn into ``shape``: dims permuted, neighbours merged, two rows more."""
    bases = [(*shape[:d], math.prod(shape[d : d + 2]), *shape[d + 2 :]) for d in range(len(shape) - 1)]
    for base in [shape, *bases, (math.prod(shape),), (1, *shape)]:
        yield base
        yield from sorted(set(itertools.permutations(base)) - {base})
    if shape:
        yield (shape[0] + 2, *shape[1:])


def described(folder, model_type):
    """A folder with a configuration only, as a manifest a model can be built from."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(model_type)))
    (folder / "tokenizer_config.json").write_text("{}")
    held = {str(n): Tensor(str(n), (1,), np.dtype(np.float32), Extent(located(""), 0)) for n in range(9)}
    return Manifest(located(folder), "hf-safetensors", held, {}, config_of(model_type))


def write(folder, model_type, model, dtype="float32", *, files=1, unwanted=True):
    """A folder KerasHub and we can load; ``model`` is only asked for shapes. One tensor in it is ``unwanted``."""
    config = config_of(model_type)
    convert = kerashub.converter(described(folder, model_type))
    loader = AskingLoader(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    with contextlib.redirect_stdout(io.StringIO()):
        convert.convert_weights(getattr(model, "backbone", model), loader, config)
        if "ForImageClassification" in config["architectures"][0]:
            convert.convert_head(model, loader, config)
    extra = {"model.unwanted.weight": np.ones(3, np.float32)} if unwanted else {}
    save(folder, {**extra, **loader.tensors}, files)
    return folder


def save(folder, tensors, files):
    names = list(tensors)
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weight_map = {}
    for part in range(files):
        file = f"model-{part + 1:05}-of-{files:05}.safetensors"
        save_file({n: tensors[n] for n in names[part::files]}, folder / file)
        weight_map.update(dict.fromkeys(names[part::files], file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@contextlib.contextmanager
def keeping_values():
    """Inside the block, KerasHub's converter of Mistral casts to float32, not to float16, which changes no value."""
    from keras_hub.src.utils.transformers import convert_mistral

    names = types.SimpleNamespace(**{**vars(np), "float16": np.float32})
    with mock.patch.object(convert_mistral, "np", names):
        yield


def reference(folder, model, model_type):
    """Fill ``model`` the way KerasHub does, but for `keeping_values`."""
    from keras_hub.src.utils.transformers.safetensor_utils import SafetensorLoader

    config = config_of(model_type)
    convert = kerashub.converter(described(folder, model_type))
    with contextlib.redirect_stdout(io.StringIO()), keeping_values(), SafetensorLoader(str(folder)) as loader:
        convert.convert_weights(getattr(model, "backbone", model), loader, config)
    if "ForImageClassification" in config["architectures"][0]:
        with SafetensorLoader(str(folder), prefix="") as loader:
            convert.convert_head(model, loader, config)
    return model


def build(folder, model_type, dtype="float32", *, abstract=False):
    manifest = hub_folders.described(folder, model_type)
    if not abstract:
        return building.build_model(manifest, dtype=dtype)
    with shardload.keras_bridge.abstraction.abstract():
        return building.build_model(manifest, dtype=dtype)


IGNORED = ("name", "built", "training", "is_awq_calibrated", "is_gptq_calibrated")
"""Of no consequence: the first call builds SmolLM3's rotary layer, and KerasHub's converter sets ``training`` on it,
which nothing reads; the last two say what quantisation did to a layer, and only some layers have them."""


def settings_of(model):
    """Every plain attribute of every layer; activations by what they compute."""
    found = {}
    for path, layer in saved_objects(model):
        for name, value in vars(layer).items():
            if name in ("activation", "act_layer") and callable(value):
                found[path, name] = np.asarray(value(np.array([-1.0, 0.5], np.float32))).tolist()
            elif not name.startswith("_") and isinstance(value, int | float | str | None) and name not in IGNORED:
                found[path, name] = value
    return found
