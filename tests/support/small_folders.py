"""Small Hugging Face folders with seeded weights, written without PyTorch, whose results PyTorch has computed once."""

import json

import numpy as np
from safetensors.numpy import save_file

from shardload.hub.config_forms import transformers_tensors

DECODER = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA = {**DECODER, "query_pre_attn_scalar": 8, "sliding_window": 64, "hidden_activation": "gelu_pytorch_tanh"}
GEMMA |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA3 = {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}
GEMMA3 |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "num_hidden_layers": 6}
QWEN = {**DECODER, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 2}
BERT = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
}  # fmt: skip
GPT2 = {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0}
CONFIGS = {
    "llama": ("LlamaModel", DECODER), "mistral": ("MistralModel", {**DECODER, "sliding_window": None}),
    "qwen2": ("Qwen2Model", QWEN), "qwen3": ("Qwen3Model", QWEN), "gemma": ("GemmaModel", DECODER),
    "gemma2": ("Gemma2Model", GEMMA), "gemma3_text": ("Gemma3TextModel", GEMMA3), "bert": ("BertModel", BERT),
    "gpt2": ("GPT2Model", GPT2),
}  # fmt: skip
TOKENS = np.array([[5, 17, 3, 42, 8, 23, 31, 11, 29, 7, 19, 44]])


def config_of(model_type, **entries):
    """A configuration; an entry of ``...`` is left out."""
    architecture, config = CONFIGS[model_type]
    config = {**config, "model_type": model_type, "architectures": [architecture], **entries}
    return {key: value for key, value in config.items() if value is not ...}


def tensors_of(config):
    rng = np.random.default_rng(0)
    return {s.name: rng.normal(0, 0.5, s.shape).astype(np.float32) for s in transformers_tensors(dict(config))}


def write(folder, model_type, **entries):
    """A folder of that configuration."""
    config = config_of(model_type, **entries)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors_of(config), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
