"""Pages of the site that are written elsewhere, for mkdocs (`hooks` in mkdocs.yml): nothing is kept in two places.

The README is the first page. The commands come from the program, the reference from docstrings, and the studies,
the changelog and the contributor's page from the files that lie beside what they describe. A link to a file of the
repository goes to its page where it has one, and is plain text where not.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_STUDIES = {
    page.relative_to(ROOT).as_posix(): f"studies/{page.parent.name}.md" for page in ROOT.glob("studies/*/README.md")
}
# Of the repository -> of the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "docker/README.md": "docker.md",
    "examples": "examples.md",
    **_STUDIES,
}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are not below docs/."""
    for source, page in PAGES.items():
        if (ROOT / source).is_file():
            files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for page, content in (("commands.md", commands()), ("reference.md", reference()), ("examples.md", examples())):
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Points the links of a page to pages of the site."""
    written = {site: source for source, site in PAGES.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts = _FENCE.split(markdown)  # code stands at odd places
    return "".join(part if i % 2 else _relinked(part, written, page.file.src_uri) for i, part in enumerate(parts))


def _relinked(text: str, source: str, page: str) -> str:
    def place(match: re.Match[str]) -> str:
        label, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in target:
            return match.group()
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / file).exists():
            return match.group()  # which mkdocs reports
        site = PAGES.get(file, file.removeprefix("docs/") if file.startswith("docs/") else "")
        if file == "docs/decisions":
            site = "decisions/README.md"
        if not site.endswith(".md"):
            return f"`{file}`" if label.strip("`").startswith(("docs/", file)) else f"{label} (`{file}`)"
        relative = posixpath.relpath(site, posixpath.dirname(page) or ".")
        return f"[{label.removeprefix('docs/')}]({relative}{'#' + anchor if anchor else ''})"

    return _LINK.sub(place, text)


def commands() -> str:
    """Returns the page with the help of each command, as `hpo COMMAND --help` prints it."""
    import typer.main
    from typer._click import Context

    from hpo.cli.main import app

    group = typer.main.get_command(app)
    parts = ["# Help of every command\n\nAs `hpo COMMAND --help` prints it.\n"]
    with Context(group, info_name="hpo") as outer:
        for name in sorted(group.list_commands(outer)):
            command = group.get_command(outer, name)
            assert command is not None
            with Context(command, info_name=name, parent=outer, terminal_width=100) as context:
                parts.append(f"\n## hpo {name}\n\n```text\n{command.get_help(context)}\n```\n")
    return "".join(parts)


def reference() -> str:
    """Returns the page of the Python names, each with its docstring by mkdocstrings."""
    import hpo

    parts = ["# Python\n\nWhat `import hpo` gives. Each name is imported at its first use.\n"]
    parts += [f"\n::: {module}.{name}\n" for name, module in sorted(hpo._EXPORTS.items(), key=_by_name)]
    return "".join(parts)


def _by_name(item: tuple[str, str]) -> str:
    return item[0].lower()


def examples() -> str:
    """Returns the page of the examples: each file whole."""
    parts = ["# Examples\n\nEach runs as it stands, and a test kills and resumes it.\n"]
    for file in sorted((ROOT / "examples").iterdir()):
        if file.suffix in (".py", ".yaml", ".sh"):
            language = {".py": "python", ".yaml": "yaml", ".sh": "bash"}[file.suffix]
            parts.append(f"\n## {file.name}\n\n```{language}\n{file.read_text(encoding='utf-8')}```\n")
    return "".join(parts)
