"""The shape of the house: imports point down, heavy packages stay in their rooms, the front door is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "shardload"

LAYERS = {
    0: {"errors", "bounds", "manifest", "units", "dtypes"},
    1: {"stores", "loaders"},
    2: {"mesh", "layout", "planner", "_blocks", "_casts", "_reads", "_regions"},
    3: {
        "transfer",
        "devices",
        "_budget",
        "_buffers",
        "_chunks",
        "_fanout",
        "_crew",
        "_mover",
        "_verified",
        "_checks",
        "_patches",
        "_ahead",
        "_placement",
        "_scatter",
        "_whole",
        "_fingerprint",
        "_orbax",
        "_snapshot",
        "_last_words",
        "_agreement",
        "_heartbeat",
        "_processes",
        "_joint",
        "_witness",
        "steps",
        "writers",
    },
    4: {
        "_keras",
        "_assets",
        "_form",
        "_hub",
        "_build_errors",
        "fidelity",
        "_config_defaults",
        "_config_forms",
        "abstraction",
        "distribution",
        "names",
        "assign",
        "parallel",
        "whereabouts",
    },
    5: {
        "loading",
        "restoring",
        "data",
        "verifying",
        "comparing",
        "converting",
        "_job",
        "_together",
        "_accord",
        "_accounts",
        "reports",
        "progress",
        "resolve",
        "synth",
        "generate",
        "callbacks",
    },
    6: {"cli", "console", "__main__"},
}

CONFINED = {
    "h5py": {"loaders/hdf5.py", "synth/h5_writer.py", "writers/h5.py"},  # one reads, two write
    "gguf": {"loaders/gguf_rows.py"},
    "keras_hub": {"_hub.py"},
    "orbax": {"_orbax.py"},
    "xxhash": {"steps/_digest_list.py"},
}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def home(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def layer(name: str) -> int:
    for number, names in LAYERS.items():
        if name in names:
            return number
    raise AssertionError(f"shardload/{name} has no layer: add it to LAYERS")


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    own = layer(home(path))
    for name in imports(path):
        if name.startswith("shardload."):
            target = name.split(".")[1]
            if (PACKAGE / target).exists() or (PACKAGE / f"{target}.py").exists():
                assert layer(target) <= own, f"{path.name} (layer {own}) imports {name} (layer {layer(target)})"


@pytest.mark.parametrize("package", CONFINED)
def test_heavy_packages_stay_in_their_rooms(package):
    users = {str(p.relative_to(PACKAGE)) for p in modules() if any(n.split(".")[0] == package for n in imports(p))}
    assert users == CONFINED[package]


def test_only_one_file_touches_private_keras():
    users = {home(p) for p in modules() if any(n.startswith("keras.src") for n in imports(p))}
    assert users <= {"_keras"}


@pytest.mark.parametrize("command", ["import shardload", "import shardload.cli", "import shardload; shardload.__all__"])
def test_front_door_is_light(command):
    heavy = "{'jax', 'keras', 'keras_hub', 'tensorflow', 'orbax', 'h5py', 'tensorstore', 'xxhash', 'numpy.testing'}"
    code = f"{command}\nimport sys\nprint(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_module_has_the_name_of_a_public_function():
    """Importing ``shardload.plan`` as a module would put it in place of the function."""
    import shardload

    assert not {home(p) for p in modules()} & (set(shardload.__all__) - {"callbacks", "data", "errors"})
