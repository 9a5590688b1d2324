# SPDX-License-Identifier: Apache-2.0
"""Which free pages to take: as few and as long ascending runs as there are. A run goes over the wire as one put."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["choose_pages"]


def choose_pages(free: npt.NDArray[np.bool_], count: int, after: int) -> npt.NDArray[np.intp]:
    """`count` > 0 free pages, ascending; at least that many must be free.

    `free`: one flag a page. `after`: where to start if that whole run is free (behind an owner's last page), or 0
    for anywhere. Else the shortest run that is long enough; else whole runs, longest first, and the rest from the
    shortest run that holds it.
    """
    if after and after + count <= len(free) and free[after : after + count].all():
        return np.arange(after, after + count)
    edges = np.flatnonzero(np.diff(free, prepend=False, append=False))
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    fitting = np.flatnonzero(lengths >= count)
    if len(fitting):
        start = starts[fitting[np.argmin(lengths[fitting])]]
        return np.arange(start, start + count)
    order = np.argsort(-lengths, kind="stable")
    starts, lengths = starts[order], lengths[order]
    whole = int(np.searchsorted(np.cumsum(lengths), count, side="right"))
    rest = count - int(lengths[:whole].sum())
    if rest:
        tail = lengths[whole:]
        last = whole + int(np.flatnonzero(tail == tail[tail >= rest].min())[0])
        starts = np.append(starts[:whole], starts[last])
        lengths = np.append(lengths[:whole], rest)
    else:
        starts, lengths = starts[:whole], lengths[:whole]
    order = np.argsort(starts)
    starts, lengths = starts[order], lengths[order]
    # Page = its position in the answer, shifted by where its run starts.
    pages: npt.NDArray[np.intp] = np.arange(count)
    pages += np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return pages
