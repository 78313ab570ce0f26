"""The site of the documentation: it builds without a warning, is complete, and asks no one else."""

import asyncio
import base64
import dataclasses
import itertools
import json
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import pytest
import torch

import mcftensor as mcf
from mcftensor.patches.table import TABLE

pytest.importorskip("mkdocs", reason="the packages of the extra `docs` are not installed")
pytest.importorskip("latex2mathml", reason="the packages of the extra `docs` are not installed")
browser = pytest.importorskip("support.browser", reason="aiohttp is not installed")
firefox = pytest.importorskip("support.firefox", reason="aiohttp is not installed")

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
    drawings: [...document.querySelectorAll("figure.drawing")].map(figure => {
        const shown = [...figure.querySelectorAll("svg")].filter(s => s.clientHeight);
        return shown.length == 1 ? shown[0].clientHeight : 0; // one of two, by the width
    }),
    letters: [...document.querySelectorAll("figure svg text")]
        .filter(t => t.ownerSVGElement.clientHeight)
        .map(t => parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a),
    pictures: [...document.images].map(i => i.naturalWidth),
    dark: document.body.dataset.mdColorScheme == "slate",
})"""
# Which text has less contrast than 4.5 (WCAG 2.2, level AA), and which marks of Markdown are left?
# One text of each kind of element is measured.
READ = r"""(() => {
    const light = c => {
        const line = v => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        const [r, g, b] = c.map(v => line(v / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
    };
    const over = (text, base) => {
        const [r, g, b, a = 1] = text.match(/[\d.]+/g)?.map(Number) ?? [0, 0, 0, 0];
        const scale = text.startsWith("color") ? 255 : 1;
        return [r, g, b].map((v, i) => scale * v * a + base[i] * (1 - a));
    };
    const paper = e =>
        e ? over(getComputedStyle(e).backgroundColor, paper(e.parentElement)) : [255, 255, 255];
    const content = document.querySelector(".md-content"), kinds = new Set(), faint = [];
    const texts = document.createTreeWalker(content, NodeFilter.SHOW_TEXT);
    for (let n; (n = texts.nextNode());) {
        const e = n.parentElement, up = e.parentElement, name = x => x.tagName + x.classList;
        const kind = name(e) + name(up) + e.getAttribute("style");
        if (!n.nodeValue.trim() || kinds.has(kind) || !e.getClientRects().length) continue;
        kinds.add(kind);
        if (e.closest("script, style, .md-clipboard, .headerlink, :disabled, svg .mono")) continue;
        const svg = e.closest("svg"), style = getComputedStyle(e);
        const back = paper(svg ? svg.parentElement : e);
        const [a, b] = [light(over(svg ? style.fill : style.color, back)), light(back)];
        if (Math.max(a, b) / Math.min(a, b) < 4.5) faint.push(n.nodeValue.trim().slice(0, 40));
    }
    const prose = content.cloneNode(true);
    prose.querySelectorAll("pre, code, script, style, svg, math").forEach(e => e.remove());
    return { faint, marks: prose.textContent.match(/\]\(|\*\*|```|<!--|\{:? ?[.#]\w/g) ?? [] };
})()"""

# Where do the links of the navigation lead, and what does the search find for some words?
GO = """Promise.all(
    [...document.querySelectorAll("a.md-tabs__link, a.md-nav__link")]
        .map(a => fetch(a.href).then(answer => [a.href, answer.status]))
)"""
SEARCH = """(async () => {
    const wait = time => new Promise(done => setTimeout(done, time));
    const field = document.querySelector("[data-md-component=search-query]");
    const meta = document.querySelector(".md-search-result__meta");
    document.querySelector("#__search").click();
    field.focus();
    const answers = [];
    for (const words of %s) {
        field.value = words;
        field.dispatchEvent(new KeyboardEvent("keyup", {key: "e", bubbles: true}));
        let found = [];
        for (let i = 0; i < 200; i++) {
            await wait(100);
            found = [...document.querySelectorAll(".md-search-result__link")].map(a => a.href);
            if (/^\\d/.test(meta.innerText) && found.join() !== answers.at(-1)?.join()) break;
        }
        answers.push(found);
    }
    return answers;
})()"""
# Sort a table by its second column, twice, and filter it.
RESULTS = """(() => {
    const table = [...document.querySelectorAll(".md-content table")]
        .find(t => t.tHead && t.tBodies[0].rows.length >= 16);
    const rows = () => [...table.tBodies[0].rows].filter(row => !row.hidden);
    const column = () => rows().map(row => row.cells[1].innerText);
    const button = table.tHead.rows[0].cells[1].querySelector("button");
    const scroll = table.closest(".md-typeset__scrollwrap");
    const filter = scroll.previousElementSibling.querySelector("input");
    button.click();
    const up = column();
    button.click();
    const down = column();
    filter.value = rows()[3].cells[0].innerText;
    filter.dispatchEvent(new Event("input"));
    const filtered = rows().map(row => row.cells[0].innerText);
    scroll.scrollLeft = 80;
    const edge = scroll.getBoundingClientRect().left;
    const place = rows()[0].cells[0].getBoundingClientRect().left - edge;
    return { up, down, wanted: filter.value, filtered, scrolled: scroll.scrollLeft, place };
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


def pages(site: Path) -> list[str]:
    return sorted(str(p.relative_to(site)) for p in site.rglob("*.html") if p.name != "404.html")


def public_names() -> Iterator[str]:
    """Qualified names of what users call, and of the formats."""
    yield from (name for name in mcf.__all__ if not isinstance(getattr(mcf, name), ModuleType))
    yield from (f"{place}.{name}" for name, place in mcf._MOVED.items())
    yield from ("meters.edq.Reading", "meters.edq.to_tensorboard")
    for module in (mcf.eft, mcf.expansion):
        for name, x in vars(module).items():
            if name[0] != "_" and getattr(x, "__module__", "") == module.__name__:
                yield f"{module.__name__.rpartition('.')[2]}.{name}"


def test_every_public_name_is_in_the_reference(site):
    pages = ("reference/index.html", "reference/arithmetic.html")
    text = "".join((site / page).read_text() for page in pages)
    for name in sorted({*public_names()} - {"eft.same_float_dtype", "meters.edq"}):
        found = operator.attrgetter(name)(mcf)
        if isinstance(found, (mcf.Format, tuple)):
            assert re.search(rf"<code>(mcf\.)?{name}</code>", text), name
        else:
            assert f'id="mcftensor.{name}"' in text, name


def test_every_patch_is_on_its_page(site):
    text = (site / "design/index.html").read_text()
    for row in TABLE:
        assert f"<code>{row.name}</code>" in text


def test_every_lesson_is_a_notebook_too(site):
    lessons = [name for name in pages(site) if name.startswith("tutorials/")]
    assert len(lessons) == 8
    for name in lessons:
        notebook = f"{Path(name).stem}.ipynb"
        assert json.loads((site / name).with_name(notebook).read_text())["nbformat"] == 4
        assert f'download="{notebook}" href="{notebook}"' in (site / name).read_text()


def test_the_site_fetches_nothing_from_another_host(site):
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        for match in FETCHED.finditer(path.read_text()):
            address = next(group for group in match.groups() if group)
            assert not urlsplit(address).netloc, f"{path.relative_to(site)}: {address}"


def test_mathematics_is_set_and_no_mark_is_left(site):
    formulas = 0
    for path in site.rglob("*.html"):
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
                    visit = await tab.visit(f"{base}/{name}", LOOK, width=width, dark=dark)
                    visit.value["read"] = await tab.ask(READ)
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
        assert not any(visit.value.get("read", {}).values()), (where, visit.value["read"])
        for kind in ("formulas", "drawings", "pictures"):
            assert all(size > 5 for size in visit.value[kind]), (where, kind)
        assert all(size > 8.5 for size in visit.value["letters"]), (where, "letters of figures")


def from_disk(site, tmp_path, name, script, **options):
    """What a script finds on a page that is opened from a disk."""

    async def ask():
        async with browser.browse(browser.find(), tmp_path) as tab:
            return await tab.visit(f"{site.as_uri()}/{name}", script, **options)

    return asyncio.run(ask())


needs_browser = pytest.mark.skipif(browser.find() is None, reason="no browser is found")


@needs_browser
def test_in_a_browser_pages_show_what_they_hold(site, tmp_path):
    names = ["index.html", "tutorials/frozen.html", "reference/arithmetic.html"]
    found = asyncio.run(_look(site, tmp_path, names, [(1280, False), (390, True)]))
    _check(found)
    assert found["tutorials/frozen.html", 390, True][0].value["formulas"]


@needs_browser
@pytest.mark.parametrize("part", range(4))
def test_in_a_browser_every_page_reads_from_a_disk_on_a_phone_and_a_screen(site, tmp_path, part):
    """No page is wider than its window, complains, or asks for what is not on the disk."""

    async def look():
        found, base = {}, site.as_uri()
        async with browser.browse(browser.find(), tmp_path) as tab:
            for name in pages(site)[part::4]:
                visit = await tab.visit(f"{base}/{name}", LOOK, width=390)
                found[name, 390, False] = visit, base
                await tab.resize(1280)
                seen = {**await tab.ask(LOOK), "read": await tab.ask(READ)}
                found[name, 1280, False] = dataclasses.replace(visit, value=seen), base
        return found

    _check(asyncio.run(look()))


# Pages with scripts of their own, and one of each kind of the others.
SCRIPTED = ["index", "edq", "optimizers", "reference/floats", "design/index"]
LESSONS = [f"tutorials/{name}" for name in ("still", "bf16", "transformations", "expansions")]


async def _by_firefox(site, tmp_path, names):
    found = {}
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    async with firefox.browse(firefox.find(), tmp_path) as tab:
        for name in names:
            overflow = await tab.visit(f"{site.as_uri()}/{name}", wide, width=390)
            found[name], tab.problems = [*tab.problems, *["too wide"] * (overflow > 0)], []
    return {name: problems for name, problems in found.items() if problems}


needs_firefox = pytest.mark.skipif(firefox.find() is None, reason="Firefox is not found")


@needs_firefox
def test_in_firefox_pages_report_no_error(site, tmp_path):
    names = [f"{name}.html" for name in SCRIPTED + LESSONS]
    assert asyncio.run(_by_firefox(site, tmp_path, names)) == {}


@needs_firefox
@pytest.mark.slow
def test_in_firefox_no_page_reports_an_error(site, tmp_path):
    assert asyncio.run(_by_firefox(site, tmp_path, pages(site))) == {}


@needs_firefox
def test_in_firefox_an_error_on_the_console_is_found(tmp_path):
    page = "<!doctype html><script src='none.js'></script><script>nothing.at.all</script>"
    (tmp_path / "page.html").write_text(page)
    (tmp_path / "profile").mkdir()
    (problems,) = asyncio.run(_by_firefox(tmp_path, tmp_path / "profile", ["page.html"])).values()
    assert any("nothing is not defined" in problem for problem in problems)


# Which controls of calculators there are, and which of them has the focus and shows it.
CONTROLS = """[...document.querySelectorAll(
    ".play :is(button, input, select, [tabindex]):not(:disabled)")]
        .filter(e => e.checkVisibility()).length"""
FOCUSED = """(() => {
    const e = document.activeElement, style = getComputedStyle(e);
    const all = [...document.querySelectorAll(".play :is(button, input, select, [tabindex])")];
    const shown = style.outlineStyle != "none" && parseFloat(style.outlineWidth) >= 1;
    return [all.indexOf(e), shown];
})()"""
BEFORE = """(() => {
    const play = document.querySelector(".play"), start = document.createElement("button");
    play.before(start);
    start.focus();
})()"""


@needs_browser
@pytest.mark.parametrize("name", ["reference/floats", "tutorials/bf16", "edq"])
def test_in_a_browser_tab_reaches_every_control_and_shows_where_it_is(site, tmp_path, name):
    async def walk():
        async with browser.browse(browser.find(), tmp_path) as tab:
            visit = await tab.visit(f"{site.as_uri()}/{name}.html", BEFORE)
            count, reached = await tab.ask(CONTROLS), {}
            for _ in range(3 * count + 30):
                await tab.press("Tab", 9)
                answer = await tab.send("Runtime.evaluate", expression=FOCUSED, returnByValue=True)
                place, shown = answer["result"]["value"]
                if place >= 0:
                    reached[place] = shown
                if len(reached) == count:
                    break
            return visit.problems, count, reached

    problems, count, reached = asyncio.run(walk())
    assert not problems
    assert count > 1
    assert len(reached) == count
    assert all(reached.values())


@needs_browser
def test_in_a_browser_keys_operate_a_calculator(site, tmp_path):
    """A bit by the space bar, a choice by an arrow, and an example by Enter."""
    focus = "document.querySelector('.play %s').focus()"
    text = "document.querySelector('.play').innerText"

    async def walk():
        async with browser.browse(browser.find(), tmp_path) as tab:
            await tab.visit(f"{site.as_uri()}/tutorials/bf16.html")
            shown = [await tab.ask(text)]
            for selector, key in (
                ("button.bit:last-of-type", (" ", 32, " ")),
                ("select", ("ArrowDown", 40)),
                (".examples button", ("Enter", 13, "\r")),
            ):
                await tab.ask(focus % selector)
                await tab.press(*key)
                shown.append(await tab.ask(text))
            return shown

    shown = asyncio.run(walk())
    assert all(a != b for a, b in itertools.pairwise(shown))


@needs_browser
def test_in_a_browser_navigation_leads_somewhere(site, tmp_path):
    async def ask():
        with browser.serve(site) as base:
            async with browser.browse(browser.find(), tmp_path) as tab:
                return (await tab.visit(f"{base}/tutorials/frozen.html", GO)).value

    links = asyncio.run(ask())
    assert len({urlsplit(href).path for href, _ in links}) >= len(pages(site)) - 1
    assert {status for _, status in links} == {200}


@needs_browser
@pytest.mark.parametrize("disk", [False, True])
def test_in_a_browser_search_finds(site, tmp_path, disk):
    wanted = {
        "renormalize": "#mcftensor.expansion.renormalize",
        "DataParallel": "distributed.html",
        "half()": "reference/limits.html",
        "FSDP": "distributed.html",
        "peft": "recipes.html",
        "LoRA": "start.html",
        "batchnorm": "start.html",
        "llama": "bytes.html",
        "OOM": "bytes.html",
        "wandb": "edq.html",
        "GradScaler": "moving.html",
        "bf16 fp16 tf32": "reference/floats.html",
        "two_sum": "#mcftensor.eft.two_sum",
    }

    async def ask():
        with browser.serve(site) as base:
            async with browser.browse(browser.find(), tmp_path) as tab:
                url = f"{site.as_uri() if disk else base}/index.html"
                return await tab.visit(url, SEARCH % json.dumps([*wanted]))

    visit = asyncio.run(ask())
    assert not visit.problems
    for words, found in zip(wanted, visit.value, strict=True):
        place = next((i for i, href in enumerate(found) if wanted[words] in href), None)
        assert place is not None, (words, found)
        assert place < 12, (words, found)


@needs_browser
def test_in_a_browser_tables_sort_and_filter_and_keep_their_first_column(site, tmp_path):
    visit = from_disk(site, tmp_path, "optimizers.html", RESULTS, width=390)
    assert not visit.problems
    found = visit.value
    figures = [float(x) for x in found["up"] if x[0].isdigit()]
    assert len(figures) > 12
    assert figures == sorted(figures)
    assert [float(x) for x in found["down"] if x[0].isdigit()] == figures[::-1]
    assert found["filtered"]
    assert all(found["wanted"].lower() in x.lower() for x in found["filtered"])
    assert found["scrolled"] == 80
    assert found["place"] >= 0


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_in_a_browser_calculators_answer(site, tmp_path, width, dark):
    names = [f"tutorials/{name}" for name in ("bf16", "transformations", "expansions")]
    names.append("reference/floats")

    async def play():
        with browser.serve(site) as base:
            async with browser.browse(browser.find(), tmp_path) as tab:
                urls = [f"{base}/{name}.html" for name in names]
                return [await tab.visit(url, PLAY, width=width, dark=dark) for url in urls]

    visits = asyncio.run(play())
    for visit in visits:
        assert not visit.problems
        assert not visit.value["empty"]
        assert not visit.value["unread"]
        assert visit.value["overflow"] <= 0
        assert visit.value["first"] != visit.value["last"]
    (number, walk), (pair, fma), (terms,), (line,) = (visit.value["first"] for visit in visits)
    assert "0.99609375" in number
    assert "the weight is where it was" in walk
    assert "0.00225830078125" in pair
    assert "0.00006103515625" in fma
    assert "0 of 6" in terms
    assert "half of the gap to its neighbour, 0.00195, is more than 0.0016" in line


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_the_number_line_has_a_scale(site, tmp_path, width):
    """Two labels at least, of which none touches its neighbour."""
    script = """[...document.querySelectorAll(".play .stage text")]
        .map(t => t.getBoundingClientRect()).map(box => [box.left, box.right])"""
    boxes = sorted(from_disk(site, tmp_path, "reference/floats.html", script, width=width).value)
    assert len(boxes) >= 2
    assert all(a[1] < b[0] for a, b in itertools.pairwise(boxes))


# A link that holds a state, what a calculator shows of it, and the link after a change.
STATES = {
    "tutorials/transformations.html#play=sum&a=1&b=2^-12&format=fp16": (
        ["b = 0.000244140625, rounded to fp16"],
        "#play=sum&operation=two_sum&format=fp16&a=1&b=abc",
        "“abc” is not a number",
    ),
    "tutorials/bf16.html#play=number&number=1e-45": (
        ["too small for bf16", ", zero"],
        "#play=number&number=abc&format=bf16",
        "“abc” is not a number",
    ),
    "reference/floats.html#play=line&format=e4m3&weight=1&update=-0.05&centre=1&span=1": (
        ["One ulp of e4m3 at 1 is 0.125"],
        "#play=line&format=e4m3&with=alone&rounding=to+nearest&weight=1&update=abc&centre=1&span=1",
        "“abc” is not a number",
    ),
}
CHANGE = """(async () => {
    await new Promise(done => setTimeout(done, 100));
    const root = document.querySelector(`.play[data-play="${%s}"]`);
    const shown = root.innerText;
    const field = [...root.querySelectorAll("input:not([type])")].at(-1);
    field.value = "abc";
    field.dispatchEvent(new Event("input", {bubbles: true}));
    field.dispatchEvent(new Event("change", {bubbles: true}));
    const hash = decodeURIComponent(location.hash);
    return {shown, hash, verdict: root.querySelector(".result").innerText};
})()"""


@needs_browser
def test_in_a_browser_a_link_holds_the_state_of_a_calculator(site, tmp_path):
    async def ask():
        async with browser.browse(browser.find(), tmp_path) as tab:
            return [
                await tab.visit(
                    f"{site.as_uri()}/{link}", CHANGE % json.dumps(link.split("=")[1].split("&")[0])
                )
                for link in STATES
            ]

    for visit, (texts, link, verdict) in zip(asyncio.run(ask()), STATES.values(), strict=True):
        assert not visit.problems
        for text in texts:
            assert text in visit.value["shown"]
        assert visit.value["hash"] == link
        assert verdict in visit.value["verdict"]


# Zoom in twice and move to the right, by keys, on a line that shows numbers from 0.985 to 1.015.
KEYS = """(async () => {
    await new Promise(done => setTimeout(done, 100));
    const stage = document.querySelector(".stage");
    stage.focus();
    for (const key of ["+", "+", "ArrowRight"])
        stage.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
    const hash = new URLSearchParams(location.hash.slice(1));
    const pulled = {pointerId: 1, pointerType: "mouse", bubbles: true};
    const held = stage.setPointerCapture;
    stage.setPointerCapture = () => {};
    const width = stage.getBoundingClientRect().width;
    for (const [kind, clientX] of [["pointerdown", width], ["pointermove", 0], ["pointerup", 0]])
        stage.dispatchEvent(new PointerEvent(kind, {...pulled, clientX, clientY: 5}));
    const after = new URLSearchParams(location.hash.slice(1));
    return [hash, after].map(x => ["centre", "span"].map(name => Number(x.get(name))));
})()"""


@needs_browser
def test_in_a_browser_the_number_line_is_moved_and_zoomed(site, tmp_path):
    link = "reference/floats.html#play=line&weight=1&centre=1&span=0.03"
    visit = from_disk(site, tmp_path, link, KEYS)
    assert not visit.problems
    keys, pulled = visit.value
    assert keys == pytest.approx([1 + 0.0075 / 8, 0.0075])
    assert pulled == pytest.approx([1 + 0.0075 / 8 + 0.0075, 0.0075])


@needs_browser
def test_in_a_browser_a_lesson_from_a_disk_saves_its_notebook(site, tmp_path):
    script = 'fetch(document.querySelector("a.notebook").href).then(x => x.text())'
    visit = from_disk(site, tmp_path, "tutorials/frozen.html", script)
    assert not visit.problems
    assert json.loads(visit.value) == json.loads((site / "tutorials/frozen.ipynb").read_text())


# Give the page two files, and wait for what it finds.
GIVE = """(async () => {
    const files = %s.map(text => Uint8Array.from(atob(text), c => c.charCodeAt(0)));
    const inputs = document.querySelectorAll(".play .file input");
    files.forEach((bytes, i) => {
        const given = new DataTransfer();
        given.items.add(new File([bytes], `${i}.safetensors`));
        inputs[i].files = given.files;
        inputs[i].dispatchEvent(new Event("change"));
    });
    for (let i = 0; i < 100 && !document.querySelector(".play table"); i++)
        await new Promise(done => setTimeout(done, 50));
    const cells = row => [...row.cells].map(cell => cell.innerText);
    return {
        verdict: document.querySelector(".play .verdict").innerText,
        rows: [...document.querySelectorAll(".play tbody tr")].map(cells),
        overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    };
})()"""


@needs_browser
def test_in_a_browser_two_checkpoints_are_compared(site, tmp_path):
    texts = []
    for last in (0.5, 0.25):
        tensors = {"norm.weight": torch.ones(8).bfloat16(), "w": torch.tensor([[1.0, 0.0, last]])}
        mcf.save_file(tensors, tmp_path / "file.safetensors")
        texts.append(base64.b64encode((tmp_path / "file.safetensors").read_bytes()).decode())

    page, script = "edq.html", GIVE % json.dumps(texts)
    visit = from_disk(site, tmp_path, page, script, width=390)
    assert not visit.problems
    assert visit.value["overflow"] <= 0
    assert visit.value["rows"] == [
        ["norm.weight", "8", "bf16", "100 %", "0 %", "100 %", "frozen", ""],
        ["w", "1×3", "fp32", "66.67 %", "33.33 %", "33.33 %", "mostly frozen", ""],
    ]
    assert visit.value["verdict"] == (
        "2 tensors: 1 frozen, 1 mostly frozen; 90.91 % of 11 elements unchanged"
    )


@needs_browser
@pytest.mark.slow
def test_in_a_browser_every_page_in_every_size_and_scheme(site, tmp_path):
    sizes = [(width, dark) for width in (390, 768, 1280) for dark in (False, True)]
    _check(asyncio.run(_look(site, tmp_path, pages(site), sizes)))
