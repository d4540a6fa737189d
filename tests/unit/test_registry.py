"""Cases by file and by name."""

from pathlib import Path

import pytest

from reconcile import registry
from reconcile.exceptions import ConfigError

CASES = registry.embedded_case().parent


@pytest.mark.parametrize("name", registry.case_names())
def test_every_embedded_case_has_its_file(name):
    assert registry.case_file(name) == CASES / f"{name}.toml"
    assert registry.case_file(name).is_file()


def test_no_name_is_the_default_case():
    assert registry.case_file(None) == CASES / "tiny-ternary.toml"


def test_a_file_goes_before_a_case_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny-fp8-block").write_text("")
    assert registry.case_file("tiny-fp8-block") == Path("tiny-fp8-block")


@pytest.mark.parametrize("name", ["case.toml", "a/case", "/a"])
def test_what_looks_like_a_path_stays_one(name):
    assert registry.case_file(name) == Path(name)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ConfigError, match=r'no such file, and no embedded case.*"tiny-fp8-block"'):
        registry.case_file("tiny-fp8-blok")
