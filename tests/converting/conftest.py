"""Presets of small families, and the same in every format."""

import pytest
from conversions import FAMILIES, FORMATS

import shardload
from shardload.synth import synth


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("convert")


@pytest.fixture(scope="module")
def presets(folder):
    return {name: synth(name, scale=0.02, directory=folder) for name in FAMILIES}


@pytest.fixture(scope="module")
def made(presets, folder):
    """Each family in each format, all from its preset."""
    found = {}
    for name, preset in presets.items():
        for to in FORMATS:
            found[name, to] = folder / f"{name}-{to}"
            shardload.convert(preset, found[name, to], to=to)
    return found
