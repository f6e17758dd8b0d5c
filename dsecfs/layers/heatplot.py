"""Pictures of heat: a strip of characters for a terminal, an SVG for everything else.

Both show a layer's chunks in the order of their addresses: what is read, and how early.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dsecfs.layers.heat import Heat, HeatLayer

LEVELS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
"""Nothing, then eighths of a block."""

_CELL, _COLUMNS, _LEFT, _WIDTH = 6, 128, 24, 128 * 6 + 48
_DIRECTORIES = 20


def strip(layer: HeatLayer, width: int) -> str:
    """The layer as at most `width` characters; higher: a larger share of the chunks is read."""
    marks = [rank is not None for blob in layer.blobs for rank in blob.ranks]
    width = min(width, len(marks))
    out = []
    for i in range(width):
        part = marks[i * len(marks) // width : (i + 1) * len(marks) // width]
        read = sum(part)
        # What is read at all is seen.
        out.append(LEVELS[max(read * 8 // len(part), 1 if read else 0)])
    return "".join(out)


def heat_svg(heat: Heat, labels: Sequence[str], title: str, *, depth: int = 3) -> str:
    """A picture of the whole report. `labels` name the layers, top first."""
    body: list[str] = []
    y = 64.0

    def text(x: float, line: float, words: str, kind: str = "") -> None:
        body.append(f'<text x="{x:g}" y="{line:g}" class="{kind}">{escape(_clean(words))}</text>')

    text(_LEFT, 28, title, "title")
    text(
        _LEFT,
        46,
        f"{len(heat.files)} of {heat.total_files} files, {_mb(heat.read)} of "
        f"{_mb(heat.total_bytes)} read; {heat.chunks} chunks, {_mb(heat.chunk_bytes)}, fetched",
    )
    last = max(heat.chunks - 1, 1)
    for layer, label in zip(heat.layers, labels, strict=True):
        if not layer.total_chunks:
            continue
        text(_LEFT, y + 12, f"{label}: {layer.chunks} of {layer.total_chunks} chunks", "head")
        y += 20
        for blob in layer.blobs:
            for row in range(0, len(blob.ranks), _COLUMNS):
                line = y + row // _COLUMNS * _CELL
                width = min(_COLUMNS, len(blob.ranks) - row) * _CELL - 1
                body.append(
                    f'<rect x="{_LEFT}" y="{line:g}" width="{width}" height="{_CELL - 1}" '
                    f'fill="#ececec"/>'
                )
                for chunk, rank in enumerate(blob.ranks[row : row + _COLUMNS]):
                    if rank is not None:
                        body.append(
                            f'<rect x="{_LEFT + chunk * _CELL}" y="{line:g}" '
                            f'width="{_CELL - 1}" height="{_CELL - 1}" '
                            f'fill="{_colour(rank / last)}"><title>chunk {row + chunk}, needed '
                            f"as number {rank + 1}</title></rect>"
                        )
            y += -(-len(blob.ranks) // _COLUMNS) * _CELL + 8
    text(_LEFT, y + 12, "first to last needed:")
    for i in range(60):
        body.append(
            f'<rect x="{_LEFT + 140 + i * 3}" y="{y + 4:g}" width="3" height="9" '
            f'fill="{_colour(i / 59)}"/>'
        )
    y += 36
    rows = heat.by_directory(depth)[:_DIRECTORIES]
    most = max((read for _, _, read in rows), default=1)
    for path, count, read in rows:
        length = max(read / most * 300, 1)
        body.append(
            f'<rect x="{_LEFT}" y="{y:g}" width="{length:.1f}" height="12" fill="#4878a8"/>'
        )
        name = "/" + path.decode("utf-8", "replace")
        files = "1 file" if count == 1 else f"{count} files"
        text(_LEFT + length + 8, y + 10, f"{name}  {_mb(read)}, {files}")
        y += 18
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 16:g}" '
        f'width="{_WIDTH}" height="{y + 16:g}">\n'
        "<style>text{font:11px sans-serif;fill:#333}.title{font-size:16px}"
        ".head{font-weight:bold}</style>\n"
        '<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _colour(share: float) -> str:
    """From dark red (first) through orange to pale yellow (last)."""
    stops = ((0x8B, 0x1A, 0x1A), (0xF0, 0x80, 0x30), (0xFF, 0xE0, 0x90))
    place = min(max(share, 0.0), 1.0) * 2
    i = min(int(place), 1)
    parts = (round(a + (b - a) * (place - i)) for a, b in zip(stops[i], stops[i + 1], strict=True))
    return "#" + "".join(f"{part:02x}" for part in parts)


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


def _clean(words: str) -> str:
    """Without characters that XML does not allow."""
    return "".join(c if c.isprintable() else "\ufffd" for c in words)
