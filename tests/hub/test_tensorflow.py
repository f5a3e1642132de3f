"""A model that was saved with a preprocessor that needs TensorFlow loads where there is none."""

import keras_hub
import models
import numpy as np
import pytest
from gguf_tokenizers import sentence_pieces

import shardload
from shardload.hub.kerashub import as_with_tensorflow

pytestmark = [
    # KerasHub leaves the vocabulary open when it builds a tokenizer.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]


def test_a_keras_archive_with_gemma_3_s_preprocessor(tmp_path):
    model = models.randomise(models.causal_lm("gemma3"))
    cls = keras_hub.models.Gemma3CausalLMPreprocessor
    with as_with_tensorflow(cls):
        model.preprocessor = cls(keras_hub.models.Gemma3Tokenizer(sentence_pieces(), has_vision_tokens=False))
    model.save(tmp_path / "model.keras")
    found = shardload.load(tmp_path / "model.keras")
    for one, two in zip(model.backbone.weights, found.backbone.weights, strict=True):
        np.testing.assert_array_equal(one, two)
    assert found.preprocessor is None
    assert any("model.preprocessor is None" in note for note in shardload.report(found).notes)


def test_a_preprocessor_that_needs_none_stays(tmp_path):
    model = models.randomise(models.causal_lm("gemma2"))
    model.preprocessor = keras_hub.models.GemmaCausalLMPreprocessor(keras_hub.models.GemmaTokenizer(sentence_pieces()))
    model.save(tmp_path / "model.keras")
    found = shardload.load(tmp_path / "model.keras")
    assert found.preprocessor.tokenizer("the quick").tolist() == model.preprocessor.tokenizer("the quick").tolist()
