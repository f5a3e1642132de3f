"""Folders that `transformers` wrote: each loads and equals PyTorch, or is refused for the reason that is true.

Weights are made from names, references were computed by PyTorch (`transformers_cross`). A share of the folders runs
always; ``--every-folder`` runs all of them, and KerasHub itself on each, for the table in the documentation.
"""

import re
import zlib

import numpy as np
import pytest
from transformers_cross import folders, running, table, weights
from transformers_cross.cases import CASES

import shardload

QUICK = (
    "llama, base model", "llama, fp8 without scales", "llama, rope yarn", "llama, tied, head stored too",
    "mistral, tied",
    "qwen2, sliding window", "qwen3_moe, bfloat16", "smollm3, untied", "gemma2, 4 KV heads",
    "gemma3_text, query_pre_attn_scalar", "gemma3_text, both directions", "llama, is_causal is false",
    "gpt2, causal masks", "bert, position_ids, masked LM", "roberta, 2 token types", "esm, base model, transformers 4",
    "bart, LM, transformers 4", "swin, base model, transformers 4", "vit, classifier", "t5gemma, tied",
    "metaclip_2, both", "gemma3, vision", "gemma3, 16 tokens an image", "gemma4_text, two head_dims", "t5gemma2, tied",
    "qwen3, a norm is missing", "blip-2, t5, transformers 4",
)  # fmt: skip
"""One of each kind: what every run has."""
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*mask attached to it:UserWarning"),  # KerasHub's T5
    pytest.mark.filterwarnings("ignore:Skipping mask_decoder:UserWarning"),  # and SAM 3
]
EXPECTED = table.read()
BY_NAME = {case.name: case for case in CASES}


def pytest_generate_tests(metafunc):
    every = metafunc.config.getoption("--every-folder")
    if "case" in metafunc.fixturenames:
        chosen = [case for case in CASES if every or case.name in QUICK]
        metafunc.parametrize("case", chosen, ids=[case.name for case in chosen])
    if "any_case" in metafunc.fixturenames:
        metafunc.parametrize("any_case", CASES if every else [], ids=[case.name for case in CASES if every])


@pytest.fixture(scope="session")
def fixtures(request):
    written_now = request.config.getoption("--folders-from")
    read = {}

    def of(case):
        if case.family not in read:
            read[case.family] = folders.read_family(case.family, *([written_now] if written_now else []))
        return read[case.family][case.name]

    return of


@pytest.mark.sample(2)
@pytest.mark.slow
def test_a_folder_loads_as_in_pytorch_or_is_refused_for_the_reason_it_has(case, fixtures, tmp_path):
    expected, fixture = EXPECTED[case.name], fixtures(case)
    found = running.ours(fixture, folders.build(fixture, tmp_path / "folder"), case.mesh)
    if expected.ours == "refused":
        assert found.kind == "refused", found
        assert re.search(expected.says, found.detail), found.detail
    else:
        assert found.error <= (expected.within or running.TOLERANCE), found
        assert found.kind == ("differs" if expected.within else "equal"), found


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_kerashub_itself_does_what_the_table_says(any_case, fixtures, tmp_path):
    if EXPECTED[any_case.name].kerashub == "untried":
        pytest.skip("the table does not say")
    fixture = fixtures(any_case)
    found = running.kerashubs(fixture, folders.build(fixture, tmp_path / "folder"))
    kinds = {"equal": "equal", "wrong": "differs", "fails": "fails"}
    assert found.kind == kinds[EXPECTED[any_case.name].kerashub], found


def test_every_case_has_a_fixture_and_a_row_and_every_row_a_case():
    assert len(BY_NAME) == len(CASES) and set(QUICK) <= set(BY_NAME)
    assert set(EXPECTED) == set(BY_NAME)
    stored = {name for path in folders.FIXTURES.glob("*.json.gz") for name in folders.read_family(path.name[:-8])}
    assert stored == set(BY_NAME)


def test_every_refusal_and_every_looser_bound_has_a_reason():
    for name, row in EXPECTED.items():
        assert row.ours in ("loads", "refused") and row.kerashub in table.KERASHUB, name
        if row.ours == "refused":
            assert len(row.says) >= 3 and row.because, name
        assert not row.within or row.because, name


def test_the_documentation_has_the_table():
    text = table.PAGE.read_text(encoding="utf-8")
    assert table.page(text) == text, "run: python -m transformers_cross table"


def test_every_family_that_kerashub_converts_is_crossed_or_named_as_not():
    import inspect

    from keras_hub.src.utils.transformers.preset_loader import TransformersPresetLoader

    known = set(re.findall(r'"([a-z][\w\-]*)"', inspect.getsource(TransformersPresetLoader.__init__))) - {"model_type"}
    left_out = table.PAGE.read_text(encoding="utf-8").partition("## Not covered")[2].partition("\n## ")[0]
    assert known - {case.family for case in CASES} == {name for name in known if f"`{name}`" in left_out}


@pytest.mark.parametrize("is_causal", [True, False])
def test_sam_3_is_refused_for_nothing_but_the_mask_of_its_text_encoder(is_causal, tmp_path, monkeypatch):
    def causal(embedded, padding):
        return np.tri(embedded.shape[1], dtype="bool") & padding[:, None, :]

    if is_causal:
        monkeypatch.setattr("keras_hub.src.models.sam3.sam3_text_encoder.create_bidirectional_mask", causal)
    fixture = folders.read_family("sam3_video")["sam3_video, detector"]
    model = shardload.load(folders.build(fixture, tmp_path / "hf"), ignore_config="is_causal")
    # Masks and scores also depend on regions of boxes, which torchvision cuts out with other sums.
    names = ("pred_boxes", "presence_logits", "semantic_seg")
    found = running.compare(model, fixture | {"outputs": {name: fixture["outputs"][name] for name in names}})
    assert found.kind == ("equal" if is_causal else "differs") and (is_causal or found.error > 0.1), found


def test_weights_are_exact_in_every_dtype_and_never_change():
    import ml_dtypes

    for name, shape in (("model.norm.weight", (64,)), ("lm_head.weight", (64, 32)), ("q_proj.bias", (64,))):
        made = weights.values(name, shape)
        assert np.array_equal(made.astype(ml_dtypes.bfloat16).astype("float32"), made)
        assert np.array_equal(made.astype("float16").astype("float32"), made)
        stored = np.frombuffer(weights.to_bytes(made, "BF16"), ml_dtypes.bfloat16)
        assert np.array_equal(stored.astype("float32"), made.ravel())
    assert zlib.crc32(weights.values("lm_head.weight", (64, 32)).tobytes()) == 2340255086


def test_fixtures_are_what_transformers_writes_now(request, fixtures):
    """Under ``--folders-from``: the stored fixtures are those of this version, references within rounding."""
    if not request.config.getoption("--folders-from"):
        pytest.skip("needs fixtures written now: make folders")
    for case in CASES:
        kept, now = folders.read_family(case.family)[case.name], fixtures(case)
        assert {k: v for k, v in kept.items() if k != "outputs"} == {k: v for k, v in now.items() if k != "outputs"}
        for name, output in kept.get("outputs", {}).items():
            np.testing.assert_allclose(output["sample"], now["outputs"][name]["sample"], atol=1e-5 * output["scale"])
