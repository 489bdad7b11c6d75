"""Elements of HTML. What is no element is text, and escaped: names of runs and files may be hostile."""

import html

from datacache.escaping import escaped

VOID = frozenset({"input", "meta"})


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def shown(text: str) -> Html:
    r"""Return a text, or HTML, as HTML.

    >>> shown("a<b>&\n"), shown(Html("<b>"))
    ('a&lt;b&gt;&amp;\\n', '<b>')
    """
    return text if isinstance(text, Html) else Html(html.escape(escaped(text)))


def tag(name: str, /, *children: str, **attributes: str) -> Html:
    """Return an element; of attributes, a last ``_`` is left out, and others become ``-``.

    >>> tag("a", "x & y", class_="b", data_at='"1"')
    '<a class="b" data-at="&quot;1&quot;">x &amp; y</a>'
    """
    words = [f' {key.rstrip("_").replace("_", "-")}="{shown(value)}"' for key, value in attributes.items()]
    begin = f"<{name}{''.join(words)}>"
    return Html(begin if name in VOID else f"{begin}{joined(*children)}</{name}>")


def joined(*parts: str) -> Html:
    """Return parts one after the other."""
    return Html("".join(map(shown, parts)))


def table(header: list[str], rows: list[list[str]], **attributes: str) -> Html:
    """Return a table, which scrolls where it is wider than the page."""
    head = tag("tr", *(tag("th", each, scope="col") for each in header))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", each) for each in row[1:])) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), **attributes), class_="wide")
