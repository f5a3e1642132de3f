"""A run that EarlyStopping ends after seven epochs, in which ReduceLROnPlateau lowers the learning rate.

python -m stopping_child FOLDER [BATCH AFTER WHICH IT KILLS ITSELF]
"""

import sys

import keras
from callback_models import KillsItself, X

from shardload.callbacks import OrbaxCheckpoint

sys.modules.setdefault("tensorflow", None)  # Keras and KerasHub import it where it is; it is not needed

LOSSES = [5, 4, 3, 3.5, 3.6, 3.7, 3.8, 3.9, 4.0, 4.1, 4.2, 4.3, 4.4, 4.5, 4.6, 4.7, 4.8, 4.9, 5.0, 5.1]


class Scripted(keras.callbacks.Callback):
    """Adds a metric with given values, one per epoch; before the callbacks that monitor it."""

    def __init__(self, values=LOSSES):
        super().__init__()
        self.values = values

    def on_epoch_end(self, epoch, logs=None):
        logs["scripted"] = self.values[epoch]


def model():
    keras.utils.set_random_seed(3)
    found = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(8)])
    found.compile(keras.optimizers.Adam(0.01), "mse")
    return found


def run(folder, *, epochs, restore_best_weights=True, saver_first=True, patience=4, kill=None, **saver):
    """Train with ``resume=True``; return the model and the number of epochs it trained."""
    one = model()
    checkpoint = OrbaxCheckpoint(folder, monitor="loss", resume=True, **saver)
    watching = {"monitor": "scripted", "mode": "min"}
    others = [
        keras.callbacks.EarlyStopping(patience=patience, restore_best_weights=restore_best_weights, **watching),
        keras.callbacks.ReduceLROnPlateau(patience=2, cooldown=1, factor=0.5, **watching),
    ]
    callbacks = [Scripted(), checkpoint, *others] if saver_first else [Scripted(), *others, checkpoint]
    callbacks += [] if kill is None else [KillsItself(kill)]
    history = one.fit(X, X, batch_size=4, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks)
    return one, len(history.epoch)


if __name__ == "__main__":
    run(sys.argv[1], epochs=20, max_to_keep=None, kill=int(sys.argv[2]) if sys.argv[2:] else None)
