"""Check what `hatchling build -d DIST` wrote, that the archive gave the same wheel in AGAIN, and
that the TAG of a release, if there is one, is of this version."""

import re
import sys
import tarfile
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
dist, again = map(Path, sys.argv[1:3])


def contents(folder: Path) -> dict[str, bytes]:
    """Of the one wheel in a folder; the record of sums aside."""
    (path,) = folder.glob("*.whl")
    with ZipFile(path) as wheel:
        return {n: wheel.read(n) for n in wheel.namelist() if not n.endswith("RECORD")}


wheel = contents(dist)
assert wheel == contents(again), "the archive builds another wheel"

found = [*ROOT.glob("mcftensor/**/*.py"), *ROOT.glob("mcftensor/**/README.md")]
files = {str(path.relative_to(ROOT)) for path in found}
packaged = {name for name in wheel if name.startswith("mcftensor/")}
data = {"mcftensor/py.typed", "mcftensor/tools/digests.json"}
assert packaged == files | data, packaged ^ (files | data)

(metadata,) = (text for name, text in wheel.items() if name.endswith("/METADATA"))
about = message_from_bytes(metadata)
needed = [line for line in about.get_all("Requires-Dist") if "extra ==" not in line]
assert needed == ["numpy", "torch>=2.9"], needed
for field in ("Summary", "License-Expression", "Requires-Python", "Project-URL", "Keywords"):
    assert about[field], f"no {field}"
assert about.get_payload().startswith("# mcftensor"), "the description is not the README"
assert any(name.endswith("/licenses/LICENSE") for name in wheel), "no licence"

if tags := sys.argv[3:]:
    assert tags == [f"v{about['Version']}"], f"{tags} is not of version {about['Version']}"
    heading = rf"^## \[{re.escape(about['Version'])}\] - \d{{4}}-\d\d-\d\d$"
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(heading, changes, re.MULTILINE), "the changelog has no date for it"

(archive,) = dist.glob("*.tar.gz")
with tarfile.open(archive) as source:
    names = {name.partition("/")[2] for name in source.getnames()}
for name in ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "tests/conftest.py"):
    assert name in names, f"{name} is not in the archive"
print(f"{archive.name}: {len(names)} files; wheel: {len(wheel)} files, version {about['Version']}")
