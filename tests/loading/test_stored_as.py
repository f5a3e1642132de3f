"""Rules for arrays: whatever the dims, the array is what NumPy makes of the tensors, and back."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from transfer_harness import Chunks, Rows, check, load, manifest_of

from shardload.errors import LayoutError, MismatchError, UsageError
from shardload.manifest import Extent, Tensor
from shardload.pipeline.array_parts import array_to_load, array_to_save
from shardload.pipeline.stored_as import StoredAs
from shardload.sharding.layout import Bounds, Layout
from shardload.sharding.mesh import MeshSpec
from shardload.stores.local import located
from shardload.transfer.planning import Binding, plan_transfers

MESHES = [MeshSpec.parse(m) for m in ("1x8", "2x4", "1x3", "1x1", "data=2,model=3")]


def grouped(data, names):
    """Put names, in order, into groups: a dim each, or several in one; sometimes a dim of length 1 in between."""
    groups, text = [], []
    names = list(names)
    while names:
        count = data.draw(st.integers(1, min(3, len(names))))
        group, names = names[:count], names[count:]
        groups.append(group)
        text.append(group[0] if count == 1 and data.draw(st.booleans()) else f"({' '.join(group)})")
        if data.draw(st.integers(0, 9)) == 0:
            groups.append([])
            text.append("1")
    return groups, " ".join(text)


def merged(value, groups, sizes):
    return value.reshape([int(np.prod([sizes[name] for name in group])) for group in groups])


class Case:
    """A random rule, the array by NumPy, and the tensors that are cut out of it."""

    def __init__(self, data):  # noqa: PLR0915  one step after the other, as a person would
        draw = data.draw
        own = [f"d{i}" for i in range(draw(st.integers(0, 4)))]
        length = {name: draw(st.sampled_from([1, 2, 3, 4, 6, 8])) for name in own}
        placeholders = {"layer": draw(st.integers(1, 4)), "expert": draw(st.integers(1, 2))}
        placeholders = dict(list(placeholders.items())[: draw(st.integers(0, 2))])
        joined = draw(st.sampled_from([None, None, *own[:1], "new"]))
        counts = [draw(st.integers(1, 3)) if joined in own else 1 for _ in range(draw(st.integers(2, 3)))]
        counts = counts if joined else [None]
        taken = draw(st.sampled_from([None, *own[1:2]]))
        padded = draw(st.sampled_from([None, *own[2:3]]))
        array = {**length, **placeholders}
        if joined:
            array[joined] = sum(counts)
        multiple = draw(st.sampled_from([2, 4, 8]))
        if padded:
            array[padded] = -(-length[padded] // multiple) * multiple
        single = bool(taken) and draw(st.booleans())  # takes one index of a dim, which the array then lacks
        if single:
            length[taken] = 1
        before, after = (draw(st.integers(0, 2)), draw(st.integers(0, 2))) if taken else (0, 0)
        right = draw(st.permutations([n for n in array if not (single and n == taken)]))
        left = draw(st.permutations(own))
        self.right, right_text = grouped(data, right)
        self.left, left_text = grouped(data, left)
        # The array with a dim for each name, filled from the tensors' own numbers.
        self.dims, self.array = right, array
        value = np.zeros([array[n] for n in right], np.uint16)
        self.tensors, number = {}, 1
        patterns = [f"t{i}" + "".join(f".{{{n}}}" for n in placeholders) for i in range(len(counts))]
        first = 0
        for pattern, count in zip(patterns, counts, strict=True):
            sizes = length | ({joined: count} if joined else {})
            stored = sizes | ({taken: before + length[taken] + after} if taken else {})
            for index in np.ndindex(*placeholders.values()):
                shape = [stored[n] for n in left]
                tensor = np.arange(number, number + int(np.prod(shape))).astype(np.uint16).reshape(shape)
                number += tensor.size
                name = pattern.format(**dict(zip(placeholders, index, strict=True)))
                self.tensors[name] = merged(tensor, self.left, stored)
                part = tensor[tuple(slice(before, before + length[n]) if n == taken else slice(None) for n in left)]
                order = [n for n in right if n in left]
                part = part.transpose([left.index(n) for n in left if n not in order] + [left.index(n) for n in order])
                where = []
                for n in right:
                    if n in placeholders:
                        where.append(index[list(placeholders).index(n)])
                    elif n == joined:
                        where.append(slice(first, first + count) if n in own else first)
                    else:
                        where.append(slice(0, sizes[n]))
                value[tuple(where)] = part.reshape([sizes[n] for n in order])
            first += count or 0
        self.value = merged(value, self.right, array)
        take = {taken: before if single else slice(before, before + length[taken])} if taken else {}
        self.full = {taken: before + length[taken] + after} if taken else {}
        self.rule = StoredAs(
            patterns if joined else patterns[0],
            f"{left_text} -> {right_text}",
            along=joined,
            sizes={n: s for n, s in length.items() if n not in (joined, taken)}
            | self.full
            | placeholders
            | ({joined: counts} if joined else {}),
            take=take,
            pad={padded: multiple} if padded else {},
        )


def layouts(data, shape):
    mesh = data.draw(st.sampled_from(MESHES))
    free, spec = list(data.draw(st.permutations(mesh.axes))), []
    for n in shape:
        fits = free and n % mesh.axis_size(free[-1]) == 0 and data.draw(st.booleans())
        spec.append((free.pop(),) if fits else ())
    return Layout(mesh, tuple(spec))


def bindings_of(found, dtype, layout):
    whole = Bounds.whole(found.shape)
    return [Binding("v", p.view, np.dtype(dtype), layout, box=None if p.box == whole else p.box) for p in found.parts]


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_rule_in_any_layout(tmp_path_factory, data):
    case = Case(data)
    path = tmp_path_factory.mktemp("any") / "f.bin"
    kind = data.draw(st.sampled_from(["raw", "decoded", "chunks"]))
    values = dict(case.tensors)
    if kind == "decoded":
        values = {n: Rows(v, path=located(path)) for n, v in values.items()}
    if kind == "chunks":
        values = {n: Chunks(v, tuple(data.draw(st.integers(1, k)) for k in v.shape)) for n, v in values.items()}
    manifest = manifest_of(path, {"pad": np.zeros(3, np.uint8), **values})
    stated = case.value.shape if data.draw(st.booleans()) else None
    found = array_to_load(case.rule, "v", manifest.tensors, stated)
    assert found.shape == case.value.shape
    assert found.is_padded == (sum(p.box.size for p in found.parts) < case.value.size)
    saved = array_to_save(case.rule, "v", found.shape, case.full)
    assert saved == found
    dtype = data.draw(st.sampled_from([np.uint16, np.uint32]))
    layout = layouts(data, found.shape)
    targets = bindings_of(found, dtype, layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardload.transfer.planning.DIRECT_RUN_BYTES", data.draw(st.sampled_from([1, 8, 1 << 10])))
        patch.setattr("shardload.transfer.planning.STAGED_BYTES", data.draw(st.sampled_from([8, 40, 1 << 20])))
        block_bytes = data.draw(st.sampled_from([7, 64, 1 << 20]))
        try:
            plan = plan_transfers(manifest, targets, host_memory_bytes=1 << 20, block_bytes=block_bytes)
        except LayoutError as error:  # a dim that chunks cut elsewhere
            assert kind == "chunks" and "expected dims that are only selected" in str(error)
            event("refused")
            return
        arrays, stats = load(plan, manifest, placement=data.draw(st.sampled_from(["adopt", "upload"])))
    check(arrays["v"], case.value.astype(dtype), layout)
    assert stats.peak_staging_bytes <= 1 << 20
    # Each byte is read once.
    if kind == "raw" and block_bytes == 1 << 20:
        ends = sorted((block.offset, block.offset + block.read_bytes) for block in plan.blocks)
        assert all(a <= b for (_, a), (b, _) in itertools.pairwise(ends))
    assert plan.device_bytes[0] * plan.bindings[0].layout.mesh.size >= case.value.astype(dtype).nbytes


def tensors_of(shapes):
    path = located(__file__)
    return {n: Tensor(n, shape, np.dtype(np.float32), Extent(path, 0)) for n, shape in shapes.items()}


def test_layers_of_several_kinds():
    rule = StoredAs("layers.{layer}.w", "out in -> layer in out", indices={"layer": range(1, 6, 2)})
    found = array_to_load(rule, "v", tensors_of({f"layers.{i}.w": (2, 3) for i in range(6)}), None)
    assert found.shape == (3, 3, 2)
    assert [tensor.name for tensor in found.tensors] == ["layers.1.w", "layers.3.w", "layers.5.w"]


def test_a_length_follows_from_the_target():
    rule = StoredAs("q", "(heads head) in -> in heads head")
    tensors = tensors_of({"q": (8, 3)})
    assert array_to_load(rule, "v", tensors, (3, 2, 4)).shape == (3, 2, 4)
    with pytest.raises(
        UsageError, match=r"the length of 'heads' does not follow from the shapes.*sizes=\{'heads': …\}"
    ):
        array_to_load(rule, "v", tensors, None)
    with pytest.raises(MismatchError, match=r'shape \(8, 3\), expected "\(heads head\) in" with heads=3'):
        array_to_load(replace(rule, sizes={"heads": 3}), "v", tensors, None)


def test_pieces_that_lie_apart_are_refused_when_too_many():
    from shardload.errors import UnsupportedError

    rule = StoredAs(["a", "b"], "n -> (n pair)", along="pair")
    with pytest.raises(UnsupportedError, match="more than 1048576 separate runs"):
        array_to_load(rule, "v", tensors_of({"a": (1 << 20,), "b": (1 << 20,)}), None)


@pytest.mark.parametrize(
    ("shapes", "rule", "text"),
    [
        ({"l.0.w": (2,), "l.2.w": (2,)}, StoredAs("l.{i}.w", "n -> i n"), r"tensors for i 0, 2, expected 0, 1, 2, …"),
        ({"l.0.v": (2,)}, StoredAs("l.{i}.w", "n -> i n"), r"no tensor 'l.\{i\}.w'. Did you mean 'l.0.v'"),
        ({"l.0.w": (2,), "l.1.w": (3,)}, StoredAs("l.{i}.w", "n -> i n"), r"'l.1.w' has shape \(3,\), expected \(2,\)"),
        ({"l.0.w": (2, 2)}, StoredAs("l.{i}.w", "n -> i n"), r'the tensor has shape \(2, 2\), expected "n"'),
        (
            {"l.0.w": (2,)},
            StoredAs("l.{i}.w", "n -> i n", indices={"i": range(2)}),
            r"no tensor 'l.1.w'. Did you mean 'l.0.w'",
        ),
        ({"l.0.w": (2,)}, StoredAs("l.{i}.w", "n -> i n", indices={"i": ()}), "a list in indices= is empty"),
        (
            {"a": (2, 3), "b": (2, 4)},
            StoredAs(["a", "b"], "n m -> n m", along="n"),
            "m is 3 in the first and 4 in another",
        ),
        (
            {"a": (4,)},
            StoredAs("a", "n -> n", take={"n": slice(2, 5)}),
            "Cannot take 2:5 of n for 'v': it has length 4",
        ),
        ({"a": (4,)}, StoredAs(["a", "a"], "n -> k n", along="k"), "it names 1 tensor more than once"),
    ],
)
def test_what_does_not_fit(shapes, rule, text):
    with pytest.raises((MismatchError, UsageError), match=text):
        array_to_load(rule, "v", tensors_of(shapes), None)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tensors": ""}, "expected the name of a tensor"),
        ({"tensors": []}, "expected the name of a tensor"),
        ({"tensors": "a.{layer}"}, "there are no dims"),
        ({"tensors": "a.{}", "dims": "n -> n"}, "a placeholder has no name"),
        ({"tensors": ["a.{x}", "b.{y}"], "dims": "n -> x n"}, "different placeholders"),
        ({"tensors": "a", "dims": "n m"}, "expected one arrow"),
        ({"tensors": "a", "dims": "n ((m)) -> n m"}, "is no list of dims"),
        ({"tensors": "a", "dims": "n 2 -> n"}, "'2' is no name of a dim"),
        ({"tensors": "a", "dims": "n n -> n"}, "'n' is on the left of -> twice"),
        ({"tensors": "a", "dims": "n -> n n"}, "'n' is on the right of -> twice"),
        ({"tensors": "a", "dims": "n m -> n"}, "'m' is not on the right"),
        ({"tensors": "a", "dims": "n -> n m"}, "'m' on the right of -> is neither"),
        ({"tensors": "a.{layer}", "dims": "n -> n"}, "'layer' is not on the right"),
        ({"tensors": "a.{layer}", "dims": "layer n -> layer n"}, "'layer' is a placeholder and a dim"),
        ({"tensors": ["a", "b"], "dims": "n -> n"}, "give both or none"),
        ({"tensors": "a", "dims": "n -> n", "along": "n"}, "give both or none"),
        ({"tensors": "a", "dims": "n -> n", "sizes": {"m": 1}}, "sizes= names 'm', expected one of n"),
        ({"tensors": "a", "dims": "n -> n", "sizes": {"n": -1}}, "sizes= has -1 for 'n'"),
        ({"tensors": "a", "dims": "n -> n", "sizes": {"n": (1, 2)}}, "expected a number"),
        ({"tensors": ["a", "b"], "dims": "n -> n", "along": "n", "sizes": {"n": (1,)}}, "expected 2 numbers, one for"),
        ({"tensors": "a", "dims": "n -> n", "take": {"n": slice(None, 2)}}, "take= has slice"),
        ({"tensors": "a", "dims": "n -> n", "take": {"n": slice(0, 4, 2)}}, "take= has slice"),
        ({"tensors": "a.{x}", "dims": "n -> x n", "indices": {"x": "01"}}, "indices= has '01' for 'x'"),
        ({"tensors": "a", "dims": "n -> n", "pad": {"n": 0}}, "a multiple to pad to"),
        ({"tensors": "a", "dims": "n -> n", "take": {"n": slice(0, 1)}, "pad": {"n": 2}}, "pad= names 'n'"),
    ],
)
def test_rules_that_contradict_themselves(arguments, text):
    with pytest.raises(UsageError, match=text):
        StoredAs(**arguments)
