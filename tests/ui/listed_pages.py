"""The pages of server/ui/pages.js, so that tests try a new page without an edit."""

from __future__ import annotations

import re
from dataclasses import dataclass

from server.glassbox.pages import page_files


@dataclass(frozen=True)
class ListedPage:
    """An entry of the list: `module` is its file below /ui/, `key` the letter behind `g`."""

    id: str
    title: str
    key: str
    module: str


def pages_of(source: str) -> list[ListedPage]:
    """Return the entries of a pages.js. Raises ValueError if one has another form."""
    lists = re.findall(r"^export const pages = \[\n(.*?)^\];", source, re.DOTALL | re.MULTILINE)
    if len(lists) != 1:
        raise ValueError("pages.js has no list `export const pages = [...];`")
    entries = re.findall(r"\{(.*?)\}", lists[0], re.DOTALL)
    return [_page_of(entry) for entry in entries]


def _page_of(entry: str) -> ListedPage:
    fields = dict(re.findall(r'\b(id|title|key): "([^"]+)"', entry))
    load = re.search(r'\bload: \(\) => import\("\./([^"]+)"\)', entry)
    if load is None or len(fields) != 3:
        form = '{ id: "ID", title: "TITLE", key: "K", load: () => import("./FOLDER/page.js") }'
        raise ValueError(f"An entry of pages.js is not {form}: {entry.strip()}")
    return ListedPage(**fields, module=load[1])


def listed_pages() -> list[ListedPage]:
    """Return the pages of the server, in the order of the rail. The first is shown at /ui/."""
    return pages_of(page_files()["pages.js"].content.decode())


def page_ids() -> list[str]:
    return [page.id for page in listed_pages()]
