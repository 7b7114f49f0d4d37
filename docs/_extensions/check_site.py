"""Check a built site: every link within it leads somewhere, nothing is loaded from the
network.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# attributes whose address a browser loads by itself
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src"}


class Page(HTMLParser):
    """The addresses and the anchors of a page.

    links: addresses that a reader may follow, and those that a browser loads.
    loaded: the second kind alone.
    anchors: values of `id` and `name`.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the addresses and anchors of a tag."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        address = values.get(LOADED.get(tag, ""))
        if address is not None:
            self.loaded.add(address)
            self.links.add(address)
        elif tag == "a" and "href" in values:
            self.links.add(values["href"])


def problems(folder: Path) -> list[str]:
    """Return a line for each link that leads nowhere or to the network."""
    pages = {
        path.resolve(): Page(path.read_text())
        for path in sorted(folder.rglob("*.html"))
        if "_static" not in path.parts
    }
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        for link in sorted(page.links):
            address = urlsplit(link)
            if address.scheme or address.netloc:
                if link in page.loaded and address.scheme != "data":
                    found.append(f"{name} loads {link} from the network")
                continue
            target = path
            if address.path:
                target = (path.parent / unquote(address.path)).resolve()
            if not target.exists():
                found.append(f"{name} links to {link}, which does not exist")
            elif target in pages and unquote(address.fragment) not in (pages[target].anchors):
                found.append(f"{name} links to {link}, which has no such anchor")
    return found


if __name__ == "__main__":
    lines = problems(Path(sys.argv[1]))
    print("\n".join(lines) or "all links are right")
    sys.exit(bool(lines))
