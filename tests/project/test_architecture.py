"""The shape of the house: imports point down, heavy packages stay in their rooms, the front door is light."""

import ast
import dataclasses
import graphlib
import inspect
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from package_edges import EDGES

import shardload
from shardload.pipeline.joint_arrays import ArraysRequest
from shardload.pipeline.request import LoadRequest, LoadWeightsRequest, PlanRequest, RestoreRequest

PACKAGE = Path(__file__).parents[2] / "shardload"
TESTS = PACKAGE.parent / "tests"
ABOUT_OTHERS = {"keras_bridge/test_keras_contract.py", "support/keras_suite_plugin.py"}
"""Tests of what Keras keeps private and shardload relies on, and what adapts Keras' own tests."""
PRIVATE_OF_OTHERS = {
    "_build_cache": "KerasHub: how a model makes the cache of its generation",
    "_embeddings": "Keras: the kernel of an Embedding under LoRA",
    "_getframe": "sys: who asks for a garbage collection",
    "_npy_value": "JAX: the copy on the host that an array keeps",
    "_path": "Keras: gives two variables one path",
    "_replace": "named tuples",
    "_render_traceback_": "IPython: what a notebook shows of an error",
    "_repr_html_": "IPython: what a notebook shows",
    "_serialize_model_as_json": "Keras: what its own callback saves",
    "_tokenizer": "tokenizers: the trained vocabulary",
}
"""Private names of other libraries that tests may use, and what for."""

CONFINED = {
    "h5py": {"loaders/hdf5/datasets.py", "loaders/hdf5/writer.py"},  # one reads, one writes
    "gguf": {"loaders/gguf/rows.py"},
    "keras_hub": {"hub/kerashub.py"},
    "orbax": {"loaders/orbax/saving.py"},
    "obstore": {f"stores/{name}.py" for name in ("answers", "clients", "queries", "requests", "uploads")},
    "boto3": {"stores/clients.py"},
    "xxhash": {"runs/digest_list.py", "stores/range_files.py"},  # steps; cached ranges
}


@cache
def modules() -> dict[str, Path]:
    """Every module by its dotted name without ``shardload.``; the front door itself is left out."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts).removesuffix("__init__").rstrip(".")] = path
    return {name: path for name, path in found.items() if name}


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names that a file imports anywhere in it."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def own_imports(path: Path) -> Iterator[str]:
    """What a file imports of shardload, as the longest dotted name that is a module."""
    for name in imports(path):
        found = name.removeprefix("shardload.")
        while found not in modules() and "." in found:
            found = found.rpartition(".")[0]
        if name.startswith("shardload.") and found in modules():
            yield found


def package(name: str) -> str:
    return name.partition(".")[0]


@cache
def edges() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {package(name): set() for name in modules()}
    for name, path in modules().items():
        found[package(name)] |= {package(other) for other in own_imports(path)} - {package(name)}
    return found


@pytest.mark.parametrize("name", sorted(edges()))
def test_a_package_imports_what_is_listed(name):
    assert name in EDGES, f"shardload/{name} is new: say in EDGES what it may import"
    assert edges()[name] == EDGES[name]


def test_imports_make_no_cycle_and_the_list_is_in_order():
    list(graphlib.TopologicalSorter(EDGES).static_order())
    order = list(EDGES)
    assert order == sorted(order, key=lambda name: (depth(name), name))
    assert EDGES.keys() == edges().keys()


@cache
def depth(name: str) -> int:
    """How many floors lie below."""
    return max((1 + depth(below) for below in EDGES[name]), default=0)


def imported_in_package(name: str) -> set[str]:
    """Return the modules of its own package that a module imports, directly or through others."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        new = {other for other in own_imports(modules()[waiting.pop()]) if package(other) == package(name)} - seen
        seen |= new
        waiting += new
    return seen


def test_modules_of_a_package_import_each_other_in_one_direction():
    assert [name for name in modules() if name in imported_in_package(name)] == []


def test_a_module_with_an_underscore_is_not_imported_from_another_package():
    for name, path in modules().items():
        home = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for other in own_imports(path):
            folder, _, leaf = other.rpartition(".")
            assert not leaf.startswith("_") or leaf == "__main__" or home == folder, f"{name} imports {other}"


def test_a_name_with_an_underscore_is_not_imported_from_another_module():
    for name, path in modules().items():
        for other in (one.removeprefix("shardload.") for one in imports(path) if one.startswith("shardload.")):
            module, _, leaf = other.rpartition(".")
            assert other in modules() or module not in modules() or not leaf.startswith("_"), f"{name} imports {other}"


FILE_MODULES = {"os", "pathlib", "tempfile", "shardload.stores.local"}
FRONT_DOOR = "loaders.recognition"
"""Takes the paths of users."""
WRITERS = {"loaders.file_pieces", "loaders.hdf5.writer", "loaders.orbax.saving"}
"""Modules of loaders that write, besides the formats that have a function `write_file`."""
WRITER = "loaders.safetensors"
"""Reads through a store, and writes to a path in the functions of `WRITING`."""
WRITING = {"write_skeleton", "write_file_skeleton", "_write"}
USED_OF_FILES = {
    FRONT_DOOR: {"os", "shardload.stores.local.located"},
    WRITER: {"pathlib.Path"},
    "loaders.keras_archive": {"shardload.stores.local.write_private_copy"},
}


@pytest.mark.parametrize("name", sorted(name for name in modules().keys() - WRITERS if name.startswith("loaders.")))
def test_loaders_open_files_through_their_store_only(name):
    if "\ndef write_file(" in modules()[name].read_text():
        return
    found = {other for other in imports(modules()[name]) for own in FILE_MODULES if f"{other}.".startswith(f"{own}.")}
    assert found <= USED_OF_FILES.get(name, set())
    tree = ast.parse(modules()[name].read_text())
    reading = [node for node in tree.body if name != WRITER or getattr(node, "name", "") not in WRITING]
    assert not [n for top in reading for n in ast.walk(top) if isinstance(n, ast.Name) and n.id == "Path"]
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [call for call in called if ast.unparse(call) in ("open", "io.open")]


ASKS_FOR_URLS = {
    "stores.remote": "the place: location_of",
    "stores.clients": "takes an address apart, and makes the client for its scheme",
    "stores.local": "file://, and URLs that are no place to write to",
    "resolve": "names hubs: kaggle://, hf://",
    "resolve.hubs": "names hubs: kaggle://, hf://",
    "accelerating": "names a hub: hf://; leaves every other address to Keras",
}
"""Modules that look at the scheme of an address, and why each is no second place that asks "is it a URL"."""
SCHEMES = {"s3", "gs", "http", "https", "hf", "kaggle"}
ASKING = {"startswith", "removeprefix", "partition", "split", "match", "fullmatch", "search", "compile", "urlsplit"}


def asks_for_urls(path: Path) -> bool:
    """Whether a module compares text with a scheme, or searches it for one."""
    for node in nodes(path):
        is_call = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ASKING
        asks = is_call or isinstance(node, ast.Compare)
        texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)] if asks else []
        if any(isinstance(text, str) and ("://" in text or text in SCHEMES) and len(text) < 40 for text in texts):
            return True
    return False


def test_one_place_asks_whether_a_source_is_a_url():
    """All others ask for a location, and look at the properties of its store."""
    assert {name for name, path in modules().items() if asks_for_urls(path)} == ASKS_FOR_URLS.keys()


SHARED_NAMES = {
    *("SPEC", "FAMILY", "open_file", "open_folder", "open_index", "open_variant", "folder_of", "describe_folder"),
    *("write_skeleton", "BUILT_IN", "GROUP", "announced", "names", "register", "unregister"),
    *("convert", "diff", "inspect", "load", "plan", "serve", "synth", "verify"),
}
"""What formats and families declare, the interface of their two registries, and commands named as what they run."""


def test_a_public_name_stands_in_one_module():
    found, classes = defaultdict(set), Counter()
    for module, path in modules().items():
        classes.update(node.name for node in nodes(path) if isinstance(node, ast.ClassDef))
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
            for name in (getattr(target, "name", getattr(target, "id", None)) for target in targets):
                found[name].add(module)
    assert {n for n, where in found.items() if len(where) > 1 and n and not n.startswith("_")} == SHARED_NAMES
    assert not [name for name, n in classes.items() if n > 1]


def test_arguments_are_written_out():
    for name, path in modules().items():
        calls = [node.func for node in nodes(path) if isinstance(node, ast.Call)]
        assert "locals" not in map(ast.unparse, calls), f"{name}: an editor, mypy and a reader cannot follow these"


@pytest.mark.parametrize("stage", ["preparing", "filling", "reporting"])
def test_a_stage_is_given_what_it_needs_and_no_request(stage):
    assert not [name for name in imports(modules()[f"pipeline.{stage}"]) if name.endswith("Request")]


WEAK = {
    "keras_bridge.model_records": "what is known about a model",
    "data.position": "the position of a running fit, in a package above Keras' private parts",
    "parallel.distribution": "the layouts that one distribution chose; it may outlive its models",
}
"""Modules that store something about objects that they do not own, and what."""


def test_one_record_says_what_is_known_about_a_model():
    assert {name for name, path in modules().items() if "WeakKeyDictionary" in path.read_text()} == WEAK.keys()


@pytest.mark.parametrize(
    ("function", "request_class", "added"),
    [
        (shardload.load, LoadRequest, set()),
        (shardload.load_weights, LoadWeightsRequest, {"as_keras"}),
        (shardload.plan, PlanRequest, {"devices", "progress", "warm_up"}),
        (shardload.restore, RestoreRequest, set()),
        (shardload.load_arrays, ArraysRequest, set()),
    ],
)
def test_a_request_has_the_parameters_of_its_function(function, request_class, added):
    asked = {name: one.default for name, one in inspect.signature(function).parameters.items()}
    fields = {
        field.name: inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(request_class)
    }
    assert {name: fields[name] for name in fields.keys() - added} == asked


def test_a_public_function_is_defined_in_one_module():
    """Commands have the names of what they run."""
    public = {name for name in shardload.__all__ if inspect.isfunction(getattr(shardload, name))}
    defined = Counter(
        name
        for module, path in modules().items()
        if package(module) != "console"
        for name in {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    )
    assert {name: defined[name] for name in public} == dict.fromkeys(public, 1)


def test_few_modules_at_the_top():
    assert len([path for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]) <= 12


def test_a_reader_does_not_have_to_jump():
    lines = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert [name for name, count in lines.items() if count > 600] == []
    assert len(lines) <= 5 * sum(lines.values()) / 1000


def private_uses(path: Path) -> Iterator[str]:
    """Names with a leading underscore that a test imports, reads of another object, or replaces."""
    for node in nodes(path):
        found: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardload"):
            found = [part for alias in node.names for part in (*node.module.split("."), alias.name)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("shardload")]
            found = [part for name in names for part in name.split(".")]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            found = [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            found = [part for a in node.args if isinstance(a, ast.Constant) for part in str(a.value).split(".")]
        yield from (name for name in found if name.startswith("_") and not name.startswith("__"))


def test_tests_use_public_names():
    for path in TESTS.rglob("*.py"):
        name = str(path.relative_to(TESTS))
        if name not in ABOUT_OTHERS:
            assert set(private_uses(path)) <= PRIVATE_OF_OTHERS.keys(), f"tests/{name}: test it through what uses it"


@pytest.mark.parametrize("heavy", CONFINED)
def test_heavy_packages_stay_in_their_rooms(heavy):
    users = {str(p.relative_to(PACKAGE)) for p in modules().values() if any(package(n) == heavy for n in imports(p))}
    assert users == CONFINED[heavy]


def test_one_place_asks_whether_a_model_has_a_backbone():
    """Users' models have an attribute of this name too."""
    users = {
        str(path.relative_to(PACKAGE))
        for path in modules().values()
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("getattr", "hasattr")
        and ast.unparse(node.args[1]) == "'backbone'"
    }
    assert users == {"keras_bridge/hub_imports.py"}


def test_only_one_package_touches_private_keras():
    users = {package(name) for name, path in modules().items() if any(n.startswith("keras.src") for n in imports(path))}
    assert users == {"keras_bridge"}


FAMILIES = "from shardload.families import registry; registry.families()"


@pytest.mark.parametrize(
    "command", ["import shardload", "import shardload.cli", "import shardload; shardload.__all__", FAMILIES]
)
def test_front_door_is_light(command):
    heavy = "{'jax', 'keras', 'keras_hub', 'tensorflow', 'orbax', 'h5py', 'tensorstore', 'obstore', 'xxhash'}"
    code = f"{command}\nimport sys\nprint(sorted({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_a_load_imports_no_solver():
    """SciPy's optimizers take a third of the time of the import, and only a search for layouts uses them."""
    code = "import keras_hub, shardload.loading, sys; print('scipy.optimize' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).endswith("False\n")


def test_no_module_has_the_name_of_a_public_function():
    """Importing ``shardload.plan`` as a module would put it in place of the function."""
    functions = set(shardload.__all__) - {"callbacks", "data", "errors", "optimizers", "parallel"}
    assert not {package(name) for name in modules()} & functions
