"""A pytest plugin that puts shardload in Keras' place while Keras' own tests of saving run.

`keras.saving.load_model` and `load_weights` go to `shardload.load` and `shardload.load_weights`, and
`keras.callbacks.OrbaxCheckpoint` is ours. What shardload does not take (`handed_over`) goes to Keras as before. Where
a test insists on the words of an error, an error of ours of the same type passes, and the test is listed.
What became of each test is written as JSON to the file that KERAS_SUITE_RESULTS names.
"""

import io
import unittest
from unittest import mock

import keras
from keras.src.callbacks import orbax_checkpoint
from keras.src.saving import saving_api, saving_lib
from keras_modules import keep, make_efficientnet_quick, put_in_place, write

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import ShardloadError
from shardload.loaders import keras_archive

told = {"ours": 0, "handed_over": set(), "words": False}


class TheirPrivateNames(OrbaxCheckpoint):
    """Keras' tests save without ``fit`` where it cannot train, by a private method."""

    def _save_checkpoint(self, step):
        self.on_train_begin()
        self._save({}, epoch_done=True)

    @property
    def checkpointer(self):
        return mock.Mock(close=self.on_train_end)


def handed_over(source, options):
    """Why a call goes to Keras: what shardload has no argument or format for."""
    named = next((name for name in ("objects_to_skip", "by_name", "bad_kwarg") if name in options), None)
    if named is None and isinstance(source, io.IOBase):
        named = "file object"
    path = str(source)
    if named is None and path.endswith((".h5", ".hdf5")) and not path.endswith(".weights.h5"):
        named = "legacy .h5"
    return named


def their_load_model(original):
    def load_model(source, custom_objects=None, compile=True, safe_mode=True):
        options = {"custom_objects": custom_objects, "compile": compile, "safe_mode": safe_mode}
        if (why := handed_over(source, {})) is not None:
            told["handed_over"].add(why)
            return original(source, **options)
        told["ours"] += 1
        found = keras.distribution.distribution()
        if found is not None:
            options |= {"mesh": found.device_mesh, "layout": found._layout_map}
        # Tests of zip bombs lower Keras' limits instead of writing gigabytes; ours are the same numbers.
        floor, expansion = saving_lib._ZIP_EXTRACT_BOMB_FLOOR_BYTES, saving_lib._ZIP_MEMBER_MAX_EXPANSION
        with mock.patch.multiple(keras_archive, ASSET_FLOOR_BYTES=floor, ASSET_EXPANSION=expansion):
            return shardload.load(source, **options)

    return load_model


def their_load_weights(original):
    def load_weights(model, source, skip_mismatch=False, **options):
        if (why := handed_over(source, options)) is not None:
            told["handed_over"].add(why)
            original(model, source, skip_mismatch=skip_mismatch, **options)
            return
        told["ours"] += 1
        shardload.load_weights(model, source, strict=not skip_mismatch)

    return load_weights


put_in_place(saving_api, "load_model", their_load_model)
put_in_place(saving_lib, "load_model", their_load_model)
put_in_place(saving_api, "load_weights", their_load_weights)
put_in_place(saving_lib, "load_weights_only", their_load_weights)
put_in_place(orbax_checkpoint, "OrbaxCheckpoint", lambda _: TheirPrivateNames)


make_efficientnet_quick()

_exit = unittest.case._AssertRaisesContext.__exit__


def _exit_whatever_the_words(self, kind, error, trace):
    if self.expected_regex is not None and isinstance(error, ShardloadError) and isinstance(error, self.expected):
        told["words"] = told["words"] or not self.expected_regex.search(str(error))
        self.expected_regex = None
    return _exit(self, kind, error, trace)


unittest.case._AssertRaisesContext.__exit__ = _exit_whatever_the_words


def pytest_runtest_setup(item):
    told.update(ours=0, handed_over=set(), words=False)


def pytest_runtest_logreport(report):
    keep(report, **{**told, "handed_over": sorted(told["handed_over"])})


pytest_sessionfinish = write
