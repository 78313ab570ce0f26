"""What every optimizer loses over expansions: class by path, against itself in float64.

Measures, writes JSON, and puts the tables into the page between their markers. `--only` measures
some classes or packages again, and leaves the others as they are.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import signal
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config

import mcftensor as mcf
from common.database import configurations, paths_of
from common.roster import PACKAGES, classes, paths, subject
from common.trial import Subject, Way, displacement, error
from matrix_page import render

RESULTS = Path("benchmarks/results/optimizer-matrix.json")
PAGE = Path("docs/optimizers.md")

EXACT = Way(torch.float64)
WAYS = {
    "bf16": Way(torch.bfloat16),
    "fp32": Way(torch.float32),
    "bf16x2": Way(mcf.bf16x2),
    "bf16x3": Way(mcf.bf16x3),
}
# What an error comes from is what has to be an expansion, too, for it to go away.
REMEDIES = {
    "gradients": Way(mcf.bf16x3, gradients=True),
    "leading terms": Way(mcf.bf16x3, gradients=True, values=True),
    "states": Way(mcf.bf16x3, gradients=True, values=True, states=True),
    "casts": Way(mcf.bf16x3, gradients=True, values=True, states=True, casts=True),
}
CONFIGURATION_WAYS = {
    "fp32": Way(torch.float32),
    "bf16x2": Way(mcf.bf16x2),
    "bf16x2 full": Way(mcf.bf16x2, collage="full"),
    "bf16x3": Way(mcf.bf16x3),
    "bf16x3 full": Way(mcf.bf16x3, collage="full"),
    "fp32x2": Way(mcf.fp32x2),
}


def small(found: float, of_float32: float) -> bool:
    """Return whether an error is too small to need an explanation."""
    return found <= max(2 * of_float32, 1e-6)


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in a body that takes longer."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"takes more than {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def reason(problem: Exception) -> str:
    """The first line of an error, with its type."""
    lines = str(problem).strip().splitlines() or [""]
    return f"{type(problem).__name__}: {lines[0][:120]}"


def measure(
    tried: Subject, ways: dict[str, Way], *, oracle: Way = EXACT, **options: Any
) -> dict[str, Any] | str:
    """The errors of a subject by way, or why there are none."""
    exact = attempt(lambda: displacement(tried, oracle))
    if isinstance(exact, str):
        return exact
    return {
        name: attempt(lambda way=way: rounded(error(displacement(tried, way, **options), exact)))
        for name, way in ways.items()
    }


def attempt(action: Callable[[], Any]) -> Any:
    """What an action gives, or the error that it raises, in words."""
    try:
        with limited(900):  # compilers may take minutes
            return action()
    except Exception as problem:  # noqa: BLE001 - whatever another package raises is the result
        return reason(problem)


def rounded(x: float) -> float | str:
    """Two digits, which is what other machines may be expected to find."""
    return float(f"{x:.1e}") if x == x else "no number"


def cause(tried: Subject, of_float32: float) -> tuple[str, float] | None:
    """Return the further expansions that reduce the error to float32's, and the remaining error."""
    for name, way in REMEDIES.items():
        oracle = replace(EXACT, casts=way.casts)
        found = measure(tried, {name: way}, oracle=oracle)
        figure = found if isinstance(found, str) else found[name]
        if not isinstance(figure, str) and small(figure, of_float32):
            return name, figure
    return None


def measure_class(package: str, name: str) -> dict[str, Any]:
    """Every eager path of a class, and the cause of its error."""
    prepare()
    tried = subject(package, name)
    result: dict[str, Any] = {"paths": {}}
    for path, flags in paths(package, name).items():
        with_flags = replace(tried, keywords=tried.keywords | flags)
        result["paths"][path] = errors = measure(with_flags, WAYS)
        if isinstance(errors, str) or isinstance(errors["bf16x3"], str):
            continue
        if not small(errors["bf16x3"], errors["fp32"]):
            found = cause(with_flags, errors["fp32"])
            result.setdefault("causes", {})[path] = found
    return result


def measure_compiled(package: str, name: str) -> dict[str, Any] | str:
    """The compiled step of a class, in the path that it takes by default."""
    prepare()
    torch.compiler.reset()
    return measure(subject(package, name), {"bf16x3": WAYS["bf16x3"]}, compiled=True)


def measure_configurations(package: str, name: str) -> dict[str, Any]:
    """Every configuration of torch's database for a class, in every eager path."""
    prepare()
    return {
        configuration: {
            path: measure(replace(tried, keywords=tried.keywords | flags), CONFIGURATION_WAYS)
            for path, flags in paths_of(name).items()
        }
        for configuration, tried in configurations(name).items()
    }


def prepare() -> None:
    """One thread, of the compiler too, and no warnings of other packages."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1


PARTS: dict[str, Callable[[str, str], Any]] = {
    "classes": measure_class,
    "compiled": measure_compiled,
    "configurations": measure_configurations,
}


def tasks(part: str) -> dict[str, tuple[str, str]]:
    """What a part of the measurement consists of: package and class, by name."""
    found = {
        f"{package}.{name}": (package, name) for package in PACKAGES for name in classes(package)
    }
    if part == "configurations":
        return {n: (p, n) for p, n in found.values() if p == "torch.optim" and configurations(n)}
    return found


def everything(options: argparse.Namespace) -> dict[str, Any]:
    """All measurements, each in some process."""
    results: dict[str, Any] = {part: {} for part in PARTS}
    if options.out.exists():
        results |= json.loads(options.out.read_text())
    results["machine"] = f"{platform.machine()}, Python {platform.python_version()}"
    results["versions"] = {
        p: version({"torch.optim": "torch"}.get(p, p).replace("_", "-")) for p in PACKAGES
    }
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        jobs = {}
        for part in options.parts:
            for key, (package, name) in tasks(part).items():
                if options.only and not {package, name, key} & set(options.only):
                    continue
                if not (options.missing and key in results[part]):
                    jobs[pool.submit(PARTS[part], package, name)] = part, key
        for done, job in enumerate(as_completed(jobs), 1):
            part, key = jobs[job]
            results[part][key] = job.result()
            print(f"{done}/{len(jobs)} {part} {key}", flush=True)
            write(results, options.out)
    return results


def write(results: dict[str, Any], out: Path) -> None:
    """The results as JSON, in the order of names."""
    for part in PARTS:
        results[part] = dict(sorted(results[part].items(), key=lambda x: x[0].lower()))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    """Measure, write, render."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="classes or packages")
    parser.add_argument("--missing", action="store_true", help="go on where another run stopped")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--render", action="store_true", help="make the tables, measure nothing")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.render else everything(options)
    options.page.write_text(render(options.page.read_text(), results))


if __name__ == "__main__":
    main()
