"""The site of the documentation: it builds without a warning, is complete, and asks no one else."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import pytest
from filelock import FileLock

import mcftensor as mcf
from mcftensor.patches.table import TABLE

pytest.importorskip("mkdocs", reason="the packages of the extra `docs` are not installed")
pytest.importorskip("latex2mathml", reason="the packages of the extra `docs` are not installed")
browser = pytest.importorskip("support.browser", reason="aiohttp is not installed")

ROOT = Path(__file__).parents[2]

# What makes a browser fetch something.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source|embed)[^>]*\ssrc=[\"']?([^\"'\s>]+)"
    r"|<link(?![^>]*rel=[\"']?(?:canonical|next|prev))[^>]*\shref=[\"']?([^\"'\s>]+)"
    r"|url\([\"']?([^\"')]+)|@import\s+[\"']([^\"']+)"
)
# Questions to a page: is it wider than the screen, is mathematics set, which scheme is it in?
LOOK = """({
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    formulas: [...document.querySelectorAll("math")].map(m => m.getBoundingClientRect().height),
    drawings: [...document.querySelectorAll("figure svg")].map(s => s.clientHeight),
    pictures: [...document.images].map(i => i.naturalWidth),
    dark: document.body.dataset.mdColorScheme == "slate",
})"""

# Where do the links of the navigation lead, and what does the search find?
GO = """Promise.all(
    [...document.querySelectorAll("a.md-tabs__link, a.md-nav__link")]
        .map(a => fetch(a.href).then(answer => [a.href, answer.status]))
)"""
SEARCH = """(async () => {
    document.querySelector("#__search").checked = true;
    const field = document.querySelector("[data-md-component=search-query]");
    field.focus();
    field.value = "renormalize";
    field.dispatchEvent(new KeyboardEvent("keyup", {key: "e", bubbles: true}));
    for (let i = 0; i < 200; i++) {
        const found = [...document.querySelectorAll(".md-search-result__link")];
        if (found.length) return found.map(a => a.href);
        await new Promise(done => setTimeout(done, 100));
    }
    return [];
})()"""

# Press every button of every calculator, and say what they showed at first and in the end.
PLAY = """(async () => {
    const plays = [...document.querySelectorAll(".play")];
    const shown = play => play.querySelector(".result").innerText;
    const first = plays.map(shown);
    const empty = [];
    for (const play of plays)
        for (let i = 0; i < play.querySelectorAll("button").length; i++) {
            const button = play.querySelectorAll("button")[i];
            button.click();
            await new Promise(done => requestAnimationFrame(done));
            if (shown(play).length < 10) empty.push(button.innerText);
        }
    return {
        first,
        last: plays.map(shown),
        empty,
        overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
        unread: document.body.innerText.includes("[object"),
    };
})()"""


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The folder of the built site, which all workers share."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "site"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            build(folder)
    return folder


def build(folder: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr


def pages(site: Path) -> list[str]:
    return sorted(str(p.parent.relative_to(site)) for p in site.rglob("index.html"))


def public_names() -> set[str]:
    """Qualified names of what users call, and of the formats."""
    names = {n for n, x in vars(mcf).items() if n[0] != "_" and not isinstance(x, ModuleType)}
    for module in (mcf.eft, mcf.expansion):
        own = [
            n for n, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__
        ]
        names |= {f"{module.__name__.rpartition('.')[2]}.{n}" for n in own if n[0] != "_"}
    return names - {"eft.same_float_dtype"} | {"edq.Reading", "edq.to_tensorboard"}


def test_every_public_name_is_in_the_reference(site):
    pages = ("reference", "reference/arithmetic")
    text = "".join((site / page / "index.html").read_text() for page in pages)
    for name in sorted(public_names()):
        found = vars(mcf).get(name)
        if isinstance(found, (mcf.Format, tuple)):
            assert re.search(rf"<code>(mcf\.)?{name}</code>", text), name
        else:
            assert f'id="mcftensor.{name}"' in text, name


def test_every_patch_is_on_its_page(site):
    text = (site / "design/patches/index.html").read_text()
    for row in TABLE:
        assert f"<code>{row.name}</code>" in text


def test_the_site_fetches_nothing_from_another_host(site):
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        for match in FETCHED.finditer(path.read_text()):
            address = next(group for group in match.groups() if group)
            assert not urlsplit(address).netloc, f"{path.relative_to(site)}: {address}"


def test_mathematics_is_set_and_no_mark_is_left(site):
    formulas = 0
    for path in site.rglob("index.html"):
        text = path.read_text()
        formulas += text.count("<math")
        prose = re.sub(r"<(pre|code|script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
        assert "$" not in re.sub(r"<[^>]+>", "", prose), path.relative_to(site)
        assert not re.search(r"<!-- (table|section):", text), path.relative_to(site)
    assert formulas > 50


async def _look(site, tmp_path, names, sizes):
    found = {}
    with browser.serve(site) as base:
        async with browser.browse(browser.find(), tmp_path) as tab:
            for name in names:
                for width, dark in sizes:
                    visit = await tab.visit(f"{base}/{name}/", LOOK, width=width, dark=dark)
                    found[name, width, dark] = visit, base
    return found


def _check(found):
    for (name, width, dark), (visit, base) in found.items():
        where = f"{name} at {width}{', dark' if dark else ''}"
        assert not visit.problems, (where, visit.problems)
        others = [r for r in visit.requests if not r.startswith((base, "data:"))]
        assert not others, (where, others)
        assert visit.value["overflow"] <= 0, where
        assert visit.value["dark"] == dark, where
        for kind in ("formulas", "drawings", "pictures"):
            assert all(size > 5 for size in visit.value[kind]), (where, kind)


needs_browser = pytest.mark.skipif(browser.find() is None, reason="no browser is found")


@needs_browser
def test_in_a_browser_pages_show_what_they_hold(site, tmp_path):
    names = [".", "tutorials/frozen", "reference/arithmetic"]
    found = asyncio.run(_look(site, tmp_path, names, [(1280, False), (390, True)]))
    _check(found)
    assert found["tutorials/frozen", 390, True][0].value["formulas"]


@needs_browser
def test_in_a_browser_navigation_and_search_lead_somewhere(site, tmp_path):
    async def ask():
        with browser.serve(site) as base:
            async with browser.browse(browser.find(), tmp_path) as tab:
                links = await tab.visit(f"{base}/tutorials/frozen/", GO)
                return links.value, (await tab.visit(f"{base}/", SEARCH)).value

    links, found = asyncio.run(ask())
    assert len({urlsplit(href).path for href, _ in links}) >= len(pages(site)) - 1
    assert {status for _, status in links} == {200}
    assert any("mcftensor.expansion.renormalize" in href for href in found)


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_in_a_browser_calculators_answer(site, tmp_path, width, dark):
    lessons = ("bf16", "transformations", "expansions")

    async def play():
        with browser.serve(site) as base:
            async with browser.browse(browser.find(), tmp_path) as tab:
                urls = [f"{base}/tutorials/{lesson}/" for lesson in lessons]
                return [await tab.visit(url, PLAY, width=width, dark=dark) for url in urls]

    visits = asyncio.run(play())
    for visit in visits:
        assert not visit.problems
        assert not visit.value["empty"]
        assert not visit.value["unread"]
        assert visit.value["overflow"] <= 0
        assert visit.value["first"] != visit.value["last"]
    (number, walk), (pair, fma), (terms,) = (visit.value["first"] for visit in visits)
    assert "0.99609375" in number
    assert "the weight is where it was" in walk
    assert "0.00225830078125" in pair
    assert "0.00006103515625" in fma
    assert "0 of 6" in terms


@needs_browser
@pytest.mark.slow
def test_in_a_browser_every_page_in_every_size_and_scheme(site, tmp_path):
    sizes = [(width, dark) for width in (390, 768, 1280) for dark in (False, True)]
    _check(asyncio.run(_look(site, tmp_path, pages(site), sizes)))
