"""CITATION.cff has the fields that its schema requires, and the same facts as
pyproject.toml.
"""

import tomllib

import pytest

from helpers import ROOT

yaml = pytest.importorskip("yaml")


def test_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    # required by schema 1.2.0
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert all(
        author.get("name") or author.get("family-names")
        for author in citation["authors"]
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["title"], citation["version"], citation["license"]) == (
        project["name"],
        project["version"],
        project["license"],
    )
