"""The administrator's own words in the catalog stay, whatever is written into it and taken out."""

import threading
from pathlib import Path

import pytest

from vmgahp.commands.image import NotDone, catalog_file
from vmgahp.images import catalog

TEXT = """\
# The images of this cluster.

[a]
path = "a.qcow2"   # here
format = "qcow2"

# Do not remove before May.
[ "b.c" ]
description = "[d]"
path = "b"
format = "raw"
# the last word
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "catalog.toml"
    made.write_text(TEXT)
    made.chmod(0o640)
    return made


def test_one_more_is_written_behind_the_others(path: Path) -> None:
    catalog_file.add(str(path), "new", {"path": "n", "format": "raw", "description": 'ü "x"\\\n\x7f', "min_memory": 3})
    assert path.read_text().startswith(TEXT + "\n[new]\n")
    found = catalog.parse(str(path), path.read_bytes())
    assert found.entries["new"].description == 'ü "x"\\\n\x7f'
    assert set(found.entries) == {"a", "b.c", "new"}
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(path.parent.iterdir()) == [path]


def test_one_is_taken_out_and_all_comments_stay(path: Path) -> None:
    catalog_file.remove(str(path), "a")
    assert path.read_text() == TEXT.replace('[a]\npath = "a.qcow2"   # here\nformat = "qcow2"\n', "")
    catalog_file.remove(str(path), "b.c")
    assert [line for line in path.read_text().splitlines() if line] == [
        "# The images of this cluster.",
        "# Do not remove before May.",
        "# the last word",
    ]


@pytest.mark.parametrize(
    "text",
    [
        'a = { path = "x", format = "raw" }\n',
        '[a]\npath = "x"\nformat = "raw"\ndescription = """\n[b]\n"""\n',
        '[a]\npath = "x"\nformat = "raw"\n[a.b]\npath = "y"\nformat = "raw"\n[[c]]\n',
    ],
)
def test_what_cannot_be_taken_out_stays_as_it_is(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(NotDone):
        catalog_file.remove(str(path), "a")
    assert path.read_text() == text


def test_what_is_no_catalog_is_not_written_to(path: Path) -> None:
    for text in ("[a\n", "x = 1\n", "#" * (catalog.LARGEST + 9)):
        path.write_text(text)
        with pytest.raises(NotDone):
            catalog_file.add(str(path), "new", {"path": "n", "format": "raw"})
        assert path.read_text() == text


def test_one_writes_at_a_time(path: Path) -> None:
    def write(name: str) -> None:
        with catalog_file.locked(str(path)):
            catalog_file.add(str(path), name, {"path": name, "format": "raw"})

    threads = [threading.Thread(target=write, args=(f"n{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(catalog.parse(str(path), path.read_bytes()).entries) == 10
