"""The built pages: what a reader copies, looks for and follows, without a network."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import quote_plus, unquote

import pytest
from markdown_it import MarkdownIt

from tests import REPOSITORY
from vmgahp import errors
from vmgahp.protocol import requests

pytestmark = pytest.mark.timeout(300)  # the first test builds the pages

DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", DOCS / "index.md", *sorted(DOCS.glob("[!_]*/*.md"))]


@pytest.fixture
def blocks() -> ModuleType:
    import blocks

    return blocks


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pages, built."""
    if shutil.which("dot") is None:
        pytest.skip("needs dot")
    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent  # it is built once, whichever of the workers wants it first
    built = place / "site"
    with open(place / "site.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            made = place / "site.made"
            options = ("-b", "html", "-q", "-d", f"{place}/site.trees")
            command = [sys.executable, "-m", "sphinx", *options, str(DOCS), str(made)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            made.rename(built)
    return built


class Page(HTMLParser):
    """What a reader may miss in a page: pictures' words, the order of headings, what it fetches, what it is about."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.headings: list[int] = []
        self.silent: list[str] = []
        self.fetched: list[str] = []
        self.description = ""
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.anchors.add(given.get("id", ""))
        if tag == "a":
            self.links.append(given.get("href", ""))
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "img" and not given.get("alt"):
            self.silent.append(given.get("src", ""))
        if tag in ("script", "img", "iframe", "source") or (tag == "link" and given.get("rel") == "stylesheet"):
            self.fetched.append(given.get("src") or given.get("href", ""))
        if tag == "meta" and given.get("name") == "description":
            self.description = given.get("content", "")


def pages(site: Path) -> Iterator[tuple[str, Page]]:
    for path in sorted(site.rglob("*.html")):
        name = str(path.relative_to(site))
        if name not in ("genindex.html", "search.html") and not name.startswith("_"):
            yield name, Page(path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_block_is_for_one_place(page: Path, blocks: ModuleType) -> None:
    """Settings, submit files and commands are copied to different places, and what is copied works there."""
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        if token.type == "code_block":
            blocks.kind_of(token.content)
        elif token.type == "fence" and token.info == "sh":
            assert blocks.kind_of(token.content) == blocks.SHELL


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("apt-get install x\n\nVM_TYPE = kvm\n", "settings and sh"),
        ("vm_type = kvm\nvmgahp submit disk x\n", "sh and submit"),
        ("VM_TYPE = kvm\nvm_type = kvm\n", "settings and submit"),
        ("cat fit.out\nthe sum is 3\n", "begin the commands with"),
        ("vmgahp view 12.0     its display\n", "put # before it"),
    ],
)
def test_a_block_for_two_places_is_refused(text: str, wrong: str, blocks: ModuleType) -> None:
    with pytest.raises(ValueError, match=wrong):
        blocks.kind_of(text)


def test_the_kinds_of_blocks(blocks: ModuleType) -> None:
    assert blocks.kind_of('# MiB\nVM_MEMORY = 1024\nSTART = Owner == "alice"\n') == blocks.SETTINGS
    assert blocks.kind_of("+VMPARAM_vm_TPM = true\nvm_type = kvm\nqueue\n") == blocks.SUBMIT
    assert blocks.kind_of("cat >x <<END\nVM_TYPE = kvm\nEND\nA=1 B=2 \\\n    vmgahp probe  # why\n") == blocks.SHELL
    assert blocks.kind_of("$ vmgahp top\nVMs: 1\n") == blocks.SESSION
    assert blocks.kind_of("Hello from a guest\n") == blocks.OTHER


def test_commands_of_htcondor_have_a_place_in_its_manual() -> None:
    import htcondor_manual as manual

    ours_or_daemons = {"condor_vm", "condor_startd", "condor_starter", "condor_shadow", "condor_schedd"}
    ours_or_daemons |= {"condor_collector", "condor_negotiator", "condor_procd"}
    for page in PAGES:
        named = set(re.findall(r"`(condor_[a-z_]+)", page.read_text()))
        named = {name for name in named if not name.endswith("_t")}  # SELinux's words for them and theirs
        assert named - set(manual.COMMANDS.split()) - ours_or_daemons == set(), page


def test_a_first_mention_leads_to_htcondors_manual(site: Path) -> None:
    assert (site / "how-to/htcondor.html").read_text().count('man-pages/htcondor-jdl.html#on_exit_hold"') == 1
    assert "admin-manual/configuration/starter.html#" in (site / "how-to/transfer-plugin.html").read_text()


def test_every_error_word_is_found(site: Path) -> None:
    """By its whole name, as it stands in a log and a hold reason, as an object of the search."""
    index = json.loads((site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    found = {entry[-1] for entries in index["objects"].values() for entry in entries}
    names = {errors.PREFIX + word for word in requests.WORDS}
    assert names - found == set()
    page = (site / "reference/errors.html").read_text()
    assert {name for name in names if f'id="error-word-{name}"' not in page} == set()


@pytest.mark.skipif(shutil.which("chromium-headless-shell") is None, reason="needs chromium-headless-shell")
@pytest.mark.parametrize(
    ("asked", "page"),
    [
        ("limit memory", "how-to/limits"),
        ("survive eviction", "how-to/eviction"),
        ("why is my job held", "how-to/held"),
        ("run windows", "how-to/windows"),
    ],
)
def test_the_search_answers_with_the_right_page_first(asked: str, page: str, site: Path, tmp_path: Path) -> None:
    command = ["chromium-headless-shell", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command += ["--virtual-time-budget=10000", "--dump-dom", f"file://{site}/search.html?q={quote_plus(asked)}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    assert re.findall(r'<li class="kind-\w+"><a href="([^"#?]+)\.html', shown)[:1] == [page]


def test_what_is_copied_has_a_button_and_what_is_read_has_none(site: Path) -> None:
    text = (site / "_static/copybutton.js").read_text()
    assert "div.highlight-sh pre" in text
    assert "div.highlight-text" not in text
    page = (site / "how-to/devices.html").read_text()
    assert 'class="submit highlight-ini' in page
    assert 'class="settings highlight-ini' in page


def test_a_page_needs_no_network(site: Path) -> None:
    assert [(name, url) for name, page in pages(site) for url in page.fetched if re.match("[a-z]+:|//", url)] == []
    for style in site.rglob("*.css"):
        assert re.findall(r"url\([\"']?(?:https?:|//)|@import", style.read_text()) == [], style


def test_every_link_within_the_site_leads_somewhere(site: Path) -> None:
    seen = {(site / name).resolve(): page for name, page in pages(site)}
    broken = []
    for path, page in seen.items():
        for link in page.links:
            target, _, anchor = unquote(link).partition("#")
            place = (path.parent / target).resolve() if target else path
            if re.match("[a-z]+:", link):
                continue
            if not place.exists() or (anchor and place in seen and anchor not in seen[place].anchors):
                broken.append((str(path.relative_to(site)), link))
    assert broken == []
    assert sum(len(page.links) for page in seen.values()) > 10 * len(seen) > 100


def test_pages_can_be_heard_and_found(site: Path) -> None:
    """Each picture has words, headings leave out no level, and a page says what it is about."""
    descriptions = {}
    for name, page in pages(site):
        assert page.silent == [], name
        steps = zip([0, *page.headings], page.headings, strict=False)
        assert [step for step in steps if step[1] > step[0] + 1] == [], name
        assert page.headings.count(1) == 1, name
        assert page.description, name
        descriptions[name] = page.description
    assert len(set(descriptions.values())) == len(descriptions)


def test_the_demo_can_be_read_on_a_phone() -> None:
    """It keeps its size where there is room, and on 328 pixels its letters are eleven high."""
    assert 328 / int(re.findall(r'<svg width="(\d+)"', (DOCS / "images/demo.svg").read_text())[0]) * 13 > 10.5
