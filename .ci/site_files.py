"""A hook of mkdocs: the pages of the site that are not in docs/, and the links to them.

The README is the home page, and any file of the repository that a page links is a page, too: so a
link is right in the repository and on the site.
"""

import base64
import json
import pathlib
import posixpath
import re
from collections.abc import Iterator

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parent.parent
# Code, which is left as it is; or else a link, whose group is a path in the repository.
LINK = re.compile(r"^```.*?^```|`[^`\n]*`|(?<=\]\()(?!https?:|#)([^)#\s]+)", re.S | re.M)
# What a browser fetches from another address; a page also names its own and those of neighbours.
LOADED = re.compile(
    r"<(?:script|img|iframe|link (?!rel=\"(?:canonical|prev|next)\"))"
    r"[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^>]*>"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the home page and each file that a page links."""
    found = ["README.md", "configs", *(f"docs/{file.src_uri}" for file in files)]
    for path in found:  # which grows
        found += [target for target in dict.fromkeys(_targets(path)) if target not in found]
        if not path.startswith("docs/"):
            files.append(_file(path, config))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turns the links of a page, which lead to files of the repository, to pages of the site."""
    uri = page.file.src_uri
    home = posixpath.dirname("README.md" if uri == "index.md" else _path(uri))

    def on_site(link: re.Match[str]) -> str:
        if link[1] is None:
            return link[0]
        target = _uri(posixpath.normpath(posixpath.join(home, link[1])))
        return posixpath.relpath(target, posixpath.dirname(uri) or ".")

    return LINK.sub(on_site, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuses a page that loads something from another address."""
    for page in pathlib.Path(config.site_dir).rglob("*.html"):
        if found := LOADED.search(page.read_text()):
            raise PluginError(f"{page} loads {found[0]}; nothing may be loaded from elsewhere")


def _path(uri: str) -> str:
    """The path in the repository of a page of the site; that of a folder for its list."""
    return f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri


def _uri(path: str) -> str:
    """The page of the site for a path in the repository."""
    if path == "README.md":
        return "index.md"
    if (ROOT / path).is_dir():
        return f"{path}/index.md"
    name = path.removeprefix("docs/")
    return name if name.endswith((".md", ".svg")) else f"{name}.md"


def _targets(path: str) -> Iterator[str]:
    """The files of the repository that a page links."""
    if (ROOT / path).is_dir():
        yield from (f"{path}/{file.name}" for file in sorted((ROOT / path).glob("*.py")))
    elif path.endswith(".md"):
        for link in LINK.finditer((ROOT / path).read_text()):
            if link[1]:
                yield posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1]))


def _file(path: str, config: MkDocsConfig) -> File:
    """A file as a page: Markdown and pictures as they are, code in a frame, a folder as a list.

    A notebook is a page with its outputs.
    """
    file = ROOT / path
    if file.is_dir():
        rows = [f"| [{each.name}]({each.name}) | {_about(each)} |" for each in file.glob("*.py")]
        content = "\n".join([f"# {path}", "", "| file | about |", "| --- | --- |", *sorted(rows)])
    elif file.suffix in (".md", ".svg"):
        return File.generated(config, _uri(path), abs_src_path=str(file))
    elif file.suffix == ".ipynb":
        content = "\n".join(_cells(json.loads(file.read_text())["cells"]))
    else:
        language = file.suffix[1:] or "text"
        content = f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n"
        content += f"````{language}\n{file.read_text()}````\n"
    return File.generated(config, _uri(path), content=content)


def _cells(cells: list[dict]) -> Iterator[str]:
    """A notebook as Markdown: its text, its code in frames, what it printed, and its pictures."""
    for cell in cells:
        source = "".join(cell["source"])
        yield source + "\n" if cell["cell_type"] == "markdown" else f"````python\n{source}\n````\n"
        for output in cell.get("outputs", []):
            if svg := output.get("data", {}).get("image/svg+xml"):
                data = base64.b64encode("".join(svg).encode()).decode()
                yield f'<img alt="a batch" src="data:image/svg+xml;base64,{data}">\n'
            else:
                text = output.get("text") or output["data"]["text/plain"]
                yield f"````text\n{''.join(text).rstrip()}\n````\n"


def _about(file: pathlib.Path) -> str:
    """The first line of a module's docstring."""
    return griffe.visit(file.stem, filepath=file, code=file.read_text()).docstring.lines[0]
