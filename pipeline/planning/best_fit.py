"""Best-fit decreasing, over a histogram: the way to fill rows that always ends, and fast."""

import numpy as np

from pipeline.planning.patterns import Pattern

# Best fit keeps a bit for each free room of a row, in words of 2**SHIFT bits.
SHIFT = 15
MASK = (1 << SHIFT) - 1


def best_fit(
    counts: np.ndarray, length: int, opens: np.ndarray, max_segments: int | None = None
) -> list[Pattern]:
    """Rows of one bucket, packed by best-fit decreasing; removes their segments from `counts`.

    Takes the segments from the longest to the shortest and puts each into the open row with the
    least room that holds it (Johnson et al., 1974).

    >>> counts = np.array([0, 0, 3, 0, 0, 0, 1, 0, 2])  # three of 2, one of 6, two of 8
    >>> patterns = best_fit(counts, 10, np.ones(9, bool))
    >>> [(pattern.pieces, pattern.rows) for pattern in patterns]
    [(((8, 1), (2, 1)), 2), (((6, 1), (2, 1)), 1)]

    `counts`, int64 [n], is changed in place. `opens`, bool [n], has the sizes that may open a row;
    the others only fill rows already open. A row has `max_segments` segments at most.
    """
    limit, may_open = max_segments or length, opens.tolist()
    # An entry is a set of equal rows: (pieces, segments, rows). `open_rows` maps the free room of a
    # row to its entries. Bit r of `rooms`, which are words of 2**SHIFT bits, is set if the entries
    # of room r are not empty, and bit w of `words` if word w is not 0.
    open_rows: dict[int, list] = {}
    patterns: list[Pattern] = []
    rooms, words = [0] * ((length >> SHIFT) + 1), 0
    # Planning spends most of its time in this loop, so it calls few functions and makes patterns by
    # `tuple.__new__`.
    entries: list | None
    new, free = tuple.__new__, 0
    some = np.flatnonzero(counts[1 : length + 1])[::-1] + 1
    remaining = []
    for size, count in zip(some.tolist(), counts[some].tolist(), strict=True):
        word, bit = size >> SHIFT, size & MASK
        while count:
            if fitting := rooms[word] >> bit:
                free = size + (fitting & -fitting).bit_length() - 1
            elif fitting := words >> word + 1:
                free = word + (fitting & -fitting).bit_length()
                fitting = rooms[free]
                free = (free << SHIFT) + (fitting & -fitting).bit_length() - 1
            if fitting:
                entries = open_rows[free]
                pieces, segments, rows = entries[-1]
                times = free // size
                if times > limit - segments:
                    times = limit - segments
                full = count // times
                full = rows if full > rows else full
                part = rows > full and count > full * times
                if stay := rows - full - part:
                    entries[-1] = pieces, segments, stay
                else:
                    entries.pop()
                    if not entries:
                        rooms[free >> SHIFT] ^= 1 << (free & MASK)
                        if not rooms[free >> SHIFT]:
                            words ^= 1 << (free >> SHIFT)
            elif may_open[size]:
                times = length // size
                if times > limit:
                    times = limit
                pieces, segments, free = (), 0, length
                full = count // times
                part = count > full * times
            else:
                break
            if full:
                more, left = segments + times, free - times * size
                count -= full * times
                if not left or more == limit:
                    row = ((*pieces, (size, times)), full, length - left, more)
                    patterns.append(new(Pattern, row))
                elif entries := open_rows.get(left):
                    entries.append(((*pieces, (size, times)), more, full))
                else:
                    open_rows[left] = [((*pieces, (size, times)), more, full)]
                    rooms[left >> SHIFT] |= 1 << (left & MASK)
                    words |= 1 << (left >> SHIFT)
            if part:  # fewer than `times` remain, for one more row
                left = free - count * size
                if entries := open_rows.get(left):
                    entries.append(((*pieces, (size, count)), segments + count, 1))
                else:
                    open_rows[left] = [((*pieces, (size, count)), segments + count, 1)]
                    rooms[left >> SHIFT] |= 1 << (left & MASK)
                    words |= 1 << (left >> SHIFT)
                count = 0
        remaining.append(count)
    counts[some] = remaining
    for free in sorted(open_rows):
        for pieces, segments, rows in open_rows[free]:
            patterns.append(new(Pattern, (pieces, rows, length - free, segments)))
    return patterns
