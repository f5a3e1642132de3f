"""What each dim means, for layer types on their own: the smallest models that show one rule each."""

import keras
import pytest

from shardload.parallel import choose
from shardload.sharding.mesh import MeshSpec

MESH = MeshSpec.parse("1x4")


def layouts(model, mesh=MESH):
    return {v.path.split("/", 1)[-1]: str(v.layout) for v in choose(model, mesh).variables}


def built(layer, *shape):
    layer.build(shape)
    return layer


class Block(keras.layers.Layer):
    """An MLP as blocks write it: sub-layers in attributes, made in any names."""

    def __init__(self, widths, **kwargs):
        super().__init__(**kwargs)
        self.parts = [keras.layers.Dense(n, name=f"part_{i}") for i, n in enumerate(widths)]

    def build(self, shape):
        hidden = shape[-1]
        for part in self.parts:
            part.build((None, hidden if part.units != hidden else self.parts[-2].units // self.halved))

    halved = 1


class FusedBlock(Block):
    """The first kernel makes gate and value at once, twice as wide as what the last consumes."""

    halved = 2


def test_a_gated_mlp_is_column_column_row():
    found = layouts(built(Block([256, 256, 64]), None, 64))
    assert found["part_0/kernel"] == found["part_1/kernel"] == "(-, model)"
    assert found["part_2/kernel"] == "(model, -)"


def test_a_column_bias_is_split_and_a_row_bias_is_not():
    found = layouts(built(Block([256, 64]), None, 64))
    assert found["part_0/bias"] == "(model)" and found["part_1/bias"] == "(-)"


def test_a_gate_fused_into_the_first_kernel_still_pairs():
    found = layouts(built(FusedBlock([512, 64]), None, 64))
    assert found["part_0/kernel"] == "(-, model)" and found["part_1/kernel"] == "(model, -)"


@pytest.mark.parametrize("fused", [1, 3])
def test_a_matrix_that_takes_the_heads_back_is_a_row(fused):
    class Attention(keras.layers.Layer):
        def build(self, shape):
            self.heads = keras.layers.EinsumDense("abc,cde->abde", (None, 8, 8 * fused), name="heads")
            self.heads.build(shape)
            self.out = keras.layers.Dense(64, name="out")
            self.out.build(shape)

    found = layouts(built(Attention(), None, None, 64))
    assert (found["heads/kernel"], found["out/kernel"]) == ("(-, model, -)", "(model, -)")


def test_square_kernels_are_columns_unless_a_graph_tells_which_one_feeds_the_other():
    parts = [keras.layers.Dense(64), keras.layers.Dense(64)]
    found = layouts(keras.Sequential([keras.Input((64,)), *parts]))
    assert [s for p, s in found.items() if p.endswith("kernel")] == ["(-, model)", "(model, -)"]

    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.parts = parts

        def build(self, shape):
            pass

    found = layouts(built(Block(), None, 64))
    assert [s for p, s in found.items() if p.endswith("kernel")] == ["(-, model)"] * 2


@pytest.mark.parametrize(
    ("equation", "output", "shape", "expected"),
    [
        ("btd,ndh->btnh", (None, 8, 16), (None, None, 64), "(model, -, -)"),
        ("bqm,muh->bquh", (None, 8, 16), (None, None, 64), "(-, model, -)"),
        ("...m,muh->...uh", (8, 16), (None, None, 64), "(-, model, -)"),
        ("btnh,nhd->btd", (None, 64), (None, None, 8, 16), "(model, -, -)"),
        ("btd,ndh->btnh", (None, 3, 16), (None, None, 64), "(-, model, -)"),
        ("btnh,nhd->btd", (None, 64), (None, None, 3, 16), "(-, -, model)"),
        ("btd,ndh->btnh", (None, 3, 16), (None, None, 63), "(-, -, model)"),
        ("abc,cdef->abdef", (None, 3, 8, 16), (None, None, 64), "(-, -, model, -)"),
    ],
)
def test_an_einsum_is_split_by_heads_then_by_width_then_inside_heads(equation, output, shape, expected):
    assert layouts(built(keras.layers.EinsumDense(equation, output), *shape))["kernel"] == expected


def test_the_bias_of_an_einsum_follows_its_heads():
    layer = built(keras.layers.EinsumDense("abc,cde->abde", (None, 8, 16), bias_axes="de"), None, None, 64)
    assert layouts(layer)["bias"] == "(model, -)"


def test_tall_tables_go_by_rows_and_wide_ones_by_features():
    assert layouts(built(keras.layers.Embedding(1000, 64), None))["embeddings"] == "(model, -)"
    assert layouts(built(keras.layers.Embedding(8, 64), None))["embeddings"] == "(-, model)"
    assert layouts(built(keras.layers.Embedding(1001, 64), None))["embeddings"] == "(-, model)"


def test_an_untied_output_table_goes_by_vocabulary_too():
    found = layouts(built(keras.layers.ReversibleEmbedding(1000, 64, tie_weights=False), None))
    assert found["reverse_embeddings"] == "(-, model)"


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (keras.layers.Conv2D(32, 3), "(-, -, -, model)"),
        (keras.layers.Conv1D(33, 3), "(-, model, -)"),
        (keras.layers.Conv2DTranspose(32, 3), "(-, -, model, -)"),
        (keras.layers.DepthwiseConv2D(3, depth_multiplier=3), "(-, -, model, -)"),
    ],
)
def test_convolutions_go_by_output_channels(layer, expected):
    shape = (None, 32, 16) if isinstance(layer, keras.layers.Conv1D) else (None, 32, 32, 16)
    assert layouts(built(layer, *shape))["kernel"] == expected


@pytest.mark.parametrize("name", ["Conv{}D", "Conv{}DTranspose", "DepthwiseConv{}D", "SeparableConv{}D", "ConvLSTM{}D"])
@pytest.mark.parametrize("mesh", ["1x4", "expert=3,model=2"])  # an expert axis divides the window of 6
def test_convolutions_over_one_dim_are_split_like_those_over_two(name, mesh):
    def specs(dims):
        sizes = {"kernel_size": 6} | ({} if "Depthwise" in name else {"filters": 32})
        shape = (None, *(8,) * ("LSTM" in name), *(16,) * dims, 256)
        choice = choose(built(getattr(keras.layers, name.format(dims))(**sizes), *shape), MeshSpec.parse(mesh))
        return [v.layout.spec for v in choice.variables]

    assert specs(1) == [spec[1:] if len(spec) == 4 else spec for spec in specs(2)]


def test_int8_scales_follow_their_kernels():
    dense = built(keras.layers.Dense(256, dtype="int8_from_float32"), None, 64)
    assert layouts(dense) == {"kernel": "(-, model)", "kernel_scale": "(model)", "bias": "(model)"}
    heads = keras.layers.EinsumDense("btd,ndh->btnh", (None, 8, 16), dtype="int8_from_float32")
    found = layouts(built(heads, None, None, 64))
    assert found["kernel"] == "(model, -, -)" and found["kernel_scale"].count("model") == 1


def test_lora_factors_follow_their_kernels():
    layer = built(keras.layers.Dense(256), None, 64)
    layer.enable_lora(4)
    found = layouts(layer)
    assert found["lora_kernel_a"] == "(-, -)" and found["lora_kernel_b"] == "(-, model)"
    table = built(keras.layers.Embedding(1000, 64), None)
    table.enable_lora(4)
    assert layouts(table)["lora_embeddings_a"] == "(model, -)"


def test_stacked_experts_pair_like_any_mlp():
    class Experts(keras.layers.Layer):
        def build(self, shape):
            self.up = self.add_weight(shape=(8, 64, 96), name="up")
            self.gate = self.add_weight(shape=(8, 64, 96), name="gate")
            self.down = self.add_weight(shape=(8, 96, 64), name="down")

    found = layouts(built(Experts(), None, 64))
    assert found == {"up": "(-, -, model)", "gate": "(-, -, model)", "down": "(-, model, -)"}


def test_an_unknown_layer_goes_by_its_largest_dim_that_divides():
    class Odd(keras.layers.Layer):
        def build(self, shape):
            self.a = self.add_weight(shape=(1001, 64), name="a")
            self.b = self.add_weight(shape=(33, 35), name="b")

    choice = choose(built(Odd(), None), MESH)
    assert [str(v.layout) for v in choice.variables] == ["(-, model)", "(-, -)"]
    assert [f.why for f in choice.fallbacks] == ["no dim of (33, 35) divides by 4; replicated"]


def test_small_things_and_vectors_stay_whole_without_a_fallback():
    model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(5), keras.layers.LayerNormalization()])
    choice = choose(model, MESH)
    assert choice.sharded == 0 and choice.fallbacks == ()


def test_optimizer_slots_follow_their_variables():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256)])
    model.compile(optimizer="adam", loss="mse")
    model.optimizer.build(model.trainable_variables)
    found = choose(model, MESH)
    slots = {v.path: str(v.layout) for v in found.variables if "kernel_" in v.path}
    assert sorted(slots.values()) == ["(-, model)", "(-, model)"]
