"""Messages with lists of parts, as `{"type": "text", "text": ...}` and `{"type": "image"}`, turned into texts.

Everything after the files reads texts with `<image>` and the column `images`. An image is in its part, under the key
`image`, or in the column, in the order of the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from rl_plugins.data.sequence_with_slices import SequenceWithSlices
from rl_plugins.errors import RowError

if TYPE_CHECKING:
    from rl_plugins.data.parquet import Row, RowSource

IMAGES = "images"
"""Column with the images of a row: a list, empty or null for none."""
PLACEHOLDER = "<image>"
"""Text in a message at the place of an image."""
_VIDEOS = "videos"


def has_values(row: Row, column: str) -> bool:
    """Return True if a column of a row has a value; an empty list and null are no values."""
    values = row.get(column)
    return values is not None and (not isinstance(values, Sequence) or len(values) > 0)


def check_parts(row: Row, location: str) -> None:
    """Check the messages of a row that have lists of parts, and refuse videos.

    Args:
        row: a row whose messages have texts or lists.
        location: file and number of the row, for the message.

    Raises:
        RowError: the row has videos, a part is no text and no image, or the row has parts of images and no image.
    """
    if has_values(row, _VIDEOS):
        raise RowError(
            location,
            f"column {_VIDEOS!r}",
            f"the row has videos, and only texts and images are read: remove the row, or write frames of the videos "
            f"into the column {IMAGES!r}",
        )
    places = 0
    for position, message in enumerate(row["prompt"]):
        for number, part in enumerate(() if isinstance(message["content"], str) else message["content"]):
            values = part if isinstance(part, Mapping) else {}
            is_image = values.get("type") == "image"
            places += is_image
            if not is_image and not (values.get("type") == "text" and isinstance(values.get("text"), str)):
                raise RowError(
                    location,
                    "column 'prompt'",
                    f"message {position}, part {number}: expected {{type: text, text: ...}} or {{type: image, "
                    f"image: path or bytes}}, got {str(part)[:40]}",
                )
    if places and not has_values(with_texts(row), IMAGES):
        raise RowError(
            location,
            "column 'prompt'",
            f"{places} parts have the type image, and the row has no image: write the images into the parts, or into "
            f"the column {IMAGES!r}",
        )


def with_texts(row: Row) -> Row:
    """Return a row with a text in each message, and with the images of the parts in the column `images`.

    Args:
        row: a row, after `check_parts`.
    """
    if all(isinstance(message["content"], str) for message in row["prompt"]):
        return row
    messages, images, column = [], [], iter(row.get(IMAGES) or ())
    for message in row["prompt"]:
        content = message["content"]
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "image":
                images.append(part["image"] if part.get("image") is not None else next(column, None))
            else:
                images += islice(column, part["text"].count(PLACEHOLDER))
        if not isinstance(content, str):
            content = "".join(PLACEHOLDER if part["type"] == "image" else part["text"] for part in content)
        messages.append({**message, "content": content})
    changed = {**row, "prompt": messages}
    images = [image for image in [*images, *column] if image is not None]
    return {**changed, IMAGES: images} if images else changed


class RowsWithTexts(SequenceWithSlices["Row"]):
    """Rows of a data set after `with_texts`, or in another form.

    Args:
        rows: the rows.
        form: function that returns a row in its form.
    """

    def __init__(self, rows: RowSource, form: Callable[[Row], Row] = with_texts) -> None:
        self._rows, self._form = rows, form

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def item(self, number: int) -> Row:
        """Return a row."""
        return self._form(self._rows[number])

    def __iter__(self) -> Iterator[Row]:
        """Yield all rows, a few in memory at a time."""
        rows = self._rows
        return map(self._form, rows if isinstance(rows, Iterable) else map(rows.__getitem__, range(len(rows))))
