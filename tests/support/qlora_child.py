"""LoRA on a quantised model, and a process that trains it, saving its adapters, until it kills itself.

python -m qlora_child RUN BASE MODE MESH EPOCHS [kill]
"""

import sys

import jax
import keras
import numpy as np
from callback_models import KillsItself

import shardload
from shardload.callbacks import OrbaxCheckpoint

sys.modules.setdefault("tensorflow", None)  # Keras and KerasHub import it where it is; it is not needed

TOKENS = np.random.default_rng(0).integers(6, 48, (8, 9))
X, Y = {"token_ids": TOKENS[:, :-1], "padding_mask": np.ones_like(TOKENS[:, :-1])}, TOKENS[:, 1:]


def qlora_model(base, mode, mesh):
    """A quantised base with LoRA: the same initial values in every process and on every mesh."""
    keras.utils.set_random_seed(5)
    model = shardload.load(base, mesh=mesh, dtype="float32")
    model.preprocessor = None
    model.quantize(mode)
    model.backbone.enable_lora(2)
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def main(run, base, mode, mesh, *rest):
    epochs, *kill = rest
    callbacks = [OrbaxCheckpoint(run, monitor="loss", save_trainable_only=True, resume=True)]
    callbacks += [KillsItself(5)] if kill else []
    model = qlora_model(base, mode, mesh)
    model.fit(X, Y, batch_size=4, epochs=int(epochs), verbose=0, shuffle=False, callbacks=callbacks)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main(*sys.argv[1:])
