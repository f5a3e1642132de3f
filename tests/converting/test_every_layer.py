"""Every class of `keras.layers` with weights, and models that share, nest and hook them: all writers, all readers."""

import inspect
import re

import keras
import keras_layers
import pytest
import saving_models as made
from keras_layers import LAYERS, applied
from written_everywhere import check

import shardload
from shardload.errors import UnsupportedError


def reloaded_by_keras(model, folder):
    model.save(folder / "keras.keras")
    return keras.saving.load_model(folder / "keras.keras")


WITH_WEIGHTS = {
    (16,): ["AdditiveAttention", "Attention", "BatchNormalization", "Dense", "EinsumDense", "GroupNormalization",
            "LayerNormalization", "Normalization", "PReLU", "RMSNormalization", "SpectralNormalization"],
    (4, 16): ["Conv1D", "Conv1DTranspose", "DepthwiseConv1D", "GroupQueryAttention", "MultiHeadAttention",
              "SeparableConv1D", "TimeDistributed"],
    (3, 16): ["Bidirectional", "GRU", "GRUCell", "LSTM", "LSTMCell", "RNN", "SimpleRNN", "SimpleRNNCell",
              "StackedRNNCells"],
    (4, 4, 3): ["Conv2D", "Conv2DTranspose", "DepthwiseConv2D", "SeparableConv2D"],
    (3, 4, 3): ["ConvLSTM1D"],
    (3, 4, 4, 2): ["Conv3D", "Conv3DTranspose", "ConvLSTM2D"],
    (2, 3, 3, 3, 2): ["ConvLSTM3D"],
    (): ["Embedding", "ReversibleEmbedding"],
}  # fmt: skip
"""Classes by the shape of one example; of `()`, those of integers."""
WITHOUT_WEIGHTS = {
    "Activation", "ActivityRegularization", "Add", "AlphaDropout", "AugMix", "AutoContrast", "Average",
    "CategoryEncoding", "CenterCrop", "Concatenate", "ContrastLimitedAdaptiveHistogramEqualization", "CutMix",
    "Discretization", "Dot", "Dropout", "ELU", "Equalization", "Flatten", "GaussianDropout", "GaussianNoise",
    "HashedCrossing", "Hashing", "Identity", "InputLayer", "Lambda", "LeakyReLU", "Masking", "MaxNumBoundingBoxes",
    "Maximum", "MelSpectrogram", "Minimum", "MixUp", "Multiply", "Permute", "RandAugment", "ReLU", "RepeatVector",
    "Rescaling", "Reshape", "Resizing", "Softmax", "Solarization", "Subtract", "UnitNormalization",
    *(f"Adaptive{of}Pooling{d}D" for of in ("Average", "Max") for d in (1, 2, 3)),
    *(f"{what}{d}D" for what in ("AveragePooling", "Cropping", "GlobalAveragePooling", "GlobalMaxPool", "MaxPool",
                                 "SpatialDropout", "UpSampling", "ZeroPadding") for d in (1, 2, 3)),
    *(f"Random{what}" for what in (
        "Brightness", "ColorDegeneration", "ColorJitter", "Contrast", "Crop", "ElasticTransform", "Erasing", "Flip",
        "GaussianBlur", "Grayscale", "Hue", "Invert", "Perspective", "Posterization", "Rotation", "Saturation",
        "Sharpness", "Shear", "Translation", "Zoom")),
}  # fmt: skip
"""Also those with nothing but the state of a seed generator, which Keras does not save."""
ELSEWHERE = {
    **dict.fromkeys(("IntegerLookup", "StringLookup", "TextVectorization"), "needs TensorFlow; test_load_assets.py"),
    "FlaxLayer": "another library's, and a JaxLayer",
    "TFSMLayer": "another library's",
    "TorchModuleWrapper": "another library's, which stores computed values",
    "JaxLayer": "needs TensorFlow, and stores plain weights",
    "STFTSpectrogram": "in `spectrogram`",
    **dict.fromkeys(("Layer", "Wrapper"), "abstract"),
    "Pipeline": "runs with TensorFlow, and has only layers without weights",
}


def test_every_class_of_keras_has_a_place_here():
    placed = {*(n for names in WITH_WEIGHTS.values() for n in names), *WITHOUT_WEIGHTS, *ELSEWHERE}
    assert set(keras_layers.classes()) == placed


def test_nothing_that_is_said_to_have_no_weights_makes_any():
    def own(name):
        bases = keras_layers.classes()[name].__mro__
        return [c for c in bases if issubclass(c, LAYERS.Layer) and c is not LAYERS.Layer]

    adds = re.compile(r"\badd_(weight|variable)\(")
    assert [n for n in sorted(WITHOUT_WEIGHTS) if any(adds.search(inspect.getsource(c)) for c in own(n))] == []


@pytest.mark.parametrize("shape", WITH_WEIGHTS, ids=str)
def test_every_class_with_weights_comes_back_from_every_file(shape, tmp_path):
    def make():
        x = keras.Input(shape or (5,), dtype="float32" if shape else "int32")
        return keras.Model(x, [applied(name, x) for name in WITH_WEIGHTS[shape]])

    check(make, tmp_path)


SAVED = {name: getattr(made, name) for name in ("tied", "containers", "shared", "nested", "wrapped", "mixed")}
SAVED |= {"spectrogram": made.spectrogram}
SAVED |= {"hooked": made.around(made.Named, made.InFolders, made.Collecting, made.State)}


@pytest.mark.parametrize("name", SAVED)
def test_what_is_shared_nested_or_hooked_comes_back_from_every_file(name, tmp_path):
    assert check(SAVED[name], tmp_path).refused == {}


# Quantising compiles for seconds.
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning")
@pytest.mark.filterwarnings("ignore:Invalid quantization mode:UserWarning")
@pytest.mark.parametrize("mode", ["int8", "int4", "float8"])
def test_quantised_layers_come_back_from_every_file(mode, tmp_path):
    assert check(made.quantised(mode), tmp_path).refused == {}


@pytest.mark.parametrize("layer", [made.Counting, made.Doubling, made.AsNumPy])
def test_a_hook_that_saves_other_values_than_variables_is_refused(layer, tmp_path):
    refused = check(made.around(layer), tmp_path).refused
    message = f"save_own_variables of {layer.__name__} at 'layers/{layer.__name__.lower()}' saves arrays"
    assert set(refused) == {"live.weights.h5", "parts.weights.json", "of_step.weights.h5", "of_step_parts.weights.json"}
    for error in refused.values():
        assert isinstance(error, UnsupportedError)
        assert message.replace("asnumpy", "as_num_py") in str(error)


def test_a_hook_that_leaves_out_a_weight_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match=r"no layer saves 1 variable \('.*/forgetful/.*' …\) with its save_own"):
        shardload.save_as(made.around(made.Forgetful)(), tmp_path / "out.weights.h5")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_variable_comes_back_from_every_file(tmp_path):
    assert check(made.around(made.Empty), tmp_path).refused == {}


# Keras says so when it finds no state of a built optimizer.
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning")
def test_the_state_of_a_second_optimizer_is_left_out_with_a_note(tmp_path):
    check(made.adversaries, tmp_path, without="second/")
    report = shardload.save_as(made.adversaries(), tmp_path / "out.weights.h5")
    assert report.notes == ("the state of the optimizer second was left out: only weights are saved",)


def test_layers_in_several_others_come_back_where_keras_can_describe_them(tmp_path):
    refused = check(made.owned_twice, tmp_path).refused
    assert "no description of their model" in str(refused.pop("of_file.weights.json"))
    assert set(refused) == {"of_step.weights.h5", "of_step_parts.weights.json"}
    assert all("is not connected to `inputs`" in str(error) for error in refused.values())
    with pytest.raises(ValueError, match="is not connected to `inputs`"):
        reloaded_by_keras(made.owned_twice(), tmp_path)
