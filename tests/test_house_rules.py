"""The house rules of CONTRIBUTING.md that a machine can check."""

import re
from collections import Counter

from tests import REPOSITORY

SOURCES = sorted((REPOSITORY / "src/vmgahp").rglob("*.py"))


def test_a_module_has_800_lines_at_most_and_what_has_a_street_is_in_it() -> None:
    assert len(SOURCES) > 100
    assert [path.name for path in SOURCES if path.read_text().count("\n") > 800] == []
    assert len([path for path in SOURCES if path.parent.name == "vmgahp"]) <= 9


def test_no_two_classes_have_one_name() -> None:
    """Private ones are known in their module alone."""
    declared = re.compile(r"^ *class ([^\W_]\w*)[(:]", re.MULTILINE)
    names = Counter(name for path in SOURCES for name in declared.findall(path.read_text()))
    assert names["Settings"] == 1
    assert [name for name, number in names.items() if number > 1] == []


IMPORTED = re.compile(r"^ *(?:from|import) tests\.(?:.*\W)?test_\w+", re.MULTILINE)


def test_no_test_module_imports_another() -> None:
    for line in ("from tests.host.test_run import x", "import tests.test_cli", "  from tests.host import y, test_run"):
        assert IMPORTED.search(line)
    found = {path.name: IMPORTED.findall(path.read_text()) for path in (REPOSITORY / "tests").rglob("*.py")}
    assert {name: modules for name, modules in found.items() if modules} == {}
