"""Plants each defect in a copy of the tracked files and checks that the tests it names fail there.

    python tests/mutations/run.py [--list] [NAME]...

NAME is the name of a patch, or the beginning of one; without a name all defects are planted. First the same tests run
in a copy without a defect, where they must pass. The exit code is 1 if they do not, or if a defect survives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from planted import DEFECTS, ROOT, Defect

PACKAGES = ("hpo", "trainer", "studies")


def copy_tracked(target: Path) -> None:
    """Copies the tracked files, as they are in the working tree, into `target`."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def python(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs this interpreter such that it, and every process it starts, imports the packages of `tree`."""
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    environ = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-P", *arguments], cwd=tree, env=environ, capture_output=True, text=True)


def check_imports(tree: Path) -> None:
    """Raises SystemExit if a package would be imported from elsewhere, as where it is installed."""
    code = f"import {', '.join(PACKAGES)}; print({', '.join(f'*{name}.__path__' for name in PACKAGES)}, sep='\\n')"
    places = python(tree, "-c", code).stdout.split()
    if places != [str(tree / name) for name in PACKAGES]:
        raise SystemExit(f"the copy {tree} is not imported, but {places}: unset what changes sys.path.")


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, list[str], str]:
    """Runs tests in `tree`: pytest's exit code, a line `PASSED TEST` or `FAILED TEST - WHY` of each, and all output."""
    options = ["-q", "--tb=short", "-rpf", "-p", "no:cacheprovider", "-m", "not slow"]
    options += ["-x"] if len(tests) == 1 else []  # one of its parameters is enough
    result = python(tree, "-m", "pytest", *options, *tests)
    output = result.stdout + result.stderr
    return result.returncode, [line for line in output.splitlines() if line.startswith(("PASSED ", "FAILED "))], output


def has(lines: Iterable[str], word: str, test: str) -> bool:
    """Whether one of the lines has this word for the test, or for one of its parameters."""
    names = (line.removeprefix(f"{word} ").split(" - ")[0] for line in lines if line.startswith(f"{word} "))
    return any(name == test or name.startswith((f"{test}[", f"{test}::")) for name in names)


def survives(defect: Defect, sound: Path) -> str:
    """Says why the tests of a defect do not catch it in a copy of the tree `sound`; returns nothing if they do."""
    tree = sound.with_name(defect.name)
    shutil.copytree(sound, tree)
    try:
        applied = defect.apply(tree)
        if applied.returncode:
            return f"the patch does not apply: {applied.stderr.strip()}"
        code, lines, output = run_tests(tree, defect.caught_by)
        passed = [test for test in defect.caught_by if not has(lines, "FAILED", test)]
        if code == 1 and not passed:
            return ""
        return f"pytest ended with {code}; not failed: {', '.join(passed) or 'none'}\n{output[-2000:]}"
    finally:
        shutil.rmtree(tree)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="plant these alone")
    parser.add_argument("--list", action="store_true", help="list the defects and plant none")
    options = parser.parse_args()
    if unknown := [name for name in options.names if not any(known.startswith(name) for known in DEFECTS)]:
        parser.error(f"no defect is called {unknown[0]}: --list shows all.")
    chosen = [one for name, one in DEFECTS.items() if not options.names or name.startswith(tuple(options.names))]
    if options.list:
        print(*(f"{one.name}\n  {one.sentence}\n  {' '.join(one.caught_by)}" for one in chosen), sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="hpo-mutations-") as directory:
        sound = Path(directory).resolve() / "sound"
        copy_tracked(sound)
        check_imports(sound)
        tests = list(dict.fromkeys(test for one in chosen for test in one.caught_by))
        code, lines, output = run_tests(sound, tests)
        failed = [test for test in tests if has(lines, "FAILED", test) or not has(lines, "PASSED", test)]
        if code or failed:
            print(f"without a defect pytest ended with {code}; not passed: {', '.join(failed)}\n{output[-4000:]}")
            return 1
        print(f"{len(tests)} tests pass without a defect\n{'defect':36} {'seconds':>7}  caught by")
        survivors = 0
        for one in chosen:
            began = time.monotonic()
            why = survives(one, sound)
            survivors += bool(why)
            print(f"{one.name:36} {time.monotonic() - began:7.1f}  {why or ' '.join(one.caught_by)}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} defects are caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
