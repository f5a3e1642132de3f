"""A model with a frozen layer under LoRA, and a process that trains it, saving its adapters, until it kills itself.

python -m lora_child FOLDER EPOCHS [kill]
"""

import sys

import keras
import numpy as np
from callback_models import KillsItself, X

from shardload.callbacks import OrbaxCheckpoint
from shardload.keras_bridge.variables import current_value

sys.modules.setdefault("tensorflow", None)  # Keras and KerasHub import it where it is; it is not needed


def lora_model(rank=2, alpha=None, width=8):
    """A frozen layer with adapters, and two that train: the same initial values in every process."""
    keras.utils.set_random_seed(5)
    first = keras.layers.Dense(width, name="first")
    norm, last = keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(8, name="last")
    model = keras.Sequential([keras.Input((8,)), first, norm, last], name="net")
    for variable in first.trainable_variables:
        variable.trainable = False
    if rank is not None:
        first.enable_lora(rank, lora_alpha=alpha)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def content(model):
    """Values of the model and its optimizer, by a name that is the same in every process."""
    found = [*model.variables, *model.optimizer.variables]
    return {f"{n} {v.name}": np.asarray(current_value(v)) for n, v in enumerate(found)}


def main(folder, epochs, kill=False):
    callbacks = [OrbaxCheckpoint(folder, monitor="loss", save_trainable_only=True, resume=True)]
    callbacks += [KillsItself(14)] if kill else []
    lora_model().fit(X, X, batch_size=4, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(bool, sys.argv[3:]))
