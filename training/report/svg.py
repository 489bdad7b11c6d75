"""Figures as files, and as SVG inside a page: with a title for screen readers, and in the page's colours."""

import io
import re
from xml.etree import ElementTree

from matplotlib.figure import Figure

from datacache.escaping import escaped
from training.report.html import Html
from training.report.style import PALETTE, WAITING, WHOLE

PNG_DPI = 150
_SVG, _LINK = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}href"
_COLOR = re.compile(r"#[0-9a-f]{6}")
# Names of colours in page.css, which are others on a dark screen.
_NAMES = {each: f"var(--run-{place})" for place, each in enumerate(PALETTE[:-1])}
_NAMES |= {PALETTE[-1]: "currentColor", WAITING: "var(--line)", WHOLE: "var(--quiet)"}
_URL = re.compile(r"url\(#([^)]+)\)")


def png(figure: Figure) -> bytes:
    """Return a figure as a picture on white."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return file.getvalue()


def inline(figure: Figure, name: str, title: str) -> Html:
    """Return a figure as an element of a page; ``name`` is different for each of them, and a word."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(file.getvalue())
    for child in list(root):
        if child.tag == f"{{{_SVG}}}metadata":
            root.remove(child)
    _rename(root, name)
    root.attrib |= {"role": "img", "aria-labelledby": f"{name}-title"}
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    heading = ElementTree.Element(f"{{{_SVG}}}title", {"id": f"{name}-title"})
    heading.text = escaped(title)
    root.insert(0, heading)
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    return Html(ElementTree.tostring(root, encoding="unicode"))


def _rename(root: ElementTree.Element, name: str) -> None:
    """Give elements that others refer to names of their own in the page, and colours their names."""
    used = {link.removeprefix("#") for each in root.iter() if (link := each.get(_LINK))}
    for each in root.iter():
        used.update(_URL.findall(" ".join(each.attrib.values())))
    for each in root.iter():
        own = each.attrib.pop("id", None)
        if own in used:
            each.set("id", f"{name}-{own}")
        if link := each.get(_LINK):
            each.set(_LINK, f"#{name}-{link.removeprefix('#')}")
        for key, value in list(each.attrib.items()):
            if "url(#" in value:
                each.set(key, _URL.sub(lambda found: f"url(#{name}-{found[1]})", value))
        if style := each.get("style"):
            each.set("style", _COLOR.sub(lambda found: _NAMES.get(found[0], found[0]), style))
