"""Elements of a page. Texts are escaped because they are texts: nothing here is put together from strings."""

from __future__ import annotations

from xml.etree import ElementTree

Node = ElementTree.Element

# What a terminal or a browser would obey is shown as its picture (U+2400 and on), or as U+FFFD.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_CONTROLS |= {0x7F: 0x2421} | dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF], 0xFFFD)


def node(name: str, *children: Node | str, **attributes: object) -> Node:
    """An element.

    Args:
        name: its tag.
        *children: elements and texts.
        **attributes: `class_` is `class`; an underscore is a hyphen; what is None is left out.
    """
    made = ElementTree.Element(name)
    for key, value in attributes.items():
        if value is not None:
            made.set(key.rstrip("_").replace("_", "-"), _clean(str(value)))
    for child in children:
        if isinstance(child, str):
            if len(made):
                made[-1].tail = (made[-1].tail or "") + _clean(child)
            else:
                made.text = (made.text or "") + _clean(child)
        else:
            made.append(child)
    return made


def table(head: list[str], rows: list[list[Node | str]], **attributes: object) -> Node:
    """A table; rows may hold elements."""
    return node(
        "table",
        node("thead", node("tr", *(node("th", name) for name in head))),
        node("tbody", *(node("tr", *(node("td", cell) for cell in row)) for row in rows)),
        **attributes,
    )


def fold(title: str, *content: Node | str) -> Node:
    """What is shown when its title is clicked."""
    return node("details", node("summary", title), *content)


def document(page: Node) -> str:
    """The page as HTML."""
    return "<!DOCTYPE html>\n" + ElementTree.tostring(page, encoding="unicode", method="html") + "\n"


def _clean(text: str) -> str:
    return text.replace("\r\n", "\n").translate(_CONTROLS)
