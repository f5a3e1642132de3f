"""Collectives are read from the text of compiled programs: every form of instruction, loop and group."""

import pytest

from shardload.layout_checks.hlo import group_axes, replica_groups, shape_bytes
from shardload.parallel import Collective, collectives_in
from shardload.sharding.mesh import MeshSpec

MESH = MeshSpec.parse("2x4", axes="data,model")
OVER_DATA = ((0, 4), (1, 5), (2, 6), (3, 7))
OVER_MODEL = ((0, 1, 2, 3), (4, 5, 6, 7))


def program(*lines, others=""):
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule jit_f, is_scheduled=true\n\n{others}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n"


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add", OVER_DATA),
        ("replica_groups=[2,4]<=[8], channel_id=1", OVER_MODEL),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", OVER_DATA),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={1}", OVER_MODEL),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", OVER_DATA),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", (tuple(range(8)),)),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", OVER_MODEL),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", OVER_DATA),
        ("replica_groups={}, use_global_device_ids=true", ()),
        ("channel_id=3", ()),
        ("source_target_pairs={{0,4},{4,0}}", ((0, 4),)),
        ("source_target_pairs={{0,1},{2,3},{1,2}}", ((0, 1, 2, 3),)),
    ],
)
def test_groups_in_every_form(text, groups):
    assert replica_groups(text) == groups


def test_axes_of_groups():
    assert group_axes(OVER_DATA, MESH) == ("data",) and group_axes(OVER_MODEL, MESH) == ("model",)
    assert group_axes(((0, 1), (2, 3)), MESH) == ("model",)
    assert group_axes((tuple(range(8)),), MESH) == ("data", "model")


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [
        ("f32[16,128]{1,0}", 8192), ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", 2048), ("pred[7]", 7), ("s4[6]{0}", 3),
        ("f8e4m3fn[10]", 10), ("f32[]", 4), ("(f32[2]{0}, /*index=1*/(s32[], u8[3]), token[])", 15),
    ],
)  # fmt: skip
def test_bytes_of_shapes(shape, nbytes):
    assert shape_bytes(shape) == nbytes


def test_a_combined_instruction_counts_all_its_operands():
    text = program(
        '%ar = (f32[8]{0}, bf16[4]{0}) all-reduce(%a, %b), replica_groups=[2,4]<=[8], metadata={op_name="jit(f)/dense"}'
    )
    (found,) = collectives_in(text, MESH)
    assert found == Collective("all-reduce", 40, "bf16+f32", 2, 4, ("model",), source="jit(f)/dense")


def test_a_start_and_its_done_count_once():
    text = program(
        "%s1 = f32[8]{0} all-reduce-start(%x), replica_groups=[2,4]<=[8], to_apply=%add",
        "%d1 = f32[8]{0} all-reduce-done(%s1)",
        "%s2 = (f32[2]{0:T(256)}, f32[8]{0:T(256)}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}",
        "%d2 = f32[8]{0} all-gather-done(%s2)",
        "%s3 = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,4},{4,0}}",
        "ROOT %d3 = f32[8]{0} collective-permute-done(%s3)",
    )
    found = [(c.kind, c.nbytes, c.operands) for c in collectives_in(text, MESH)]
    assert found == [("all-reduce", 32, 1), ("all-gather", 32, 1), ("collective-permute", 32, 1)]


def test_a_wrapped_asynchronous_instruction_counts_once():
    wrapped = (
        "%wrapped (p: f32[8]) -> f32[2] {\n  ROOT %rs = f32[2]{0} reduce-scatter(%p), replica_groups=[2,4]<=[8]\n}"
    )
    text = program(
        "%s = ((f32[8]{0}), f32[2]{0}, s32[]) async-start(%x), calls=%wrapped",
        "ROOT %d = f32[2]{0} async-done(%s), calls=%wrapped",
        others=wrapped,
    )
    assert [(c.kind, c.nbytes) for c in collectives_in(text, MESH)] == [("reduce-scatter", 8)]


BODY = """%inner (p: (f32[8])) -> (f32[8]) {
  ROOT %ar = f32[8]{0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
}
%body (p: (f32[8])) -> (f32[8]) {
  ROOT %w = (f32[8]{0}) while(%p), condition=%c, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
}
"""


def test_a_collective_that_xla_for_tpu_divides_among_fusions_counts_once():
    gather = (
        "f32[8,4]{{1,0}} all-gather(%x), channel_id={0}, replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, "
        'use_global_device_ids=true, frontend_attributes={{chain_id="{1}"}}'
    )
    text = "HloModule m\n\n"
    for n, (channel, chain) in enumerate([(7, 1), (7, 1), (9, 2)]):
        text += f"%fused.{n} (x: f32[2,4]) -> f32[8,4] {{\n  %x = f32[2,4]{{1,0}} parameter(0)\n"
        text += f"  ROOT %g.{n} = {gather.format(channel, chain)}\n}}\n\n"
    text += "ENTRY %main (x: f32[2,4]) -> f32[8,4] {\n  %x = f32[2,4]{1,0} parameter(0)\n"
    for n in range(3):
        text += f"  %f.{n} = f32[8,4]{{1,0}} fusion(%x), kind=kCustom, calls=%fused.{n}\n"
    text += "}\n"
    assert [(c.kind, c.nbytes, c.count) for c in collectives_in(text, MESH)] == [("all-gather", 128, 1)] * 2


def test_what_xla_for_tpu_writes_as_an_all_reduce_and_a_slice_is_a_reduce_scatter():
    others = (
        "%all-reduce-scatter.7 (input: bf16[8,4]) -> bf16[2,4] {\n  %input = bf16[8,4]{1,0} parameter(0)\n"
        "  %ar = bf16[8,4]{1,0} all-reduce(%input), channel_id=5, replica_groups=[2,4]<=[8], to_apply=%add\n"
        "  ROOT %ds = bf16[2,4]{1,0} dynamic-slice(%ar, %i, %zero), dynamic_slice_sizes={2,4}\n}\n"
    )
    text = program("ROOT %f = bf16[2,4]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.7", others=others)
    (found,) = collectives_in(text, MESH)
    assert (found.kind, found.nbytes, found.axes) == ("reduce-scatter", 16, ("model",))


def test_a_program_for_tpu_states_no_groups():
    text = program("ROOT %ar = f32[8]{0:T(256)S(1)} all-reduce(%x), channel_id=1, replica_groups={}, to_apply=%add")
    (found,) = collectives_in(text, MESH)
    assert (found.nbytes, found.group_size, found.axes) == (32, 0, ()) and "over some axes" in str(found)


def test_loops_multiply_and_nest():
    loop = '%w = (f32[8]{0}) while(%x), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}'
    (found,) = collectives_in(program(loop, others=BODY), MESH)
    assert (found.count, found.inside, found.total_bytes) == (15, "", 480)


def test_a_loop_of_unknown_length_and_a_branch_are_marked():
    (found,) = collectives_in(program("%w = (f32[8]{0}) while(%x), condition=%c, body=%body", others=BODY), MESH)
    assert (found.count, found.inside) == (5, "loop") and "loop of unknown length" in str(found)
    branch = program("%c = f32[8]{0} conditional(%i, %x, %x), branch_computations={%inner, %other}", others=BODY)
    (found,) = collectives_in(branch, MESH)
    assert (found.count, found.inside) == (1, "branch") and str(found).endswith("in a branch")
